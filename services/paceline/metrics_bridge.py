"""Copies the metrics of a registry into another metrics system, for as long as their owner runs.

For places where nobody can ask each process for its own metrics, because the system that runs them gathers and exports
them itself. Knows no such system, nor what the metrics mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

import structlog
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.samples import Sample

logger = structlog.get_logger(__name__)

# A system that gathers what was set since it looked last must find every gauge: Ray looks every ten seconds.
DEFAULT_INTERVAL_S = 5.0


class CounterMetric(Protocol):
    def inc(self, value: float, tags: dict[str, str], /) -> None:
        """Count `value` more, which is above 0."""


class GaugeMetric(Protocol):
    def set(self, value: float, tags: dict[str, str], /) -> None: ...


class MetricsSystem(Protocol):
    """Makes metrics by name, description and the names of their labels (a tuple); `ray.serve.metrics` is one."""

    def Counter(self, name: str, description: str, tag_keys: Any, /) -> CounterMetric: ...  # noqa: N802 - as it is in Ray

    def Gauge(self, name: str, description: str, tag_keys: Any, /) -> GaugeMetric: ...  # noqa: N802


@asynccontextmanager
async def bridged(
    registry: CollectorRegistry,
    system: MetricsSystem,
    *,
    labels: Mapping[str, str],
    interval_s: float = DEFAULT_INTERVAL_S,
) -> AsyncIterator[None]:
    """Copy the registry every `interval_s` while the block runs, and once more at its end.

    Every series gets `labels` besides its own. What goes wrong in a copy is logged, the first time, and never raised.
    """
    bridge = MetricsBridge(registry, system, labels=labels)
    task = asyncio.ensure_future(_keep_copying(bridge, interval_s))
    try:
        yield
    finally:
        bridge.copy()
        task.cancel()
        await asyncio.wait({task})


async def _keep_copying(bridge: MetricsBridge, interval_s: float) -> None:
    while True:
        bridge.copy()
        await asyncio.sleep(interval_s)


class MetricsBridge:
    """Invariant: for every series of a counter, what was counted in the other system is what was counted here.

    Counters are counted on by what they have grown, under the name without `_total`. Everything else is set, under its
    own name: gauges, and also the cumulative counts and the sum of a histogram. The other system's own histogram would
    take single observations, which are not kept; and as counters, buckets in which nothing fell would be missing there
    (nothing can be counted on by 0), which makes quantiles wrong.
    """

    def __init__(self, registry: CollectorRegistry, system: MetricsSystem, *, labels: Mapping[str, str]) -> None:
        self._registry, self._system, self._labels = registry, system, labels
        self._counters: dict[str, CounterMetric] = {}
        self._gauges: dict[str, GaugeMetric] = {}
        self._counted: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}  # by name and labels
        self._has_failed = False

    def copy(self) -> None:
        """Bring the other system up to date; never raises."""
        try:
            for family in self._registry.collect():
                self._copy_family(family)
        except Exception as error:  # noqa: BLE001 - metrics never end what they are about
            self._note(error)

    def _copy_family(self, family: Metric) -> None:
        for sample in family.samples:
            try:
                if sample.name == f"{family.name}_created":
                    continue
                if family.type == "counter":
                    self._count(family, sample)
                else:
                    self._set(family, sample)
            except Exception as error:  # noqa: BLE001 - nor one of them the others
                self._note(error)

    def _count(self, family: Metric, sample: Sample) -> None:
        tags = self._tags(sample)
        series = (family.name, frozenset(tags.items()))
        before = self._counted.get(series, 0.0)
        # One that has become smaller has begun again at 0, as Prometheus reads it too.
        growth = sample.value - before if sample.value >= before else sample.value
        if growth > 0:
            if family.name not in self._counters:
                self._counters[family.name] = self._system.Counter(family.name, family.documentation, tuple(tags))
            self._counters[family.name].inc(growth, tags)
        self._counted[series] = sample.value

    def _set(self, family: Metric, sample: Sample) -> None:
        tags = self._tags(sample)
        if sample.name not in self._gauges:
            self._gauges[sample.name] = self._system.Gauge(sample.name, family.documentation, tuple(tags))
        self._gauges[sample.name].set(sample.value, tags)

    def _tags(self, sample: Sample) -> dict[str, str]:
        return {**sample.labels, **self._labels}

    def _note(self, error: Exception) -> None:
        """Once: it would be the same every few seconds."""
        if not self._has_failed:
            logger.warning("metrics cannot be exported", exc_info=error)
        self._has_failed = True
