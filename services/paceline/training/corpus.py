"""What a drafter is trained on: the target's answers with the rows they came from, as files in a folder.

One file a wave of answers, written whole or not at all, so an interrupted run goes on with the next wave. Knows nothing
of prompts, models or training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import StartupFailed
from paceline.training.writing import write_whole


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer behind its prompt, and what the target thought at the row that each token of it was drawn from."""

    prompt_ids: Tensor  # [prompt_length] int32
    answer_ids: Tensor  # [answer_length] int32
    top_ids: Tensor  # [answer_length, entries] int32, most probable first
    top_log_probs: Tensor  # [answer_length, entries] float16, at temperature 1
    temperature: float

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


_ROWS = ("answer_ids", "top_ids", "top_log_probs")


class Corpus:
    """The waves of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, wave: int) -> Path:
        return self._folder / f"wave-{wave:04d}.safetensors"

    @property
    def waves(self) -> int:
        """How many there are; they are numbered from 0 without a gap."""
        count = 0
        while self.path(count).is_file():
            count += 1
        return count

    def write(self, wave: int, samples: Sequence[Sample]) -> None:
        """Add a wave, whole or not at all. Raises `StartupFailed` where that cannot be done."""
        tensors = {name: torch.cat([getattr(sample, name) for sample in samples]) for name in (*_ROWS, "prompt_ids")}
        tensors["prompt_lengths"] = torch.tensor([len(sample.prompt_ids) for sample in samples], dtype=torch.int32)
        tensors["answer_lengths"] = torch.tensor([len(sample.answer_ids) for sample in samples], dtype=torch.int32)
        tensors["temperatures"] = torch.tensor([sample.temperature for sample in samples], dtype=torch.float64)
        write_whole(self.path(wave), lambda partial: save_file(tensors, partial))

    def read(self, wave: int) -> list[Sample]:
        """The samples of a wave, in the order they were written in. Raises `StartupFailed` if its file is damaged."""
        try:
            tensors = load_file(self.path(wave))
        except (OSError, SafetensorError) as error:
            raise StartupFailed(
                f"Cannot read '{self.path(wave)}' ({error}); delete it, and run the same command again."
            ) from error
        lengths: list[int] = tensors["answer_lengths"].tolist()
        prompts = torch.split(tensors["prompt_ids"], tensors["prompt_lengths"].tolist())
        answers, top_ids, top_log_probs = (torch.split(tensors[name], lengths) for name in _ROWS)
        temperatures: list[float] = tensors["temperatures"].tolist()
        return [Sample(*each) for each in zip(prompts, answers, top_ids, top_log_probs, temperatures, strict=True)]

    def samples(self, waves: int) -> Iterator[Sample]:
        """Those of the first waves."""
        for wave in range(waves):
            yield from self.read(wave)


def frequent_ids(samples: Sequence[Sample], vocab_size: int, count: int) -> Tensor:
    """The `count` tokens that a drafter should be able to propose, ascending, int64: those that the target gave, or might
    have given, most often."""
    weights = torch.zeros(vocab_size, dtype=torch.float64)
    for sample in samples:
        weights.index_add_(0, sample.answer_ids.long(), torch.ones(len(sample.answer_ids), dtype=torch.float64))
        weights.index_add_(0, sample.top_ids.flatten().long(), sample.top_log_probs.flatten().double().exp())
    return weights.topk(min(count, vocab_size)).indices.sort().values


def coverage(samples: Sequence[Sample], draft_ids: Tensor) -> float:
    """The share of answer tokens that are among `draft_ids`."""
    if not samples:
        return math.nan
    given = torch.cat([sample.answer_ids for sample in samples]).long()
    return float(torch.isin(given, draft_ids).double().mean())
