"""The metrics that services report; docs/metrics.md says what each is for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from paceline.errors import StartupFailed
from paceline.tls import expires_unix_s
from paceline.types import SpeculationStats


def serve_metrics(registry: CollectorRegistry, *, host: str, port: int) -> None:
    """Expose the registry over HTTP for Prometheus; port 0 leaves it off."""
    if port:
        try:
            start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise StartupFailed(
                f"Port {port} on {host} cannot be opened for metrics; choose another with --metrics-port "
                f"({error.strerror})."
            ) from error


def show_certificates(registry: CollectorRegistry, **certificates: Path | None) -> None:
    """Report when each of the certificates ends that a service shows, by what it is for; None: it has none.

    The files are read whenever somebody asks, for they may be replaced; one that cannot be read has ended.
    """
    expiry = Gauge(
        "paceline_certificate_expiry_timestamp_seconds",
        "When a certificate that this service shows ends, in seconds since 1970.",
        ["certificate"],
        registry=registry,
    )
    for name, path in certificates.items():
        if path is not None:
            expiry.labels(certificate=name).set_function(partial(_expiry, path))


def _expiry(path: Path) -> float:
    try:
        return expires_unix_s(path)
    except StartupFailed:
        return 0.0


class Load(Protocol):
    """How busy a model service is (the fields of `LoadReport`)."""

    @property
    def sessions(self) -> int: ...
    @property
    def max_sessions(self) -> int: ...
    @property
    def queued(self) -> int: ...
    @property
    def draining(self) -> bool: ...
    @property
    def stale_items(self) -> int: ...
    @property
    def kv_used_tokens(self) -> int: ...
    @property
    def kv_capacity_tokens(self) -> int: ...
    @property
    def step_busy_share(self) -> float: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def prefix_reused_tokens(self) -> int: ...


class StepReport(Protocol):
    """How much one model step took on, and how long that was (`engine.step_plan.StepReport`)."""

    @property
    def sessions(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def seconds(self) -> float: ...


class ServiceMetrics:
    """What each model service counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.failed_sessions = Counter(
            "paceline_failed_sessions", "Sessions failed by a typed error.", ["reason"], registry=registry
        )
        self._step_seconds = Histogram(
            "paceline_step_seconds",
            "Duration of one model step, by how many sessions it took and how many tokens it fed.",
            ["sessions", "tokens"],
            registry=registry,
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
        )
        self.queue_seconds = Histogram(
            "paceline_queue_seconds",
            "From the arrival of a draft to the start of its first step.",
            registry=registry,
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
        )

    def observe_step(self, step: StepReport) -> None:
        """Count one model step; may be called from any thread."""
        labels = {"sessions": _power_of_two(step.sessions), "tokens": _power_of_two(step.tokens)}
        self._step_seconds.labels(**labels).observe(step.seconds)

    def follow(self, load: Callable[[], Load]) -> None:
        """Report the figures of `load` whenever they are asked for; called once."""
        figures: dict[str, tuple[str, Callable[[Load], float]]] = {
            "sessions": ("Sessions held.", lambda now: now.sessions),
            "max_sessions": ("Sessions held at most.", lambda now: now.max_sessions),
            "queued_items": ("Items waiting for a model step.", lambda now: now.queued),
            "draining": ("1 while no new sessions are taken.", lambda now: now.draining),
            "stale_items": ("Items dropped for an old epoch or another base.", lambda now: now.stale_items),
            "kv_used_tokens": ("Tokens whose keys and values are held, or owed.", lambda now: now.kv_used_tokens),
            "kv_capacity_tokens": ("Tokens up to which sessions are taken.", lambda now: now.kv_capacity_tokens),
            "step_busy_share": ("Share of time in model steps, 0 to 1.", lambda now: now.step_busy_share),
            "preemptions": ("Sessions that gave up their memory for others.", lambda now: now.preemptions),
            "prefix_reused_tokens": ("Tokens found in the prefix cache.", lambda now: now.prefix_reused_tokens),
        }
        for name, (description, figure) in figures.items():
            gauge = Gauge(f"paceline_{name}", description, registry=self.registry)
            gauge.set_function(partial(_figure_now, figure, load))


def _power_of_two(count: int) -> str:
    """The smallest power of two that is no less: few labels, whatever the load."""
    return str(1 << max(0, count - 1).bit_length())


def _figure_now(figure: Callable[[Load], float], load: Callable[[], Load]) -> float:
    return figure(load())


class PoolMetrics:
    """What the orchestrator counts of the pools it uses."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.migrations = Counter(
            "paceline_migrations",
            "Sessions that went on at another replica, by why they left the one before.",
            ["pool", "reason"],
            registry=registry,
        )
        self.connected_replicas = Gauge(
            "paceline_connected_replicas", "Replicas with an open stream.", ["pool"], registry=registry
        )


class SpeculationMetrics:
    """What the orchestrator counts, with the field's names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.num_drafts = Counter("paceline_spec_decode_num_drafts", "Drafts sent to the target.", registry=registry)
        self.num_draft_tokens = Counter(
            "paceline_spec_decode_num_draft_tokens", "Tokens in those drafts.", registry=registry
        )
        self.num_accepted_tokens = Counter(
            "paceline_spec_decode_num_accepted_tokens", "Draft tokens accepted.", registry=registry
        )
        self.num_accepted_tokens_per_pos = Counter(
            "paceline_spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            ["position"],
            registry=registry,
        )
        self.fallback_rounds = Counter(
            "paceline_fallback_rounds", "Rounds drafted by lookup because no drafter answered.", registry=registry
        )
        self.rounds = Counter(
            "paceline_rounds", "Rounds by where their draft came from.", ["draft_origin"], registry=registry
        )
        self.num_rejections = Counter(
            "paceline_spec_decode_num_rejections", "Rounds ended by a rejection.", registry=registry
        )
        self.branch_hits = Counter(
            "paceline_branch_hits",
            "Rejections behind which drafted tokens were there already when the verdict came.",
            registry=registry,
        )
        self.num_received_draft_tokens = Counter(
            "paceline_spec_decode_num_received_draft_tokens",
            "Draft tokens that came from drafters, branches included, sent to the target or not.",
            registry=registry,
        )
        self.num_wasted_draft_tokens = Counter(
            "paceline_spec_decode_num_wasted_draft_tokens",
            "Of the draft tokens that came from drafters, those that no answer kept.",
            registry=registry,
        )
        self.stale_items = Gauge(
            "paceline_stale_items", "Items dropped for an old epoch or another base.", registry=registry
        )
        judged_by = ["drafter", "temperature"]  # the model, and the nearest temperature of its recorded evaluation
        self._acceptance = Gauge(
            "paceline_spec_decode_per_token_acceptance",
            "Accepted / (accepted + rounds ended by a rejection) of a drafter's own drafts, as compared last.",
            judged_by,
            registry=registry,
        )
        self._expected_acceptance = Gauge(
            "paceline_spec_decode_expected_acceptance",
            "The same as the drafter's training recorded it.",
            judged_by,
            registry=registry,
        )
        self._below_expected = Gauge(
            "paceline_drafter_acceptance_below_expected",
            "1 while a drafter is accepted far less than its training recorded.",
            judged_by,
            registry=registry,
        )
        self.drafter_unused = Gauge(
            "paceline_drafter_unused",
            "1 while drafters are connected and no answer uses a draft of theirs.",
            registry=registry,
        )

    def record(self, stats: SpeculationStats) -> None:
        """Add the counts of one finished answer."""
        self.num_drafts.inc(stats.num_drafts)
        self.num_draft_tokens.inc(stats.num_draft_tokens)
        self.num_accepted_tokens.inc(stats.num_accepted_tokens)
        for position, accepted in enumerate(stats.accepted_per_position):
            self.num_accepted_tokens_per_pos.labels(position=str(position)).inc(accepted)
        self.fallback_rounds.inc(stats.fallback_rounds)
        for origin, rounds in stats.rounds_by_origin.items():
            self.rounds.labels(draft_origin=origin.value).inc(rounds)
        self.num_rejections.inc(stats.num_rejections)
        self.branch_hits.inc(stats.branch_hits)
        self.num_received_draft_tokens.inc(stats.num_received_draft_tokens)
        kept_of_drafters = stats.num_accepted_tokens - stats.fallback_accepted_tokens
        self.num_wasted_draft_tokens.inc(max(0, stats.num_received_draft_tokens - kept_of_drafters))

    def show_acceptance(
        self, drafter: str, temperature: float, *, measured: float, expected: float, is_below: bool
    ) -> None:
        """How a drafter's acceptance compares with its record; each from 0 to 1."""
        labels = (drafter, f"{temperature:g}")
        self._acceptance.labels(*labels).set(measured)
        self._expected_acceptance.labels(*labels).set(expected)
        self._below_expected.labels(*labels).set(is_below)

    def forget_acceptance(self, drafter: str, temperature: float) -> None:
        """The drafter is there no more; does nothing if it was never shown."""
        for gauge in (self._acceptance, self._expected_acceptance, self._below_expected):
            gauge.remove(drafter, f"{temperature:g}")
