"""`paceline trace` against a fake server: the summary, the files, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from rich.console import Console

from paceline.cli.serving import free_port
from paceline.cli.trace_view import trace_view
from paceline.client import DraftOrigin, RoundRecord, TracedRounds
from paceline.generation_wire import traced_rounds_to_proto
from paceline.v1 import generation_service_pb2 as pb
from tests.command_line import ESCAPE, paceline, refused
from tests.fake_generation import FakeGenerationService, serving

PLAIN = RoundRecord(
    session_id="r1",
    number=0,
    committed_length=10,
    began_s=0.0,
    draft_s=0.0,
    verdict_s=0.6,
    ended_s=0.6,
    step_time_s=0.6,
    emitted=1,
)
REJECTED = replace(
    PLAIN,
    number=1,
    began_s=1.0,
    draft_s=1.1,
    verdict_s=1.35,
    ended_s=1.4,
    queue_time_s=0.05,
    step_time_s=0.1,
    draft_origin=DraftOrigin.REDRAFT,
    draft_length=4,
    kept_length=1,
    emitted=2,
    has_continuation=True,
)
MISSED = replace(REJECTED, session_id="r1-1", has_continuation=False)
TRACED = TracedRounds(records=(PLAIN, REJECTED, MISSED))


class TracingService(FakeGenerationService):
    """Remembers three rounds, those of request r1."""

    asked: pb.GetRoundTraceRequest

    def GetRoundTrace(  # noqa: N802
        self, request: pb.GetRoundTraceRequest, context: grpc.ServicerContext
    ) -> pb.GetRoundTraceResponse:
        self.asked = request
        records = TRACED.records if request.request_id in ("", "r1") else ()
        return traced_rounds_to_proto(replace(TRACED, records=records))


@pytest.fixture
def service() -> TracingService:
    return TracingService()


@pytest.fixture
def endpoint(service: TracingService) -> Iterator[str]:
    with serving(service) as address:
        yield address


def drawn(traced: TracedRounds, *, width: int = 80) -> list[str]:
    """The lines of the view."""
    console = Console(width=width, record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(trace_view(traced))
    return console.export_text().splitlines()


# ---------------------------------------------------------------------------------------------------------------------
# The summary


def test_summary_says_where_the_time_went() -> None:
    """The parts of all rounds together, as means and as shares of the whole, which they add up to."""
    rows = {line[:20].strip(): line[20:].split() for line in drawn(TRACED)}
    assert rows["target computes"][:3] == ["266.67", "57", "%"]
    assert rows["queue at the target"][:3] == ["33.33", "7", "%"]
    assert rows["wire to the target"][:3] == ["66.67", "14", "%"]
    assert rows["waiting for drafts"][:3] == ["66.67", "14", "%"]
    assert rows["orchestrator"][:3] == ["33.33", "7", "%"]


def test_summary_counts_rounds_drafts_and_rejections() -> None:
    """Choices are of one request; origins without a round take no line."""
    text = "\n".join(drawn(TRACED))
    assert "3 rounds of 1 request, 5 tokens, 1.67 a round" in text
    rows = [line.split() for line in drawn(TRACED)]
    assert ["waited", "for", "2", "8", "25", "%", "2.00"] in rows
    assert ["no", "draft", "1", "-", "-", "1.00"] in rows
    assert "on a branch" not in text
    assert "2 rejections, drafted tokens there behind 1 (50 %) and missing behind 1" in text
    assert "emulated" not in text
    assert "forgotten" not in text


def test_summary_warns_of_what_it_is_not() -> None:
    """Emulated times are no measurements, and what was forgotten is not in the figures."""
    text = "\n".join(drawn(replace(TRACED, records=(PLAIN,), is_emulated=True, dropped=7)))
    assert "emulated: " in text
    assert "7 older rounds of this orchestrator forgotten" in text
    assert "no rejections" in text


def test_summary_fits_into_the_terminal() -> None:
    """80 columns, with every origin and large numbers."""
    records = [replace(REJECTED, draft_origin=origin, draft_length=10**6) for origin in DraftOrigin]
    assert max(map(len, drawn(TracedRounds(records=tuple(records))))) <= 80


# ---------------------------------------------------------------------------------------------------------------------
# The command


def test_command_shows_the_summary_and_writes_nothing(endpoint: str, service: TracingService) -> None:
    """Without options all rounds are asked for."""
    result = paceline("trace", endpoint)
    assert result.exit_code == 0
    assert "3 rounds of 1 request" in result.stdout
    assert ESCAPE not in result.stdout
    assert service.asked == pb.GetRoundTraceRequest()


def test_command_writes_a_timeline(endpoint: str, service: TracingService, tmp_path: Path) -> None:
    """Where to open it is said beside the summary; limit and request reach the server."""
    path = tmp_path / "trace.json"
    result = paceline("trace", endpoint, "--output", str(path), "--request", "r1", "--limit", "9")
    assert result.exit_code == 0
    assert "ui.perfetto.dev" in result.stderr
    assert {event["ph"] for event in json.loads(path.read_text())["traceEvents"]} == {"X", "M"}
    assert service.asked == pb.GetRoundTraceRequest(request_id="r1", limit=9)


def test_command_writes_the_records(endpoint: str, tmp_path: Path) -> None:
    """As JSON, under their own names."""
    path = tmp_path / "trace.json"
    result = paceline("trace", endpoint, "--output", str(path), "--format", "json")
    assert "perfetto" not in result.stderr
    assert [record["session_id"] for record in json.loads(path.read_text())["records"]] == ["r1", "r1", "r1-1"]


def test_failures_are_one_sentence(endpoint: str, tmp_path: Path) -> None:
    """An unknown request, a file that cannot be written, nobody at the endpoint."""
    assert "remembers no round of request r9" in refused(paceline("trace", endpoint, "--request", "r9"), status=1)
    unwritable = paceline("trace", endpoint, "--output", str(tmp_path))
    assert unwritable.exit_code == 1
    assert "cannot be written: Is a directory." in " ".join(unwritable.stderr.split())
    assert "Nothing answers at" in refused(paceline("trace", f"127.0.0.1:{free_port()}"), status=1)


def test_no_rounds_are_no_failure() -> None:
    """A server that has only begun has nothing to show."""
    assert drawn(TracedRounds(records=())) == ["No round is remembered yet."]
