"""The target service over real gRPC: what a bad item does to its own session, and to nothing else.

The model counts: behind token t comes t + 1, around a vocabulary of 8. So the right verdict is plain to see.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from paceline.rpc import open_channel
from paceline.v1 import session_pb2 as session_pb
from paceline.v1 import target_service_pb2 as target_pb
from tests.contract.stream_peer import (
    BAD_SAMPLING,
    LIMIT_S,
    MAX_CONTEXT,
    NO_SHRINKING,
    VOCAB,
    FuzzBench,
    TargetPeer,
    any_opening,
    assert_is_sentence,
    id_lists,
    legal_sampling,
    open_session,
    open_target_stream,
    sampling_with,
    status_of_bytes,
    target_peer,
    token_ids,
    uint32s,
)
from tests.fakes import FakeModel, Logits, counting_logits
from tests.harness import Running, running, target_of

PROMPT = (0, 1, 2)
SERVICE_NAME = "paceline.v1.TargetService"
VERIFY = f"/{SERVICE_NAME}/Verify"

COUPLED = session_pb.VERIFICATION_RULE_COUPLED
REJECTION = session_pb.VERIFICATION_RULE_REJECTION


def counting_model(logits: Logits | None = None) -> FakeModel:
    return FakeModel(logits or counting_logits(VOCAB), vocab_size=VOCAB, max_context=MAX_CONTEXT)


@asynccontextmanager
async def target(**settings: Any) -> AsyncIterator[Running]:
    async with running(target_of(counting_model(), heartbeat_s=0.02, **settings)) as service:
        yield service


@asynccontextmanager
async def connected_target(**settings: Any) -> AsyncIterator[TargetPeer]:
    """A service of its own, and one stream to it."""
    async with target(**settings) as service, target_peer(service.address) as peer:
        yield peer


# ---------------------------------------------------------------------------------------------------------------------
# Items, valid but for what is named


def opened(session_id: str, *, epoch: int = 1, ids: Sequence[int] = PROMPT, **changes: Any) -> target_pb.TargetCommand:
    return target_pb.TargetCommand(session_id=session_id, epoch=epoch, open=open_session(ids, **changes))


def verify(
    session_id: str,
    *,
    epoch: int = 1,
    base_length: int = len(PROMPT),
    committed: Sequence[int] = (),
    draft: Sequence[int] = (),
    distributions: Sequence[bytes] = (),
    budget_ms: int = 0,
) -> target_pb.TargetCommand:
    return target_pb.TargetCommand(
        session_id=session_id,
        epoch=epoch,
        verify=target_pb.VerifyDraft(
            base_length=base_length,
            committed_ids=committed,
            draft_ids=draft,
            draft_distributions=distributions,
            budget_ms=budget_ms,
        ),
    )


def closed(session_id: str, *, epoch: int = 1) -> target_pb.TargetCommand:
    return target_pb.TargetCommand(session_id=session_id, epoch=epoch, close=session_pb.CloseSession())


def packed(ids: Sequence[int], probs: Sequence[float], /, **changes: Any) -> bytes:
    """A draft distribution as it travels, but for the fields named in `changes`."""
    fields = {
        "v": 1,
        "n": VOCAB,
        "ids": np.array(ids, dtype="<u4").tobytes(),
        "probs": np.array(probs, dtype="<f2").tobytes(),
    }
    payload: bytes = msgpack.packb(fields | changes)
    return payload


async def assert_verdict(peer: TargetPeer, session_id: str, token_ids: Sequence[int], *, base_length: int) -> None:
    event = await peer.event(session_id)
    assert event.WhichOneof("event") == "verdict", event
    assert (event.verdict.base_length, list(event.verdict.token_ids)) == (base_length, list(token_ids))


# ---------------------------------------------------------------------------------------------------------------------
# Bad items


@dataclass(frozen=True)
class Bad:
    """Items of one session, the last of which fails it."""

    what: str
    reason: str
    says: str  # a part of the sentence that names the fault
    items: tuple[target_pb.TargetCommand, ...]


def bad_open(what: str, says: str, *, reason: str = "PAYLOAD_INVALID", **changes: Any) -> Bad:
    return Bad(what, reason, says, (opened("bad", **changes),))


def bad_verify(
    what: str,
    says: str,
    *,
    reason: str = "PAYLOAD_INVALID",
    rule: session_pb.VerificationRule = REJECTION,
    **fields: Any,
) -> Bad:
    session = opened("bad", rule=rule, sampling=sampling_with())
    return Bad(what, reason, says, (session, verify("bad", **fields)))


def bad_distribution(what: str, says: str, payload: bytes) -> Bad:
    return bad_verify(f"distribution {what}", says, draft=(3,), distributions=(payload,))


HALF = (0.5, 0.5)
BAD_ITEMS = [
    Bad("no command", "PAYLOAD_INVALID", "no command", (target_pb.TargetCommand(session_id="bad", epoch=1),)),
    Bad("unknown session", "SESSION_NOT_FOUND", "open it again", (verify("bad"),)),
    Bad("epoch never opened", "SESSION_NOT_FOUND", "open it again", (opened("bad"), verify("bad", epoch=2))),
    Bad("command after close", "SESSION_NOT_FOUND", "open it again", (opened("bad"), closed("bad"), verify("bad"))),
    bad_open("committed id of the vocabulary size", "ids are 0 to 7", ids=(0, 8)),
    bad_open("committed id 2^31 - 1", "ids are 0 to 7", ids=(2**31 - 1,)),
    bad_open("committed id 2^32 - 1", "ids are 0 to 7", ids=(2**32 - 1, 0)),
    bad_open("no committed ids", "prompt", ids=()),
    bad_open("no prompt", "prompt", prompt_length=0),
    bad_open("prompt longer than the tokens", "prompt of 4", prompt_length=4),
    bad_open("no rule", "rule", rule=session_pb.VERIFICATION_RULE_UNSPECIFIED),
    bad_open("unknown rule", "rule", rule=99),
    bad_open("rule greedy above temperature 0", "temperature 0", sampling=sampling_with()),
    bad_open("no vocabulary", "vocabulary", vocab_size=0),
    bad_open("another model's vocabulary", "vocabulary", vocab_size=VOCAB + 1),
    bad_open("prompt beyond the context", "context of 64", reason="CONTEXT_TOO_LONG", ids=[0] * (MAX_CONTEXT + 1)),
    bad_verify("draft id of the vocabulary size", "ids are 0 to 7", draft=(3, 8)),
    bad_verify("draft id 2^31 - 1", "ids are 0 to 7", draft=(2**31 - 1,)),
    bad_verify("committed id outside the vocabulary", "ids are 0 to 7", base_length=4, committed=(8,)),
    bad_verify("draft too long", "at most 64", draft=[0] * 65),
    bad_verify("too few distributions", "1 distributions", draft=(3, 4), distributions=[packed([3], [1.0])]),
    bad_verify("distributions without a draft", "1 distributions", distributions=[packed([3], [1.0])]),
    bad_distribution("empty", "unpacked", b""),
    bad_distribution("of random bytes", "distribution", bytes(range(200, 240))),
    bad_distribution("cut short", "unpacked", packed([3, 4], HALF)[:-1]),
    bad_distribution("with bytes behind it", "unpacked", packed([3, 4], HALF) + b"\0"),
    bad_distribution("that is a list", "distribution", msgpack.packb([1, 2])),
    bad_distribution("with a field too many", "distribution", packed([3, 4], HALF, x=1)),
    bad_distribution("of a later version", "version", packed([3, 4], HALF, v=2)),
    bad_distribution("over another vocabulary", "another vocabulary", packed([3, 4], HALF, n=9)),
    bad_distribution("with text for ids", "binary", packed([3, 4], HALF, ids="33334444")),
    bad_distribution("with one id too few", "bytes", packed([3], HALF)),
    bad_distribution("without entries", "entries", packed([], [])),
    bad_distribution("with an id twice", "distinct", packed([3, 3], HALF)),
    bad_distribution("with an id outside the vocabulary", "below 8", packed([3, 8], HALF)),
    bad_distribution("that sums to 2", "sum to 1", packed([3, 4], [1.0, 1.0])),
    bad_distribution("with a negative entry", "positive", packed([3, 4], [1.5, -0.5])),
    bad_distribution("with NaN", "positive", packed([3, 4], [math.nan, 1.0])),
    bad_distribution("without the drafted token", "cannot have been drawn", packed([4, 5], HALF)),
    bad_verify("base beyond the committed tokens", "open", reason="LENGTH_MISMATCH", base_length=6, committed=(4, 5)),
    bad_verify(
        "base shorter than its own ids", "open", reason="LENGTH_MISMATCH", base_length=3, committed=(0, 0, 1, 2)
    ),
    bad_verify("base that contradicts", "open", reason="LENGTH_MISMATCH", base_length=4, committed=(7, 3)),
    bad_verify("base of 2^32 - 1", "64", reason="CONTEXT_TOO_LONG", base_length=2**32 - 1),
    bad_verify("draft beyond the context", "draft fewer", reason="CONTEXT_TOO_LONG", draft=[3] * (MAX_CONTEXT - 2)),
]


async def assert_fails_alone(bad: Bad) -> None:
    """The bad session hears its reason; a session that began before it goes on, and so does the stream."""
    async with connected_target() as peer:
        await peer.send(opened("neighbour"), verify("neighbour", draft=(3,)))
        await assert_verdict(peer, "neighbour", (3, 4), base_length=3)
        await peer.send(*bad.items, verify("neighbour", base_length=5, committed=(3, 4), draft=(5, 0)))
        failure = await peer.failure("bad")
        assert failure.reason == bad.reason
        assert bad.says in failure.message
        await assert_verdict(peer, "neighbour", (5, 6), base_length=5)
        await peer.send(closed("bad"), opened("new"), verify("new", draft=(3, 4)))
        await assert_verdict(peer, "new", (3, 4, 5), base_length=3)
        assert peer.waiting("bad") == []


@pytest.mark.parametrize("bad", BAD_ITEMS, ids=lambda bad: bad.what)
async def test_bad_item_fails_its_own_session_alone(bad: Bad) -> None:
    """A typed reason and a sentence for the bad session; its neighbour gets the right verdict, the stream lives on."""
    await assert_fails_alone(bad)


@pytest.mark.parametrize(("parameter", "value"), BAD_SAMPLING)
async def test_sampling_value_out_of_range_fails_its_own_session_alone(parameter: str, value: Any) -> None:
    """The sentence names the parameter, and no other session notices."""
    session = opened("bad", rule=COUPLED, sampling=sampling_with(**{parameter: value}))
    await assert_fails_alone(Bad(parameter, "PAYLOAD_INVALID", parameter, (session,)))


@pytest.mark.parametrize("vocab_size", [VOCAB + 1, 2**32 - 1])
@pytest.mark.parametrize("parameter", ["logit_bias", "banned_token_ids", "allowed_token_ids"])
async def test_token_that_only_a_larger_vocabulary_has_fails_its_own_session_alone(
    vocab_size: int, parameter: str
) -> None:
    """Sampling parameters are held against the model's own vocabulary, whatever size the session claims."""
    values: dict[str, Any] = {
        "logit_bias": [session_pb.LogitBias(token_id=VOCAB, bias=1.0)],
        "banned_token_ids": [VOCAB],
        "allowed_token_ids": session_pb.TokenIds(ids=[VOCAB]),
    }
    sampling = sampling_with(**{parameter: values[parameter]})
    async with connected_target() as peer:
        await peer.send(opened("bad", rule=COUPLED, vocab_size=vocab_size, sampling=sampling), verify("bad"))
        assert (await peer.failure("bad")).reason == "PAYLOAD_INVALID"
        await peer.send(opened("a"), verify("a"))
        await assert_verdict(peer, "a", (3,), base_length=3)


async def test_failed_verify_leaves_its_session_usable() -> None:
    """Behind a draft that was refused, the session stands where it stood."""
    async with connected_target() as peer:
        await peer.send(opened("a"), verify("a", draft=(3, VOCAB)))
        await peer.failure("a")
        await peer.send(verify("a", base_length=6, committed=(4, 5)))
        assert (await peer.failure("a")).reason == "LENGTH_MISMATCH"
        await peer.send(verify("a", draft=(3, 4)))
        await assert_verdict(peer, "a", (3, 4, 5), base_length=3)


async def test_one_item_fails_among_many_of_one_message() -> None:
    """Of three sessions in one message, the two good ones get their verdicts (field case C47)."""
    async with connected_target() as peer:
        await peer.send(opened("a"), opened("b"), opened("c"))
        await peer.send(verify("a", draft=(3,)), verify("b", draft=(2**31 - 1,)), verify("c", draft=(4,)))
        assert (await peer.failure("b")).reason == "PAYLOAD_INVALID"
        await assert_verdict(peer, "a", (3, 4), base_length=3)
        await assert_verdict(peer, "c", (3,), base_length=3)


async def test_work_that_is_late_already_is_not_begun() -> None:
    """A draft whose caller's time was used up in the queue is refused, and the session can go on."""

    is_reached, may_end = threading.Event(), threading.Event()

    def held_logits(ids: Sequence[int]) -> Sequence[float]:
        is_reached.set()
        assert may_end.wait(LIMIT_S)
        return counting_logits(VOCAB)(ids)

    model = counting_model(held_logits)
    async with running(target_of(model, heartbeat_s=0.02)) as service, target_peer(service.address) as peer:
        await peer.send(opened("slow"), opened("late"), verify("slow", draft=[3] * 20))
        assert await asyncio.to_thread(is_reached.wait, LIMIT_S)
        await peer.send(verify("late", budget_ms=1))
        await peer.load(lambda load: load.queued == 2)  # the one that is judged, and this one
        await asyncio.sleep(0.002)
        may_end.set()
        assert (await peer.failure("late")).reason == "DEADLINE_EXCEEDED"
        assert model.steps == 1
        await peer.send(verify("late", budget_ms=60_000))
        await assert_verdict(peer, "late", (3,), base_length=3)


async def test_sessions_beyond_the_limit_are_refused_until_one_is_closed() -> None:
    """QUEUE_FULL for the session too many; those held go on, and a closed one makes room."""
    async with connected_target(max_sessions=2) as peer:
        await peer.send(opened("a"), opened("b"), opened("c"))
        failure = await peer.failure("c")
        assert failure.reason == "QUEUE_FULL"
        assert "2 sessions" in failure.message
        await peer.send(verify("a"), opened("b", epoch=2), verify("b", epoch=2))
        await assert_verdict(peer, "a", (3,), base_length=3)
        await assert_verdict(peer, "b", (3,), base_length=3)
        await peer.send(closed("a"), opened("c", epoch=2), verify("c", epoch=2))
        await assert_verdict(peer, "c", (3,), base_length=3)


# ---------------------------------------------------------------------------------------------------------------------
# Stale and repeated items


async def test_item_of_an_older_epoch_is_dropped_and_counted() -> None:
    """It gets no answer and moves nothing, whether it commits or closes."""
    async with connected_target() as peer:
        await peer.send(opened("a"), opened("a", epoch=2))
        await peer.send(verify("a", base_length=4, committed=(3,)), closed("a"), opened("a"))
        await peer.send(verify("a", epoch=2, draft=(3,)))
        event = await peer.event("a")
        assert (event.epoch, list(event.verdict.token_ids)) == (2, [3, 4])
        load = await peer.load(lambda load: load.stale_items >= 3)
        assert (load.stale_items, load.sessions) == (3, 1)


async def test_repeated_opening_changes_nothing() -> None:
    """The session keeps what was committed since."""
    async with connected_target() as peer:
        await peer.send(opened("a"), verify("a", base_length=4, committed=(3,)), opened("a"))
        await assert_verdict(peer, "a", (4,), base_length=4)
        await peer.send(verify("a", base_length=5, committed=(4,), draft=(5,)))
        await assert_verdict(peer, "a", (5, 6), base_length=5)
        assert (await peer.load(lambda load: load.stale_items > 0)).stale_items == 1


async def test_repeated_draft_gets_the_same_verdict() -> None:
    """Judging is repeatable: a draft that arrives twice commits once."""
    async with connected_target() as peer:
        once = verify("a", base_length=4, committed=(3,), draft=(4, 6))
        await peer.send(opened("a"), once, once, verify("a", base_length=6, committed=(4, 5)))
        await assert_verdict(peer, "a", (4, 5), base_length=4)
        await assert_verdict(peer, "a", (4, 5), base_length=4)
        await assert_verdict(peer, "a", (6,), base_length=6)


async def test_draft_on_fewer_tokens_than_are_committed_is_dropped_and_counted() -> None:
    """A late draft neither gets an answer nor takes anything back."""
    async with connected_target() as peer:
        await peer.send(opened("a"), verify("a", base_length=5, committed=(3, 4)), verify("a", draft=(3,)))
        await peer.send(verify("a", base_length=6, committed=(5,)))
        await assert_verdict(peer, "a", (5,), base_length=5)
        await assert_verdict(peer, "a", (6,), base_length=6)
        assert (await peer.load(lambda load: load.stale_items > 0)).stale_items == 1


async def test_closing_twice_is_no_error() -> None:
    """The session is gone after the first, and nobody hears of the second."""
    async with connected_target() as peer:
        await peer.send(opened("a"), closed("a"), closed("a"), closed("never opened"))
        await peer.send(opened("b"), verify("b"))
        await assert_verdict(peer, "b", (3,), base_length=3)
        await peer.load(lambda load: load.sessions == 1)
        assert peer.waiting("a") == peer.waiting("never opened") == []


async def test_session_opened_again_elsewhere_is_taken_from_its_first_stream() -> None:
    """The first stream hears STALE_EPOCH and its items count for nothing; the second stream goes on from its tokens."""
    async with target() as service, target_peer(service.address) as first, target_peer(service.address) as second:
        await first.send(opened("a"), verify("a", draft=(3,)))
        await assert_verdict(first, "a", (3, 4), base_length=3)
        await second.send(opened("a", epoch=2, ids=(0, 1, 2, 3, 4), prompt_length=3))
        assert (await first.failure("a")).reason == "STALE_EPOCH"
        await first.send(verify("a", base_length=4, committed=(6,)), closed("a"), opened("b"), verify("b"))
        await assert_verdict(first, "b", (3,), base_length=3)
        await second.send(verify("a", epoch=2, base_length=5, draft=(5,)))
        await assert_verdict(second, "a", (5, 6), base_length=5)
        assert first.waiting("a") == []
        assert (await second.load(lambda load: load.stale_items >= 2)).sessions == 2


async def test_sessions_of_an_orchestrator_that_is_gone_make_room_for_others() -> None:
    """Its stream ends without a word, as when it is killed: a while later its session is let go of, another's is not."""
    async with target(orphan_grace_s=0.05) as service, target_peer(service.address) as stays:
        await stays.send(opened("b"))
        async with target_peer(service.address) as leaves:
            await leaves.send(opened("a"), opened("b", epoch=2))
            assert (await stays.failure("b")).reason == "STALE_EPOCH"
            await stays.load(lambda load: load.sessions == 2)
            await stays.send(opened("b", epoch=3))
        await stays.load(lambda load: load.sessions == 1)
        await stays.send(verify("b", epoch=3))
        await assert_verdict(stays, "b", (3,), base_length=3)


async def test_stream_cannot_touch_a_session_of_another_stream() -> None:
    """Items under the right id and epoch from a stream that did not open the session change nothing for its owner."""
    async with target() as service, target_peer(service.address) as owner, target_peer(service.address) as stranger:
        await owner.send(opened("a"), verify("a"))
        await assert_verdict(owner, "a", (3,), base_length=3)
        await stranger.send(verify("a", base_length=4, committed=(7,)), closed("a"), opened("b"), verify("b"))
        await assert_verdict(stranger, "b", (3,), base_length=3)
        assert [event for event in stranger.waiting("a") if event.WhichOneof("event") == "verdict"] == []
        await owner.send(verify("a", base_length=4, committed=(3,)))
        await assert_verdict(owner, "a", (4,), base_length=4)


@pytest.mark.parametrize("session_id", ["", "x" * 129])
async def test_session_id_has_a_length(session_id: str) -> None:
    """None is no session's, and a very long one would be remembered for long; the other session is served."""
    async with connected_target() as peer:
        await peer.send(opened(session_id), opened("a"), verify("a"))
        assert (await peer.failure(session_id)).reason == "PAYLOAD_INVALID"
        await assert_verdict(peer, "a", (3,), base_length=3)


async def read_into(events: list[target_pb.TargetEvent], call: Any) -> None:
    """All events of a stream, up to the error that ends it."""
    while True:
        events += target_pb.VerifyResponse.FromString(await call.read()).events


async def test_bytes_that_are_no_message_end_their_stream_in_our_words() -> None:
    """With what came for the items before them, and without a word in the log."""
    async with target() as service, open_channel(service.address) as channel:
        call: Any = channel.stream_stream(VERIFY)()
        await call.write(target_pb.VerifyRequest(commands=[opened("a", ids=())]).SerializeToString())
        await call.write(b"\xff\xff\xff")
        events: list[target_pb.TargetEvent] = []
        with capture_logs() as logs, pytest.raises(grpc.aio.AioRpcError) as refusal:
            await read_into(events, call)
        assert [event.failed.reason for event in events if event.session_id == "a"] == ["PAYLOAD_INVALID"]
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert_is_sentence(refusal.value.details() or "")
        assert [entry for entry in logs if entry["log_level"] == "error"] == []


# ---------------------------------------------------------------------------------------------------------------------
# Anything at all

payloads = st.one_of(
    st.binary(max_size=40),
    st.builds(
        packed,
        st.lists(st.integers(0, VOCAB), min_size=1, max_size=3),
        st.lists(st.floats(-1, 1, width=16), min_size=1, max_size=3),
    ),
    st.just(packed([3, 4], HALF)),
)
any_draft = st.builds(
    target_pb.VerifyDraft,
    base_length=st.integers(1, 6) | uint32s,
    committed_ids=id_lists,
    draft_ids=id_lists,
    draft_distributions=st.just(()) | st.lists(payloads, max_size=6),
    budget_ms=uint32s,
)
any_command = st.builds(
    lambda session_id, epoch, command: target_pb.TargetCommand(session_id=session_id, epoch=epoch, **command),
    st.sampled_from(["a", "b", ""]),
    st.integers(0, 2) | uint32s,
    st.one_of(
        st.builds(lambda value: {"open": value}, any_opening),
        st.builds(lambda value: {"verify": value}, any_draft),
        st.just({"close": session_pb.CloseSession()}),
        st.just({}),
    ),
)
legal_rounds = st.builds(
    lambda ids, rule, sampling, draft: [
        opened("a", ids=ids, prompt_length=1, rule=rule, sampling=sampling),
        verify(
            "a", base_length=len(ids), draft=draft, distributions=[packed(range(VOCAB), [0.125] * VOCAB)] * len(draft)
        ),
        verify("a", base_length=len(ids), draft=draft),
    ],
    st.lists(token_ids, min_size=1, max_size=8),
    st.sampled_from([COUPLED, REJECTION]),
    legal_sampling,
    st.lists(token_ids, max_size=4),
)
"""A session within all limits, if at their very ends, and two drafts for it, one with distributions and one without."""

REASONS = {
    "CONTEXT_TOO_LONG",
    "DEADLINE_EXCEEDED",
    "DISTRIBUTION_UNUSABLE",
    "LENGTH_MISMATCH",
    "PAYLOAD_INVALID",
    "SESSION_NOT_FOUND",
}


Bench = FuzzBench[target_pb.TargetCommand, target_pb.TargetEvent]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        bench = Bench(runner, lambda: target_of(counting_model()), open_target_stream)
        yield bench
        bench.stop()


@given(items=st.lists(any_command, min_size=1, max_size=6) | legal_rounds)
@settings(max_examples=100, deadline=None, derandomize=True, phases=NO_SHRINKING)
def test_whatever_the_items_say_only_typed_errors_come_out(bench: Bench, items: list[target_pb.TargetCommand]) -> None:
    """100 batches of up to 6 items, the same each time: verdicts or typed failures, and the neighbour's verdict every time."""
    for event in bench.run(lambda peer, prefix: answers_to(items, peer, prefix)):
        if event.WhichOneof("event") == "failed":
            assert event.failed.reason in REASONS
        else:
            assert all(token_id < VOCAB for token_id in event.verdict.token_ids)


async def answers_to(
    items: Sequence[target_pb.TargetCommand], peer: TargetPeer, prefix: str
) -> list[target_pb.TargetEvent]:
    """Send the items in front of a neighbour's draft; gives what came back for them."""
    neighbour = f"{prefix}neighbour"
    ids = sorted({f"{prefix}{item.session_id}" for item in items})
    for item in items:
        item.session_id = f"{prefix}{item.session_id}"
    await peer.send(opened(neighbour), *items)
    await peer.send(verify(neighbour, draft=(3, 4, 6)))
    await assert_verdict(peer, neighbour, (3, 4, 5), base_length=3)
    await peer.send(*(closed(session_id, epoch=2**32 - 1) for session_id in (neighbour, *ids)))
    return [event for session_id in ids for event in peer.waiting(session_id)]


damaged_messages = st.builds(
    lambda items, cut, tail: target_pb.VerifyRequest(commands=items).SerializeToString()[:cut] + tail,
    st.lists(any_command, min_size=1, max_size=2),
    st.integers(0, 40),
    st.binary(max_size=8),
)


@given(message=st.binary(max_size=60) | damaged_messages)
@settings(max_examples=200, deadline=None, derandomize=True, phases=NO_SHRINKING)
def test_whatever_the_bytes_are_only_their_own_stream_may_end(bench: Bench, message: bytes) -> None:
    """200 messages of random or damaged bytes, the same each time: refused in our words at the worst; the other stream goes on."""
    with capture_logs():
        code, details = bench.status_of(VERIFY, message)
    assert code in {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
    assert code is grpc.StatusCode.OK or f"no request of {VERIFY}" in details
    bench.run(lambda peer, prefix: answers_to([], peer, prefix))


async def test_oversized_message_ends_its_own_stream_alone() -> None:
    """Beyond 8 MiB gRPC refuses the message with RESOURCE_EXHAUSTED; another stream goes on."""
    unlimited = [("grpc.max_send_message_length", -1)]
    async with target() as service, target_peer(service.address) as other:
        await other.send(opened("a"))
        async with grpc.aio.insecure_channel(service.address, options=unlimited) as channel:
            code, _ = await status_of_bytes(channel, VERIFY, bytes(9 * 1024 * 1024))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        await other.send(verify("a"))
        await assert_verdict(other, "a", (3,), base_length=3)
