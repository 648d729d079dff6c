"""For tests that hand in requests themselves: somebody who watches them, and the spans that come of it."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from orchestrator.request_metrics import RequestMetrics
from orchestrator.request_watch import RequestWatch
from paceline.tracing import RequestTracer


def watch_alone() -> RequestWatch:
    """Counts requests for nobody."""
    return RequestWatch(RequestMetrics(CollectorRegistry()), model=lambda: "model")


class Spans:
    """A tracer, and the spans that have ended."""

    def __init__(self, *, sample_ratio: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracer = RequestTracer(SimpleSpanProcessor(self._exporter), service="test", sample_ratio=sample_ratio)

    @property
    def ended(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()
