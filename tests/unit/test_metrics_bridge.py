"""A registry copied into another metrics system: every series, never backwards, and never an error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
import ray.serve.metrics
import ray.util.metrics
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from structlog.testing import capture_logs

from orchestrator.request_metrics import RequestMetrics
from paceline.engine.step_plan import StepReport
from paceline.metrics_bridge import MetricsBridge, MetricsSystem, bridged
from paceline.telemetry import PoolMetrics, ServiceMetrics, SpeculationMetrics
from paceline.v1.session_pb2 import LoadReport
from tests.metrics import FakeMetrics

LABELS = {"service": "target"}


def bridge_to(system: MetricsSystem, registry: CollectorRegistry) -> MetricsBridge:
    return MetricsBridge(registry, system, labels=LABELS)


class Scripted(Collector):
    """A counter that shows the values it is given, one at each look."""

    def __init__(self, *values: float) -> None:
        self._values = iter(values)

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily("answers", "Answers.", value=next(self._values))


class Broken(Collector):
    def collect(self) -> Iterable[Metric]:
        raise RuntimeError("no figures")


# ---------------------------------------------------------------------------------------------------------------------
# What is copied


def test_counters_are_counted_on_by_their_growth() -> None:
    """Each label by itself; where nothing was counted since the last time, nothing is said."""
    registry, system = CollectorRegistry(), FakeMetrics()
    counter = Counter("answers", "Answers by how they ended.", ["outcome"], registry=registry)
    bridge = bridge_to(system, registry)
    counter.labels("stop").inc(2)
    bridge.copy()
    counter.labels("stop").inc(0.5)
    counter.labels("length").inc()
    bridge.copy()
    bridge.copy()
    assert system.counters.keys() == {"answers"}
    assert system.counters["answers"].told == [2, 0.5, 1]
    assert system.value("answers", outcome="stop", service="target") == 2.5
    assert system.value("answers", outcome="length", service="target") == 1
    assert system.counters["answers"].description == "Answers by how they ended."


def test_counter_that_begins_again_is_counted_on() -> None:
    """From 0, as Prometheus reads it: what was counted before stays."""
    registry, system = CollectorRegistry(), FakeMetrics()
    registry.register(Scripted(5, 7, 3, 3, 4))
    bridge = bridge_to(system, registry)
    for _ in range(5):
        bridge.copy()
    assert system.counters["answers"].told == [5, 2, 3, 1]


def test_gauges_are_set_every_time() -> None:
    """To what they are, up or down, zero too: a system that forgets what it does not hear keeps them."""
    registry, system = CollectorRegistry(), FakeMetrics()
    gauge = Gauge("sessions", "Sessions held.", ["pool"], registry=registry)
    bridge = bridge_to(system, registry)
    for value in (0, 3, 3, 1):
        gauge.labels("target").set(value)
        bridge.copy()
    assert system.gauges["sessions"].told == [0, 3, 3, 1]
    assert system.value("sessions", pool="target", service="target") == 1


def test_histogram_keeps_its_buckets_and_its_sum() -> None:
    """Exactly, those included in which nothing fell: quantiles are those of the original."""
    registry, system = CollectorRegistry(), FakeMetrics()
    histogram = Histogram("step_seconds", "Of a step.", registry=registry, buckets=(0.125, 0.25, 0.5))
    bridge = bridge_to(system, registry)
    for value in (0.25, 0.3125, 8):
        histogram.observe(value)
        bridge.copy()
    buckets = {
        bound: system.value("step_seconds_bucket", le=bound, service="target")
        for bound in ("0.125", "0.25", "0.5", "+Inf")
    }
    assert buckets == {"0.125": 0, "0.25": 1, "0.5": 2, "+Inf": 3}
    assert system.value("step_seconds_count", service="target") == 3
    assert system.value("step_seconds_sum", service="target") == 8.5625
    assert system.counters == {}


def test_when_a_series_was_made_is_not_copied() -> None:
    """It would be a series more for each, of which nobody asks."""
    registry, system = CollectorRegistry(), FakeMetrics()
    Counter("answers", "Answers.", registry=registry).inc()
    Histogram("step_seconds", "Of a step.", registry=registry).observe(1)
    bridge_to(system, registry).copy()
    assert not [name for name in (*system.counters, *system.gauges) if name.endswith("_created")]


def test_every_metric_of_the_services_is_copied() -> None:
    """Under one name each; counters once they have counted anything."""
    model_service, orchestrator, system = CollectorRegistry(), CollectorRegistry(), FakeMetrics()
    ServiceMetrics(model_service).follow(LoadReport)
    SpeculationMetrics(orchestrator).num_drafts.inc()
    PoolMetrics(orchestrator).connected_replicas.labels("target").set(1)
    with capture_logs() as logs:
        bridge_to(system, model_service).copy()
        assert len(system.gauges) == 10 + 3  # of the load, and of the histogram that has no labels
        bridge_to(FakeMetrics(), orchestrator).copy()
    assert logs == []


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong


def test_unregistered_metrics_are_let_go() -> None:
    """They are told no more, and the others are; one that comes back begins again."""
    registry, system = CollectorRegistry(), FakeMetrics()
    counter = Counter("answers", "Answers.", registry=registry)
    gauge = Gauge("sessions", "Sessions held.", registry=registry)
    bridge = bridge_to(system, registry)
    counter.inc(4)
    bridge.copy()
    registry.unregister(counter)
    gauge.set(2)
    bridge.copy()
    assert system.value("sessions", service="target") == 2
    Counter("answers", "Answers.", registry=registry).inc(1)
    bridge.copy()
    assert system.counters["answers"].told == [4, 1]


def test_refused_metric_leaves_the_others_alone() -> None:
    """The log says so once, with the reason."""
    registry, system = CollectorRegistry(), FakeMetrics(refused=frozenset({"answers"}))
    Counter("answers", "Answers.", registry=registry).inc()
    Gauge("sessions", "Sessions held.", registry=registry).set(3)
    bridge = bridge_to(system, registry)
    with capture_logs() as logs:
        bridge.copy()
        bridge.copy()
    assert system.value("sessions", service="target") == 3
    assert [line["event"] for line in logs] == ["metrics cannot be exported"]
    assert "answers" in str(logs[0]["exc_info"])


def test_growth_that_was_refused_is_counted_later() -> None:
    """Nothing is lost to a system that cannot take it at the moment."""
    registry, system = CollectorRegistry(), FakeMetrics(refused=frozenset({"answers"}))
    counter = Counter("answers", "Answers.", registry=registry)
    bridge = bridge_to(system, registry)
    counter.inc(2)
    with capture_logs():
        bridge.copy()
    system.refused = frozenset()
    counter.inc(3)
    bridge.copy()
    assert system.value("answers", service="target") == 5


def test_figures_that_cannot_be_had_are_no_error() -> None:
    """A collector that fails is logged; what came before it is copied, and the next copy is tried."""
    registry, system = CollectorRegistry(), FakeMetrics()
    gauge = Gauge("sessions", "Sessions held.", registry=registry)
    registry.register(Broken())
    bridge = bridge_to(system, registry)
    with capture_logs() as logs:
        for value in (1, 2):
            gauge.set(value)
            bridge.copy()
    assert system.gauges["sessions"].told == [1, 2]
    assert [line["event"] for line in logs] == ["metrics cannot be exported"]


# ---------------------------------------------------------------------------------------------------------------------
# For how long


async def test_copies_go_on_while_the_block_runs_and_end_with_it() -> None:
    """Again and again, a last time at the end, and never afterwards."""
    registry, system = CollectorRegistry(), FakeMetrics()
    gauge = Gauge("sessions", "Sessions held.", registry=registry)
    async with bridged(registry, system, labels=LABELS, interval_s=0.001):
        async with asyncio.timeout(10):
            while "sessions" not in system.gauges or len(system.gauges["sessions"].told) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        gauge.set(7)
    told = list(system.gauges["sessions"].told)
    assert told[-1] == 7
    assert len(asyncio.all_tasks()) == 1
    await asyncio.sleep(0.01)
    assert system.gauges["sessions"].told == told


async def test_what_fails_in_the_block_is_what_is_raised() -> None:
    """And the last figures are copied all the same."""
    registry, system = CollectorRegistry(), FakeMetrics()
    Counter("answers", "Answers.", registry=registry).inc()
    with pytest.raises(KeyError):
        async with bridged(registry, system, labels=LABELS):
            raise KeyError
    assert system.value("answers", service="target") == 1


# ---------------------------------------------------------------------------------------------------------------------
# Ray's own


@pytest.mark.parametrize("system", [ray.util.metrics, ray.serve.metrics], ids=["core", "serve"])
def test_ray_takes_every_metric(system: MetricsSystem) -> None:
    """Its checks of names, labels and values run without a cluster too."""
    model_service, orchestrator = CollectorRegistry(), CollectorRegistry()
    metrics = ServiceMetrics(model_service)
    metrics.follow(LoadReport)
    metrics.failed_sessions.labels(reason="DRAINING").inc()
    metrics.observe_step(StepReport(sessions=2, tokens=5, seconds=0.1))
    SpeculationMetrics(orchestrator).num_drafts.inc()
    requests = RequestMetrics(orchestrator)
    requests.outcomes.labels(outcome="finished").inc()
    requests.time_to_first_token.observe(0.1)
    PoolMetrics(orchestrator).migrations.labels(pool="target", reason="lost").inc()
    with capture_logs() as logs:
        for registry in (model_service, orchestrator):
            bridge = bridge_to(system, registry)
            bridge.copy()
            bridge.copy()
    assert logs == []
