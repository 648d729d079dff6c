"""One session's drafts from the pool of drafters: taken when they are there, never waited for when they are not.

A drafter's session is a cache of the committed tokens. When its drafter is lost the session goes on without, asks for
another seat in the background, and opens there from the committed tokens when one comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from orchestrator.board import Replica
from orchestrator.loop import DraftOrder, RoundPlan
from orchestrator.pool import Seat
from orchestrator.proposals import Arrival, ProposalStore
from orchestrator.replica_client import DrafterClient, PeerSession
from paceline.errors import Draining, LengthMismatch, PacelineError, QueueFull, SessionNotFound
from paceline.prefix import TokenPrefix
from paceline.types import Draft, ModelInfo, Proposal, SessionSpec
from paceline.v1 import drafter_service_pb2 as drafter_pb
from paceline.v1 import session_pb2 as session_pb
from paceline.wire import failure_from_proto, open_to_proto, proposal_from_proto

logger = structlog.get_logger(__name__)

MAX_REOPENINGS = 3
_SILENT_S = 0.5  # without a proposal; a round that waits for one is mostly over in less
_MOST_MISSING = 8  # round trips that last longer than so many rounds are not measured
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0  # before asking for another seat, behind one that was of no use
_MOST_DOUBLINGS = 16  # of that pause; far beyond its longest


class SeatTaker(PeerSession, Protocol):
    """A session that waits for a seat."""

    def on_seat(self, seat: Seat[DrafterClient]) -> None: ...


class DrafterSeats(Protocol):
    """Where seats come from (`drafter_pool.DrafterPool`)."""

    def ask(self, session_id: str, taker: SeatTaker, *, tokens: int) -> None:
        """Call `taker.on_seat` when its turn has come; asking twice is asking once."""

    def withdraw(self, session_id: str) -> None: ...

    def note_refusal(self, replica: Replica, refusal: PacelineError) -> None: ...

    def count_move(self, reason: str) -> None: ...


class DraftCostMeter(Protocol):
    """Whoever wants to know what drafts cost (`costs.DraftCosts`)."""

    def on_draft(self, *, tokens: int, steps: int, seconds: float) -> None:
        """So many tokens, branches included, took the drafter so many steps of that many seconds in all."""

    def on_redraft(self, *, first_s: float) -> None:
        """Nothing was there for the committed tokens; the first token came so long after the drafter was told of them."""


@dataclass(frozen=True, slots=True)
class _Commit:
    """What a drafter is told behind each round."""

    prefix: TokenPrefix
    base_length: int
    order: DraftOrder


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A round that waits for its draft."""

    digest: int  # of the tokens that it is to continue
    plan: RoundPlan
    epoch: int
    is_over: asyncio.Future[bool]  # True: the patience has run out


def _resolve(future: asyncio.Future[bool], result: bool) -> None:
    if not future.done():
        future.set_result(result)


class RemoteDrafts:
    """One session's drafts from the drafter service (`drafting.Remote`). Invariant: at most one seat.

    Never raises and never holds the session up for long: once the drafter has said nothing for a while, the next rounds do
    not wait at all, and the pause doubles with each miss in a row.
    """

    def __init__(self, seats: DrafterSeats, spec: SessionSpec, *, meter: DraftCostMeter | None = None) -> None:
        self._seats, self._spec, self._meter = seats, spec, meter
        self._store = ProposalStore()
        self.received_tokens = 0  # drafted ones, branches included
        # Prefixes that nothing was there for when the drafter was told of them, by their digests, and when that was.
        self._missing: deque[tuple[int, float]] = deque(maxlen=_MOST_MISSING)
        self._heard_s = 0.0  # when the last proposal came, or the seat
        self._epoch = 0
        self._seat: Seat[DrafterClient] | None = None
        self._is_open = False  # at the seat
        self._is_awaited = True  # whether a draft of this seat is worth waiting for
        self._openings = 0
        self._given_up = False
        self._left_because = ""
        self._last_commit: _Commit | None = None
        self._sent_length = 0
        self._waiting: _Waiting | None = None  # a round, for its draft
        self._is_hole = False  # what is wanted next did not come at all: it may never have arrived
        self._misses = 0
        self._rounds_to_skip = 0
        self._useless_seats = 0  # in a row
        self._asking: asyncio.TimerHandle | None = None
        self._drafters: set[ModelInfo] = set()

    @property
    def wants_drafts(self) -> bool:
        """Whether any drafter could serve this session."""
        return not self._given_up

    @property
    def is_served(self) -> bool:
        """Whether a drafter holds the session now."""
        return self._is_open

    @property
    def drafters(self) -> frozenset[ModelInfo]:
        """Each that this session was opened at."""
        return frozenset(self._drafters)

    def ask(self) -> None:
        """Ask for a seat in the background."""
        self._seats.ask(self._spec.session_id, self, tokens=self._spec.prompt_length)

    def commit(self, prefix: TokenPrefix, order: DraftOrder) -> None:
        self._store.prune(len(prefix), prefix.digest())
        self._last_commit = _Commit(prefix, len(prefix), order)
        if order.is_due:
            self._send_commit(self._last_commit)
            self._note_missing(prefix.digest(), order)

    def available(self, prefix: TokenPrefix, max_length: int) -> int:
        """Drafted tokens that are there for the committed ones."""
        return self._store.available(prefix.digest(), max_length)

    def is_ready(self, prefix: TokenPrefix, plan: RoundPlan) -> bool:
        """Whether `draft` would wait for nothing now."""
        digest = prefix.digest()
        is_skipped = self._rounds_to_skip > 0 and not self._store.has_heard(digest)
        return is_skipped or not self._is_short(digest, plan)

    async def draft(self, prefix: TokenPrefix, plan: RoundPlan) -> Draft | None:
        """The drafter's draft; empty if it has nothing to offer, None if it is gone, late, or not waited for."""
        digest = prefix.digest()
        if self._store.has_heard(digest):
            self._misses = self._rounds_to_skip = 0
        if self._is_short(digest, plan):
            if self._rounds_to_skip:
                self._rounds_to_skip -= 1
            else:
                await self._wait_for_draft(digest, plan)
        return self._store.find(digest, plan.draft_length)

    def continues(self, digest: int) -> bool:
        return self._store.continues(digest)

    def distrust(self) -> None:
        """The target cannot judge what was drafted: this answer goes on without."""
        logger.warning("a drafter's draft cannot be judged", session_id=self._spec.session_id)
        self._store.clear()
        self._give_up()

    def arrival(self, prefix: TokenPrefix) -> Arrival | None:
        """Of the drafted tokens that are there for the committed ones, in seconds of `time.perf_counter`."""
        return self._store.arrival(prefix.digest())

    def close(self) -> None:
        """End the session where it is open, give the seat back or stop asking for one."""
        self._given_up = True
        self._leave("")

    # ---- what the drafter and its pool say

    def on_seat(self, seat: Seat[DrafterClient]) -> None:
        self._seat, self._is_open = seat, False
        self._heard_s = time.perf_counter()
        self._missing.clear()
        # A drafter that takes over in mid-answer must read all of it first, and nobody waits for that.
        self._is_awaited = self._epoch == 0
        self._misses = self._rounds_to_skip = 0
        if self._left_because:
            self._seats.count_move(self._left_because)
            self._left_because = ""
        commit = self._last_commit
        if commit is not None and commit.base_length == len(commit.prefix):
            self._send_commit(commit)

    def on_event(self, event: drafter_pb.DrafterEvent) -> None:
        if event.epoch != self._epoch:
            self._count_stale()
        elif event.WhichOneof("event") == "failed" and not self._is_open:
            self._count_stale()  # the same loss, met by another commit
        elif event.WhichOneof("event") == "failed":
            self._on_failed(failure_from_proto(event.failed))
        else:
            self._on_proposal(event.proposal)

    def on_lost(self, reason: str) -> None:
        self._leave("lost")

    def on_draining(self) -> None:
        self._leave("draining")

    def _on_proposal(self, message: drafter_pb.Proposal) -> None:
        try:
            proposal = proposal_from_proto(message, vocab_size=self._spec.vocab_size)
        except PacelineError as error:
            self._on_failed(error)
            return
        now_s = self._heard_s = time.perf_counter()
        self._store.add(proposal, now_s=now_s)
        self._measure(proposal, now_s)
        self._useless_seats = self._openings = 0
        self._is_awaited = True
        self._wake()

    def _on_failed(self, error: PacelineError) -> None:
        """The drafter does not hold the session: open it again or elsewhere if that can help, else go on without."""
        logger.info("drafter failed a session", session_id=self._spec.session_id, reason=error.reason, why=str(error))
        if isinstance(error, (QueueFull, Draining)):
            self._refuse_seat(error)
        elif isinstance(error, (SessionNotFound, LengthMismatch)) and self._openings < MAX_REOPENINGS:
            self._openings += 1
        else:
            self._give_up()
        self._is_open = False
        self._wake()

    # ---- what drafts cost

    def _note_missing(self, digest: int, order: DraftOrder) -> None:
        if order.draft_length > 0 and self._is_open and not self._store.continues(digest):
            self._missing.append((digest, time.perf_counter()))

    def _measure(self, proposal: Proposal, now_s: float) -> None:
        tokens = len(proposal.draft.ids)
        for branch in proposal.branches:
            tokens += len(branch.draft.ids)
        self.received_tokens += tokens
        if self._meter is None:
            return
        if proposal.draft_steps:
            self._meter.on_draft(tokens=tokens, steps=proposal.draft_steps, seconds=proposal.draft_time_s)
        # A round trip may be longer than a round: what comes may be behind a prefix that has grown since.
        for digest, since_s in reversed(self._missing):
            if self._store.continues(digest):
                self._meter.on_redraft(first_s=now_s - since_s)
                self._missing.clear()
                break

    # ---- the seat

    def _refuse_seat(self, error: QueueFull | Draining) -> None:
        if self._seat is not None:
            replica = self._seat.replica
            self._leave("draining" if isinstance(error, Draining) else "full")
            self._seats.note_refusal(replica, error)

    def _give_up(self) -> None:
        self._given_up = True
        self._leave("")

    def _leave(self, reason: str) -> None:
        """Give the seat back and, unless given up, ask for another: at once, but later each time it was of no use."""
        seat, self._seat = self._seat, None
        if seat is not None:
            if self._is_open:
                self._left_because = reason
                with contextlib.suppress(QueueFull):
                    seat.client.send(self._command(close=session_pb.CloseSession()))
            seat.release()
        self._is_open = False
        self._wake()
        if self._given_up:
            self._stop_asking()
        elif seat is not None:
            self._ask_later()

    def _ask_later(self) -> None:
        pause_s = min(_FIRST_PAUSE_S * (2**self._useless_seats - 1), _LONGEST_PAUSE_S)
        self._useless_seats = min(self._useless_seats + 1, _MOST_DOUBLINGS)
        self._asking = asyncio.get_running_loop().call_later(pause_s, self.ask)

    def _stop_asking(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        self._seats.withdraw(self._spec.session_id)

    # ---- one round

    def _is_short(self, digest: int, plan: RoundPlan) -> bool:
        """Whether more is wanted, and a drafter is at it."""
        return self._is_open and self._is_awaited and not self._is_enough(digest, plan)

    def _is_enough(self, digest: int, plan: RoundPlan) -> bool:
        """Whether the round begins with what is there; fewer tokens will do if no more are to come."""
        enough = min(plan.enough_length, plan.draft_length)
        available = self._store.available(digest, enough)
        return available >= enough or available >= self._room or self._store.is_complete(digest)

    @property
    def _room(self) -> int:
        """How many tokens the drafter's context leaves behind the committed ones."""
        commit, info = self._last_commit, self._seat.client.info if self._seat is not None else None
        return info.max_context - commit.base_length if commit is not None and info is not None else 0

    async def _wait_for_draft(self, digest: int, plan: RoundPlan) -> None:
        """Until there is enough, the patience has run out, or the drafter is gone."""
        loop = asyncio.get_running_loop()
        self._waiting = waiting = _Waiting(digest, plan, self._epoch, loop.create_future())
        # One timer and one future: this is done in most rounds of some sessions.
        patience = loop.call_later(plan.patience_s, _resolve, waiting.is_over, True)
        try:
            is_late = await waiting.is_over
        finally:
            patience.cancel()
            self._waiting = None
        if is_late:
            self._note_late(digest)

    def _wake(self) -> None:
        """Something has come, or the drafter is gone: end the wait if that is what it was for."""
        waiting = self._waiting
        if waiting is None:
            return
        is_lost = not self._is_open or self._epoch != waiting.epoch
        if is_lost or self._is_enough(waiting.digest, waiting.plan):
            _resolve(waiting.is_over, False)

    def _note_late(self, digest: int) -> None:
        """Short waits may well be in vain; a drafter that says nothing at all for long is not waited for again so soon."""
        if self._store.has_heard(digest):
            return
        self._is_hole = True
        if time.perf_counter() - self._heard_s >= _SILENT_S:
            self._misses += 1
            self._rounds_to_skip = 2 ** min(self._misses, 6)

    def _send_commit(self, commit: _Commit) -> None:
        if self._seat is None or self._given_up or not self._fits(self._seat.client, commit.base_length):
            return
        if not self._is_open:
            self._open(commit.prefix)
        self._send(
            # A mapping, not a message: that would be made first and then copied.
            commit={
                "base_length": commit.base_length,
                "committed_ids": commit.prefix.ids[self._sent_length :],
                "draft_length": commit.order.draft_length,
                "credit": commit.order.credit,
                "branches": commit.order.branches,
                "fan_out": commit.order.fan_out,
                "acceptance": commit.order.acceptance,
                "resend": self._is_hole,
            }
        )
        self._sent_length = commit.base_length
        self._is_hole = False

    def _fits(self, client: DrafterClient, length: int) -> bool:
        """Whether the drafter can hold the session now. One that cannot hold so many tokens never will."""
        if client.info is None or not client.is_connected:
            return False
        if length >= client.info.max_context:
            self._give_up()
        return not self._given_up

    def _open(self, prefix: TokenPrefix) -> None:
        if self._seat is not None and self._seat.client.info is not None:
            self._drafters.add(self._seat.client.info)
        self._epoch += 1
        self._is_open = True
        self._sent_length = len(prefix)
        self._send(open=open_to_proto(self._spec, prefix.ids))

    def _send(self, **command: Any) -> None:
        if self._seat is None:
            return
        try:
            self._seat.client.send(self._command(**command))
        except QueueFull:
            # A drafter that does not read costs speed alone; the session opens there again when it does.
            self._is_open = False

    def _count_stale(self) -> None:
        if self._seat is not None:
            self._seat.client.stale_items += 1

    def _command(self, **command: Any) -> drafter_pb.DrafterCommand:
        return drafter_pb.DrafterCommand(session_id=self._spec.session_id, epoch=self._epoch, **command)
