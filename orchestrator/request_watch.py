"""Looks on while requests are answered, and tells operators: metrics, one log line a request, one span a request.

It sees lengths, times and words from short lists; no text of a prompt or an answer comes into any of the three.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import structlog

from orchestrator.loop import Observer, RoundReport
from orchestrator.request_metrics import RequestMetrics
from paceline.errors import AnswerCancelled, DeadlineExceeded, PacelineError
from paceline.generation import Event, Finished, GenerationRequest, Started
from paceline.logs import bind_request

logger = structlog.get_logger(__name__)

MAX_ROUND_EVENTS = 64
"""A span holds the first rounds of a request, those of all choices together, up to so many; it says how many there were."""

FINISHED, FAILED, LATE, CANCELLED = "finished", "failed", "late", "cancelled"
"""How a request ends: answered; with an error; out of its caller's time; left or cancelled by its caller."""

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]


OnRound = Callable[[str, RoundReport], None]
"""Hears of a round that has ended just now, with its session's id."""


class SessionRounds:
    """One session's rounds, for its part of the round trace and for whoever watches its request (`loop.Observer`)."""

    __slots__ = ("_observer", "_on_round", "_session_id")

    def __init__(self, session_id: str, observer: Observer, on_round: OnRound) -> None:
        self._session_id, self._observer, self._on_round = session_id, observer, on_round

    def on_round(self, round_: RoundReport) -> None:
        self._observer.on_round(round_)
        self._on_round(self._session_id, round_)


class Span(Protocol):
    """One sampled request (`tracing.RequestSpan`)."""

    def event(self, name: str, attributes: Attributes, *, unix_s: float) -> None: ...

    def end(self, attributes: Attributes, *, error: str | None) -> None: ...


class Tracer(Protocol):
    """Makes spans (`tracing.RequestTracer`)."""

    def begin(self, name: str, attributes: Attributes, *, traceparent: str | None) -> Span | None:
        """None: this request is not sampled."""


class RequestWatch:
    """All requests of one orchestrator. Invariant: each is counted once, and so is each error, whatever its way in."""

    def __init__(self, metrics: RequestMetrics, *, model: Callable[[], str], tracer: Tracer | None = None) -> None:
        """`model` names the target; without a tracer there are no spans."""
        self._metrics, self._model, self._tracer = metrics, model, tracer

    @contextmanager
    def watch(self, request: GenerationRequest, *, caller: str, traceparent: str | None) -> Iterator[WatchedRequest]:
        """Around one answer, from its request's arrival on; `traceparent` is the caller's W3C trace context, if any.

        Once its id is known the lines that this task logs carry it, also behind the block: a front says what failed.
        """
        model = self._model()
        span = None
        if self._tracer is not None:
            attributes = _asked(request, caller=caller, model=model)
            span = self._tracer.begin(f"{_operation(request)} {model}", attributes, traceparent=traceparent)
        watched = WatchedRequest(request, self._metrics, span)
        bind_request(watched.request_id)
        try:
            yield watched
        except BaseException as error:
            outcome = watched.outcome(error)
            reason = self._count_error(error) if outcome in (FAILED, LATE) else None
            self._end(watched, outcome, reason, caller=caller, model=model)
            raise
        else:
            self._end(watched, FINISHED, None, caller=caller, model=model)

    def refuse(self, error: PacelineError, *, caller: str = "") -> None:
        """A call ended by `error` before there was a request to answer."""
        self._log(caller=caller, model=self._model(), outcome=FAILED, error=self._count_error(error))

    def _count_error(self, error: BaseException) -> str:
        """Gives the reason, one of those that error types have: what a peer calls its error is no label."""
        reason = type(error).reason if isinstance(error, PacelineError) else PacelineError.reason
        self._metrics.errors.labels(reason=reason).inc()
        return reason

    def _end(self, watched: WatchedRequest, outcome: str, reason: str | None, *, caller: str, model: str) -> None:
        watched.end(outcome, reason)
        self._metrics.outcomes.labels(outcome=outcome).inc()
        self._log(caller=caller, model=model, outcome=outcome, error=reason, **watched.figures())

    def _log(self, **figures: object) -> None:
        logger.info("request", **{name: figure for name, figure in figures.items() if figure is not None})


class WatchedRequest:
    """What is known of one request while it is answered."""

    def __init__(self, request: GenerationRequest, metrics: RequestMetrics, span: Span | None) -> None:
        self.request_id = request.request_id  # "" until it is known
        self._choices, self._metrics, self._span = request.n, metrics, span
        self._began_s = time.perf_counter()
        # Taken at once: a span's rounds lie right even if somebody sets the clock meanwhile.
        self._clock_offset_s = time.time() - self._began_s
        self._started: Started | None = None
        self._queued_s = 0.0
        self._first_token_s: float | None = None
        self._generated = 0  # tokens
        self._finished: list[Finished] = []
        self._rounds = 0
        self._reports: list[tuple[str, RoundReport]] = []  # made into events at the end, when nobody waits
        metrics.waiting.inc()

    def on_round(self, session_id: str, report: RoundReport) -> None:
        """A round of one of its sessions has ended just now."""
        self._metrics.rounds.record(report)
        self._rounds += 1
        self._generated += report.outcome.emitted
        if self._first_token_s is None and self._generated:
            self._first_token_s = self._elapsed_s()
            self._metrics.time_to_first_token.observe(self._first_token_s)
        if self._span is not None and len(self._reports) < MAX_ROUND_EVENTS:
            self._reports.append((session_id, report))

    def on_event(self, event: Event) -> None:
        """An event is about to go to the caller."""
        if isinstance(event, Started):
            self._start(event)
        elif isinstance(event, Finished):
            self._finished.append(event)
            self._metrics.successes.labels(finished_reason=event.finish_reason.value).inc()

    def outcome(self, error: BaseException) -> str:
        """In a word; a caller that leaves behind the last event has its answer."""
        if isinstance(error, (asyncio.CancelledError, GeneratorExit, AnswerCancelled)):
            return FINISHED if len(self._finished) == self._choices else CANCELLED
        return LATE if isinstance(error, DeadlineExceeded) else FAILED

    def end(self, outcome: str, reason: str | None) -> None:
        if self._started is None:
            self._metrics.waiting.dec()
        else:
            self._metrics.running.dec()
        if outcome == FINISHED:
            self._metrics.latency.observe(self._elapsed_s())
        if self._span is not None:
            for session_id, report in self._reports:
                unix_s = report.verdict_s + self._clock_offset_s
                self._span.event("paceline.round", _round_attributes(session_id, report), unix_s=unix_s)
            self._span.end(self._answered(outcome), error=reason)

    def figures(self) -> dict[str, object]:
        """For the log; None: not known."""
        return {
            "request_id": self.request_id or None,
            "prompt_tokens": self._started.prompt_tokens if self._started else None,
            "completion_tokens": self._completion_tokens,
            "finish_reason": ",".join(self._finish_reasons) or None,
            "seconds": round(self._elapsed_s(), 4),
            "first_token_seconds": self._first_token_s and round(self._first_token_s, 4),
            "acceptance": self._acceptance and round(self._acceptance, 3),
        }

    def _start(self, started: Started) -> None:
        self._started, self.request_id = started, started.request_id
        bind_request(started.request_id)
        self._queued_s = self._elapsed_s()
        self._metrics.waiting.dec()
        self._metrics.running.inc()
        self._metrics.queue_time.observe(self._queued_s)
        self._metrics.prompt_tokens.inc(started.prompt_tokens)

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._began_s

    @property
    def _completion_tokens(self) -> int:
        """As the caller is told in the end; of an answer that is not whole, what it has got of it."""
        if len(self._finished) < self._choices:
            return self._generated
        return sum(finished.usage.completion_tokens for finished in self._finished)

    @property
    def _finish_reasons(self) -> list[str]:
        return [event.finish_reason.value for event in sorted(self._finished, key=lambda event: event.choice)]

    @property
    def _acceptance(self) -> float | None:
        """Kept over drafted tokens; None without drafts."""
        drafted = sum(finished.speculation.num_draft_tokens for finished in self._finished)
        kept = sum(finished.speculation.num_accepted_tokens for finished in self._finished)
        return kept / drafted if drafted else None

    def _answered(self, outcome: str) -> Attributes:
        """Of the span, known at the end."""
        attributes: dict[str, str | int | float | Sequence[str]] = {
            "paceline.outcome": outcome,
            "paceline.request_id": self.request_id,
            "paceline.rounds": self._rounds,
            "gen_ai.usage.output_tokens": self._completion_tokens,
        }
        if self._started is not None:
            attributes |= {
                "gen_ai.response.id": self.request_id,
                "gen_ai.usage.input_tokens": self._started.prompt_tokens,
                "paceline.queue_seconds": self._queued_s,
            }
        if self._first_token_s is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = self._first_token_s
        if self._finished:
            attributes["gen_ai.response.finish_reasons"] = self._finish_reasons
            speculation = self._finished[0].speculation
            if speculation.rule is not None and speculation.schedule is not None:
                attributes["paceline.rule"] = speculation.rule.value
                attributes["paceline.schedule"] = speculation.schedule.value
        if self._acceptance is not None:
            attributes["paceline.acceptance"] = self._acceptance
        return attributes


def _operation(request: GenerationRequest) -> str:
    return "text_completion" if request.messages is None else "chat"


def _asked(request: GenerationRequest, *, caller: str, model: str) -> Attributes:
    """Of the span, known from the start: names of OpenTelemetry's conventions for generative AI, and our own."""
    sampling = request.sampling
    attributes: dict[str, str | int | float] = {
        "gen_ai.operation.name": _operation(request),
        "gen_ai.provider.name": "paceline",
        "gen_ai.request.model": model,
        "gen_ai.request.choice.count": request.n,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "paceline.caller": caller,
    }
    if request.stopping.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = request.stopping.max_tokens
    if request.seed is not None and request.seed < 2**63:
        attributes["gen_ai.request.seed"] = request.seed
    return attributes


def _round_attributes(session_id: str, report: RoundReport) -> Attributes:
    outcome = report.outcome
    return {
        "paceline.session_id": session_id,
        "paceline.round": report.number,
        "paceline.draft_origin": outcome.origin.value,
        "paceline.draft_length": outcome.draft_length,
        "paceline.kept_length": outcome.kept_length,
        "paceline.emitted": outcome.emitted,
        "paceline.draft_wait_seconds": outcome.waited_s,
        "paceline.verify_seconds": outcome.verify_s,
        "paceline.step_seconds": outcome.step_s,
        "paceline.queue_seconds": outcome.queue_s,
    }
