"""Drafters that are worth less than they say, in running systems over real gRPC: seen in metrics and in the log.

The target counts: behind token t comes t + 1, around a vocabulary of 8. At temperature 0, no test here has anything to
do with chance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from orchestrator.acceptance_check import FIRST_ANSWERS, UNUSED_AFTER
from paceline.generation import Schedule
from tests.checkpoints import save_markov_checkpoint
from tests.fakes import FakeModel, counting_logits, fake_info
from tests.harness import Fleet, fleet, model_drafter_of, ngram_drafter, request, target_of

VOCAB = 8
PROMPT = (0, 1, 2)
CLAIM = 0.9


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One word a token: t0, t1, ..."""
    uniform = [[1 / VOCAB] * VOCAB] * VOCAB
    return str(save_markov_checkpoint(tmp_path_factory.mktemp("models") / "words", uniform))


def counting() -> FakeModel:
    return FakeModel(counting_logits(VOCAB), vocab_size=VOCAB)


def mostly_wrong() -> FakeModel:
    """Right behind token 0, which is one of 8; else it repeats."""

    def logits(ids: Sequence[int]) -> Sequence[float]:
        following = 1 if ids[-1] == 0 else ids[-1]
        return [8.0 if token_id == following else 0.0 for token_id in range(VOCAB)]

    return FakeModel(logits, vocab_size=VOCAB)


def gauge(deployment: Fleet, name: str, **labels: str) -> float | None:
    return deployment.registry.get_sample_value(f"paceline_{name}", labels)


async def warnings_of(deployment: Fleet, *, answers: int, max_tokens: int) -> list[Mapping[str, Any]]:
    """What is warned of while so many answers are given, one after the other."""
    asked = request(PROMPT, temperature=0.0, max_tokens=max_tokens, schedule=Schedule.SEQUENTIAL)
    with capture_logs() as lines:
        for _ in range(answers):
            await deployment.complete(asked)
    return [line for line in lines if line["log_level"] == "warning"]


@pytest.mark.parametrize(
    ("model", "measured", "is_below"), [(counting, 1.0, False), (mostly_wrong, 1 / 8, True)], ids=["same", "wrong"]
)
async def test_acceptance_is_compared_with_what_the_drafter_claims(
    tokenizer: str, model: Callable[[], FakeModel], measured: float, is_below: bool
) -> None:
    """A drafter that is the target accepts 1.0 and nobody is warned; one that claims 0.9 and gives 0.1 is (C53)."""
    drafter = model()
    info = replace(
        fake_info(drafter, model_id="claims", method="draft_model"), expected_acceptance=((0.0, CLAIM), (1.0, 0.5))
    )
    async with fleet(
        [target_of(counting())], [model_drafter_of(drafter, info)], tokenizer, draft_deadline_s=10
    ) as deployment:
        warnings = await warnings_of(deployment, answers=FIRST_ANSWERS, max_tokens=24)
        labels = {"drafter": "claims", "temperature": "0"}
        shown = gauge(deployment, "spec_decode_per_token_acceptance", **labels)
        assert shown is not None
        assert shown == pytest.approx(measured, abs=0.05)
        assert gauge(deployment, "spec_decode_expected_acceptance", **labels) == pytest.approx(CLAIM)
        assert gauge(deployment, "drafter_acceptance_below_expected", **labels) == is_below
        assert gauge(deployment, "drafter_unused") == 0.0
    assert [(line["drafter"], line["measured"]) for line in warnings] == [("claims", round(shown, 3))] * is_below


async def test_connected_drafter_that_drafts_nothing_is_warned_of(tokenizer: str) -> None:
    """Prompt lookup finds nothing in answers without repetition; the first that repeats itself ends the warning."""
    async with fleet([target_of(counting())], [ngram_drafter()], tokenizer, draft_deadline_s=10) as deployment:
        [warning] = await warnings_of(deployment, answers=UNUSED_AFTER, max_tokens=3)
        assert warning["drafters"] == ["ngram"]
        assert gauge(deployment, "drafter_unused") == 1.0
        assert await warnings_of(deployment, answers=1, max_tokens=40) == []
        assert gauge(deployment, "drafter_unused") == 0.0
