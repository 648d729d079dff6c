"""Digests name prefixes: the same tokens always, other tokens never, whatever was appended and forgotten in between."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.prefix import EMPTY_DIGEST, TokenPrefix, extend_digest

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=8)


def digest_of(ids: list[int]) -> int:
    """The definition: one token after another."""
    digest = EMPTY_DIGEST
    for token_id in ids:
        digest = extend_digest(digest, token_id)
    return digest


@pytest.mark.parametrize(
    ("ids", "digest"),
    [
        ([], 0x9AC3_11E5_0F5E_ED01),
        ([0], 0x1DB5_7AC0_11D3_70F4),
        ([1, 2, 3], 0x8E96_44DB_652E_3224),
        ([151_935] * 4, 0x9DF9_C7A8_29B5_804F),
    ],
)
def test_digests_never_change(ids: list[int], digest: int) -> None:
    """Drafter and orchestrator may be of different versions, so these numbers are part of the protocol."""
    assert TokenPrefix(ids).digest() == digest


@settings(max_examples=100, deadline=None, derandomize=True)
@given(steps=st.lists(IDS | st.floats(0, 1), max_size=10))
def test_any_history_ends_as_if_built_at_once(steps: list[list[int] | float]) -> None:
    """100 drawn histories of extending, and of truncating to a share of the length: every digest as by definition."""
    prefix, ids = TokenPrefix(), list[int]()
    for step in steps:
        if isinstance(step, float):
            length = int(step * len(ids))
            prefix.truncate(length)
            del ids[length:]
        else:
            prefix.extend(step)
            ids += step
        assert list(prefix.ids) == ids
        assert [prefix.digest(length) for length in range(len(prefix) + 1)] == [
            digest_of(ids[:length]) for length in range(len(ids) + 1)
        ]
        assert prefix.digest() == prefix.digest(len(prefix))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(digest=st.integers(0, 2**64 - 1), token_id=st.integers(0, 2**32 - 1))
def test_digests_fit_the_wire(digest: int, token_id: int) -> None:
    """They travel as fixed64."""
    assert 0 <= extend_digest(digest, token_id) < 2**64


def test_short_prefixes_never_share_a_digest() -> None:
    """All 9,841 prefixes of up to 8 tokens out of 3, token 0 among them: no order, no length, no zero is overlooked."""
    prefixes = [list(ids) for length in range(9) for ids in product(range(3), repeat=length)]
    assert len({digest_of(ids) for ids in prefixes}) == len(prefixes) == 9841


def test_truncation_beyond_the_end_is_our_own_mistake() -> None:
    """Lengths are checked where they enter, not silently cut."""
    with pytest.raises(AssertionError):
        TokenPrefix([1, 2]).truncate(3)
