"""What services show to Prometheus at the moment of asking: their load, and when their certificates end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from paceline.telemetry import ServiceMetrics, show_certificates
from paceline.v1.session_pb2 import LoadReport
from tests.certificates import TARGET, Authority


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


def test_certificate_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    """It may be replaced while the service runs; a file that is gone has ended, and takes no other figure with it."""
    authority, registry = Authority(tmp_path), CollectorRegistry()
    identity = authority.issue(TARGET, expires_in_s=3600)
    show_certificates(registry, services=identity.cert, public=None)

    def left_s() -> float:
        ends_s = registry.get_sample_value("paceline_certificate_expiry_timestamp_seconds", {"certificate": "services"})
        assert ends_s is not None
        return ends_s - time.time()

    assert left_s() == pytest.approx(3600, abs=300)
    authority.reissue(identity, TARGET, expires_in_s=7200)
    assert left_s() == pytest.approx(7200, abs=300)
    identity.cert.unlink()
    assert left_s() == pytest.approx(-time.time(), abs=300)
    shown = [sample.labels for metric in registry.collect() for sample in metric.samples]
    assert shown == [{"certificate": "services"}]
