"""What one orchestrator counts of requests and of their rounds, under the field's names (vLLM's stems).

docs/metrics.md says what each is for. Labels are words from short lists: never a request, a tenant or a text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from orchestrator.loop import RoundReport

_ANSWER_BUCKETS_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
_WAIT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_TOKEN_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)
_LAG_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class RequestMetrics:
    """Of requests: how many, how long, how they ended."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.rounds = RoundMetrics(registry)
        self.time_to_first_token = Histogram(
            "paceline_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            registry=registry,
            buckets=_WAIT_BUCKETS_S,
        )
        self.latency = Histogram(
            "paceline_e2e_request_latency_seconds",
            "From a request's arrival to the end of its answer; of whole answers alone.",
            registry=registry,
            buckets=_ANSWER_BUCKETS_S,
        )
        self.queue_time = Histogram(
            "paceline_request_queue_time_seconds",
            "From a request's arrival until it is admitted and its prompt is tokenized.",
            registry=registry,
            buckets=_WAIT_BUCKETS_S,
        )
        self.outcomes = Counter("paceline_requests", "Requests by how they ended.", ["outcome"], registry=registry)
        self.running = Gauge("paceline_num_requests_running", "Requests that are being answered.", registry=registry)
        self.waiting = Gauge("paceline_num_requests_waiting", "Requests that are not admitted yet.", registry=registry)
        self.prompt_tokens = Counter(
            "paceline_prompt_tokens", "Tokens of the prompts of admitted requests.", registry=registry
        )
        self.successes = Counter(
            "paceline_request_success",
            "Whole answers by why they ended, each choice of a request by itself.",
            ["finished_reason"],
            registry=registry,
        )
        self.errors = Counter(
            "paceline_errors", "Calls refused or ended by an error, by its reason.", ["reason"], registry=registry
        )
        self.loop_lag = Histogram(
            "paceline_event_loop_lag_seconds",
            "How late the orchestrator's event loop takes up what is due.",
            registry=registry,
            buckets=_LAG_BUCKETS_S,
        )


class RoundMetrics(Collector):
    """Of rounds, which are many: one writer, plain numbers, and all work left to whoever asks for them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._generated = 0
        self._round_s = self._draft_wait_s = 0.0
        self._speculated = self._plain = 0
        self._token_gaps = WeightedHistogram(_TOKEN_BUCKETS_S)
        registry.register(self)

    def record(self, report: RoundReport) -> None:
        """A round has ended."""
        outcome = report.outcome
        self._generated += outcome.emitted
        if report.number == 0:
            # The first never has a draft, and its token is what `time_to_first_token` is about.
            return
        self._round_s += outcome.round_s
        self._draft_wait_s += outcome.waited_s
        if report.plan.draft_length:
            self._speculated += 1
        else:
            self._plain += 1
        if outcome.emitted:
            self._token_gaps.observe(outcome.round_s / outcome.emitted, weight=outcome.emitted)

    def collect(self) -> Iterable[Metric]:
        """Everything as it is now, from any thread."""
        yield CounterMetricFamily(
            "paceline_generation_tokens", "Tokens that rounds added to answers.", value=self._generated
        )
        yield CounterMetricFamily(
            "paceline_round_seconds",
            "Time in rounds, without first ones and without what clients take.",
            value=self._round_s,
        )
        yield CounterMetricFamily(
            "paceline_draft_wait_seconds",
            "Of the time in rounds, what was spent waiting for drafts.",
            value=self._draft_wait_s,
        )
        decisions = CounterMetricFamily(
            "paceline_draft_decisions",
            "Rounds by whether they were to verify a draft, without first ones.",
            labels=["decision"],
        )
        decisions.add_metric(["speculate"], self._speculated)
        decisions.add_metric(["plain"], self._plain)
        yield decisions
        yield self._token_gaps.as_family(
            "paceline_inter_token_latency_seconds",
            "Time between tokens: k tokens that a round brings after t seconds count as k gaps of t / k.",
        )


class WeightedHistogram:
    """A histogram in which one observation may count many times, at the price of one."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(map(float, bounds))  # written as the library writes its own: 1.0, not 1
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, *, weight: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += weight
        self._sum += value * weight

    def as_family(self, name: str, description: str) -> HistogramMetricFamily:
        """Cumulative buckets, as Prometheus has them: each counts what is no larger than its bound."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], list(self._counts), strict=True):
            total += count
            buckets.append((bound, total))
        return HistogramMetricFamily(name, description, buckets=buckets, sum_value=self._sum)
