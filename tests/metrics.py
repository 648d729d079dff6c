"""A metrics system that remembers what it was told, as strict as the one of Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Tags = frozenset[tuple[str, str]]


@dataclass(slots=True)
class FakeMetric:
    """Takes the labels it was made with, no others; a counter grows only."""

    description: str
    tag_keys: tuple[str, ...]
    values: dict[Tags, float] = field(default_factory=dict)
    told: list[float] = field(default_factory=list)

    def inc(self, value: float, tags: dict[str, str], /) -> None:
        if value <= 0:
            raise ValueError(f"value must be >0, got {value}")
        self._tell(value, tags)
        self.values[frozenset(tags.items())] = self.values.get(frozenset(tags.items()), 0.0) + value

    def set(self, value: float, tags: dict[str, str], /) -> None:
        self._tell(value, tags)
        self.values[frozenset(tags.items())] = value

    def _tell(self, value: float, tags: Mapping[str, str]) -> None:
        if set(tags) != set(self.tag_keys):
            raise ValueError(f"Missing or unknown tags: {sorted(tags)}, not {sorted(self.tag_keys)}.")
        self.told.append(value)


@dataclass(slots=True)
class FakeMetrics:
    """Counters and gauges by name. `refused` are names that it cannot make."""

    refused: frozenset[str] = frozenset()
    counters: dict[str, FakeMetric] = field(default_factory=dict)
    gauges: dict[str, FakeMetric] = field(default_factory=dict)

    def Counter(self, name: str, description: str, tag_keys: tuple[str, ...], /) -> FakeMetric:  # noqa: N802
        return self._make(self.counters, name, description, tag_keys)

    def Gauge(self, name: str, description: str, tag_keys: tuple[str, ...], /) -> FakeMetric:  # noqa: N802
        return self._make(self.gauges, name, description, tag_keys)

    def _make(self, kind: dict[str, FakeMetric], name: str, description: str, tag_keys: tuple[str, ...]) -> FakeMetric:
        if name in self.refused:
            raise ValueError(f"Invalid metric name: {name}.")
        assert name not in self.counters
        assert name not in self.gauges
        kind[name] = FakeMetric(description, tag_keys)
        return kind[name]

    def value(self, name: str, **tags: str) -> float:
        """Of one series; raises `KeyError` if there is none."""
        return (self.counters | self.gauges)[name].values[frozenset(tags.items())]
