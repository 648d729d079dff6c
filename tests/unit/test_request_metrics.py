"""What is counted of rounds: tokens by what they took, decisions, waits; and that it reaches other metrics systems."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from orchestrator.loop import DraftOrder, RoundOutcome, RoundPlan, RoundReport
from orchestrator.request_metrics import RequestMetrics, WeightedHistogram
from paceline.metrics_bridge import MetricsBridge
from paceline.types import DraftOrigin
from tests.metrics import FakeMetrics

OUTCOME = RoundOutcome(
    draft_length=4,
    kept_length=2,
    emitted=3,
    origin=DraftOrigin.AHEAD,
    waited_s=0.25,
    is_rejection=True,
    has_continuation=False,
    verify_s=0.05,
    step_s=0.04,
    queue_s=0.0,
    step_sessions=1,
    step_tokens=5,
    round_s=0.375,
)
REPORT = RoundReport(
    number=1,
    base_length=10,
    order=DraftOrder(draft_length=4),
    plan=RoundPlan(draft_length=4),
    available=4,
    arrival=None,
    began_s=0.0,
    draft_s=0.25,
    verdict_s=0.3,
    outcome=OUTCOME,
)
PLAIN = replace(
    REPORT, plan=RoundPlan(), outcome=replace(OUTCOME, draft_length=0, kept_length=0, emitted=1, waited_s=0.0)
)


def recorded(*reports: RoundReport) -> CollectorRegistry:
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    for report in reports:
        metrics.rounds.record(report)
    return registry


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(f"paceline_{name}", labels)
    assert found is not None, name
    return found


def test_run_of_tokens_counts_as_so_many_gaps() -> None:
    """Three tokens after 0.375 s are three gaps of 0.125 s; the sum is the time that passed, so the mean is right."""
    registry = recorded(REPORT)
    assert value(registry, "inter_token_latency_seconds_count") == 3
    assert value(registry, "inter_token_latency_seconds_sum") == pytest.approx(0.375)
    assert value(registry, "inter_token_latency_seconds_bucket", le="0.1") == 0
    assert value(registry, "inter_token_latency_seconds_bucket", le="0.15") == 3


def test_first_round_is_no_gap_and_no_decision() -> None:
    """Its token counts, its time is another metric's."""
    registry = recorded(replace(REPORT, number=0))
    assert value(registry, "generation_tokens_total") == 3
    for name in ("inter_token_latency_seconds_count", "round_seconds_total", "draft_wait_seconds_total"):
        assert value(registry, name) == 0, name
    assert value(registry, "draft_decisions_total", decision="speculate") == 0


def test_rounds_are_counted_by_decision_and_wait() -> None:
    registry = recorded(REPORT, REPORT, PLAIN)
    assert value(registry, "draft_decisions_total", decision="speculate") == 2
    assert value(registry, "draft_decisions_total", decision="plain") == 1
    assert value(registry, "draft_wait_seconds_total") == pytest.approx(0.5)
    assert value(registry, "round_seconds_total") == pytest.approx(3 * 0.375)
    assert value(registry, "generation_tokens_total") == 7


def test_round_without_a_token_is_no_gap() -> None:
    """A round may add nothing to the answer: where its end was cut."""
    registry = recorded(replace(REPORT, outcome=replace(OUTCOME, emitted=0)))
    assert value(registry, "inter_token_latency_seconds_count") == 0


def test_weighted_histogram_is_one_that_observes_as_often() -> None:
    """The same buckets, under the same names, as the library's own, also for values on a bound, behind the last and below
    the first."""
    bounds = (0.1, 0.2, 0.5, 1)
    ours, registry = WeightedHistogram(bounds), CollectorRegistry()
    theirs = Histogram("gaps", "Gaps.", registry=registry, buckets=bounds)
    for observed, weight in ((0.0, 1), (0.1, 2), (0.15, 3), (0.2, 1), (0.5, 4), (0.7, 5), (100.0, 1)):
        ours.observe(observed, weight=weight)
        for _ in range(weight):
            theirs.observe(observed)
    family = ours.as_family("gaps", "Gaps.")
    for sample in family.samples:
        assert sample.value == pytest.approx(registry.get_sample_value(sample.name, sample.labels)), sample
    assert len(family.samples) == len(bounds) + 3


def test_rounds_reach_another_metrics_system() -> None:
    """What is computed at the moment of asking is copied like any other metric."""
    system, registry = FakeMetrics(), recorded(REPORT, PLAIN)
    MetricsBridge(registry, system, labels={"service": "orchestrator"}).copy()
    assert system.value("paceline_generation_tokens", service="orchestrator") == 4
    assert system.value("paceline_draft_decisions", decision="plain", service="orchestrator") == 1
    name = "paceline_inter_token_latency_seconds_bucket"
    assert system.value(name, le="+Inf", service="orchestrator") == 4
    assert b"paceline_inter_token_latency_seconds_bucket" in generate_latest(registry)
