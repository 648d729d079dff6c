"""The round trace: the ring in the orchestrator, its way over the wire, and the files that are made of it."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, cast

import grpc
import pytest

from orchestrator.api import GenerationServicer, IngressContext, ingress_get_round_trace
from orchestrator.door import Door, OpenGate
from orchestrator.generator import Generator
from orchestrator.loop import DraftOrder, RoundOutcome, RoundPlan, RoundReport
from orchestrator.proposals import Arrival
from orchestrator.round_trace import RoundTrace
from paceline.errors import PayloadInvalid, TargetUnavailable
from paceline.generation_wire import traced_rounds_from_proto, traced_rounds_to_proto
from paceline.rounds import RoundRecord, TracedRounds, VerifyTime
from paceline.trace_events import Lane, as_json, as_trace_events
from paceline.types import DraftOrigin
from paceline.v1 import generation_service_pb2 as pb

OUTCOME = RoundOutcome(
    draft_length=4,
    kept_length=2,
    emitted=3,
    origin=DraftOrigin.BRANCH,
    waited_s=0.5,
    is_rejection=True,
    has_continuation=True,
    verify_s=1.0,
    step_s=0.5,
    queue_s=0.25,
    step_sessions=7,
    step_tokens=31,
    round_s=1.5,
)
REPORT = RoundReport(
    number=3,
    base_length=100,
    order=DraftOrder(draft_length=5, credit=9, branches=2, fan_out=3),
    plan=RoundPlan(draft_length=4, reason="best 4"),
    available=6,
    arrival=Arrival(9.5, 0.25, 4),
    began_s=10.0,
    draft_s=10.5,
    verdict_s=11.5,
    outcome=OUTCOME,
)
RECORD = RoundRecord(
    session_id="r1",
    number=3,
    committed_length=100,
    began_s=10.0,
    draft_s=10.5,
    verdict_s=11.5,
    ended_s=11.75,
    queue_time_s=0.25,
    step_time_s=0.5,
    step_sessions=7,
    step_tokens=31,
    draft_origin=DraftOrigin.REDRAFT,
    draft_arrived_s=10.5,
    draft_time_s=0.25,
    draft_steps=4,
    available=0,
    draft_length=4,
    kept_length=2,
    emitted=3,
    has_continuation=False,
    ordered_draft_length=5,
    credit=9,
    branches=2,
    fan_out=3,
    reason="best 4",
)
TRACED = TracedRounds(records=(RECORD,), dropped=2, clock_offset_s=1e9, is_emulated=True, orchestrator_id="o1")


def read(trace: RoundTrace, *, request_id: str = "", limit: int = 0) -> list[RoundRecord]:
    """All pieces in one."""
    return [record for piece in trace.read(request_id=request_id, limit=limit) for record in piece.records]


def numbered(trace: RoundTrace, count: int, *, session_id: str = "r1") -> None:
    observer = trace.observer(session_id)
    for number in range(count):
        observer.on_round(replace(REPORT, number=number))


# ---------------------------------------------------------------------------------------------------------------------
# The ring


def test_last_rounds_are_kept_and_the_others_counted() -> None:
    """A trace never holds more than its capacity, and knows how many have left it; the newest is the last."""
    trace = RoundTrace(capacity=300)
    numbered(trace, 700)
    assert [record.number for record in read(trace)] == list(range(400, 700))
    assert {piece.dropped for piece in trace.read()} == {400}
    assert trace.dropped == 400


@pytest.mark.parametrize(
    ("limit", "numbers"), [(0, [0, 1, 2, 3]), (3, [1, 2, 3]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])]
)
def test_limit_leaves_the_newest(limit: int, numbers: list[int]) -> None:
    """0 is all."""
    trace = RoundTrace()
    numbered(trace, 4)
    assert [record.number for record in read(trace, limit=limit)] == numbers


def test_rounds_of_one_request_are_found() -> None:
    """A request's id finds all its choices, a session's its own rounds, and part of an id nothing."""
    trace = RoundTrace()
    for session_id in ("r1", "r1-1", "r12", "r2"):
        numbered(trace, 2, session_id=session_id)
    assert [(record.session_id, record.choice) for record in read(trace, request_id="r1")] == [
        ("r1", 0),
        ("r1", 0),
        ("r1-1", 1),
        ("r1-1", 1),
    ]
    assert {record.session_id for record in read(trace, request_id="r1-1")} == {"r1-1"}
    assert read(trace, request_id="r") == []
    assert [record.number for record in read(trace, request_id="r1", limit=1)] == [1]


def test_what_is_read_is_of_one_moment() -> None:
    """Rounds that end between two pieces of an excerpt are not in it, and push nothing out of it."""
    trace = RoundTrace(capacity=300)
    numbered(trace, 300)
    pieces = trace.read()
    first = next(pieces)
    numbered(trace, 300)
    assert [record.number for piece in (first, *pieces) for record in piece.records] == list(range(300))
    assert len(first.records) < 300


def test_record_says_what_the_loop_reported() -> None:
    """Times, lengths, order and reason; the round ends when the trace hears of it, on the clock of the other moments."""
    trace = RoundTrace()
    before_s = time.perf_counter()
    trace.observer("r1").on_round(REPORT)
    after_s = time.perf_counter()
    (record,) = read(trace)
    assert before_s <= record.ended_s <= after_s
    assert record == replace(
        RECORD,
        ended_s=record.ended_s,
        draft_origin=DraftOrigin.BRANCH,
        draft_arrived_s=9.5,
        available=6,
        has_continuation=True,
    )


def test_draft_from_nowhere_has_no_arrival() -> None:
    """The orchestrator's own lookup, and no draft at all, cost no drafter anything."""
    trace = RoundTrace()
    trace.observer("r1").on_round(replace(REPORT, arrival=None))
    (record,) = read(trace)
    assert (record.draft_arrived_s, record.draft_time_s, record.draft_steps) == (None, 0.0, 0)


def test_continuation_is_told_of_rejections_alone() -> None:
    """Behind a draft that was kept whole there is neither a hit nor a miss."""
    trace = RoundTrace()
    observer = trace.observer("r1")
    for is_rejection, has_continuation in ((False, True), (False, False), (True, True), (True, False)):
        outcome = replace(OUTCOME, is_rejection=is_rejection, has_continuation=has_continuation)
        observer.on_round(replace(REPORT, outcome=outcome))
    assert [record.has_continuation for record in read(trace)] == [None, None, True, False]


def test_moments_have_a_date() -> None:
    """The unix time of a moment is its value and the offset, the same in every excerpt."""
    trace = RoundTrace()
    (empty,) = trace.read()
    assert empty.records == ()
    assert abs(time.perf_counter() + empty.clock_offset_s - time.time()) < 60.0
    assert {piece.clock_offset_s for piece in trace.read()} == {empty.clock_offset_s}


# ---------------------------------------------------------------------------------------------------------------------
# The wire


@pytest.mark.parametrize("origin", list(DraftOrigin))
def test_records_survive_the_wire(origin: DraftOrigin) -> None:
    """Every field, whatever its value, and what is absent stays absent."""
    absent = replace(RECORD, draft_origin=origin, draft_arrived_s=None, has_continuation=None)
    traced = replace(TRACED, records=(replace(RECORD, draft_origin=origin), absent))
    message = pb.GetRoundTraceResponse.FromString(traced_rounds_to_proto(traced).SerializeToString())
    assert traced_rounds_from_proto(message) == traced


def test_every_field_of_the_message_is_that_of_the_value() -> None:
    """Nothing is on the wire that a record does not hold, and nothing of a record is left out."""
    assert {field.name for field in pb.RoundRecord.DESCRIPTOR.fields} == set(asdict(RECORD))


def test_unknown_origin_asks_for_a_newer_client() -> None:
    """A client that is too old says so."""
    with pytest.raises(PayloadInvalid):
        traced_rounds_from_proto(pb.GetRoundTraceResponse(records=[pb.RoundRecord()]))


class FakeGenerator:
    """Reads a real trace, or fails."""

    def __init__(self, trace: RoundTrace, failure: Exception | None = None) -> None:
        self._trace, self._failure = trace, failure

    def round_trace(self, *, request_id: str, limit: int) -> Iterator[TracedRounds]:
        if self._failure is not None:
            raise self._failure
        return self._trace.read(request_id=request_id, limit=limit)


class FakeContext:
    """Takes the status that an ingress would send."""

    code: grpc.StatusCode | None = None

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, Any]]) -> None: ...


async def test_call_gives_the_pieces_as_one() -> None:
    """Both doors give all rounds in their order, of the request that was asked for; an ingress adds who answers."""
    trace = RoundTrace()
    numbered(trace, 300)
    numbered(trace, 5, session_id="r2")
    door = Door(cast(Generator, FakeGenerator(trace)), OpenGate())
    servicer = GenerationServicer(door)
    whole = await servicer.GetRoundTrace(pb.GetRoundTraceRequest(), cast(Any, FakeContext()))
    assert traced_rounds_from_proto(whole).records == tuple(read(trace))
    asked = pb.GetRoundTraceRequest(request_id="r2", limit=3)
    part = await ingress_get_round_trace(
        door, asked, FakeContext(), annotate=lambda traced: replace(traced, orchestrator_id="o1")
    )
    assert [(record.session_id, record.number) for record in part.records] == [("r2", 2), ("r2", 3), ("r2", 4)]
    assert part.orchestrator_id == "o1"


async def test_error_behind_an_ingress_becomes_a_status() -> None:
    """An empty message carries it, as for every other call."""
    context: IngressContext = FakeContext()
    door = Door(cast(Generator, FakeGenerator(RoundTrace(), TargetUnavailable("No target answers."))), OpenGate())
    assert await ingress_get_round_trace(door, pb.GetRoundTraceRequest(), context) == pb.GetRoundTraceResponse()
    assert cast(FakeContext, context).code is grpc.StatusCode.UNAVAILABLE


# ---------------------------------------------------------------------------------------------------------------------
# The parts of a verdict's time


@pytest.mark.parametrize(
    ("queue_s", "step_s", "parts"),
    [
        (0.25, 0.5, VerifyTime(way_s=0.125, queue_s=0.25, step_s=0.5)),
        (0.75, 0.5, VerifyTime(way_s=0.0, queue_s=0.5, step_s=0.5)),
        (0.75, 1.5, VerifyTime(way_s=0.0, queue_s=0.0, step_s=1.0)),
    ],
)
def test_parts_of_a_verdicts_time_are_the_whole(queue_s: float, step_s: float, parts: VerifyTime) -> None:
    """Both ways share what the target leaves, and what it claims beyond what was seen is cut."""
    assert replace(RECORD, queue_time_s=queue_s, step_time_s=step_s).verify_time == parts


# ---------------------------------------------------------------------------------------------------------------------
# The timeline


Event = dict[str, Any]


def events_of(traced: TracedRounds) -> list[Event]:
    """As a reader of the file sees them."""
    return cast(list[Event], json.loads(json.dumps(as_trace_events(traced)))["traceEvents"])


def lane_slices(events: list[Event]) -> dict[str, list[tuple[str, float, float]]]:
    """By the name of the lane: what happened there, from when to when, in microseconds."""
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    lanes: defaultdict[str, list[tuple[str, float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[names[event["tid"]]].append((event["name"], event["ts"], event["ts"] + event["dur"]))
    return lanes


def random_rounds(generator: random.Random, count: int) -> TracedRounds:
    """Rounds of three sessions; what target and drafter say of themselves fits into the round, or does not."""
    free_s = dict.fromkeys(("a", "b", "b-1"), 1000.0)
    records = []
    for number in range(count):
        session_id = generator.choice(list(free_s))
        began_s, draft_s, verdict_s, ended_s = sorted(free_s[session_id] + generator.random() for _ in range(4))
        free_s[session_id] = ended_s
        record = replace(
            RECORD,
            session_id=session_id,
            number=number,
            began_s=began_s,
            draft_s=draft_s,
            verdict_s=verdict_s,
            ended_s=ended_s,
            queue_time_s=generator.random() * generator.choice([0.0, 0.1, 1.0]),
            step_time_s=generator.random() * generator.choice([0.0, 0.1, 1.0]),
            draft_origin=generator.choice(list(DraftOrigin)),
            draft_arrived_s=generator.choice([None, draft_s, began_s - generator.random()]),
            draft_time_s=generator.random() * generator.choice([0.0, 0.1, 1.0]),
        )
        records.append(record)
    return TracedRounds(records=tuple(records))


def test_timeline_keeps_the_trace_event_format() -> None:
    """Fields, types, phases, names of all lanes; durations above zero, no overlap within a lane, whole arrows.

    300 random rounds with a fixed seed: no false alarms.
    """
    events = events_of(random_rounds(random.Random(6), 300))
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= set(event)
        assert event["ph"] in {"X", "M", "s", "f"}
        assert all(isinstance(event[key], int) for key in ("pid", "tid"))
        if event["ph"] == "X":
            assert event["ts"] >= 0.0
            assert event["dur"] > 0.0
            assert event["cat"] in set(Lane)
    slices = [event for event in events if event["ph"] == "X"]
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert {event["tid"] for event in slices} == named
    assert sum(event["name"] == "process_name" for event in events) == 1
    for lane in named:
        # In whole nanoseconds, as they were before they became microseconds.
        spans = sorted(
            (round(1000 * event["ts"]), round(1000 * event["ts"]) + round(1000 * event["dur"]))
            for event in slices
            if event["tid"] == lane
        )
        assert all(ended <= began for (_, ended), (began, _) in pairwise(spans))
    starts, ends = ({event["id"]: event for event in events if event["ph"] == phase} for phase in "sf")
    assert set(starts) == set(ends)
    assert len(starts) > 30
    begins = {(event["tid"], event["ts"]): event["name"] for event in slices}
    assert {begins[event["tid"], event["ts"]] for event in starts.values()} == {"draft"}
    assert {begins[event["tid"], event["ts"]] for event in ends.values()} == {"verify"}


def test_draft_that_was_waited_for_is_shown_with_its_ways() -> None:
    """What target and drafter do not account for is shared by the way there and the way back."""
    assert lane_slices(events_of(TRACED)) == {
        "r1 rounds": [("redraft", 0.0, 1_750_000.0)],
        "r1 orchestrator": [("wait for draft", 0.0, 500_000.0), ("commit", 1_500_000.0, 1_750_000.0)],
        "r1 wire to target": [("verify", 500_000.0, 625_000.0), ("verdict", 1_375_000.0, 1_500_000.0)],
        "r1 target": [("queue", 625_000.0, 875_000.0), ("step", 875_000.0, 1_375_000.0)],
        "r1 wire to drafter": [("commit", 0.0, 125_000.0), ("proposal", 375_000.0, 500_000.0)],
        "r1 drafter": [("draft", 125_000.0, 375_000.0)],
    }


def test_draft_ahead_ends_where_it_arrived() -> None:
    """It was made before its round began, and its ways are not known, so the timeline begins with it."""
    ahead = replace(RECORD, draft_origin=DraftOrigin.AHEAD, draft_arrived_s=9.75, draft_s=10.0)
    lanes = lane_slices(events_of(replace(TRACED, records=(ahead,))))
    assert lanes["r1 drafter"] == [("draft", 0.0, 250_000.0)]
    assert lanes["r1 rounds"] == [("ahead", 500_000.0, 2_250_000.0)]
    assert "r1 wire to drafter" not in lanes
    assert lanes["r1 orchestrator"] == [("commit", 2_000_000.0, 2_250_000.0)]


def test_draft_begun_before_its_round_ends_where_it_arrived() -> None:
    """A drafter that says it took longer than the round waited had begun before, so nothing is left for the ways."""
    lanes = lane_slices(events_of(replace(TRACED, records=(replace(RECORD, draft_time_s=0.75),))))
    assert lanes["r1 drafter"] == [("draft", 0.0, 750_000.0)]
    assert "r1 wire to drafter" not in lanes


def test_draft_that_is_used_late_is_shown_where_it_was_made() -> None:
    """A branch may have arrived before the draft of the round before it."""
    first = replace(RECORD, draft_origin=DraftOrigin.AHEAD, draft_arrived_s=10.0)
    second = replace(first, draft_origin=DraftOrigin.BRANCH, draft_arrived_s=9.75)
    events = events_of(replace(TRACED, records=(first, replace(second, began_s=12.0, draft_s=12.0, verdict_s=13.0))))
    assert lane_slices(events)["r1 drafter"] == [("draft", 0.0, 250_000.0), ("draft", 250_000.0, 500_000.0)]


def test_draft_that_serves_two_rounds_was_made_once() -> None:
    """The rest of a draft behind an emitted token is no other draft."""
    first = replace(RECORD, draft_origin=DraftOrigin.AHEAD, draft_arrived_s=10.0)
    second = replace(first, number=4, began_s=12.0, draft_s=12.0, verdict_s=13.0, ended_s=13.5)
    events = events_of(replace(TRACED, records=(first, second)))
    assert len(lane_slices(events)["r1 drafter"]) == 1
    assert [event["id"] for event in events if event["ph"] == "f"] == [0]


def test_timeline_says_what_it_is() -> None:
    """The date, whose it is, that it is emulated, and how what is not known was placed."""
    whole = as_trace_events(TRACED)
    about = cast(dict[str, Any], whole["otherData"])
    assert about["began"] == datetime.fromtimestamp(1e9 + 10.0, UTC).isoformat()
    assert (about["rounds"], about["dropped"], about["is_emulated"]) == (1, 2, True)
    assert "shared equally" in about["placement"]
    (process,) = [event for event in events_of(TRACED) if event["name"] == "process_name"]
    assert process["args"] == {"name": "orchestrator o1 (emulated)"}
    (real,) = [event for event in events_of(TracedRounds(records=())) if event["name"] == "process_name"]
    assert real["args"] == {"name": "orchestrator"}


def test_round_carries_its_figures() -> None:
    """Whoever clicks on a round reads its lengths, its order and its reason."""
    (round_,) = [event for event in events_of(TRACED) if event.get("cat") == Lane.ROUNDS]
    assert round_["args"]["reason"] == "best 4"
    assert (round_["args"]["kept_length"], round_["args"]["draft_length"], round_["args"]["credit"]) == (2, 4, 9)
    assert not any(name.endswith("_s") for name in round_["args"])


def test_json_holds_the_records_as_they_are() -> None:
    """Under the names of the value, with request and choice spelled out."""
    choice = replace(RECORD, session_id="r1-2")
    whole = json.loads(json.dumps(as_json(replace(TRACED, records=(RECORD, choice)))))
    assert whole["metadata"]["clock_offset_s"] == 1e9
    assert whole["records"][0] == {"request_id": "r1", "choice": 0, **asdict(RECORD)}
    assert (whole["records"][1]["request_id"], whole["records"][1]["choice"]) == ("r1", 2)


def test_empty_trace_is_a_valid_file() -> None:
    """No rounds, no date."""
    assert cast(dict[str, Any], as_trace_events(TracedRounds(records=()))["otherData"])["began"] is None
    assert as_json(TracedRounds(records=()))["records"] == []
