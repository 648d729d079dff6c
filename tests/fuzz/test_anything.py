"""Anything at all, from every side: typed errors alone, nothing left behind, and somebody else's answer undisturbed.

2,000 cases that are the same each time, and, as slow tests, 50,000 or as many as PACELINE_FUZZ_CASES says, other ones
each time: they print their seed, which repeats them as PACELINE_FUZZ_SEED. `make fuzz` runs those.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.contract.stream_peer import NO_SHRINKING
from tests.fuzz.arena import DRAFTER, PATIENCE_S, TARGET, Arena, Case, arena
from tests.fuzz.cases import GENERATE, INPUTS, METHODS, Call, Exchange, Stream
from tests.fuzz.http_requests import broken_bodies, json_requests, raw_requests
from tests.fuzz.messages import any_bytes, any_message, drafter_items, generate_requests, target_items

BATCH = 25  # cases side by side
PART = 1000  # cases of one seed
GROWTH_LIMIT_MIB = 64.0
"""Of the resident memory, from behind the first cases of a kind to its end. What is remembered of cases is bounded."""

_ONE_FOR_MANY = [method for method in METHODS if not method.client_streaming]
_OTHERS = [method.full_name for method in _ONE_FOR_MANY if method.full_name != GENERATE]
_SENSIBLE = {TARGET.full_name: target_items, DRAFTER.full_name: drafter_items}

_metadata = st.sampled_from(
    [
        *[()] * 4,
        (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),),
        (("traceparent", "zz"), ("traceparent", "")),
        (("authorization", "Bearer nonsense"), ("authorization", "")),
        (("deadline-unix-ms", "-1"), ("application", "other")),
        (("anything-bin", b"\xff\0"),),
    ]
)
_generate = st.builds(
    Call,
    method=st.just(GENERATE),
    data=generate_requests,
    metadata=_metadata,
    patience_s=st.sampled_from([PATIENCE_S] * 8 + [0.02]),
    leaves_after=st.sampled_from([None] * 8 + [1, 2]),
)
_questions = st.sampled_from(_OTHERS).flatmap(
    lambda method: st.builds(Call, st.just(method), any_message(INPUTS[method]), _metadata)
)


def _streams(service: str) -> st.SearchStrategy[Case]:
    items = _SENSIBLE[service]
    return st.builds(Stream, st.just(service), st.lists(items, min_size=1, max_size=2).map(tuple), st.just(True))


def _bytes_for(service: str) -> st.SearchStrategy[Case]:
    data = st.tuples(any_bytes(_SENSIBLE[service]))
    return st.builds(Stream, st.just(service), data, st.just(False))


KINDS: dict[str, st.SearchStrategy[Case]] = {
    "generate": _generate,
    "questions": _questions,
    "target items": _streams(TARGET.full_name),
    "drafter items": _streams(DRAFTER.full_name),
    "bytes over gRPC": st.one_of(
        st.builds(Call, st.just(GENERATE), any_bytes(generate_requests)),
        st.builds(Call, st.sampled_from(_OTHERS), any_bytes(st.just(b"\x0a\x04name\x10\x05"))),
        _bytes_for(TARGET.full_name),
        _bytes_for(DRAFTER.full_name),
    ),
    "JSON": st.builds(Exchange, json_requests),
    "broken bodies": st.builds(Exchange, broken_bodies),
    "bytes over HTTP": st.builds(Exchange, raw_requests),
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with arena(tmp_path_factory.mktemp("fuzz")) as opened:
        yield opened


def throw(stack: Arena, kind: str, *, cases: int, first_seed: int) -> None:
    """Play so many cases of a kind, those of one seed, in batches. Raises what the first bad batch does."""
    waiting: list[Case] = []
    failures: list[Exception] = []

    def play() -> None:
        batch = waiting[:]
        waiting.clear()
        try:
            stack.play(batch)
        except Exception as failure:  # noqa: BLE001 - raised behind the last case
            failures.append(failure)

    @seed(first_seed)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=False,
        phases=NO_SHRINKING,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=KINDS[kind])
    def take(case: Case) -> None:
        if not failures:
            waiting.append(case)
            if len(waiting) == BATCH:
                play()

    take()
    play()
    if failures:
        raise failures[0]


def throw_all(stack: Arena, kind: str, *, parts: list[int], first_seed: int) -> None:
    """Cases in parts, each with a seed of its own; the memory must not grow behind the first."""
    played, resident_mib = stack.cases, 0.0
    print(f"\n{kind}: seed {first_seed}", flush=True)
    for part, cases in enumerate(parts):
        throw(stack, kind, cases=cases, first_seed=first_seed + part)
        resident_mib = resident_mib or stack.resident_mib
    growth_mib = stack.resident_mib - resident_mib
    print(f"{kind}: {stack.cases - played} cases, resident memory {growth_mib:+.1f} MiB", flush=True)
    assert growth_mib < GROWTH_LIMIT_MIB


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_comes_is_answered_or_refused_in_our_words(stack: Arena, kind: str) -> None:
    """250 cases of each of eight kinds, the same each time."""
    throw_all(stack, kind, parts=[50, 200], first_seed=0)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_much_of_anything_is_answered_or_refused_in_our_words(stack: Arena, kind: str) -> None:
    """An eighth of all cases for each kind, other ones each time, from a printed seed on."""
    cases = int(os.environ.get("PACELINE_FUZZ_CASES") or 50_000)
    first_seed = int(os.environ.get("PACELINE_FUZZ_SEED") or secrets.randbits(32))
    of_kind = -(-cases // len(KINDS))
    parts = [min(PART, of_kind - done) for done in range(0, of_kind, PART)]
    throw_all(stack, kind, parts=parts, first_seed=first_seed)
