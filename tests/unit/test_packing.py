"""The packed draft distribution: what a drafter packs arrives bit for bit, and nothing else gets through (C47)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import PayloadInvalid
from paceline.packing import MAX_DISTRIBUTION_ENTRIES, pack_distribution, unpack_distribution
from paceline.sampling import SparseDistribution, truncate_to_top

VOCAB_SIZE = 10
IDS, PROBS = (7, 2, 5), (0.5, 0.25, 0.25)


def packed_ids(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def packed_probs(probs: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(probs)}e", *probs)


def fields(**changes: Any) -> dict[Any, Any]:
    """The map of a valid payload, written down from the protocol, with changes."""
    return {"v": 1, "n": VOCAB_SIZE, "ids": packed_ids(IDS), "probs": packed_probs(PROBS), **changes}


def without(key: str) -> dict[Any, Any]:
    return {name: value for name, value in fields().items() if name != key}


VALID: bytes = msgpack.packb(fields())


def test_the_format_is_the_one_in_the_protocol() -> None:
    """The comment on `VerifyDraft.draft_distributions`, byte for byte, in both directions."""
    distribution = SparseDistribution(torch.tensor(IDS), torch.tensor(PROBS))
    assert pack_distribution(distribution, vocab_size=VOCAB_SIZE) == VALID
    unpacked = unpack_distribution(VALID, vocab_size=VOCAB_SIZE)
    assert unpacked.ids.equal(torch.tensor(IDS))
    assert unpacked.probs.equal(torch.tensor(PROBS))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    vocab_size=st.integers(1, 300),
    entries=st.integers(1, 300),
    spread=st.floats(0, 30),
    seed=st.integers(0, 2**32),
)
def test_what_was_drawn_from_is_what_arrives(vocab_size: int, entries: int, spread: float, seed: int) -> None:
    """100 drawn rows, from flat to one-hot: the target judges by exactly the bits that the drafter drew from."""
    row = spread * torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))
    drawn_from = truncate_to_top(row.log_softmax(0), entries)
    unpacked = unpack_distribution(pack_distribution(drawn_from, vocab_size=vocab_size), vocab_size=vocab_size)
    assert unpacked.ids.equal(drawn_from.ids)
    assert unpacked.probs.equal(drawn_from.probs)


@pytest.mark.parametrize("entries", [64, 256, 1024, MAX_DISTRIBUTION_ENTRIES])
@pytest.mark.parametrize("tail_share", [0.05, 0.2, 0.9])
def test_every_honest_distribution_is_taken(entries: int, tail_share: float) -> None:
    """Also a row with one likely token and thousands of others that each are next to nothing."""
    vocab_size = 5_000
    row = torch.full((vocab_size,), tail_share / (vocab_size - 1))
    row[3] = 1.0 - tail_share
    payload = pack_distribution(truncate_to_top(row.log(), entries), vocab_size=vocab_size)
    unpack_distribution(payload, vocab_size=vocab_size)


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(fields(ids=packed_ids((7, 2, VOCAB_SIZE))), id="id equal to the vocabulary size"),
        pytest.param(fields(ids=packed_ids((7, 2, 2**31 - 1))), id="id 2**31-1"),
        pytest.param(fields(ids=packed_ids((7, 2, 2**32 - 1))), id="id -1 as uint32"),
        pytest.param(fields(ids=packed_ids((7, 2, 7))), id="id twice"),
        pytest.param(fields(probs=packed_probs((0.5, 0.5, float("nan")))), id="probability not a number"),
        pytest.param(fields(probs=packed_probs((0.5, 0.5, float("inf")))), id="probability infinite"),
        pytest.param(fields(probs=packed_probs((1.0, 0.5, -0.5))), id="probability negative"),
        pytest.param(fields(probs=packed_probs((0.5, 0.5, 0.0))), id="probability zero"),
        pytest.param(fields(probs=packed_probs((0.25, 0.25, 0.25))), id="sum too small"),
        pytest.param(fields(probs=packed_probs((0.5, 0.5, 0.5))), id="sum too large"),
        pytest.param(fields(ids=b"", probs=b""), id="no entry"),
        pytest.param(fields(ids=packed_ids((1, 2))), id="fewer ids than probabilities"),
        pytest.param(fields(ids=packed_ids((1, 2, 3, 4))), id="more ids than probabilities"),
        pytest.param(fields(ids_=1), id="unknown key"),
        pytest.param(without("v"), id="no version"),
        pytest.param(without("n"), id="no vocabulary size"),
        pytest.param(without("ids"), id="no ids"),
        pytest.param(without("probs"), id="no probabilities"),
        pytest.param({}, id="empty map"),
        pytest.param({key.encode(): value for key, value in fields().items()}, id="keys that are bytes"),
        pytest.param({1: 1, **without("v")}, id="a key that is a number"),
        pytest.param(fields(v=2), id="another version"),
        pytest.param(fields(v="1"), id="version as text"),
        pytest.param(fields(v=None), id="version nil"),
        pytest.param(fields(n=VOCAB_SIZE + 1), id="another vocabulary"),
        pytest.param(fields(n=float("nan")), id="vocabulary not a number"),
        pytest.param(fields(n=-VOCAB_SIZE), id="vocabulary negative"),
        pytest.param(fields(ids="abcdefg"), id="ids as text"),
        pytest.param(fields(ids=1), id="ids as a number"),
        pytest.param(fields(ids=None), id="ids nil"),
        pytest.param(fields(probs=[0.5, 0.5]), id="probabilities as an array"),
        pytest.param(fields(probs=packed_probs(PROBS)[:-1]), id="half a probability"),
        pytest.param(fields(probs=packed_probs(PROBS) + b"\x3c"), id="half a probability more"),
        pytest.param(fields(ids=packed_ids(IDS)[:-1]), id="three quarters of an id"),
        pytest.param(fields(ids={"a": {"b": {}}}), id="nested maps"),
        pytest.param(fields(ids=[[[]]]), id="nested arrays"),
        pytest.param(fields(ids=msgpack.ExtType(4, packed_ids(IDS))), id="extension type"),
        pytest.param(fields(v=msgpack.Timestamp(1, 1)), id="timestamp"),
        pytest.param(
            fields(
                ids=packed_ids(range(MAX_DISTRIBUTION_ENTRIES + 1)),
                probs=packed_probs([1 / 4096] * (MAX_DISTRIBUTION_ENTRIES + 1)),
                n=2 * MAX_DISTRIBUTION_ENTRIES,
            ),
            id="too many entries",
        ),
        pytest.param(7, id="a number"),
        pytest.param("text", id="text"),
        pytest.param(b"bytes", id="bytes"),
        pytest.param(None, id="nil"),
        pytest.param([1, VOCAB_SIZE, packed_ids(IDS), packed_probs(PROBS)], id="an array"),
    ],
)
def test_malformed_payload_is_refused_by_type(payload: Any) -> None:
    """Every one of them with `PayloadInvalid`, so that its session fails and no other."""
    vocab_size = 2 * MAX_DISTRIBUTION_ENTRIES if isinstance(payload, dict) and payload.get("n") == 8192 else VOCAB_SIZE
    with pytest.raises(PayloadInvalid):
        unpack_distribution(msgpack.packb(payload), vocab_size=vocab_size)


def test_payload_cut_anywhere_is_refused() -> None:
    """Every proper beginning, the empty one too, and a valid payload with more behind it."""
    for length in range(len(VALID)):
        with pytest.raises(PayloadInvalid):
            unpack_distribution(VALID[:length], vocab_size=VOCAB_SIZE)
    for rest in (b"\x00", b"\xc0", VALID):
        with pytest.raises(PayloadInvalid):
            unpack_distribution(VALID + rest, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"\x81\xa1v" * 100_000, id="maps without end"),
        pytest.param(b"\x91" * 100_000, id="arrays without end"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="map of 2**32 entries"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="array of 2**32 entries"),
        pytest.param(b"\xc6\xff\xff\xff\xff", id="4 GiB of bytes"),
        pytest.param(b"\x84\xa1\xff" + VALID[3:], id="key that is not UTF-8"),
        pytest.param(b"\xc7\x00\xff", id="empty timestamp"),
        pytest.param(b"\xc1", id="byte that means nothing"),
    ],
)
def test_payload_that_promises_too_much_is_refused(payload: bytes) -> None:
    """By its lengths, before anything is reserved for it."""
    with pytest.raises(PayloadInvalid):
        unpack_distribution(payload, vocab_size=VOCAB_SIZE)


def require_distribution_or_refusal(payload: bytes) -> None:
    """Either `PayloadInvalid`, or a distribution that is safe to judge by."""
    try:
        distribution = unpack_distribution(payload, vocab_size=VOCAB_SIZE)
    except PayloadInvalid:
        return
    ids, probs = distribution.ids, distribution.probs
    assert 0 <= int(ids.min()) <= int(ids.max()) < VOCAB_SIZE
    assert len(set(ids.tolist())) == len(ids) == len(probs)
    assert float(probs.min()) > 0.0
    assert abs(float(probs.sum()) - 1.0) < 0.05


@settings(max_examples=300, deadline=None, derandomize=True)
@given(payload=st.binary(max_size=200))
def test_random_bytes_are_refused_by_type(payload: bytes) -> None:
    """300 drawn payloads: nothing but `PayloadInvalid` comes out."""
    require_distribution_or_refusal(payload)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    start=st.integers(0, len(VALID)),
    removed=st.integers(0, 4),
    inserted=st.binary(max_size=4),
)
def test_damaged_payload_is_refused_or_harmless(start: int, removed: int, inserted: bytes) -> None:
    """500 drawn damages to a valid payload, which get much further into the checks than random bytes do."""
    require_distribution_or_refusal(VALID[:start] + inserted + VALID[start + removed :])
