"""Where drafts come from: the drafter, else prompt lookup, else nowhere; every step down costs speed alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from drafter_service.drafter import Drafter, DrafterEvent
from drafter_service.methods.draft_model import DraftModelMethod
from drafter_service.servicer import proposal_of
from drafter_service.session import Commit, Drafted
from orchestrator.board import Replica
from orchestrator.drafting import DraftsWithFallback, NoDrafts
from orchestrator.loop import DraftOrder, OfferedDraft, RoundPlan
from orchestrator.pool import Seat
from orchestrator.proposals import Arrival, ProposalStore
from orchestrator.remote_drafts import RemoteDrafts, SeatTaker
from orchestrator.stall import StallMeter
from paceline.errors import Draining, LengthMismatch, PacelineError, PayloadInvalid, QueueFull, SessionNotFound
from paceline.lookup.ngram import NgramIndex
from paceline.prefix import TokenPrefix
from paceline.sessions import Address, Open, SessionTable
from paceline.types import Draft, DraftOrigin, ModelInfo, VerificationRule
from paceline.v1 import drafter_service_pb2 as drafter_pb
from paceline.wire import failure_to_proto, open_from_proto, proposal_to_proto
from tests.fakes import FakeModel, fake_info, hashed_logits, spec_of

PERIODIC = TokenPrefix((7, 8, 9, 7, 8))
NEW = TokenPrefix((1, 2, 3, 4))
ARRIVAL = Arrival(1.0, 0.5, 3)
ORDER = DraftOrder(draft_length=2, credit=4)


def wanted(draft_length: int, *, enough_length: int | None = None, patience_s: float = 60.0) -> RoundPlan:
    """So many tokens, which a round waits for unless told otherwise."""
    enough = draft_length if enough_length is None else enough_length
    return RoundPlan(draft_length=draft_length, enough_length=enough, patience_s=patience_s)


@dataclass
class FakeRemote:
    """A drafter service that answers as it is told; notes what it hears (`drafting.Remote`)."""

    answer: Draft | None = None
    heard: list[tuple[str, int, int, int]] = field(default_factory=list)
    wants_drafts: bool = True
    is_served: bool = True
    is_distrusted: bool = False

    def commit(self, prefix: TokenPrefix, order: DraftOrder) -> None:
        self.heard.append(("commit", len(prefix), order.draft_length, order.credit))

    def available(self, prefix: TokenPrefix, max_length: int) -> int:
        return min(max_length, len(self.answer or ()))

    def is_ready(self, prefix: TokenPrefix, plan: RoundPlan) -> bool:
        return self.answer is not None

    async def draft(self, prefix: TokenPrefix, plan: RoundPlan) -> Draft | None:
        self.heard.append(("draft", len(prefix), plan.draft_length, 0))
        return self.answer

    def arrival(self, prefix: TokenPrefix) -> Arrival | None:
        return ARRIVAL

    def continues(self, digest: int) -> bool:
        return digest == 4

    def distrust(self) -> None:
        self.is_distrusted = True


def lookup() -> NgramIndex:
    return NgramIndex(prompt_lookup_min=1, prompt_lookup_max=3)


async def test_without_a_drafter_there_are_no_drafts() -> None:
    """Plain decoding: an empty draft, never one that stands in for a drafter, and nothing ever waits behind it."""
    drafts = NoDrafts()
    drafts.commit(PERIODIC, ORDER)
    assert await drafts.draft(PERIODIC, wanted(4)) == OfferedDraft()
    assert not drafts.continues(PERIODIC.digest())


@pytest.mark.parametrize("answer", [Draft((1, 2)), Draft((1,), (b"row",)), Draft()])
async def test_what_the_drafter_says_holds(answer: Draft) -> None:
    """Also that it has nothing to offer: lookup does not step in for a drafter that answers."""
    drafts = DraftsWithFallback(FakeRemote(answer), lookup())
    expected = OfferedDraft(answer, DraftOrigin.AHEAD, ARRIVAL) if answer.ids else OfferedDraft()
    assert await drafts.draft(PERIODIC, wanted(4)) == expected


async def test_lookup_stands_in_for_a_drafter_that_does_not_answer() -> None:
    """Its drafts are deterministic, marked as a stand-in, and no longer than asked for."""
    drafts = DraftsWithFallback(FakeRemote(None), lookup())
    assert await drafts.draft(PERIODIC, wanted(4)) == OfferedDraft(Draft((9, 7, 8, 9)), DraftOrigin.FALLBACK)
    assert await drafts.draft(PERIODIC, wanted(1)) == OfferedDraft(Draft((9,)), DraftOrigin.FALLBACK)


@pytest.mark.parametrize("has_lookup", [True, False])
async def test_without_a_match_or_a_lookup_there_is_no_draft(has_lookup: bool) -> None:
    """And a round without a draft is not counted as one of the stand-in."""
    drafts = DraftsWithFallback(FakeRemote(None), lookup() if has_lookup else None)
    assert await drafts.draft(NEW, wanted(4)) == OfferedDraft()


async def test_lookup_catches_up_on_the_rounds_that_the_drafter_served() -> None:
    """It is built when first needed and then kept up, as if it had been there all along."""
    remote, index = FakeRemote(Draft((1,))), lookup()
    drafts, prefix = DraftsWithFallback(remote, index), TokenPrefix(NEW.ids)
    await drafts.draft(prefix, wanted(4))
    assert len(index) == 0
    for answer, committed in ((None, (1, 2)), (Draft((5,)), (9, 1)), (None, (2,)), (Draft(), (4, 4)), (None, (9, 1))):
        prefix.extend(committed)
        remote.answer = answer
        offered = await drafts.draft(prefix, wanted(3))
        if answer is None:
            fresh = lookup()
            fresh.extend(prefix.ids)
            assert offered == OfferedDraft(Draft(fresh.propose((), 3)), DraftOrigin.FALLBACK)


async def test_the_drafter_hears_of_every_commit_and_answers_for_what_is_there() -> None:
    """Only what the drafter pushed can stand in for a bonus token: a lookup is no draft that is there."""
    remote = FakeRemote()
    drafts = DraftsWithFallback(remote, lookup())
    drafts.commit(PERIODIC, ORDER)
    await drafts.draft(PERIODIC, wanted(3))
    assert remote.heard == [("commit", 5, ORDER.draft_length, ORDER.credit), ("draft", 5, 3, 0)]
    assert drafts.continues(4)
    assert not drafts.continues(PERIODIC.digest())


# ---- the session at the drafter service -----------------------------------------------------------------------------


@dataclass
class FakeClient:
    """A connection to a drafter; notes what is sent on it, or takes no more."""

    is_full: bool = False
    sent: list[drafter_pb.DrafterCommand] = field(default_factory=list)
    is_connected: bool = True
    stale_items: int = 0
    replica: Replica = field(default_factory=lambda: Replica(replica_id="drafter", address="drafter:1"))
    info: ModelInfo = field(default_factory=lambda: fake_info(FakeModel(hashed_logits(10), vocab_size=10)))

    def attach(self, session_id: str, session: Any) -> None:
        """Events are handed to the session by the tests themselves."""

    def detach(self, session_id: str) -> None: ...

    def send(self, command: drafter_pb.DrafterCommand) -> None:
        if self.is_full:
            raise QueueFull("The peer does not read its stream.")
        self.sent.append(command)

    @property
    def kinds(self) -> list[tuple[str | None, int]]:
        return [(command.WhichOneof("command"), command.epoch) for command in self.sent]


@dataclass
class FakeSeats:
    """A pool of drafters that gives out seats when told to (`remote_drafts.DrafterSeats`)."""

    asked: list[str] = field(default_factory=list)
    refused: list[PacelineError] = field(default_factory=list)
    given_back: int = 0
    moves: list[str] = field(default_factory=list)

    def ask(self, session_id: str, taker: SeatTaker, *, tokens: int) -> None:
        if session_id not in self.asked:
            self.asked.append(session_id)

    def withdraw(self, session_id: str) -> None:
        if session_id in self.asked:
            self.asked.remove(session_id)

    def note_refusal(self, replica: Replica, refusal: PacelineError) -> None:
        self.refused.append(refusal)

    def count_move(self, reason: str) -> None:
        self.moves.append(reason)

    def give(self, drafts: RemoteDrafts, client: FakeClient) -> None:
        """The turn of the session has come."""
        assert self.asked == ["session"]
        self.asked.clear()
        seat: Seat[Any] = Seat("session", drafts, self._on_given_back)
        seat.take(FakeLease(client.replica), client)
        drafts.on_seat(seat)

    def _on_given_back(self, seat: Seat[Any]) -> None:
        self.given_back += 1


@dataclass
class FakeLease:
    replica: Replica
    releases: int = 0

    def release(self) -> None:
        self.releases += 1


def remote_drafts(client: FakeClient | None = None, seats: FakeSeats | None = None) -> RemoteDrafts:
    """A session's drafts; with a client, it has a seat there."""
    seats = seats or FakeSeats()
    drafts = RemoteDrafts(seats, spec_of(prompt_length=4, vocab_size=10))
    drafts.ask()
    if client is not None:
        seats.give(drafts, client)
    return drafts


def failed(error: PacelineError, *, epoch: int = 1) -> drafter_pb.DrafterEvent:
    return drafter_pb.DrafterEvent(session_id="session", epoch=epoch, failed=failure_to_proto(error))


def proposed(*ids: int, epoch: int = 1) -> drafter_pb.DrafterEvent:
    proposal = drafter_pb.Proposal(base_length=len(NEW), prefix_digest=NEW.digest(), draft_ids=ids)
    return drafter_pb.DrafterEvent(session_id="session", epoch=epoch, proposal=proposal)


async def test_a_draft_that_is_there_is_given_at_once() -> None:
    """And what continues it is known to be there; one of an older epoch is dropped and counted."""
    client = FakeClient()
    drafts = remote_drafts(client)
    drafts.commit(NEW, ORDER)
    drafts.on_event(proposed(9, epoch=0))
    drafts.on_event(proposed(5, 6, 7))
    assert await drafts.draft(NEW, wanted(2)) == Draft((5, 6))
    assert drafts.continues(TokenPrefix((*NEW.ids, 5, 6)).digest())
    assert client.stale_items == 1
    assert client.kinds == [("open", 1), ("commit", 1)]


async def test_a_draft_is_ready_exactly_when_nothing_would_be_waited_for() -> None:
    """There is no drafter, enough is there, nothing more is to come, or a round asks for nothing: at any other time a
    round waits."""
    drafts = DraftsWithFallback(remote_drafts(), None)
    assert drafts.is_ready(NEW, wanted(2))
    assert NoDrafts().is_ready(NEW, wanted(2))
    remote = remote_drafts(FakeClient())
    drafts = DraftsWithFallback(remote, None)
    drafts.commit(NEW, ORDER)
    assert not drafts.is_ready(NEW, wanted(2))
    assert drafts.is_ready(NEW, wanted(2, enough_length=0))
    remote.on_event(proposed(5))
    assert [drafts.is_ready(NEW, wanted(length)) for length in (1, 2)] == [True, False]
    remote.on_event(failed(SessionNotFound("Open it again.")))
    assert drafts.is_ready(NEW, wanted(2))


async def test_a_round_that_is_not_to_wait_is_ready_until_something_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a drafter that was silent for long two rounds do not wait; to ask whether they would costs none of them."""
    monkeypatch.setattr("orchestrator.remote_drafts._SILENT_S", 0.0)
    for comes in (False, True):
        drafts = remote_drafts(FakeClient())
        drafts.commit(NEW, ORDER)
        assert await drafts.draft(NEW, wanted(2, patience_s=0.0)) is None
        if comes:
            drafts.on_event(proposed(5))
            assert not drafts.is_ready(NEW, wanted(2))
            continue
        for _ in range(2):
            assert drafts.is_ready(NEW, wanted(2))
            assert drafts.is_ready(NEW, wanted(2))
            assert await asyncio.wait_for(drafts.draft(NEW, wanted(2)), 5) is None
        assert not drafts.is_ready(NEW, wanted(2))


async def test_a_session_that_the_drafter_lost_is_opened_again_from_its_tokens() -> None:
    """Under a higher epoch, with the next commit; until then nobody waits for it. After several times it is left."""
    client, prefix = FakeClient(), TokenPrefix(NEW.ids)
    drafts = remote_drafts(client)
    for epoch in (1, 2, 3, 4):
        drafts.commit(prefix, ORDER)
        assert client.kinds[-2:] == [("open", epoch), ("commit", epoch)]
        assert list(client.sent[-2].open.committed_ids) == list(prefix.ids)
        drafts.on_event(failed(LengthMismatch("Open it again."), epoch=epoch))
        assert await drafts.draft(prefix, wanted(2)) is None
        prefix.extend([epoch])
    sent = len(client.sent)
    drafts.commit(prefix, ORDER)
    assert [kind for kind, _ in client.kinds[sent:]] in ([], ["close"])


@pytest.mark.parametrize("event", [proposed(10), failed(PayloadInvalid("The committed tokens hold the id 10."))])
async def test_a_session_that_is_given_up_is_closed_at_the_drafter(event: drafter_pb.DrafterEvent) -> None:
    """It would hold its memory there, and go on drafting, until it has idled too long. No other drafter is asked for."""
    client, seats = FakeClient(), FakeSeats()
    drafts = remote_drafts(client, seats)
    drafts.commit(NEW, ORDER)
    drafts.on_event(event)
    assert await drafts.draft(NEW, wanted(2)) is None
    drafts.close()
    assert client.kinds == [("open", 1), ("commit", 1), ("close", 1)]
    assert (seats.given_back, seats.asked, drafts.wants_drafts) == (1, [], False)


async def test_a_drafter_that_does_not_read_never_fails_a_session() -> None:
    """The queue to it is full: that costs drafts, not the answer."""
    client = FakeClient(is_full=True)
    drafts = remote_drafts(client)
    drafts.commit(NEW, ORDER)
    assert await drafts.draft(NEW, wanted(2)) is None
    drafts.close()


async def test_a_session_without_a_seat_waits_for_nothing() -> None:
    """It has asked for a seat, and goes on without drafts until it is given one."""
    seats = FakeSeats()
    drafts = remote_drafts(seats=seats)
    drafts.commit(NEW, ORDER)
    assert await drafts.draft(NEW, wanted(2)) is None
    assert seats.asked == ["session"]
    drafts.close()
    assert seats.asked == []


async def test_a_session_opens_as_soon_as_its_seat_comes() -> None:
    """With the last commit, if that still holds: the drafter reads the prompt while the target does."""
    client, seats = FakeClient(), FakeSeats()
    drafts, prefix = remote_drafts(seats=seats), TokenPrefix(NEW.ids)
    drafts.commit(prefix, ORDER)
    seats.give(drafts, client)
    assert client.kinds == [("open", 1), ("commit", 1)]
    assert (client.sent[1].commit.base_length, client.sent[1].commit.credit) == (4, 4)
    prefix.extend([5])
    drafts.commit(prefix, ORDER)
    assert list(client.sent[2].commit.committed_ids) == [5]


async def test_a_seat_that_comes_between_two_rounds_is_opened_with_the_next_commit() -> None:
    """What is committed by then is more than the last commit said."""
    client, seats = FakeClient(), FakeSeats()
    drafts, prefix = remote_drafts(seats=seats), TokenPrefix(NEW.ids)
    drafts.commit(prefix, ORDER)
    prefix.extend([5])
    seats.give(drafts, client)
    assert client.kinds == []
    drafts.commit(prefix, ORDER)
    assert client.kinds == [("open", 1), ("commit", 1)]
    assert list(client.sent[0].open.committed_ids) == [*NEW.ids, 5]


@pytest.mark.parametrize("is_draining", [False, True])
async def test_a_lost_drafter_ends_the_wait_for_its_draft(is_draining: bool) -> None:
    """The round goes on at once; a new seat is asked for, and what the old drafter still says counts for nothing."""
    old, new, seats = FakeClient(), FakeClient(), FakeSeats()
    drafts = RemoteDrafts(seats, spec_of(prompt_length=4, vocab_size=10))
    drafts.ask()
    seats.give(drafts, old)
    drafts.commit(NEW, ORDER)
    waiting = asyncio.ensure_future(drafts.draft(NEW, wanted(2)))
    await asyncio.sleep(0)
    if is_draining:
        drafts.on_draining()
    else:
        drafts.on_lost("its stream has ended")
    assert await asyncio.wait_for(waiting, 5) is None
    assert seats.given_back == 1
    assert old.kinds[2:] == [("close", 1)]
    await until_asked(seats)
    seats.give(drafts, new)
    assert new.kinds == [("open", 2), ("commit", 2)]
    drafts.on_event(proposed(5, 6))
    assert await drafts.draft(NEW, wanted(2)) is None
    assert new.stale_items == 1
    assert seats.moves == ["draining" if is_draining else "lost"]


async def test_nobody_waits_for_a_drafter_that_takes_over_until_it_has_read_the_answer() -> None:
    """Reading takes it as long as the answer is; from its first proposal on its drafts are waited for again."""
    seats, new = FakeSeats(), FakeClient()
    drafts = RemoteDrafts(seats, spec_of(prompt_length=4, vocab_size=10))
    drafts.ask()
    seats.give(drafts, FakeClient())
    drafts.commit(NEW, ORDER)
    drafts.on_lost("its stream has ended")
    await until_asked(seats)
    seats.give(drafts, new)
    assert await asyncio.wait_for(drafts.draft(NEW, wanted(2)), 5) is None
    longer = TokenPrefix((*NEW.ids, 9))
    drafts.on_event(proposed(5, 6, epoch=2))
    drafts.commit(longer, ORDER)
    waiting = asyncio.ensure_future(drafts.draft(longer, wanted(1)))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    proposal = drafter_pb.Proposal(base_length=5, prefix_digest=longer.digest(), draft_ids=[7])
    drafts.on_event(drafter_pb.DrafterEvent(session_id="session", epoch=2, proposal=proposal))
    assert await asyncio.wait_for(waiting, 5) == Draft((7,))


@pytest.mark.parametrize("error", [QueueFull("No room."), Draining("About to stop.")])
async def test_a_drafter_that_refuses_is_told_of_and_another_is_asked_for(error: PacelineError) -> None:
    """The pool hears of the refusal, so that the next session goes elsewhere."""
    seats = FakeSeats()
    drafts = remote_drafts(FakeClient(), seats)
    drafts.commit(NEW, ORDER)
    drafts.on_event(failed(error))
    assert [type(refusal) for refusal in seats.refused] == [type(error)]
    assert seats.given_back == 1
    await until_asked(seats)
    assert seats.asked == ["session"]
    drafts.close()


async def test_seats_that_are_of_no_use_are_asked_for_ever_more_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time at once, then after a pause, here longer than any test."""
    monkeypatch.setattr("orchestrator.remote_drafts._FIRST_PAUSE_S", 3600.0)
    monkeypatch.setattr("orchestrator.remote_drafts._LONGEST_PAUSE_S", 3600.0)
    seats = FakeSeats()
    drafts = remote_drafts(FakeClient(), seats)
    drafts.on_lost("its stream has ended")
    await until_asked(seats)
    seats.give(drafts, FakeClient())
    drafts.on_lost("its stream has ended")
    await asyncio.sleep(0.01)
    assert seats.asked == []
    drafts.close()


async def test_a_session_that_has_ended_asks_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when the pause it was in is over."""
    monkeypatch.setattr("orchestrator.remote_drafts._FIRST_PAUSE_S", 0.001)
    seats = FakeSeats()
    drafts = remote_drafts(FakeClient(), seats)
    drafts.on_lost("its stream has ended")
    await until_asked(seats)
    seats.give(drafts, FakeClient())
    drafts.on_lost("its stream has ended")
    drafts.close()
    await asyncio.sleep(0.02)
    assert seats.asked == []


async def until_asked(seats: FakeSeats) -> None:
    async with asyncio.timeout(30):
        while not seats.asked:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.001)


# ---- how long a round waits ------------------------------------------------------------------------------------------


def drafted(prefix: TokenPrefix, *ids: int, behind: tuple[int, ...] = (), steps: int = 0) -> drafter_pb.DrafterEvent:
    """A draft behind the prefix and some drafted tokens."""
    longer = TokenPrefix((*prefix.ids, *behind))
    proposal = drafter_pb.Proposal(
        base_length=len(longer),
        prefix_digest=longer.digest(),
        draft_ids=ids,
        draft_steps=steps,
        draft_time_us=1000 * steps,
    )
    return drafter_pb.DrafterEvent(session_id="session", epoch=1, proposal=proposal)


async def test_a_round_begins_with_what_is_enough_and_waits_for_more_otherwise() -> None:
    """Enough may be fewer tokens than are wanted, and as many as are there are taken."""
    drafts = remote_drafts(FakeClient())
    drafts.commit(NEW, ORDER)
    drafts.on_event(drafted(NEW, 5, 6))
    assert drafts.available(NEW, 10) == 2
    assert await drafts.draft(NEW, wanted(4, enough_length=2)) == Draft((5, 6))
    waiting = asyncio.ensure_future(drafts.draft(NEW, wanted(4, enough_length=3)))
    await asyncio.sleep(0)
    assert not waiting.done()
    drafts.on_event(drafted(NEW, 7, 8, 9, behind=(5, 6)))
    assert await asyncio.wait_for(waiting, 5) == Draft((5, 6, 7, 8))


async def test_a_plan_that_does_not_wait_is_answered_at_once() -> None:
    """With nothing if nothing is there; that is no miss, so the next round waits if it is to."""
    drafts = remote_drafts(FakeClient())
    drafts.commit(NEW, ORDER)
    assert await drafts.draft(NEW, wanted(4, enough_length=0)) is None
    waiting = asyncio.ensure_future(drafts.draft(NEW, wanted(4, enough_length=1)))
    await asyncio.sleep(0)
    assert not waiting.done()
    drafts.on_event(drafted(NEW, 5))
    assert await asyncio.wait_for(waiting, 5) == Draft((5,))


async def test_some_tokens_are_taken_when_the_patience_has_run_out() -> None:
    """Not enough of them is better than none."""
    drafts = remote_drafts(FakeClient())
    drafts.commit(NEW, ORDER)
    drafts.on_event(drafted(NEW, 5))
    assert await drafts.draft(NEW, wanted(4, patience_s=0.01)) == Draft((5,))


async def test_behind_a_miss_the_next_rounds_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that hangs costs one long wait, not one a round."""
    monkeypatch.setattr("orchestrator.remote_drafts._SILENT_S", 0.005)
    drafts = remote_drafts(FakeClient())
    drafts.commit(NEW, ORDER)
    assert await drafts.draft(NEW, wanted(4, patience_s=0.01)) is None
    assert await asyncio.wait_for(drafts.draft(NEW, wanted(4, patience_s=60)), 5) is None


async def test_a_short_wait_in_vain_is_no_miss() -> None:
    """A planner that waits no longer than pays finds nothing now and then; the next round waits again."""
    drafts = remote_drafts(FakeClient())
    drafts.commit(NEW, ORDER)
    assert await drafts.draft(NEW, wanted(4, patience_s=0.001)) is None
    waiting = asyncio.ensure_future(drafts.draft(NEW, wanted(1)))
    await asyncio.sleep(0)
    drafts.on_event(drafted(NEW, 5))
    assert await asyncio.wait_for(waiting, 5) == Draft((5,))


async def test_nobody_waits_for_tokens_that_the_drafter_has_not_got() -> None:
    """It says so behind the last of them, or has no room for more in its context."""
    drafts = remote_drafts(FakeClient())
    drafts.commit(NEW, ORDER)
    drafts.on_event(drafted(NEW, 5, 6))
    waiting = asyncio.ensure_future(drafts.draft(NEW, wanted(4)))
    await asyncio.sleep(0)
    drafts.on_event(drafted(NEW, behind=(5, 6)))
    assert await asyncio.wait_for(waiting, 5) == Draft((5, 6))
    small = FakeClient(info=replace(FakeClient().info, max_context=len(NEW) + 1))
    drafts = remote_drafts(small)
    drafts.commit(NEW, ORDER)
    drafts.on_event(drafted(NEW, 5))
    assert await asyncio.wait_for(drafts.draft(NEW, wanted(4)), 5) == Draft((5,))


async def test_a_commit_that_is_not_due_is_sent_with_the_next_one_that_is() -> None:
    """While drafts do not pay, the drafter is not told of each token by itself."""
    client, prefix = FakeClient(), TokenPrefix(NEW.ids)
    drafts = remote_drafts(client)
    drafts.commit(prefix, ORDER)
    for token_id in (5, 6, 7):
        prefix.extend([token_id])
        drafts.commit(prefix, DraftOrder(is_due=False))
    assert client.kinds == [("open", 1), ("commit", 1)]
    prefix.extend([8])
    drafts.commit(prefix, DraftOrder(draft_length=3, credit=7, branches=2, fan_out=1, acceptance=0.5))
    sent = client.sent[-1].commit
    assert (sent.base_length, list(sent.committed_ids)) == (8, [5, 6, 7, 8])
    assert (sent.draft_length, sent.credit, sent.branches, sent.fan_out, sent.acceptance) == (3, 7, 2, 1, 0.5)


def resends(client: FakeClient) -> list[bool]:
    """Of each commit that was sent: whether it asks for all to be sent again."""
    return [command.commit.resend for command in client.sent if command.WhichOneof("command") == "commit"]


async def test_what_did_not_come_at_all_is_asked_for_again_once() -> None:
    """With the next commit that is sent. What came for later tokens meanwhile is joined on."""
    client, prefix = FakeClient(), TokenPrefix(NEW.ids)
    drafts = remote_drafts(client)
    drafts.commit(prefix, ORDER)
    drafts.on_event(drafted(prefix, 8, 9, behind=(5, 6, 7)))
    assert await drafts.draft(prefix, wanted(2, patience_s=0.001)) is None
    prefix.extend([5])
    drafts.commit(prefix, DraftOrder(is_due=False))
    assert resends(client) == [False]
    drafts.commit(prefix, ORDER)
    assert resends(client) == [False, True]
    drafts.on_event(drafted(prefix, 6, 7))
    assert await asyncio.wait_for(drafts.draft(prefix, wanted(4)), 5) == Draft((6, 7, 8, 9))
    for token_id in (6, 7):
        prefix.extend([token_id])
        drafts.commit(prefix, ORDER)
    assert resends(client) == [False, True, False, False]


@pytest.mark.parametrize("ids", [(5,), ()], ids=["too few tokens", "nothing to offer"])
async def test_a_late_round_with_an_answer_asks_for_nothing_again(ids: tuple[int, ...]) -> None:
    """What has come has arrived, though it is not enough; the rest is on its way."""
    client, prefix = FakeClient(), TokenPrefix(NEW.ids)
    drafts = remote_drafts(client)
    drafts.commit(prefix, ORDER)
    waiting = asyncio.ensure_future(drafts.draft(prefix, wanted(4, patience_s=0.005)))
    await asyncio.sleep(0)
    drafts.on_event(drafted(prefix, *ids))
    assert await asyncio.wait_for(waiting, 5) == Draft(ids)
    prefix.extend([5])
    drafts.commit(prefix, ORDER)
    assert resends(client) == [False, False]


async def test_a_round_that_did_not_wait_to_the_end_asks_for_nothing_again() -> None:
    """Nothing was there at a glance, or its draft came while it waited: nothing says that anything was lost."""
    client, prefix = FakeClient(), TokenPrefix(NEW.ids)
    drafts = remote_drafts(client)
    drafts.commit(prefix, ORDER)
    assert await drafts.draft(prefix, wanted(4, enough_length=0)) is None
    prefix.extend([5])
    drafts.commit(prefix, ORDER)
    waiting = asyncio.ensure_future(drafts.draft(prefix, wanted(1)))
    await asyncio.sleep(0)
    drafts.on_event(drafted(prefix, 6))
    assert await asyncio.wait_for(waiting, 5) == Draft((6,))
    prefix.extend([9])
    drafts.commit(prefix, ORDER)
    assert resends(client) == [False, False, False]


LOGITS = hashed_logits(10)
WIDE = DraftOrder(draft_length=2, credit=6, branches=3, fan_out=2)


@dataclass
class NearbyDrafter(FakeClient):
    """A drafter in this process; what it pushes is handed on by `work`, or lost."""

    lost: int = 0  # tokens of the likeliest line

    def __post_init__(self) -> None:
        method = DraftModelMethod(FakeModel(LOGITS, vocab_size=10), distribution_entries=10)
        self._drafter = Drafter(method, SessionTable[Any](max_sessions=1, idle_ttl_s=1e9))
        self._received = 0

    def work(self, drafts: RemoteDrafts, *, is_losing: bool) -> None:
        """Do all that was asked for since the last time."""
        for command in self.sent[self._received :]:
            self._pass_on(self._drafter.accept(self._command_of(command)), drafts, is_losing=is_losing)
        self._received = len(self.sent)
        while self._drafter.has_work():
            self._pass_on(self._drafter.step(), drafts, is_losing=is_losing)

    def _pass_on(self, events: Sequence[DrafterEvent], drafts: RemoteDrafts, *, is_losing: bool) -> None:
        for event in events:
            assert isinstance(event.outcome, Drafted), event.outcome
            self.lost += is_losing * len(event.outcome.tokens)
            if not is_losing:
                proposal = proposal_to_proto(proposal_of(event.outcome))
                drafts.on_event(drafter_pb.DrafterEvent(session_id="session", epoch=1, proposal=proposal))

    @staticmethod
    def _command_of(command: drafter_pb.DrafterCommand) -> Open | Commit:
        address = Address(0, command.session_id, command.epoch)
        if command.WhichOneof("command") == "open":
            return Open(address, *open_from_proto(command.session_id, command.open, vocab_size=10))
        message = command.commit
        return Commit(
            address=address,
            base_length=message.base_length,
            committed_ids=tuple(message.committed_ids),
            draft_length=message.draft_length,
            credit=message.credit,
            branches=message.branches,
            fan_out=message.fan_out,
            is_resend=message.resend,
        )


async def tokens_found(drafter: NearbyDrafter, *, rounds: int, losing: Sequence[int] = ()) -> list[int]:
    """Of the draft of each round; all of them are right, and one more is emitted. What is pushed in some rounds is lost."""
    seats, found, prefix = FakeSeats(), list[int](), TokenPrefix(NEW.ids)
    drafts = RemoteDrafts(seats, spec_of(prompt_length=4, vocab_size=10, rule=VerificationRule.GREEDY))
    drafts.ask()
    seats.give(drafts, drafter)
    for number in range(rounds):
        drafts.commit(prefix, WIDE)
        drafter.work(drafts, is_losing=number in losing)
        draft = await drafts.draft(prefix, wanted(2, patience_s=0.001)) or Draft()
        found.append(len(draft))
        for token_id in (*draft.ids, None):
            prefix.extend([right := max(range(10), key=LOGITS(prefix.ids).__getitem__)])
            assert token_id in (right, None)
    return found


async def test_proposals_that_are_lost_on_the_way_cost_two_rounds() -> None:
    """The one that waits for them in vain, and at most the next, whose commit asks for them again."""
    drafter = NearbyDrafter()
    found = await tokens_found(drafter, rounds=12, losing=(0, 5))
    assert drafter.lost > 0
    assert found[0] == 0
    assert all(earlier + later > 0 for earlier, later in pairwise(found))
    assert sum(found) >= 16
    assert sum(resends(drafter)) == found.count(0)


@pytest.mark.parametrize("max_runs", [2, 3])
async def test_what_a_store_had_no_room_for_costs_two_rounds(max_runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted tokens beyond its bounds are dropped; once they are wanted and missing, they are asked for again."""
    monkeypatch.setattr("orchestrator.remote_drafts.ProposalStore", partial(ProposalStore, max_runs=max_runs))
    drafter = NearbyDrafter()
    found = await tokens_found(drafter, rounds=24)
    assert 0 in found, "the store drops what is wanted later"
    assert all(earlier + later > 0 for earlier, later in pairwise(found))
    assert sum(resends(drafter)) >= found[:-1].count(0)


@dataclass
class NotedCosts:
    """Notes what it hears (`remote_drafts.DraftCostMeter`)."""

    drafts: list[tuple[int, int, float]] = field(default_factory=list)
    redrafts: int = 0

    def on_draft(self, *, tokens: int, steps: int, seconds: float) -> None:
        self.drafts.append((tokens, steps, seconds))

    def on_redraft(self, *, first_s: float) -> None:
        assert first_s >= 0.0
        self.redrafts += 1


async def test_the_meter_hears_of_what_drafts_cost() -> None:
    """Tokens with branches, steps and seconds of each proposal that says so; and of each wait from a commit behind which
    nothing was there to its first token."""
    meter, seats, prefix = NotedCosts(), FakeSeats(), TokenPrefix(NEW.ids)
    drafts = RemoteDrafts(seats, spec_of(prompt_length=4, vocab_size=10), meter=meter)
    drafts.ask()
    seats.give(drafts, FakeClient())
    drafts.commit(prefix, ORDER)
    event = drafted(prefix, 5, 6, steps=2)
    event.proposal.branches.add(base_length=5, prefix_digest=TokenPrefix((*prefix.ids, 9)).digest(), draft_ids=[1])
    drafts.on_event(event)
    assert (meter.drafts, meter.redrafts) == ([(3, 2, 0.002)], 1)
    prefix.extend([9])  # the branch is there
    drafts.commit(prefix, ORDER)
    drafts.on_event(drafted(prefix, 4, behind=(1,), steps=1))
    assert (len(meter.drafts), meter.redrafts) == (2, 1)
    prefix.extend([3])  # nothing is
    drafts.commit(prefix, ORDER)
    drafts.on_event(drafted(prefix, behind=(7, 7)))
    assert meter.redrafts == 1
    drafts.on_event(drafted(prefix, 8))
    assert (meter.redrafts, drafts.received_tokens) == (2, 5)
    prefix.extend([2])  # again, and once more before anything comes
    drafts.commit(prefix, ORDER)
    told = TokenPrefix(prefix.ids)
    prefix.extend([2])
    drafts.commit(prefix, ORDER)
    drafts.on_event(drafted(told, 6))
    assert meter.redrafts == 3


# ---- stall ----------------------------------------------------------------------------------------------------------


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class SlowRemote(FakeRemote):
    """Takes its time, by the test's clock, for every draft."""

    clock: Clock = field(default_factory=Clock)
    wait_s: float = 0.0
    wants_drafts: bool = True

    async def draft(self, prefix: TokenPrefix, plan: RoundPlan) -> Draft | None:
        self.clock.now_s += self.wait_s
        return self.answer


async def run_rounds(
    remote: SlowRemote, *, rounds: int, verify_s: float, is_wanted: bool = True, client_s: float = 0.0
) -> StallMeter:
    """Rounds of one session, each the client's turn, a wait for a draft and then a verdict; one more commit ends the last."""
    meter = StallMeter(clock=remote.clock)
    drafts = DraftsWithFallback(remote, lookup(), stall=meter)
    for _ in range(rounds):
        drafts.commit(PERIODIC, ORDER)
        remote.clock.now_s += client_s
        if is_wanted:
            await drafts.draft(PERIODIC, wanted(4))
        remote.clock.now_s += verify_s
    drafts.commit(PERIODIC, ORDER)
    return meter


async def test_stall_is_the_share_of_the_round_that_was_spent_waiting_for_the_draft() -> None:
    """One second in four here, whether the draft holds tokens or says that there are none to offer."""
    for answer in (Draft((1,)), Draft()):
        meter = await run_rounds(SlowRemote(answer, wait_s=1.0), rounds=2, verify_s=3.0)
        assert meter.fraction == pytest.approx(0.25)


async def test_clients_time_is_no_stall() -> None:
    """Nobody waits for a drafter while the client takes its tokens: more drafters would not make it faster."""
    meter = await run_rounds(SlowRemote(Draft((1,)), wait_s=1.0), rounds=2, verify_s=3.0, client_s=4.0)
    assert meter.fraction == pytest.approx(1 / 8)


async def test_a_round_without_the_drafters_draft_is_stalled_as_a_whole() -> None:
    """Though it did not wait, and prompt lookup stood in: otherwise a pool without drafters would look idle."""
    assert (await run_rounds(SlowRemote(None), rounds=3, verify_s=1.0)).fraction == pytest.approx(1.0)


async def test_rounds_that_no_drafter_could_serve_do_not_count() -> None:
    """Neither those of a session that drafting was given up for, nor those that want no draft."""
    given_up = SlowRemote(None, wants_drafts=False)
    assert (await run_rounds(given_up, rounds=3, verify_s=1.0)).fraction is None
    assert (await run_rounds(SlowRemote(None), rounds=3, verify_s=1.0, is_wanted=False)).fraction is None


async def test_a_round_without_a_drafter_is_stalled_whatever_the_plan() -> None:
    """Also one that wants no draft: its planner may have turned speculation off because there is no drafter."""
    absent = SlowRemote(None, is_served=False)
    assert (await run_rounds(absent, rounds=3, verify_s=1.0, is_wanted=False)).fraction == pytest.approx(1.0)


async def test_a_round_that_does_not_wait_for_the_drafter_does_not_count() -> None:
    """Verifying without a draft while one is on its way is the planner's choice: more drafters would change nothing."""
    remote = SlowRemote(None)
    meter = StallMeter(clock=remote.clock)
    drafts = DraftsWithFallback(remote, None, stall=meter)
    for _ in range(3):
        drafts.commit(PERIODIC, ORDER)
        assert await drafts.draft(PERIODIC, wanted(4, enough_length=0)) == OfferedDraft()
        remote.clock.now_s += 1.0
    assert meter.fraction is None


async def test_stall_is_forgotten_behind_the_window() -> None:
    """It says how things are, not how they were."""
    remote = SlowRemote(None)
    meter = await run_rounds(remote, rounds=3, verify_s=1.0)
    remote.clock.now_s += 5.0
    meter.record(stalled_s=0.0, round_s=3.0)
    assert meter.fraction == pytest.approx(0.5)
    remote.clock.now_s += 7.0
    assert meter.fraction == pytest.approx(0.0)
    remote.clock.now_s += 10.0
    assert meter.fraction is None


async def test_one_loss_that_many_commits_met_is_one_loss() -> None:
    """Each of them is answered that the session is unknown; it is opened again with the next commit, and not given up."""
    client = FakeClient()
    drafts = remote_drafts(client)
    for _ in range(5):
        drafts.commit(NEW, ORDER)
    for _ in range(5):
        drafts.on_event(failed(SessionNotFound("Open it again.")))
    assert drafts.wants_drafts
    drafts.commit(NEW, ORDER)
    assert client.kinds[-2:] == [("open", 2), ("commit", 2)]
    assert client.stale_items == 4


async def test_only_losses_in_a_row_make_it_give_up() -> None:
    """Between which no draft has come."""
    client = FakeClient()
    drafts = remote_drafts(client)
    for loss in range(1, 9):
        drafts.commit(NEW, ORDER)
        if loss <= 5:
            drafts.on_event(proposed(5, epoch=loss))
        assert drafts.wants_drafts
        drafts.on_event(failed(SessionNotFound("Open it again."), epoch=loss))
    assert not drafts.wants_drafts


async def test_a_session_that_no_drafter_ever_serves_asks_on_however_long_it_lasts() -> None:
    """Two thousand seats of no use: the pause stays what it is at most."""
    seats = FakeSeats()
    drafts = remote_drafts(seats=seats)
    for _ in range(2000):
        drafts.ask()
        seats.give(drafts, FakeClient())
        drafts.on_lost("its stream has ended")
    drafts.close()


async def test_a_drafter_whose_drafts_cannot_be_judged_is_left() -> None:
    """For the rest of the answer: what it has sent is forgotten, and its seat is given back."""
    client, seats = FakeClient(), FakeSeats()
    drafts = remote_drafts(client, seats)
    drafts.commit(NEW, ORDER)
    drafts.on_event(proposed(5, 6))
    DraftsWithFallback(drafts, None).distrust()
    assert not drafts.wants_drafts
    assert drafts.available(NEW, 2) == 0
    assert seats.given_back == 1
