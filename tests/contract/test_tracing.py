"""Spans on their way: to a collector over real gRPC, and what it costs when there is none."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collector_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as collector_grpc

from paceline.errors import StartupFailed
from paceline.settings import OrchestratorSettings
from paceline.tracing import otlp_tracer


class Collector(collector_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.requests: list[collector_pb.ExportTraceServiceRequest] = []

    def Export(  # noqa: N802 - the name is the contract's
        self, request: collector_pb.ExportTraceServiceRequest, context: Any
    ) -> collector_pb.ExportTraceServiceResponse:
        self.requests.append(request)
        return collector_pb.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """A collector, and where it is."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    collector_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]  # generated
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_spans_reach_a_collector_before_the_end() -> None:
    """With their service, attributes, events at their times, and status; `close` waits until they are there."""
    with collecting() as (collector, endpoint):
        tracer = otlp_tracer(endpoint, service="paceline-orchestrator", sample_ratio=1.0)
        span = tracer.begin("chat m", {"gen_ai.request.model": "m"}, traceparent=None)
        assert span is not None
        span.event("paceline.round", {"paceline.kept_length": 3}, unix_s=1_700_000_000.5)
        span.end({"paceline.outcome": "failed"}, error="QUEUE_FULL")
        tracer.close()
    [received] = [spans for request in collector.requests for spans in request.resource_spans]
    service = {attribute.key: attribute.value.string_value for attribute in received.resource.attributes}
    assert service["service.name"] == "paceline-orchestrator"
    [sent] = received.scope_spans[0].spans
    attributes = {attribute.key: attribute.value.string_value for attribute in sent.attributes}
    assert attributes == {
        "gen_ai.request.model": "m",
        "paceline.outcome": "failed",
        "error.type": "QUEUE_FULL",
    }
    assert sent.name == "chat m"
    assert sent.events[0].time_unix_nano == 1_700_000_000_500_000_000
    assert sent.status.message == "QUEUE_FULL"


def test_absent_collector_holds_nothing_up() -> None:
    """Ending spans waits for nobody; the end of the process does for some seconds at most."""
    tracer = otlp_tracer("http://127.0.0.1:9", service="test", sample_ratio=1.0)
    for _ in range(3000):  # more than wait at once
        span = tracer.begin("chat m", {}, traceparent=None)
        assert span is not None
        span.end({}, error=None)
    started_s = time.monotonic()
    tracer.close()
    assert time.monotonic() - started_s < 30


def test_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(StartupFailed, match=r"paceline\[otlp\]"):
        otlp_tracer("http://127.0.0.1:9", service="test", sample_ratio=1.0)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "grpc://collector:4317", "http://", "http://a b"])
def test_endpoint_is_a_url(endpoint: str) -> None:
    with pytest.raises(ValueError, match="otlp_endpoint"):
        OrchestratorSettings.model_validate({"target": "t:1", "otlp_endpoint": endpoint})


@pytest.mark.slow  # it loads what an orchestrator loads
def test_whoever_traces_nothing_loads_nothing_of_it() -> None:
    """An orchestrator without an endpoint has no module of OpenTelemetry."""
    script = (
        "import sys, orchestrator.service; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert process.stdout.strip() == "[]"
