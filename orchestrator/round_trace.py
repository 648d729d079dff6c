"""The last rounds of one orchestrator, in memory: what made each of them as fast or as slow as it was.

To remember a round costs well under a microsecond, whatever has come before: all work is left to whoever reads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.loop import Observer, RoundReport
from paceline.rounds import RoundRecord, TracedRounds

DEFAULT_CAPACITY = 16_384  # rounds: about 15 MB when it is full, and minutes of a busy orchestrator
_READ_AT_ONCE = 128  # rounds: about a millisecond of work


@dataclass(frozen=True, slots=True)
class _Entry:
    session_id: str
    report: RoundReport
    ended_s: float


class RoundTrace:
    """A ring of rounds. Invariant: it holds the last `capacity` of all that it was told of, in their order."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._entries: deque[_Entry] = deque(maxlen=capacity)
        self._appended = 0
        # Taken once: two excerpts agree on the date of a round even if somebody sets the clock in between.
        self._clock_offset_s = time.time() - time.perf_counter()

    def observer(self, session_id: str) -> Observer:
        """What hears of the rounds of one session."""
        return _SessionObserver(self, session_id)

    def append(self, session_id: str, report: RoundReport) -> None:
        """Remember a round that ends now."""
        self._entries.append(_Entry(session_id, report, time.perf_counter()))
        self._appended += 1

    @property
    def dropped(self) -> int:
        """How many rounds have made room for newer ones."""
        return self._appended - len(self._entries)

    def read(self, *, request_id: str = "", limit: int = 0) -> Iterator[TracedRounds]:
        """The last `limit` rounds (0: all that are there), of one request or session alone if its id is given.

        In one or more pieces that follow one another, of the moment at which the first is taken: between two of them a
        reader on an event loop lets others have their turn.
        """
        entries = [entry for entry in self._entries if not request_id or _is_of(entry.session_id, request_id)]
        entries, dropped = entries[-limit:], self.dropped
        for start in range(0, len(entries) or 1, _READ_AT_ONCE):
            records = tuple(map(_record, entries[start : start + _READ_AT_ONCE]))
            yield TracedRounds(records=records, dropped=dropped, clock_offset_s=self._clock_offset_s)


class _SessionObserver:
    """One session's part of the trace (`loop.Observer`)."""

    __slots__ = ("_session_id", "_trace")

    def __init__(self, trace: RoundTrace, session_id: str) -> None:
        self._trace, self._session_id = trace, session_id

    def on_round(self, round_: RoundReport) -> None:
        self._trace.append(self._session_id, round_)


def _is_of(session_id: str, wanted_id: str) -> bool:
    """Whether a session is that, one of its choices, or of a request with that id."""
    request_id, tilde, _ = session_id.partition("~")
    if tilde and request_id == wanted_id:
        return True
    if tilde and "~" not in wanted_id:
        return False  # what a caller chose may look like the choice of another request
    return session_id == wanted_id or session_id.startswith(f"{wanted_id}-")


def _record(entry: _Entry) -> RoundRecord:
    report, outcome, arrival = entry.report, entry.report.outcome, entry.report.arrival
    return RoundRecord(
        session_id=entry.session_id,
        number=report.number,
        committed_length=report.base_length,
        began_s=report.began_s,
        draft_s=report.draft_s,
        verdict_s=report.verdict_s,
        ended_s=entry.ended_s,
        queue_time_s=outcome.queue_s,
        step_time_s=outcome.step_s,
        step_sessions=outcome.step_sessions,
        step_tokens=outcome.step_tokens,
        draft_origin=outcome.origin,
        draft_arrived_s=None if arrival is None else arrival.arrived_s,
        draft_time_s=0.0 if arrival is None else arrival.draft_time_s,
        draft_steps=0 if arrival is None else arrival.draft_steps,
        available=report.available,
        draft_length=outcome.draft_length,
        kept_length=outcome.kept_length,
        emitted=outcome.emitted,
        has_continuation=outcome.has_continuation if outcome.is_rejection else None,
        ordered_draft_length=report.order.draft_length,
        credit=report.order.credit,
        branches=report.order.branches,
        fan_out=report.order.fan_out,
        reason=report.plan.reason,
    )
