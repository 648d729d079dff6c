"""Spans for OpenTelemetry, sent to a collector by OTLP over gRPC from a thread of their own.

Whoever traces nothing does not import this module, and so nothing of OpenTelemetry. It takes names, numbers and times;
what belongs in a span is its caller's business.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from paceline.errors import StartupFailed

Attributes = Mapping[str, AttributeValue]

_MAX_EVENTS = 128  # of one span; its caller is to stay below
_EXPORT_TIMEOUT_S = 5.0
_CLOSE_LIMIT_S = 5.0


class RequestSpan:
    """One sampled request; ended once."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span = span

    def event(self, name: str, attributes: Attributes, *, unix_s: float) -> None:
        self._span.add_event(name, attributes, timestamp=int(unix_s * 1e9))

    def end(self, attributes: Attributes, *, error: str | None) -> None:
        """`error` is the reason, one of a bounded number of words."""
        self._span.set_attributes(attributes)
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class RequestTracer:
    """Begins spans and hands those that end to `processor`.

    The caller's own decision to sample holds if it sends one along; of all others `sample_ratio` (0 to 1) are sampled.
    """

    def __init__(self, processor: SpanProcessor, *, service: str, sample_ratio: float) -> None:
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(sample_ratio),
            resource=Resource.create({"service.name": service}),
            span_limits=SpanLimits(max_events=_MAX_EVENTS),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("paceline")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, attributes: Attributes, *, traceparent: str | None) -> RequestSpan | None:
        """A span below the caller's (W3C `traceparent`; a malformed one is ignored); None if it is not sampled."""
        parent = self._propagator.extract({"traceparent": traceparent}, Context()) if traceparent else Context()
        span = self._tracer.start_span(name, parent, kind=SpanKind.SERVER, attributes=attributes)
        return RequestSpan(span) if span.is_recording() else None

    def close(self) -> None:
        """Send what has ended; a collector that does not answer is waited for some seconds, and no process longer."""
        closing = threading.Thread(target=self._provider.shutdown, name="trace-end", daemon=True)
        closing.start()
        closing.join(_CLOSE_LIMIT_S)


def otlp_tracer(endpoint: str, *, service: str, sample_ratio: float) -> RequestTracer:
    """Spans for the collector at `endpoint` (http://HOST:PORT, or https:// for TLS); raises `StartupFailed`.

    A collector that does not answer costs log lines and spans, never an answer: spans wait in a bounded queue.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise StartupFailed(
            "Traces need a package that is not installed; run pip install 'paceline[otlp]', or leave --otlp-endpoint out."
        ) from error
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
    return RequestTracer(BatchSpanProcessor(exporter), service=service, sample_ratio=sample_ratio)
