"""Prompt lookup: what followed the last tokens before, found without searching."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import InvalidRequest
from paceline.lookup.ngram import NgramIndex

LOOKUP_MIN, LOOKUP_MAX = 2, 4
# Three different tokens repeat their n-grams all the time.
TOKENS = st.lists(st.integers(0, 2), max_size=12)


def indexed(ids: Sequence[int]) -> NgramIndex:
    index = NgramIndex(prompt_lookup_min=LOOKUP_MIN, prompt_lookup_max=LOOKUP_MAX)
    index.extend(ids)
    return index


def expected_proposal(context: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """The definition: search the whole context from its end, longest n-gram first, and copy token by token."""
    context = list(context)
    for size in range(min(LOOKUP_MAX, len(context)), LOOKUP_MIN - 1, -1):
        for end in range(len(context) - 1, size - 1, -1):
            if context[end - size : end] == context[-size:]:
                written = list(context)
                for position in range(end, end + max_tokens):
                    written.append(written[position])
                return tuple(written[len(context) :])
    return ()


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(committed=TOKENS, tail=TOKENS, max_tokens=st.integers(0, 20))
def test_proposal_is_that_of_a_full_search(committed: list[int], tail: list[int], max_tokens: int) -> None:
    """1,000 drawn contexts, cut into committed tokens and tail: exact, so no failure is by chance."""
    assert indexed(committed).propose(tail, max_tokens) == expected_proposal(committed + tail, max_tokens)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(steps=st.lists(TOKENS | st.floats(0, 1), max_size=12), tail=TOKENS)
def test_proposal_depends_on_the_tokens_alone(steps: list[list[int] | float], tail: list[int]) -> None:
    """500 drawn histories: extended, truncated to a share of the length, and asked in between, as if built afresh."""
    index, committed = indexed([]), list[int]()
    for step in steps:
        if isinstance(step, float):
            length = int(step * len(committed))
            index.truncate(length)
            del committed[length:]
        else:
            index.extend(step)
            committed += step
        assert len(index) == len(committed)
        assert index.propose(tail, 8) == indexed(committed).propose(tail, 8) == expected_proposal(committed + tail, 8)


@pytest.mark.parametrize(
    ("context", "proposal"),
    [
        ([1, 2, 3, 4, 1, 2], (3, 4, 1, 2, 3, 4)),  # the copy runs on into what it wrote
        ([1, 2, 3, 1, 2, 4, 1, 2], (4, 1, 2, 4, 1, 2)),  # the latest of two
        ([1, 2, 3, 5, 9, 2, 3, 6, 1, 2, 3], (5, 9, 2, 3, 6, 1)),  # the longer before the later
        ([7, 7, 7], (7,) * 6),  # an occurrence that overlaps the end
        ([1, 2, 3, 4], ()),
        ([1, 1], ()),  # too short to have an earlier n-gram
        ([], ()),
    ],
)
def test_proposal_continues_the_longest_then_latest_match(context: list[int], proposal: tuple[int, ...]) -> None:
    """Worked by hand."""
    assert indexed(context).propose((), 6) == proposal


def test_match_may_lie_across_committed_tokens_and_tail() -> None:
    """What was drafted already is part of the context, and leaves no trace."""
    index = indexed([5, 6, 7, 1])
    assert index.propose([2, 8, 1, 2], 3) == (8, 1, 2)
    assert (len(index), index.propose((), 3)) == (4, ())


def test_forgotten_tokens_are_never_proposed() -> None:
    """After a truncation the older occurrence counts again."""
    index = indexed([1, 2, 3, 1, 2, 4])
    index.truncate(4)
    index.extend([2])
    assert index.propose((), 2) == (3, 1)


@pytest.mark.parametrize(("lookup_min", "lookup_max"), [(0, 3), (3, 2)])
def test_sizes_out_of_order_are_refused(lookup_min: int, lookup_max: int) -> None:
    """The error names the parameter."""
    with pytest.raises(InvalidRequest, match="prompt_lookup_min"):
        NgramIndex(prompt_lookup_min=lookup_min, prompt_lookup_max=lookup_max)
