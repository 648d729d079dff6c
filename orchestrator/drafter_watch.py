"""Says when drafters are worth less than they should be: counts of finished answers in, metrics and log lines out.

What is judged, and by which odds, is in `acceptance_check`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import structlog

from orchestrator.acceptance_check import AcceptanceWindow, Comparison, UsageCount, expected_at, is_comparable
from paceline.telemetry import SpeculationMetrics
from paceline.types import ModelInfo, SamplingParams, SpeculationStats

logger = structlog.get_logger(__name__)

LIKELY_CAUSES = (
    "drafter or target loaded in another quantisation or number format than in the evaluation",
    "another chat template or prompt format than it was trained on",
    "wrong revision of the drafter or of the target",
    "trained for another target",
    "a workload far from the prompts of the evaluation",
)
UNUSED_CAUSES = (
    "drafts come later than draft_deadline_s",
    "the drafter refuses the sessions (its log says why)",
    "prompts do not fit the drafter's context",
    "its method finds nothing to propose for these prompts",
)


class DrafterWatch:
    """Judges the drafters of one orchestrator, each model by all its replicas together.

    Invariant: a model that is judged was connected when an answer ended last, or no other one was.
    """

    def __init__(self, metrics: SpeculationMetrics) -> None:
        self._metrics = metrics
        self._windows: dict[tuple[str, float], AcceptanceWindow] = {}  # by model and band of temperatures
        self._reported: set[str] = set()  # incarnations that took part in what was warned of
        self._usage = UsageCount()

    def record(
        self,
        sampling: SamplingParams,
        stats: SpeculationStats,
        *,
        drafters: Collection[ModelInfo],
        connected: Collection[ModelInfo],
    ) -> None:
        """Take in one finished answer that wanted drafts: who drafted for it, and who is there now."""
        self._forget_replaced(drafters, connected)
        if connected:
            self._record_usage(stats, connected)
        # An answer that moved between models says of neither how good it is.
        if is_comparable(sampling) and len({(info.model_id, info.expected_acceptance) for info in drafters}) == 1:
            self._record_acceptance(sampling, stats, drafters)

    def _record_acceptance(
        self, sampling: SamplingParams, stats: SpeculationStats, drafters: Collection[ModelInfo]
    ) -> None:
        drafter = next(iter(drafters))
        expectation = expected_at(drafter.expected_acceptance, sampling.temperature)
        if expectation is None:
            return
        window = self._windows.setdefault((drafter.model_id, expectation.band), AcceptanceWindow())
        comparison = window.add(
            accepted=stats.num_accepted_tokens - stats.fallback_accepted_tokens,
            rejections=stats.num_rejections - stats.fallback_rejections,
            expected=expectation.acceptance,
        )
        if comparison is None:
            return
        self._metrics.show_acceptance(
            drafter.model_id,
            expectation.band,
            measured=comparison.measured,
            expected=comparison.expected,
            is_below=comparison.is_below,
        )
        if comparison.is_below:
            self._warn(comparison, drafters, expectation.band)

    def _warn(self, comparison: Comparison, drafters: Collection[ModelInfo], temperature: float) -> None:
        """Once for each start of a drafter."""
        incarnations = {info.incarnation for info in drafters}
        if incarnations <= self._reported:
            return
        self._reported |= incarnations
        drafter = next(iter(drafters))
        logger.warning(
            "drafter is accepted far less than its training recorded",
            drafter=drafter.model_id,
            dtype=drafter.dtype,
            temperature=temperature,
            measured=round(comparison.measured, 3),
            expected=round(comparison.expected, 3),
            judged_tokens=comparison.judged_tokens,
            answers=comparison.answers,
            likely_causes=LIKELY_CAUSES,
        )

    def _record_usage(self, stats: SpeculationStats, connected: Iterable[ModelInfo]) -> None:
        if stats.rounds < 2:
            # The first round never has a draft, so an answer that ends with it lacks none.
            return
        was_unused = self._usage.is_unused
        self._usage.add(has_drafted=stats.num_drafts > stats.fallback_rounds)
        self._metrics.drafter_unused.set(self._usage.is_unused)
        if self._usage.is_unused and not was_unused:
            logger.warning(
                "a drafter is connected, but no answer has used a draft of it",
                drafters=sorted({info.model_id for info in connected}),
                answers=self._usage.answers_without,
                likely_causes=UNUSED_CAUSES,
            )

    def _forget_replaced(self, drafters: Collection[ModelInfo], connected: Collection[ModelInfo]) -> None:
        """Nobody would ever clear the warning of a model that others have taken the place of."""
        if not connected:
            return
        present = [*drafters, *connected]
        models = {info.model_id for info in present}
        for model_id, band in [key for key in self._windows if key[0] not in models]:
            del self._windows[model_id, band]
            self._metrics.forget_acceptance(model_id, band)
        self._reported &= {info.incarnation for info in present}
