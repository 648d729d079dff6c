"""When drafters are warned of, and what the metrics say meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from orchestrator.acceptance_check import FIRST_ANSWERS, UNUSED_AFTER
from orchestrator.drafter_watch import DrafterWatch
from paceline.telemetry import SpeculationMetrics
from paceline.types import DraftOrigin, ModelInfo, SamplingParams, SpeculationStats

DRAFTER = ModelInfo(
    model_id="tiny-drafter",
    vocab_size=8,
    max_context=64,
    tokenizer_sha256="",
    incarnation="first",
    expected_acceptance=((0.0, 0.9), (1.0, 0.5)),
)
GREEDY = SamplingParams(temperature=0.0)


def counted(kept: int, *, rounds: int = 20, is_fallback: bool = False) -> SpeculationStats:
    """One answer whose rounds keep so many of four drafted tokens each, behind the first round without a draft."""
    stats = SpeculationStats()
    stats.record_round(0, 0)
    for _ in range(rounds):
        stats.record_round(4, kept, origin=DraftOrigin.FALLBACK if is_fallback else DraftOrigin.AHEAD)
    return stats


BAD, GOOD = counted(0), counted(4)


class Watched:
    """A watch, its metrics and its log."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.watch = DrafterWatch(SpeculationMetrics(self._registry))

    def record(
        self,
        stats: SpeculationStats,
        *,
        drafter: ModelInfo | None = DRAFTER,
        sampling: SamplingParams = GREEDY,
        connected: tuple[ModelInfo, ...] | None = None,
        count: int = FIRST_ANSWERS,
    ) -> Sequence[Mapping[str, Any]]:
        """The log lines of so many answers by one drafter, which stays connected if nothing else is said."""
        drafters = (drafter,) if drafter else ()
        with capture_logs() as lines:
            for _ in range(count):
                present = drafters if connected is None else connected
                self.watch.record(sampling, stats, drafters=drafters, connected=present)
        return lines

    def gauge(self, name: str, *, temperature: str = "0", drafter: str = DRAFTER.model_id) -> float | None:
        return self._registry.get_sample_value(f"paceline_{name}", {"drafter": drafter, "temperature": temperature})

    @property
    def is_below(self) -> float | None:
        return self.gauge("drafter_acceptance_below_expected")

    @property
    def is_unused(self) -> float | None:
        return self._registry.get_sample_value("paceline_drafter_unused")


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_bad_drafter_is_warned_of_by_name_with_figures_and_causes(watched: Watched) -> None:
    """The line says what whoever reads it needs to find the cause (C53)."""
    [line] = watched.record(BAD)
    assert line["log_level"] == "warning"
    assert (line["drafter"], line["temperature"]) == (DRAFTER.model_id, 0.0)
    assert (line["measured"], line["expected"]) == (0.0, 0.9)
    assert (line["judged_tokens"], line["answers"]) == (20 * FIRST_ANSWERS, FIRST_ANSWERS)
    causes = " ".join(line["likely_causes"])
    assert all(cause in causes for cause in ("quantisation", "chat template", "revision", "another target"))
    assert watched.is_below == 1.0
    assert watched.gauge("spec_decode_per_token_acceptance") == 0.0
    assert watched.gauge("spec_decode_expected_acceptance") == pytest.approx(0.9)


def test_good_drafter_is_shown_and_not_warned_of(watched: Watched) -> None:
    """Acceptance 1.0, as of a drafter that is the target."""
    assert watched.record(GOOD) == []
    assert watched.is_below == 0.0
    assert watched.gauge("spec_decode_per_token_acceptance") == 1.0


def test_warning_comes_once_for_each_start_of_a_drafter(watched: Watched) -> None:
    """The metric stays for as long as it is so; another start of it is another chance, and another line."""
    again = replace(DRAFTER, incarnation="second")
    both = (DRAFTER, again)
    assert len(watched.record(BAD, connected=both)) == 1
    assert watched.record(BAD, connected=both, count=200) == []
    assert watched.is_below == 1.0
    assert len(watched.record(BAD, drafter=again, connected=both, count=200)) == 1
    assert watched.record(BAD, connected=both, count=200) == []


def test_warning_ends_with_the_fault(watched: Watched) -> None:
    """Once later rounds prove that the drafter is accepted as it should be."""
    watched.record(BAD)
    assert watched.record(GOOD) == []
    assert watched.is_below == 0.0


def test_temperatures_are_judged_apart(watched: Watched) -> None:
    """A drafter that is bad at temperature 0 alone is not excused by what it does at 1."""
    watched.record(GOOD, sampling=SamplingParams(temperature=1.0), count=100)
    watched.record(BAD)
    assert (watched.gauge("drafter_acceptance_below_expected", temperature="1"), watched.is_below) == (0.0, 1.0)


def test_expectation_is_interpolated(watched: Watched) -> None:
    """At 0.75 between 0.9 at 0 and 0.5 at 1; shown under the nearest recorded temperature."""
    watched.record(GOOD, sampling=SamplingParams(temperature=0.75))
    assert watched.gauge("spec_decode_expected_acceptance", temperature="1") == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [
        (replace(DRAFTER, expected_acceptance=()), GREEDY),
        (DRAFTER, SamplingParams(temperature=1.5)),
        (DRAFTER, SamplingParams(temperature=1.0, top_k=40)),
        (DRAFTER, SamplingParams(temperature=0.0, repetition_penalty=1.2)),
    ],
)
def test_what_the_evaluation_did_not_cover_is_not_judged(
    watched: Watched, drafter: ModelInfo, sampling: SamplingParams
) -> None:
    """No record, a temperature outside it, filters or penalties: nothing is claimed."""
    assert watched.record(BAD, drafter=drafter, sampling=sampling, count=200) == []
    assert watched.is_below is None


def test_rounds_drafted_by_lookup_are_not_the_drafters(watched: Watched) -> None:
    """Lookup is accepted little; that says nothing of the drafter, nor do its good rounds excuse one."""
    fallback = counted(0, is_fallback=True)
    assert watched.record(fallback, count=UNUSED_AFTER - 1) == []
    assert watched.is_below is None
    mixed = counted(4, rounds=200, is_fallback=True)
    for _ in range(20):
        mixed.record_round(4, 0)
    assert len(watched.record(mixed)) == 1
    assert watched.gauge("spec_decode_per_token_acceptance") == 0.0


def test_answer_that_moved_between_models_is_not_judged(watched: Watched) -> None:
    """Nobody knows which of the two drafted its rounds."""
    other = replace(DRAFTER, model_id="another", incarnation="other")
    with capture_logs() as lines:
        for _ in range(100):
            watched.watch.record(GREEDY, BAD, drafters=(DRAFTER, other), connected=(other,))
    assert lines == []
    assert watched.is_below is None


def test_drafter_that_was_replaced_is_forgotten(watched: Watched) -> None:
    """The remedy of a bad drafter is another one: its warning must not stay. A lost connection alone forgets nothing."""
    watched.record(BAD)
    watched.record(GOOD, drafter=None, connected=())
    assert watched.is_below == 1.0
    watched.record(GOOD, drafter=replace(DRAFTER, model_id="better", incarnation="other"))
    assert watched.is_below is None
    assert watched.gauge("drafter_acceptance_below_expected", drafter="better") == 0.0


def test_drafter_forgotten_before_it_was_shown_is_no_error(watched: Watched) -> None:
    """It had drafted for too few answers."""
    watched.record(BAD, count=1)
    watched.record(GOOD, drafter=replace(DRAFTER, model_id="better"))
    assert watched.is_below is None


@pytest.mark.parametrize("stats", [counted(0, rounds=5, is_fallback=True), SpeculationStats(rounds=9, plain_rounds=9)])
def test_drafter_that_nobody_drafts_with_is_warned_of_once(watched: Watched, stats: SpeculationStats) -> None:
    """It is connected, yet no answer has a draft of it, but at most of lookup (C53); until one has."""
    assert watched.record(stats, count=UNUSED_AFTER - 1) == []
    assert watched.is_unused == 0.0
    [line] = watched.record(stats, count=UNUSED_AFTER)
    assert (line["log_level"], line["drafters"]) == ("warning", [DRAFTER.model_id])
    assert watched.is_unused == 1.0
    watched.record(GOOD, count=1)
    assert watched.is_unused == 0.0


def test_answers_that_cannot_have_drafts_do_not_make_a_drafter_unused(watched: Watched) -> None:
    """One of a single round, and one that ended while no drafter was connected."""
    assert watched.record(SpeculationStats(rounds=1, plain_rounds=1), count=2 * UNUSED_AFTER) == []
    plain = SpeculationStats(rounds=9, plain_rounds=9)
    assert watched.record(plain, drafter=None, connected=(), count=2 * UNUSED_AFTER) == []
    assert watched.is_unused == 0.0
