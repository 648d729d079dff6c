"""What operators see of requests, through a whole deployment over real gRPC: metrics, spans and log lines.

The target counts: behind token t comes t + 1, around a vocabulary of 8. At temperature 0, no test here has anything to
do with chance.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace

import pytest
import pytest_asyncio
import structlog
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client import CollectorRegistry

from orchestrator import api
from orchestrator.door import Caller, Door, OpenGate
from orchestrator.request_metrics import RequestMetrics
from orchestrator.request_watch import MAX_ROUND_EVENTS, RequestWatch
from paceline.errors import ContextTooLong, DeadlineExceeded
from paceline.generation import Delta, Event, GenerationRequest, Schedule
from paceline.generation_wire import request_to_proto
from paceline.logs import configure_logging
from paceline.v1 import generation_service_pb2 as pb
from tests.checkpoints import save_markov_checkpoint
from tests.contract.test_ingress import FakeContext
from tests.fakes import FakeModel, counting_logits
from tests.harness import Fleet, fleet, model_drafter_of, request, target_of
from tests.watching import Spans

VOCAB = 8
PROMPT = (0, 1, 2)
MAX_CONTEXT = 512
SEEN_TRACE, SEEN_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MODEL = "fake"

shared = pytest.mark.asyncio(loop_scope="module")


def counting() -> FakeModel:
    return FakeModel(counting_logits(VOCAB), vocab_size=VOCAB, max_context=MAX_CONTEXT)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """A target, and a drafter that is always right."""
    uniform = [[1 / VOCAB] * VOCAB] * VOCAB
    tokenizer = str(save_markov_checkpoint(tmp_path_factory.mktemp("models") / "words", uniform))
    async with fleet(
        [target_of(counting())], [model_drafter_of(counting())], tokenizer, draft_deadline_s=10
    ) as services:
        yield services


class Watched:
    """The deployment behind a door, watched by somebody new."""

    def __init__(self, deployment: Fleet, *, sample_ratio: float = 1.0) -> None:
        self.registry, self.spans = CollectorRegistry(), Spans(sample_ratio=sample_ratio)
        self.generator = deployment.generator
        self.generator.watch = RequestWatch(
            RequestMetrics(self.registry), model=lambda: MODEL, tracer=self.spans.tracer
        )
        self.door = Door(self.generator, OpenGate())

    async def ask(
        self, asked: GenerationRequest, *, timeout_s: float = 60.0, traceparent: str | None = None
    ) -> list[Event]:
        answer = self.door.generate(asked, caller=Caller("ann"), timeout_s=timeout_s, traceparent=traceparent)
        async with aclosing(answer) as events:
            return [event async for event in events]

    def value(self, name: str, **labels: str) -> float:
        """0 for a series of which nothing was counted."""
        return self.registry.get_sample_value(f"paceline_{name}", labels) or 0.0

    @property
    def span(self) -> ReadableSpan:
        [span] = self.spans.ended
        return span


def asked_for(max_tokens: int, **fields: object) -> GenerationRequest:
    """Drafts of four tokens, each waited for: so that there are some."""
    asked = request(PROMPT, temperature=0.0, max_tokens=max_tokens, schedule=Schedule.SEQUENTIAL)
    return replace(asked, **fields)  # type: ignore[arg-type]  # by the name of the field


TOO_LONG = replace(asked_for(4), token_ids=(1,) * MAX_CONTEXT)


# ---------------------------------------------------------------------------------------------------------------------
# Metrics


@shared
async def test_answers_are_counted(deployment: Fleet) -> None:
    """Two requests, three answers: each token once, and as a gap all but the first of each answer."""
    watched = Watched(deployment)
    await watched.ask(asked_for(10))
    await watched.ask(asked_for(7, n=2))
    assert watched.value("requests_total", outcome="finished") == 2
    assert watched.value("request_success_total", finished_reason="length") == 3
    assert watched.value("prompt_tokens_total") == 2 * len(PROMPT)
    assert watched.value("generation_tokens_total") == 10 + 2 * 7
    assert watched.value("inter_token_latency_seconds_count") == 10 + 2 * 7 - 3
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert watched.value(f"{name}_seconds_count") == 2, name
    assert watched.value("draft_decisions_total", decision="speculate") > 0
    assert 0 < watched.value("draft_wait_seconds_total") < watched.value("round_seconds_total")
    assert watched.value("e2e_request_latency_seconds_sum") > watched.value("time_to_first_token_seconds_sum")


@shared
async def test_requests_are_running_or_waiting_while_they_are(deployment: Fleet) -> None:
    watched = Watched(deployment)
    async with aclosing(watched.door.generate(asked_for(5), caller=Caller(), timeout_s=60)) as events:
        async for _ in events:
            assert (watched.value("num_requests_running"), watched.value("num_requests_waiting")) == (1, 0)
    with pytest.raises(ContextTooLong):
        await watched.ask(TOO_LONG)
    assert (watched.value("num_requests_running"), watched.value("num_requests_waiting")) == (0, 0)


@shared
async def test_caller_that_leaves_is_no_error(deployment: Fleet) -> None:
    """What it had got is counted, its time is not: only whole answers are compared."""
    watched = Watched(deployment)
    async with aclosing(watched.door.generate(asked_for(400), caller=Caller(), timeout_s=60)) as events:
        async for event in events:
            if isinstance(event, Delta):
                break
    assert watched.value("requests_total", outcome="cancelled") == 1
    assert watched.value("generation_tokens_total") >= 1
    assert watched.value("e2e_request_latency_seconds_count") == 0
    assert "paceline_errors_total" not in {
        sample.name for metric in watched.registry.collect() for sample in metric.samples
    }


@shared
async def test_late_answer_is_late(deployment: Fleet) -> None:
    watched = Watched(deployment)
    with pytest.raises(DeadlineExceeded):
        await watched.ask(asked_for(4), timeout_s=0.0)
    assert watched.value("requests_total", outcome="late") == 1
    assert watched.value("errors_total", reason="DEADLINE_EXCEEDED") == 1


@shared
async def test_each_error_is_counted_once_wherever_it_arises(deployment: Fleet) -> None:
    """In the message, before there is a request; and in the plan of one."""
    watched = Watched(deployment)
    malformed, too_long = pb.GenerateRequest(), request_to_proto(TOO_LONG)
    for message in (malformed, too_long):
        async with aclosing(api.ingress_generate(watched.door, message, FakeContext())) as responses:
            assert len([response async for response in responses]) == 1
    assert watched.value("errors_total", reason="INVALID_ARGUMENT") == 1
    assert watched.value("errors_total", reason="CONTEXT_TOO_LONG") == 1
    assert watched.value("requests_total", outcome="failed") == 1


# ---------------------------------------------------------------------------------------------------------------------
# Traces


@shared
async def test_request_is_one_span(deployment: Fleet) -> None:
    """It says what was asked and what came of it, in the conventions' names; its rounds are events within it."""
    watched = Watched(deployment)
    events = await watched.ask(asked_for(12, seed=5))
    span, attributes = watched.span, dict(watched.span.attributes or {})
    assert (span.name, span.kind, span.parent) == (f"text_completion {MODEL}", SpanKind.SERVER, None)
    assert span.status.status_code is StatusCode.UNSET
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "paceline",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.seed": 5,
        "gen_ai.usage.input_tokens": len(PROMPT),
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.response.id": events[0].request_id,  # type: ignore[union-attr]  # it is `Started`
        "paceline.caller": "ann",
        "paceline.outcome": "finished",
        "paceline.rule": "greedy",
        "paceline.schedule": "sequential",
        "paceline.acceptance": 1.0,
        "paceline.rounds": len(span.events),
    }
    assert {name: attributes.get(name) for name in expected} == expected
    assert sum(int(str((event.attributes or {})["paceline.emitted"])) for event in span.events) == 12
    moments = [span.start_time or 0, *(event.timestamp for event in span.events), span.end_time or 0]
    assert moments == sorted(moments)


@shared
async def test_rounds_of_a_span_are_bounded(deployment: Fleet) -> None:
    """The first so many are there, and how many there were."""
    watched = Watched(deployment)
    rounds = MAX_ROUND_EVENTS + 22
    plain = request(PROMPT, temperature=0.0, max_tokens=rounds, draft_length=0)
    await watched.ask(plain)
    assert len(watched.span.events) == MAX_ROUND_EVENTS
    assert (watched.span.attributes or {})["paceline.rounds"] == rounds


@shared
async def test_span_continues_the_callers_trace(deployment: Fleet) -> None:
    """Through the metadata of a call; the caller's decision to sample counts, not our share of 0."""
    watched = Watched(deployment, sample_ratio=0.0)
    message = request_to_proto(asked_for(3))
    for flags in ("01", "00"):
        context = FakeContext(traceparent=f"00-{SEEN_TRACE}-{SEEN_SPAN}-{flags}")
        async with aclosing(api.ingress_generate(watched.door, message, context)) as responses:
            async for _ in responses:
                pass
        assert context.code is None
    parent = watched.span.parent
    assert parent is not None
    assert (f"{parent.trace_id:032x}", f"{parent.span_id:016x}") == (SEEN_TRACE, SEEN_SPAN)
    assert watched.span.context is not None
    assert watched.span.context.trace_id == parent.trace_id


@shared
@pytest.mark.parametrize("traceparent", ["", "nonsense", f"00-{'0' * 32}-{SEEN_SPAN}-01", "00-é-é-01"])
async def test_malformed_context_begins_a_trace(deployment: Fleet, traceparent: str) -> None:
    watched = Watched(deployment)
    await watched.ask(asked_for(2), traceparent=traceparent)
    assert watched.span.parent is None


@shared
async def test_share_of_nothing_samples_nothing(deployment: Fleet) -> None:
    watched = Watched(deployment, sample_ratio=0.0)
    await watched.ask(asked_for(3))
    assert watched.spans.ended == ()


@shared
async def test_failed_request_is_a_failed_span(deployment: Fleet) -> None:
    """By its reason alone: a sentence may repeat what the caller wrote."""
    watched = Watched(deployment)
    with pytest.raises(ContextTooLong):
        await watched.ask(TOO_LONG)
    assert watched.span.status.status_code is StatusCode.ERROR
    assert watched.span.status.description == "CONTEXT_TOO_LONG"
    assert (watched.span.attributes or {})["error.type"] == "CONTEXT_TOO_LONG"


# ---------------------------------------------------------------------------------------------------------------------
# The log


@contextmanager
def log_lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, object]]]:
    """What is written meanwhile, each line as the JSON object that it is; then as it was before."""
    written, before, lines = io.StringIO(), structlog.get_config(), list[dict[str, object]]()
    monkeypatch.setattr(sys, "stderr", written)
    configure_logging("debug", service="orchestrator")
    try:
        yield lines
    finally:
        structlog.configure(**before)
        structlog.contextvars.clear_contextvars()
        lines += [json.loads(line) for line in written.getvalue().splitlines()]


@shared
async def test_each_request_is_one_line(deployment: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON with ids, who asked, and figures; of an error the reason; of what was asked and answered no word."""
    watched = Watched(deployment)
    texts = replace(asked_for(6), token_ids=None, text="t0 t1 t2")
    with log_lines(monkeypatch) as lines:
        events = await watched.ask(texts)
        await watched.ask(replace(texts, request_id="mine", n=2))
        with pytest.raises(ContextTooLong):
            await watched.ask(replace(texts, text="t0 t1 t2 " * MAX_CONTEXT))
    answered, chosen, failed = (line for line in lines if line["event"] == "request")
    expected = {
        "level": "info",
        "service": "orchestrator",
        "request_id": events[0].request_id,  # type: ignore[union-attr]  # it is `Started`
        "caller": "ann",
        "model": MODEL,
        "outcome": "finished",
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "finish_reason": "length",
        "acceptance": 1.0,
    }
    assert {name: answered.get(name) for name in expected} == expected
    assert answered.keys() >= {"timestamp", "seconds", "first_token_seconds"}
    assert (chosen["request_id"], chosen["finish_reason"]) == ("mine", "length,length")
    assert (failed["outcome"], failed["error"]) == ("failed", "CONTEXT_TOO_LONG")
    assert "finish_reason" not in failed
    answer = "".join(event.text for event in events if isinstance(event, Delta))
    for text in ("t0 t1 t2", answer.strip()):
        assert text
        assert text not in json.dumps(lines)


@shared
async def test_lines_of_a_session_say_which(deployment: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each choice keeps its own ids, however the choices' rounds alternate."""
    watched = Watched(deployment)
    trace = deployment.generator._trace

    class Chatty:
        """Logs as anything that runs for a session might."""

        def on_round(self, round_: object) -> None:
            structlog.get_logger("test").info("a round")

    monkeypatch.setattr(trace, "observer", lambda session_id: Chatty())
    with log_lines(monkeypatch) as lines:
        await watched.ask(asked_for(9, n=2, request_id="mine"))
    rounds = [line for line in lines if line["event"] == "a round"]
    sessions = {str(line["session_id"]) for line in rounds}
    assert {line["request_id"] for line in rounds} == {"mine"}
    assert len(sessions) == 2
    assert all(session_id.startswith("mine~") for session_id in sessions)
    assert len(rounds) > 4
