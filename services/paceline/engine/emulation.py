"""A model whose steps are held to a set time, to stand for hardware that this machine lacks.

What it computes is the model's own; only its speed is made up, so whatever is measured with it is to be called
emulated. While a step is held the thread sleeps, and the processor is free for others, as it is beside a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic

from torch import Tensor

from paceline.engine.interface import CacheT, Extension, Memory, Model


class EmulatedModel(Generic[CacheT]):
    """Any model behind the narrow interface, no step of which ends before `step_s` seconds have passed."""

    def __init__(
        self,
        model: Model[CacheT],
        *,
        step_s: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._model, self._step_s = model, step_s
        self._clock, self._sleep = clock, sleep
        self.vocab_size, self.max_context = model.vocab_size, model.max_context

    @property
    def memory(self) -> Memory:
        return self._model.memory

    def new_cache(self) -> CacheT:
        return self._model.new_cache()

    def reserve(self, cache: CacheT, length: int) -> bool:
        return self._model.reserve(cache, length)

    def truncate(self, cache: CacheT, length: int) -> None:
        self._model.truncate(cache, length)

    def release(self, cache: CacheT) -> None:
        self._model.release(cache)

    def reuse_prefix(self, cache: CacheT, ids: Sequence[int]) -> int:
        return self._model.reuse_prefix(cache, ids)

    def share_prefix(self, cache: CacheT, ids: Sequence[int]) -> None:
        self._model.share_prefix(cache, ids)

    def step(self, batch: Sequence[Extension[CacheT]]) -> list[Tensor]:
        """The model's own rows, held from the start of the step; a step that takes longer by itself is not held."""
        ends_s = self._clock() + self._step_s
        rows = self._model.step(batch)
        remaining_s = ends_s - self._clock()
        if remaining_s > 0:
            self._sleep(remaining_s)
        return rows


def emulated(model: Model[CacheT], *, step_ms: float) -> Model[CacheT]:
    """The model with its steps held to `step_ms` milliseconds; the model itself if that is 0."""
    return EmulatedModel(model, step_s=step_ms / 1000) if step_ms else model
