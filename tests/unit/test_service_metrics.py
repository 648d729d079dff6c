"""What a model service shows to Prometheus: its load, as it is at the moment of asking."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from paceline.telemetry import ServiceMetrics
from paceline.v1.session_pb2 import LoadReport


def test_figures_are_those_of_the_moment_they_are_asked_for() -> None:
    """Each under its own name."""
    load = LoadReport()
    registry = CollectorRegistry()
    ServiceMetrics(registry).follow(lambda: load)
    load = LoadReport(
        sessions=1,
        max_sessions=2,
        queued=3,
        draining=True,
        stale_items=4,
        kv_used_tokens=5,
        kv_capacity_tokens=6,
        step_busy_share=0.5,
    )
    shown = {name: registry.get_sample_value(f"paceline_{name}") for name in EXPECTED}
    assert shown == EXPECTED


EXPECTED = {
    "sessions": 1,
    "max_sessions": 2,
    "queued_items": 3,
    "draining": 1,
    "stale_items": 4,
    "kv_used_tokens": 5,
    "kv_capacity_tokens": 6,
    "step_busy_share": 0.5,
}
