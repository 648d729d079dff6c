"""A target that a drafter can learn in seconds, answers for it, and an observer that counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from paceline.engine.checkpoint import without_progress_bars
from paceline.training.corpus import Sample
from paceline.training.evaluation import Evaluation
from paceline.training.settings import TrainingSettings
from paceline.training.trainer import StepLog
from tests.checkpoints import save_tiny_checkpoint

_ATTENTION_SCALE = 0.1


def save_learnable_checkpoint(folder: Path) -> Path:
    """A tiny target of four layers that hardly looks back: few answers tell what it says behind each token."""
    save_tiny_checkpoint(folder, seed=1, layers=4)
    with without_progress_bars():
        network: Any = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if "o_proj" in name:
                    parameter.mul_(_ATTENTION_SCALE)
        network.save_pretrained(folder)
    return folder


def tiny_settings(target: Path, **changed: Any) -> TrainingSettings:
    """For a run of seconds, in float32."""
    usual: dict[str, Any] = {
        "answers": 64,
        "answer_tokens": 24,
        "draft_vocab_size": 0,
        "steps": 60,
        "learning_rate": 3e-3,
        "dtype": "float32",
        "device": "cpu",
    }
    return TrainingSettings(target=str(target), **{**usual, **changed})


def sample(
    answer_ids: list[int],
    *,
    prompt_ids: tuple[int, ...] = (1,),
    top_ids: list[list[int]] | None = None,
    top_log_probs: list[list[float]] | None = None,
    temperature: float = 0.0,
) -> Sample:
    """An answer; if nothing else is said, the target was certain of each token."""
    return Sample(
        torch.tensor(prompt_ids, dtype=torch.int32),
        torch.tensor(answer_ids, dtype=torch.int32),
        torch.tensor(top_ids or [[token_id] for token_id in answer_ids], dtype=torch.int32),
        torch.tensor(top_log_probs or [[0.0] for _ in answer_ids], dtype=torch.float16),
        temperature,
    )


@dataclass(slots=True)
class CountingObserver:
    """Remembers what it hears, and asks to stop behind a step."""

    stop_at: int | None = None
    answers: int = 0
    losses: list[float] = field(default_factory=list)
    logs: list[StepLog] = field(default_factory=list)

    def on_answer(self, tokens: int) -> None:
        self.answers += 1

    def on_step(self, loss: float) -> None:
        self.losses.append(loss)

    def on_log(self, log: StepLog, evaluation: Evaluation | None) -> None:
        self.logs.append(log)

    def is_asked_to_stop(self) -> bool:
        return len(self.losses) == self.stop_at
