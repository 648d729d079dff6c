"""The drafter service over real gRPC: what a bad item does to its own session, and to nothing else.

The model counts: behind token t comes t + 1, around a vocabulary of 8. So the right proposal is plain to see.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from paceline.packing import unpack_distribution
from paceline.prefix import TokenPrefix
from paceline.process import Serve
from paceline.v1 import drafter_service_pb2 as drafter_pb
from paceline.v1 import session_pb2 as session_pb
from tests.contract.stream_peer import (
    BAD_SAMPLING,
    MAX_CONTEXT,
    NO_SHRINKING,
    VOCAB,
    DrafterPeer,
    FuzzBench,
    any_opening,
    drafter_peer,
    id_lists,
    legal_sampling,
    open_drafter_stream,
    open_session,
    sampling_with,
    token_ids,
    uint32s,
)
from tests.fakes import FakeModel, counting_logits
from tests.harness import Running, model_drafter_of, ngram_drafter, running

PROMPT = (0, 1, 2)
DRAFT = "/paceline.v1.DrafterService/Draft"

COUPLED = session_pb.VERIFICATION_RULE_COUPLED
REJECTION = session_pb.VERIFICATION_RULE_REJECTION


def counting_drafter(*, max_context: int = MAX_CONTEXT, **settings: Any) -> Serve:
    model = FakeModel(counting_logits(VOCAB), vocab_size=VOCAB, max_context=max_context)
    return model_drafter_of(model, heartbeat_s=0.02, **settings)


@asynccontextmanager
async def drafter(**settings: Any) -> AsyncIterator[Running]:
    async with running(counting_drafter(**settings)) as service:
        yield service


@asynccontextmanager
async def connected_drafter(**settings: Any) -> AsyncIterator[DrafterPeer]:
    """A service of its own, and one stream to it."""
    async with drafter(**settings) as service, drafter_peer(service.address) as peer:
        yield peer


# ---------------------------------------------------------------------------------------------------------------------
# Items, valid but for what is named


def opened(
    session_id: str, *, epoch: int = 1, ids: Sequence[int] = PROMPT, **changes: Any
) -> drafter_pb.DrafterCommand:
    return drafter_pb.DrafterCommand(session_id=session_id, epoch=epoch, open=open_session(ids, **changes))


def commit(
    session_id: str,
    *,
    epoch: int = 1,
    base_length: int = len(PROMPT),
    committed: Sequence[int] = (),
    draft_length: int = 2,
    credit: int = 2,
    branches: int = 0,
    fan_out: int = 0,
) -> drafter_pb.DrafterCommand:
    return drafter_pb.DrafterCommand(
        session_id=session_id,
        epoch=epoch,
        commit=drafter_pb.Commit(
            base_length=base_length,
            committed_ids=committed,
            draft_length=draft_length,
            credit=credit,
            branches=branches,
            fan_out=fan_out,
            acceptance=0.5,
        ),
    )


def closed(session_id: str, *, epoch: int = 1) -> drafter_pb.DrafterCommand:
    return drafter_pb.DrafterCommand(session_id=session_id, epoch=epoch, close=session_pb.CloseSession())


async def assert_proposal(peer: DrafterPeer, session_id: str, draft_ids: Sequence[int], *, on: Sequence[int]) -> None:
    """The next event is a draft that continues exactly the tokens `on`."""
    event = await peer.event(session_id)
    assert event.WhichOneof("event") == "proposal", event
    proposal = event.proposal
    assert (proposal.base_length, list(proposal.draft_ids)) == (len(on), list(draft_ids))
    assert proposal.prefix_digest == TokenPrefix(on).digest()


# ---------------------------------------------------------------------------------------------------------------------
# Bad items


@dataclass(frozen=True)
class Bad:
    """Items of one session, the last of which fails it."""

    what: str
    reason: str
    says: str  # a part of the sentence that names the fault
    items: tuple[drafter_pb.DrafterCommand, ...]


def bad_open(what: str, says: str, *, reason: str = "PAYLOAD_INVALID", **changes: Any) -> Bad:
    return Bad(what, reason, says, (opened("bad", **changes),))


def bad_commit(what: str, says: str, *, reason: str = "PAYLOAD_INVALID", **fields: Any) -> Bad:
    return Bad(what, reason, says, (opened("bad"), commit("bad", **fields)))


BAD_ITEMS = [
    Bad("no command", "PAYLOAD_INVALID", "no command", (drafter_pb.DrafterCommand(session_id="bad", epoch=1),)),
    Bad("unknown session", "SESSION_NOT_FOUND", "open it again", (commit("bad"),)),
    Bad("epoch never opened", "SESSION_NOT_FOUND", "open it again", (opened("bad"), commit("bad", epoch=2))),
    Bad("command after close", "SESSION_NOT_FOUND", "open it again", (opened("bad"), closed("bad"), commit("bad"))),
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
    bad_open("prompt beyond the context", "context of 64", reason="CONTEXT_TOO_LONG", ids=[0] * (MAX_CONTEXT + 1)),
    bad_commit("committed id of the vocabulary size", "ids are 0 to 7", base_length=4, committed=(8,)),
    bad_commit("committed id 2^31 - 1", "ids are 0 to 7", base_length=4, committed=(2**31 - 1,)),
    bad_commit("draft length beyond the limit", "at most 64", draft_length=65),
    bad_commit("credit beyond the limit", "at most 129", credit=130),
    bad_commit("base beyond the committed tokens", "open", reason="LENGTH_MISMATCH", base_length=6, committed=(4, 5)),
    bad_commit(
        "base shorter than its own ids", "open", reason="LENGTH_MISMATCH", base_length=3, committed=(0, 0, 1, 2)
    ),
    bad_commit("base that contradicts", "open", reason="LENGTH_MISMATCH", base_length=4, committed=(7, 3)),
    bad_commit("base beyond the context", "context of 64", reason="CONTEXT_TOO_LONG", base_length=MAX_CONTEXT + 1),
    bad_commit("base of 2^32 - 1", "context of 64", reason="CONTEXT_TOO_LONG", base_length=2**32 - 1),
]


async def assert_fails_alone(bad: Bad) -> None:
    """The bad session hears its reason; a session that began before it goes on, and so does the stream."""
    async with connected_drafter() as peer:
        await peer.send(opened("neighbour"), commit("neighbour"))
        await assert_proposal(peer, "neighbour", (3, 4), on=PROMPT)
        await peer.send(*bad.items, commit("neighbour", base_length=5, committed=(3, 4)))
        failure = await peer.failure("bad")
        assert failure.reason == bad.reason
        assert bad.says in failure.message
        await assert_proposal(peer, "neighbour", (5, 6), on=(0, 1, 2, 3, 4))
        await peer.send(closed("bad"), opened("new"), commit("new"))
        await assert_proposal(peer, "new", (3, 4), on=PROMPT)
        assert peer.waiting("bad") == []


@pytest.mark.parametrize("bad", BAD_ITEMS, ids=lambda bad: bad.what)
async def test_bad_item_fails_its_own_session_alone(bad: Bad) -> None:
    """A typed reason and a sentence for the bad session; its neighbour gets the right draft, the stream lives on."""
    await assert_fails_alone(bad)


@pytest.mark.parametrize(("parameter", "value"), BAD_SAMPLING)
async def test_sampling_value_out_of_range_fails_its_own_session_alone(parameter: str, value: Any) -> None:
    """The sentence names the parameter, and no other session notices."""
    session = opened("bad", rule=COUPLED, sampling=sampling_with(**{parameter: value}))
    await assert_fails_alone(Bad(parameter, "PAYLOAD_INVALID", parameter, (session,)))


async def test_vocabulary_that_no_model_has_fails_its_own_session_alone() -> None:
    """A claimed size must not make the drafter fill its memory with padding (2^26 tokens: 256 MiB a row)."""
    await assert_fails_alone(bad_open("vocabulary of 2^26 tokens", "vocabulary", vocab_size=2**26))


async def test_failed_commit_leaves_its_session_usable() -> None:
    """Behind a commit that was refused, the session stands where it stood."""
    async with connected_drafter() as peer:
        await peer.send(opened("a"), commit("a", base_length=4, committed=(VOCAB,)))
        await peer.failure("a")
        await peer.send(commit("a", base_length=6, committed=(4, 5)))
        assert (await peer.failure("a")).reason == "LENGTH_MISMATCH"
        await peer.send(commit("a"))
        await assert_proposal(peer, "a", (3, 4), on=PROMPT)


async def test_one_item_fails_among_many_of_one_message() -> None:
    """Of three sessions in one message, the two good ones get their drafts (field case C47)."""
    async with connected_drafter() as peer:
        await peer.send(opened("a"), opened("b"), opened("c"))
        await peer.send(commit("a"), commit("b", base_length=4, committed=(2**31 - 1,)), commit("c", draft_length=1))
        assert (await peer.failure("b")).reason == "PAYLOAD_INVALID"
        await assert_proposal(peer, "a", (3, 4), on=PROMPT)
        await assert_proposal(peer, "c", (3,), on=PROMPT)


async def test_sessions_beyond_the_limit_are_refused_until_one_is_closed() -> None:
    """QUEUE_FULL for the session too many; those held go on, and a closed one makes room."""
    async with connected_drafter(max_sessions=2) as peer:
        await peer.send(opened("a"), opened("b"), opened("c"))
        failure = await peer.failure("c")
        assert failure.reason == "QUEUE_FULL"
        assert "2 sessions" in failure.message
        await peer.send(commit("a"), opened("b", epoch=2), commit("b", epoch=2))
        await assert_proposal(peer, "a", (3, 4), on=PROMPT)
        await assert_proposal(peer, "b", (3, 4), on=PROMPT)
        await peer.send(closed("a"), opened("c", epoch=2), commit("c", epoch=2))
        await assert_proposal(peer, "c", (3, 4), on=PROMPT)


async def test_method_without_a_model_takes_no_id_beyond_the_targets_vocabulary() -> None:
    """Prompt lookup has no vocabulary of its own, and would propose what it was told."""
    async with running(ngram_drafter(heartbeat_s=0.02)) as service, drafter_peer(service.address) as peer:
        await peer.send(opened("bad", ids=(1, 2, 1)), opened("good", ids=(1, 2, 1)))
        await peer.send(commit("bad", base_length=5, committed=(VOCAB, 1)), commit("good"))
        await assert_proposal(peer, "good", (2, 1), on=(1, 2, 1))
        assert (await peer.failure("bad")).reason == "PAYLOAD_INVALID"


async def test_method_with_nothing_to_offer_says_so() -> None:
    """An empty draft, so that nobody waits for one."""
    async with running(ngram_drafter()) as service, drafter_peer(service.address) as peer:
        await peer.send(opened("a"), commit("a"))
        await assert_proposal(peer, "a", (), on=PROMPT)


# ---------------------------------------------------------------------------------------------------------------------
# Credit and rollback


async def test_drafting_goes_past_the_draft_in_flight_as_far_as_credit_allows() -> None:
    """One whole draft, then what the rest of the credit yields, and not a token more."""
    async with connected_drafter() as peer:
        await peer.send(opened("a"), commit("a", draft_length=2, credit=5))
        await assert_proposal(peer, "a", (3, 4), on=PROMPT)
        await assert_proposal(peer, "a", (5, 6, 7), on=(0, 1, 2, 3, 4))
        await peer.send(commit("a", base_length=5, committed=(3, 4), draft_length=2, credit=5))
        await assert_proposal(peer, "a", (0, 1), on=(0, 1, 2, 3, 4, 5, 6, 7))
        await peer.send(opened("b"), commit("b"))
        await assert_proposal(peer, "b", (3, 4), on=PROMPT)
        assert peer.waiting("a") == []


async def test_commit_that_contradicts_the_draft_rolls_it_back() -> None:
    """Behind a correction the drafter begins anew, on exactly the committed tokens."""
    async with connected_drafter() as peer:
        await peer.send(opened("a"), commit("a", draft_length=2, credit=4))
        await assert_proposal(peer, "a", (3, 4), on=PROMPT)
        await assert_proposal(peer, "a", (5, 6), on=(0, 1, 2, 3, 4))
        await peer.send(commit("a", base_length=5, committed=(3, 6)))
        await assert_proposal(peer, "a", (7, 0), on=(0, 1, 2, 3, 6))


async def test_branches_continue_other_outcomes_and_one_that_comes_true_is_drafted_on() -> None:
    """The model counts, so the first token of a branch names its guess. Each token of a branch has what it was drawn from.

    So sure a model guesses nothing itself: under `rejection` guesses do not go by what it thinks. It counts on with a
    probability of 0.998 a token, and the seed is fixed.
    """
    async with connected_drafter() as peer:
        await peer.send(opened("a", rule=REJECTION, sampling=sampling_with()))
        await peer.send(commit("a", draft_length=3, credit=4, branches=3, fan_out=2))
        proposals: list[drafter_pb.Proposal] = []
        while sum(len(proposal.draft_ids) for proposal in proposals) < 4:
            proposals.append((await peer.event("a")).proposal)
        branches = [branch for proposal in proposals for branch in proposal.branches]
        first = next(branch for branch in branches if branch.base_length == len(PROMPT) + 1)
        guess = (first.draft_ids[0] - 1) % VOCAB
        assert guess != proposals[0].draft_ids[0]
        assert first.prefix_digest == TokenPrefix((*PROMPT, guess)).digest()
        assert all(len(branch.draft_distributions) == len(branch.draft_ids) > 0 for branch in branches)
        assert sum(proposal.draft_steps for proposal in proposals) >= 4
        await peer.send(commit("a", base_length=4, committed=(guess,), draft_length=3, credit=9))
        following = (await peer.event("a")).proposal
        while following.base_length == 4 or not following.draft_ids:
            following = (await peer.event("a")).proposal
        assert following.draft_ids[0] == (guess + following.base_length - len(PROMPT)) % VOCAB


async def test_rounds_without_credit_still_reach_the_drafter() -> None:
    """After rounds without a draft, the next one continues all that was committed meanwhile (field case C32)."""
    async with connected_drafter() as peer:
        await peer.send(opened("a"))
        await peer.send(commit("a", base_length=4, committed=(6,), credit=0))
        await peer.send(commit("a", base_length=5, committed=(1,), credit=0))
        await peer.send(commit("a", base_length=6, committed=(4,)))
        await assert_proposal(peer, "a", (5, 6), on=(0, 1, 2, 6, 1, 4))


async def test_drafts_end_where_the_drafters_context_does() -> None:
    """Committed and drafted tokens never exceed it, whatever the credit (field case C50)."""
    async with connected_drafter(max_context=8) as peer:
        await peer.send(opened("a", ids=(0, 1, 2, 3, 4, 5)), commit("a", base_length=6, draft_length=4, credit=4))
        await assert_proposal(peer, "a", (6, 7), on=(0, 1, 2, 3, 4, 5))


async def test_draft_under_rejection_carries_what_each_token_was_drawn_from() -> None:
    """One distribution a token, over the target's vocabulary, that gives the token a probability."""
    async with connected_drafter() as peer:
        await peer.send(opened("a", rule=REJECTION, sampling=sampling_with(), vocab_size=VOCAB + 2))
        await peer.send(commit("a", draft_length=4, credit=4))
        proposal = (await peer.event("a")).proposal
        assert len(proposal.draft_ids) == len(proposal.draft_distributions) == 4
        for draft_id, payload in zip(proposal.draft_ids, proposal.draft_distributions, strict=True):
            assert unpack_distribution(payload, vocab_size=VOCAB + 2).probability(draft_id) > 0.0


# ---------------------------------------------------------------------------------------------------------------------
# Stale and repeated items


async def test_item_of_an_older_epoch_is_dropped_and_counted() -> None:
    """It gets no answer and moves nothing, whether it commits, closes or opens."""
    async with connected_drafter() as peer:
        await peer.send(opened("a"), opened("a", epoch=2))
        await peer.send(commit("a", base_length=4, committed=(6,)), closed("a"), opened("a"))
        await peer.send(commit("a", epoch=2))
        await assert_proposal(peer, "a", (3, 4), on=PROMPT)
        load = await peer.load(lambda load: load.stale_items >= 3)
        assert (load.stale_items, load.sessions) == (3, 1)


async def test_repeated_opening_changes_nothing() -> None:
    """The session keeps what was committed since."""
    async with connected_drafter() as peer:
        await peer.send(opened("a"), commit("a", base_length=4, committed=(6,), credit=0), opened("a"))
        await peer.send(commit("a", base_length=5, committed=(1,)))
        await assert_proposal(peer, "a", (2, 3), on=(0, 1, 2, 6, 1))
        assert (await peer.load(lambda load: load.stale_items > 0)).stale_items == 1


async def test_repeated_commit_brings_no_second_draft() -> None:
    """A commit that arrives twice, before or behind the draft it asked for, is the same as one."""
    async with connected_drafter() as peer:
        once = commit("a", base_length=4, committed=(6,))
        await peer.send(opened("a"), once, once)
        await assert_proposal(peer, "a", (7, 0), on=(0, 1, 2, 6))
        await peer.send(once, opened("b"), commit("b"))
        await assert_proposal(peer, "b", (3, 4), on=PROMPT)
        assert peer.waiting("a") == []
        await peer.send(commit("a", base_length=6, committed=(7, 0)))
        await assert_proposal(peer, "a", (1, 2), on=(0, 1, 2, 6, 7, 0))


async def test_commit_overtaken_by_a_later_one_is_dropped_and_counted() -> None:
    """Commits that arrive in the wrong order leave the later one standing."""
    async with connected_drafter() as peer:
        await peer.send(opened("a"))
        await peer.send(commit("a", base_length=5, committed=(6, 1)), commit("a", base_length=4, committed=(6,)))
        await assert_proposal(peer, "a", (2, 3), on=(0, 1, 2, 6, 1))
        assert (await peer.load(lambda load: load.stale_items > 0)).stale_items == 1
        await peer.send(commit("a", base_length=6, committed=(2,)))
        await assert_proposal(peer, "a", (4,), on=(0, 1, 2, 6, 1, 2, 3))


async def test_closing_twice_is_no_error() -> None:
    """The session is gone after the first, and nobody hears of the second."""
    async with connected_drafter() as peer:
        await peer.send(opened("a"), closed("a"), closed("a"), closed("never opened"))
        await peer.send(opened("b"), commit("b"))
        await assert_proposal(peer, "b", (3, 4), on=PROMPT)
        await peer.load(lambda load: load.sessions == 1)
        assert peer.waiting("a") == peer.waiting("never opened") == []


async def test_session_opened_again_elsewhere_is_taken_from_its_first_stream() -> None:
    """The first stream hears STALE_EPOCH and its items count for nothing; the second stream goes on from its tokens."""
    async with drafter() as service, drafter_peer(service.address) as first, drafter_peer(service.address) as second:
        await first.send(opened("a"), commit("a"))
        await assert_proposal(first, "a", (3, 4), on=PROMPT)
        await second.send(opened("a", epoch=2, ids=(0, 1, 2, 5), prompt_length=3))
        assert (await first.failure("a")).reason == "STALE_EPOCH"
        await first.send(commit("a", base_length=4, committed=(6,)), closed("a"), opened("b"), commit("b"))
        await assert_proposal(first, "b", (3, 4), on=PROMPT)
        await second.send(commit("a", epoch=2, base_length=4))
        await assert_proposal(second, "a", (6, 7), on=(0, 1, 2, 5))
        assert first.waiting("a") == []
        assert (await second.load(lambda load: load.stale_items >= 2)).sessions == 2


async def test_stream_cannot_touch_a_session_of_another_stream() -> None:
    """Items under the right id and epoch from a stream that did not open the session change nothing for its owner."""
    async with drafter() as service, drafter_peer(service.address) as owner, drafter_peer(service.address) as stranger:
        await owner.send(opened("a"), commit("a", credit=0))
        await owner.load(lambda load: load.sessions == 1)
        await stranger.send(commit("a", base_length=4, committed=(7,), credit=0), closed("a"), opened("b"), commit("b"))
        await assert_proposal(stranger, "b", (3, 4), on=PROMPT)
        await owner.send(commit("a", base_length=4, committed=(3,)))
        await assert_proposal(owner, "a", (4, 5), on=(0, 1, 2, 3))


# ---------------------------------------------------------------------------------------------------------------------
# Anything at all

any_commit = st.builds(
    drafter_pb.Commit,
    base_length=st.integers(1, 6) | uint32s,
    committed_ids=id_lists,
    draft_length=st.integers(0, 5) | uint32s,
    credit=st.integers(0, 8) | uint32s,
    resend=st.booleans(),
)
any_command = st.builds(
    lambda session_id, epoch, command: drafter_pb.DrafterCommand(session_id=session_id, epoch=epoch, **command),
    st.sampled_from(["a", "b", ""]),
    st.integers(0, 2) | uint32s,
    st.one_of(
        # Sizes beyond these are refused, or the drafter would run out of memory: they have a test of their own.
        st.builds(lambda value: {"open": value}, any_opening.filter(lambda opening: opening.vocab_size <= 100)),
        st.builds(lambda value: {"commit": value}, any_commit),
        st.just({"close": session_pb.CloseSession()}),
        st.just({}),
    ),
)
legal_rounds = st.builds(
    lambda ids, vocab_size, rule, sampling, commits: [
        opened("a", ids=ids, prompt_length=1, vocab_size=vocab_size, rule=rule, sampling=sampling),
        *(
            drafter_pb.DrafterCommand(
                session_id="a",
                epoch=1,
                commit=drafter_pb.Commit(
                    base_length=len(ids) + more,
                    committed_ids=[0] * more,
                    draft_length=draft_length,
                    credit=credit,
                    branches=branches,
                    fan_out=2,
                    acceptance=0.5,
                    resend=resend,
                ),
            )
            for more, draft_length, credit, branches, resend in commits
        ),
    ],
    st.lists(token_ids, min_size=1, max_size=8),
    st.integers(VOCAB, VOCAB + 3),
    st.sampled_from([COUPLED, REJECTION]),
    legal_sampling,
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 9), st.sampled_from([0, 0, 3]), st.booleans()),
        min_size=1,
        max_size=4,
    ),
)
"""A session within all limits, if at their very ends, and commits for it in any order."""

REASONS = {
    "CONTEXT_TOO_LONG",
    "DISTRIBUTION_UNUSABLE",
    "LENGTH_MISMATCH",
    "PAYLOAD_INVALID",
    "SESSION_NOT_FOUND",
}
Bench = FuzzBench[drafter_pb.DrafterCommand, drafter_pb.DrafterEvent]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        bench = Bench(runner, counting_drafter, open_drafter_stream)
        yield bench
        bench.stop()


@given(items=st.lists(any_command, min_size=1, max_size=6) | legal_rounds)
@settings(max_examples=100, deadline=None, derandomize=True, phases=NO_SHRINKING)
def test_whatever_the_items_say_only_typed_errors_come_out(
    bench: Bench, items: list[drafter_pb.DrafterCommand]
) -> None:
    """100 batches of up to 6 items, the same each time: drafts or typed failures, and the neighbour's draft every time."""
    for event in bench.run(lambda peer, prefix: answers_to(items, peer, prefix)):
        if event.WhichOneof("event") == "failed":
            assert event.failed.reason in REASONS
        else:
            assert all(token_id < VOCAB for token_id in event.proposal.draft_ids)
            assert len(event.proposal.draft_distributions) in {0, len(event.proposal.draft_ids)}


async def answers_to(
    items: Sequence[drafter_pb.DrafterCommand], peer: DrafterPeer, prefix: str
) -> list[drafter_pb.DrafterEvent]:
    """Send the items in front of a neighbour's commit; gives what came back for them."""
    neighbour = f"{prefix}neighbour"
    ids = sorted({f"{prefix}{item.session_id}" for item in items})
    for item in items:
        item.session_id = f"{prefix}{item.session_id}"
    await peer.send(opened(neighbour), *items)
    await peer.send(commit(neighbour, draft_length=3, credit=3))
    await assert_proposal(peer, neighbour, (3, 4, 5), on=PROMPT)
    await peer.send(*(closed(session_id, epoch=2**32 - 1) for session_id in (neighbour, *ids)))
    return [event for session_id in ids for event in peer.waiting(session_id)]


damaged_messages = st.builds(
    lambda items, cut, tail: drafter_pb.DraftRequest(commands=items).SerializeToString()[:cut] + tail,
    st.lists(any_command, min_size=1, max_size=2),
    st.integers(0, 40),
    st.binary(max_size=8),
)


@given(message=st.binary(max_size=60) | damaged_messages)
@settings(max_examples=100, deadline=None, derandomize=True, phases=NO_SHRINKING)
def test_whatever_the_bytes_are_only_their_own_stream_may_end(bench: Bench, message: bytes) -> None:
    """100 messages of random or damaged bytes, the same each time: refused in our words at the worst; the other stream goes on."""
    with capture_logs():
        code, details = bench.status_of(DRAFT, message)
    assert code in {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
    assert code is grpc.StatusCode.OK or f"no request of {DRAFT}" in details
    bench.run(lambda peer, prefix: answers_to([], peer, prefix))
