"""The drafters that the end-to-end tests compare, each as a service beside a target: one for every way of drafting.

All but the models' noise are built as a drafter's settings say.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from drafter_service.registry import BuiltMethod, build_method
from paceline.engine.checkpoint import load_network
from paceline.engine.model import CausalModel
from paceline.process import Serve
from paceline.settings import DrafterSettings
from paceline.training.evaluation import Acceptance, Costs, Evaluation
from paceline.training.folder import write_drafter
from paceline.training.student import Shape, Student
from paceline.types import ModelInfo
from tests.checkpoints import TINY_VOCAB_SIZE, tiny_tokenizer
from tests.harness import drafter_of, model_drafter_of, target_of

NOISE = 1.0  # standard deviation on the drafter's logits: about one draft token in four is kept
LACKING = 24  # merges of the target's tokenizer that the other one does without

DRAFTERS = ("draft model", "noisy drafter", "ngram", "suffix", "hybrid", "other tokenizer", "trained")
"""All ways of drafting; `build_drafter` says what each is."""


def by_default(*names: str) -> list[ParameterSet]:
    """All drafters as parameters of a test: these run by default, the others are slow."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.slow) for name in DRAFTERS]


UNLIKE_ONE_ANOTHER = by_default(*DRAFTERS[1:])  # the noisy drafter, too, is a draft model


@dataclass(frozen=True, slots=True)
class Folders:
    """The checkpoints of a target, and of the models that draft for it."""

    target: Path
    drafter: Path
    other_tokenizer: Path  # a drafter whose tokenizer is not the target's
    trained: Path  # what `paceline train` writes


def tiny_folders(folder: Path, target: Path) -> Folders:
    """Drafters for a tiny target, all of its own weights: the target itself, the same under a tokenizer of other ids
    that lacks some tokens, and its layers before a head that lacks a quarter of the tokens."""
    other = shutil.copytree(target, folder / "other")
    _other_tokenizer().save_pretrained(other)
    draft_ids = [token_id for token_id in range(TINY_VOCAB_SIZE) if token_id % 4]
    return Folders(target, target, other, save_trained_drafter(folder / "trained", target, draft_ids))


def save_trained_drafter(folder: Path, target: Path, draft_ids: Sequence[int]) -> Path:
    """Write all layers of a target as a drafter that was to learn the last one and has learned nothing."""
    network = load_network(target, dtype=torch.float32)
    shape = Shape(tuple(range(network.config.num_hidden_layers)), trained_layers=1, draft_vocab_size=len(draft_ids))
    student = Student(network, shape, torch.tensor(draft_ids))
    results = Acceptance(
        temperature=1.0,
        rows=1,
        acceptance=0.0,
        by_position=(0.0,),
        tokens_per_round=(1.0,),
        tokens_per_block=(1.0,),
    )
    write_drafter(folder, student, verifier=str(target), evaluation=Evaluation((results,), Costs(1.0, (1.0, 1.0))))
    return folder


def drafter_for(name: str, folders: Folders) -> Serve:
    """The drafter of that name. The hybrid takes whatever repeats itself in the slightest, the model where nothing does."""
    return service_of(build_drafter(name, folders))


def build_drafter(name: str, folders: Folders, **changes: Any) -> BuiltMethod:
    model = {"dtype": "float32", "device": "cpu", "model": str(folders.drafter)}
    settings: dict[str, Any]
    match name:
        case "ngram":
            settings = {"method": "ngram", "prompt_lookup_min": 1}
        case "suffix":
            settings = {"method": "suffix"}
        case "hybrid":
            settings = {**model, "method": "hybrid", "hybrid_suffix_min_score": 0.3}
        case "noisy drafter":
            settings = {**model, "logit_noise": NOISE}
        case "other tokenizer":
            settings = {
                **model,
                "model": str(folders.other_tokenizer),
                "use_heterogeneous_vocab": True,
                "target_tokenizer": str(folders.target),
            }
        case "trained":
            settings = {**model, "model": str(folders.trained)}
        case "draft model":
            settings = model
        case _:
            raise AssertionError(f"there is no drafter {name!r}")
    return build_method(DrafterSettings(**{**settings, **changes}))


def service_of(built: BuiltMethod) -> Serve:
    return drafter_of(built.method, built.info)


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


def _other_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny tokenizer with two ids swapped and without its last merges."""
    parts = json.loads(tiny_tokenizer(swapped_ids=(40, 50)).backend_tokenizer.to_str())
    model = parts["model"]
    model["merges"] = model["merges"][:-LACKING]
    size = len(model["vocab"]) - LACKING
    model["vocab"] = {token: token_id for token, token_id in model["vocab"].items() if token_id < size}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(json.dumps(parts))
    )
