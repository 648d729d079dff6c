"""Tenants, from the caller's request to the drafter's trees, over real gRPC."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drafter_service.methods.suffix import build
from paceline.settings import DrafterSettings
from tests.checkpoints import save_markov_checkpoint
from tests.fakes import FakeModel, counting_logits
from tests.harness import drafter_of, request, system, target_of

VOCAB_SIZE = 40
SETTINGS: dict[str, Any] = {"method": "suffix"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One word a token: t0, t1, ..."""
    uniform = [[1 / VOCAB_SIZE] * VOCAB_SIZE] * VOCAB_SIZE
    return str(save_markov_checkpoint(tmp_path_factory.mktemp("models") / "words", uniform))


async def test_an_answer_is_drafted_from_what_its_own_tenant_was_answered(tokenizer: str) -> None:
    """An answer that never repeats itself has no drafts but from an earlier one; no other tenant's ever serves it."""
    built = build(DrafterSettings(**SETTINGS))
    target = target_of(FakeModel(counting_logits(VOCAB_SIZE), vocab_size=VOCAB_SIZE))
    async with system(target, drafter_of(built.method, built.info), tokenizer, fallback="none") as services:
        asked = request((3,), max_tokens=20, temperature=0.0)
        drafted = {}
        for turn, tenant in enumerate(["acme", "", "other", "acme", ""]):
            answer = await services.client.complete(replace(asked, tenant=tenant))
            assert answer.token_ids == tuple(range(4, 24))
            drafted[turn, tenant] = answer.speculation.num_accepted_tokens > 0
    assert drafted == {
        (0, "acme"): False,
        (1, ""): False,
        (2, "other"): False,
        (3, "acme"): True,
        (4, ""): True,
    }
