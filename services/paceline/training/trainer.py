"""Training a student on a corpus, step by step, so that an interrupted run goes on as if nothing had happened.

What a step does is a function of the settings and its number: the samples it takes, the learning rate. A checkpoint holds
the rest: weights and optimizer. Knows nothing of prompts, folders of drafters, or terminals.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import StartupFailed
from paceline.training.corpus import Sample
from paceline.training.loss import mixed_targets, sparse_cross_entropy
from paceline.training.student import Student
from paceline.training.writing import write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to train. Equal recipes on equal corpora give equal weights, on one kind of machine and so many threads."""

    steps: int
    batch_samples: int = 4
    learning_rate: float = 1.5e-3  # reached after `warmup_steps`, held, then linear to 0 over the second half
    warmup_steps: int = 100
    weight_decay: float = 0.02
    given_weight: float = 0.3  # of the token that the target gave, beside its most probable ones
    entries: int = 24  # most probable tokens that the loss looks at
    prompt_tokens: int = 64  # the last ones of a prompt, which the student reads and is not judged on
    seed: int = 0

    def learning_rate_at(self, step: int) -> float:
        warm = min(1.0, (step + 1) / self.warmup_steps)
        remaining = 1.0 - step / self.steps
        return self.learning_rate * warm * min(1.0, 2.0 * remaining)


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples side by side, padded at their ends; `judged` are places in the flattened batch."""

    ids: Tensor  # [samples, tokens] int64
    judged: Tensor  # [rows] int64
    top_ids: Tensor  # [rows, entries] int64
    top_log_probs: Tensor  # [rows, entries] float32
    given_ids: Tensor  # [rows] int64


def collate(samples: Sequence[Sample], *, prompt_tokens: int, entries: int) -> Batch:
    """The student's input, and the rows it is judged at: behind each token of the answers but the last.

    The first token of an answer is decided before any draft, so nobody drafts it.
    """
    prompts = [sample.prompt_ids[-prompt_tokens:] for sample in samples]
    length = max(len(prompt) + len(sample.answer_ids) for prompt, sample in zip(prompts, samples, strict=True))
    ids = torch.zeros(len(samples), length, dtype=torch.int64)
    judged = []
    for number, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
        end = len(prompt) + len(sample.answer_ids)
        ids[number, : len(prompt)] = prompt
        ids[number, len(prompt) : end] = sample.answer_ids
        judged.append(torch.arange(number * length + len(prompt), number * length + end - 1))
    return Batch(
        ids,
        torch.cat(judged),
        torch.cat([sample.top_ids[1:, :entries] for sample in samples]).long(),
        torch.cat([sample.top_log_probs[1:, :entries] for sample in samples]).float(),
        torch.cat([sample.answer_ids[1:] for sample in samples]).long(),
    )


@dataclass(frozen=True, slots=True)
class StepLog:
    """What came of some steps: means over them."""

    step: int  # how many were done
    loss: float  # nats
    learning_rate: float
    tokens: int  # judged since the start, of this and earlier runs
    seconds: float  # likewise


class Trainer:
    """Invariant: after `step` steps, weights and optimizer are what an uninterrupted run has after as many."""

    def __init__(self, student: Student, samples: Sequence[Sample], recipe: Recipe) -> None:
        self._student, self._recipe = student, recipe
        self._samples = [sample for sample in samples if len(sample.answer_ids) > 1]
        if len(self._samples) < recipe.batch_samples:
            raise StartupFailed(
                f"There are {len(self._samples)} answers to train on, fewer than one batch of {recipe.batch_samples}; "
                "make more with --answers."
            )
        self._parameters = student.parameters
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, betas=(0.9, 0.98), fused=True
        )
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self._epoch, self._batches = -1, list[list[int]]()

    @property
    def is_done(self) -> bool:
        return self.step >= self._recipe.steps

    @property
    def epochs(self) -> float:
        """How often each sample has been seen."""
        return self.step / self._steps_per_epoch

    def run(self, *, until: int, on_step: Callable[[float], None] = lambda _: None) -> StepLog:
        """Train up to step `until`, or to the end; `on_step` hears of each loss, in nats."""
        losses = []
        while self.step < min(until, self._recipe.steps):
            started_s = time.perf_counter()
            losses.append(self._train_step())
            self.seconds += time.perf_counter() - started_s
            on_step(losses[-1])
        mean = sum(losses) / max(1, len(losses))
        learning_rate = self._recipe.learning_rate_at(max(0, self.step - 1))
        return StepLog(self.step, mean, learning_rate, self.tokens, self.seconds)

    def save(self, path: Path) -> None:
        """Write a checkpoint, whole or not at all."""
        checkpoint = {
            "recipe": asdict(self._recipe),
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "weights": self._student.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        write_whole(path, lambda partial: torch.save(checkpoint, partial))

    def load(self, path: Path) -> None:
        """Go on from a checkpoint. Raises `StartupFailed` if it is damaged, or belongs to another recipe or student."""
        try:
            checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise StartupFailed(
                f"Cannot read '{path}' ({error}); delete it, and run the same command again: training then begins anew."
            ) from error
        if checkpoint["recipe"] != asdict(self._recipe):
            changed = [name for name, value in asdict(self._recipe).items() if checkpoint["recipe"].get(name) != value]
            raise StartupFailed(
                f"The run in '{path.parent}' was begun with another {', '.join(sorted(changed)) or 'recipe'}; give the same "
                "options, or another --output."
            )
        self.step, self.tokens, self.seconds = checkpoint["step"], checkpoint["tokens"], checkpoint["seconds"]
        self._student.load_state_dict(checkpoint["weights"])
        self._optimizer.load_state_dict(checkpoint["optimizer"])

    @property
    def _steps_per_epoch(self) -> int:
        return len(self._samples) // self._recipe.batch_samples

    def _train_step(self) -> float:
        recipe, student = self._recipe, self._student
        batch = collate(self._next_samples(), prompt_tokens=recipe.prompt_tokens, entries=recipe.entries)
        for group in self._optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(self.step)
        with torch.autocast("cpu", torch.bfloat16):
            states = student.states(batch.ids)
        judged = states.flatten(0, 1)[batch.judged].float()
        targets = mixed_targets(
            batch.top_ids, batch.top_log_probs, batch.given_ids, student.row_of_id, given_weight=recipe.given_weight
        )
        loss = sparse_cross_entropy(judged, student.head_weight, *targets)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self.step += 1
        self.tokens += len(batch.judged)
        return float(loss.detach())

    def _next_samples(self) -> list[Sample]:
        epoch, number = divmod(self.step, self._steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._shuffled(epoch)
        return [self._samples[index] for index in self._batches[number]]

    def _shuffled(self, epoch: int) -> list[list[int]]:
        """All samples in batches of about equal lengths, in the epoch's own order."""
        dice, size = random.Random(f"{self._recipe.seed} {epoch}"), self._recipe.batch_samples
        # The lengths are blurred, so that not the same samples meet in each epoch.
        order = sorted(range(len(self._samples)), key=lambda index: self._samples[index].length + 20 * dice.random())
        batches = [order[start : start + size] for start in range(0, len(order) - size + 1, size)]
        dice.shuffle(batches)
        return batches
