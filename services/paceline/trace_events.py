"""Traced rounds as files for other tools: a timeline for Perfetto or chrome://tracing, and plain JSON.

The timeline is in the Trace Event Format, of which it uses complete events ("X"), names of processes and threads ("M") and
arrows ("s" and "f"): one process for the orchestrator, and for each session a thread for whoever took part in its rounds.
Knows nothing of files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum

from paceline.rounds import RoundRecord, TracedRounds
from paceline.types import DraftOrigin

JsonObject = dict[str, object]

_PROCESS = 1
_ID_LENGTH = 8  # characters that tell sessions apart in a list
_NS = 1_000_000_000
_MEANINGS = {
    "clock": "Moments are the orchestrator's. Target and drafter, with which it has no clock in common, tell durations.",
    "placement": "What they do not account for is shared equally by the way there and the way back. A draft that was made "
    "ahead ends where it arrived, since nobody knows which way it took how long.",
}


class Lane(StrEnum):
    """Whose time is shown, of one session."""

    ROUNDS = "rounds"
    ORCHESTRATOR = "orchestrator"
    TARGET_WIRE = "wire to target"
    TARGET = "target"
    DRAFTER_WIRE = "wire to drafter"
    DRAFTER = "drafter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What somebody did from one moment to another, in nanoseconds from the beginning of the timeline."""

    lane: Lane
    name: str
    began_ns: int
    ended_ns: int
    details: Mapping[str, object] = field(default_factory=dict)
    starts_arrow: int | None = None  # the number of the arrow
    ends_arrow: int | None = None


def as_trace_events(traced: TracedRounds) -> JsonObject:
    """The timeline, which begins at 0 with the first round; `otherData` holds the date."""
    origin_s = _began_s(traced)
    by_session: defaultdict[str, list[Slice]] = defaultdict(list)
    for number, record in enumerate(traced.records):
        by_session[record.session_id] += _slices(record, origin_s, arrow=number)
    events = [_named("process_name", _PROCESS, name=_process_name(traced))]
    for place, (session_id, slices) in enumerate(by_session.items()):
        events += _session_events(session_id, slices, first_thread=1 + place * len(Lane))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": _about(traced)}


def as_json(traced: TracedRounds) -> JsonObject:
    """All that the records hold, under their own names, beside what must be known to read them."""
    about = _about(traced) | {"clock_offset_s": traced.clock_offset_s}
    return {"metadata": about, "records": [_as_object(record) for record in traced.records]}


def _as_object(record: RoundRecord) -> JsonObject:
    return {"request_id": record.request_id, "choice": record.choice} | asdict(record)


def _about(traced: TracedRounds) -> JsonObject:
    began = datetime.fromtimestamp(_began_s(traced) + traced.clock_offset_s, UTC)
    return {
        "began": began.isoformat() if traced.records else None,
        "orchestrator_id": traced.orchestrator_id,
        "rounds": len(traced.records),
        "dropped": traced.dropped,
        "is_emulated": traced.is_emulated,
        **_MEANINGS,
    }


def _began_s(traced: TracedRounds) -> float:
    return min((_first_moment(record) for record in traced.records), default=0.0)


def _first_moment(record: RoundRecord) -> float:
    """Of what is shown of a round: its draft may have been made before."""
    made_s = record.began_s if record.draft_arrived_s is None else record.draft_arrived_s - record.draft_time_s
    return min(record.began_s, made_s)


def _process_name(traced: TracedRounds) -> str:
    return f"orchestrator {traced.orchestrator_id}".strip() + (" (emulated)" if traced.is_emulated else "")


# ---------------------------------------------------------------------------------------------------------------------
# From a round to slices


@dataclass(frozen=True, slots=True)
class _Timeline:
    origin_s: float

    def slice(
        self,
        lane: Lane,
        name: str,
        began_s: float,
        ended_s: float,
        *,
        details: Mapping[str, object] | None = None,
        starts_arrow: int | None = None,
        ends_arrow: int | None = None,
    ) -> Slice:
        return Slice(
            lane=lane,
            name=name,
            began_ns=self._ns(began_s),
            ended_ns=self._ns(ended_s),
            details=details or {},
            starts_arrow=starts_arrow,
            ends_arrow=ends_arrow,
        )

    def _ns(self, moment_s: float) -> int:
        return round((moment_s - self.origin_s) * _NS)


def _slices(record: RoundRecord, origin_s: float, *, arrow: int) -> Iterator[Slice]:
    at = _Timeline(origin_s)
    name = "plain" if record.draft_origin is DraftOrigin.NONE else str(record.draft_origin)
    yield at.slice(Lane.ROUNDS, name, record.began_s, record.ended_s, details=_details(record))
    yield at.slice(Lane.ORCHESTRATOR, "wait for draft", record.began_s, record.draft_s)
    yield at.slice(Lane.ORCHESTRATOR, "commit", record.verdict_s, record.ended_s)
    yield from _target_slices(record, at, arrow=arrow)
    if record.draft_arrived_s is not None:
        yield from _drafter_slices(record, at, record.draft_arrived_s, arrow=arrow)


def _details(record: RoundRecord) -> JsonObject:
    """All but the times, which are seen."""
    return {name: value for name, value in asdict(record).items() if not name.endswith("_s")}


def _target_slices(record: RoundRecord, at: _Timeline, *, arrow: int) -> Iterator[Slice]:
    parts = record.verify_time
    queued_s = record.draft_s + parts.way_s
    stepped_s = queued_s + parts.queue_s
    done_s = stepped_s + parts.step_s
    batch = {"sessions": record.step_sessions, "tokens": record.step_tokens}
    yield at.slice(Lane.TARGET_WIRE, "verify", record.draft_s, queued_s, ends_arrow=arrow)
    yield at.slice(Lane.TARGET, "queue", queued_s, stepped_s)
    yield at.slice(Lane.TARGET, "step", stepped_s, done_s, details=batch)
    yield at.slice(Lane.TARGET_WIRE, "verdict", done_s, record.verdict_s)


def _drafter_slices(record: RoundRecord, at: _Timeline, arrived_s: float, *, arrow: int) -> Iterator[Slice]:
    """Of a draft that was waited for, the ways too: it was ordered when the round began."""
    unaccounted_s = arrived_s - record.began_s - record.draft_time_s
    was_ordered = record.draft_origin is DraftOrigin.REDRAFT and unaccounted_s >= 0.0
    way_s = unaccounted_s / 2 if was_ordered else 0.0
    done_s = arrived_s - way_s
    made_s = done_s - record.draft_time_s
    if was_ordered:
        yield at.slice(Lane.DRAFTER_WIRE, "commit", record.began_s, made_s)
        yield at.slice(Lane.DRAFTER_WIRE, "proposal", done_s, arrived_s)
    yield at.slice(Lane.DRAFTER, "draft", made_s, done_s, details={"steps": record.draft_steps}, starts_arrow=arrow)


# ---------------------------------------------------------------------------------------------------------------------
# From slices to events


def _session_events(session_id: str, slices: Sequence[Slice], *, first_thread: int) -> Iterator[JsonObject]:
    shown: list[Slice] = []
    for offset, lane in enumerate(Lane):
        in_lane = list(_side_by_side(piece for piece in slices if piece.lane is lane))
        if in_lane:
            name = f"{_short(session_id)} {lane}"
            yield _named("thread_name", first_thread + offset, name=name)
            yield _named("thread_sort_index", first_thread + offset, sort_index=first_thread + offset)
        shown += in_lane
    drawn = _whole_arrows(shown)
    threads = {lane: first_thread + offset for offset, lane in enumerate(Lane)}
    for piece in shown:
        yield from _events(piece, threads[piece.lane], drawn)


def _short(session_id: str) -> str:
    request_id, hyphen, choice = session_id.partition("-")
    return request_id[:_ID_LENGTH] + hyphen + choice


def _side_by_side(slices: Iterable[Slice]) -> Iterator[Slice]:
    """Without empty ones, and none before the end of another: one draft may serve two rounds, but was made once."""
    free_ns = 0
    for piece in sorted(slices, key=lambda piece: (piece.ended_ns, piece.began_ns)):
        began_ns = max(piece.began_ns, free_ns)
        if began_ns < piece.ended_ns:
            yield replace(piece, began_ns=began_ns)
            free_ns = piece.ended_ns


def _whole_arrows(slices: Sequence[Slice]) -> frozenset[int]:
    """The arrows both of whose ends are shown."""
    starts = {piece.starts_arrow for piece in slices}
    return frozenset(
        piece.ends_arrow for piece in slices if piece.ends_arrow is not None and piece.ends_arrow in starts
    )


def _events(piece: Slice, thread: int, arrows: frozenset[int]) -> Iterator[JsonObject]:
    place: JsonObject = {"pid": _PROCESS, "tid": thread, "ts": piece.began_ns / 1000}
    yield {
        "ph": "X",
        "name": piece.name,
        "cat": piece.lane,
        "dur": (piece.ended_ns - piece.began_ns) / 1000,
        "args": dict(piece.details),
    } | place
    if piece.starts_arrow in arrows:
        yield {"ph": "s", "name": "draft", "cat": "draft", "id": piece.starts_arrow} | place
    if piece.ends_arrow in arrows:
        # "e": the arrow ends at the slice that it lands in, not at the next one.
        yield {"ph": "f", "bp": "e", "name": "draft", "cat": "draft", "id": piece.ends_arrow} | place


def _named(what: str, thread: int, **args: object) -> JsonObject:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": thread, "args": args}
