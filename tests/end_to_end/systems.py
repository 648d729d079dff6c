"""The drafters that the end-to-end tests compare, each as a service beside a target of the same checkpoint."""

from __future__ import annotations

from pathlib import Path

from paceline.engine.model import CausalModel
from paceline.process import Serve
from paceline.types import ModelInfo
from tests.harness import model_drafter_of, ngram_drafter, target_of

NOISE = 1.0  # standard deviation on the drafter's logits: about one draft token in four is kept


def load(folder: Path, *, logit_noise: float = 0.0) -> CausalModel:
    return CausalModel.load(str(folder), dtype="float32", device="cpu", logit_noise=logit_noise)


def info_of(model: CausalModel, *, method: str = "") -> ModelInfo:
    return ModelInfo(
        model_id=model.model_id,
        vocab_size=model.vocab_size,
        max_context=model.max_context,
        tokenizer_sha256=model.tokenizer_sha256,
        incarnation="1",
        method=method,
        dtype="float32",
        eos_token_ids=model.eos_token_ids,
    )


def target(folder: Path) -> Serve:
    model = load(folder)
    return target_of(model, info_of(model))


def draft_model(folder: Path, *, logit_noise: float = 0.0) -> Serve:
    model = load(folder, logit_noise=logit_noise)
    return model_drafter_of(model, info_of(model, method="draft_model"))


def drafters_for(target_folder: Path) -> dict[str, Serve]:
    """Prompt lookup, the target as its own drafter, and a noisy copy of it."""
    return {
        "ngram": ngram_drafter(),
        "target as drafter": draft_model(target_folder),
        "noisy drafter": draft_model(target_folder, logit_noise=NOISE),
    }
