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

_WAKE_EARLY_S = 0.1e-3  # how late a sleeper is woken where a core is free, with a margin


class EmulatedModel(Generic[CacheT]):
    """Any model behind the narrow interface, with steps that last as long as set.

    That is `step_s`, and `per_session_s` for each extension of the step (so forks count one by one), and `per_token_s`
    for each token fed, in seconds. No step ends sooner.
    """

    def __init__(
        self,
        model: Model[CacheT],
        *,
        step_s: float,
        per_session_s: float = 0.0,
        per_token_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._model = model
        self._step_s, self._per_session_s, self._per_token_s = step_s, per_session_s, per_token_s
        self._clock, self._sleep = clock, sleep
        self.vocab_size, self.max_context = model.vocab_size, model.max_context

    @property
    def memory(self) -> Memory:
        return self._model.memory

    def new_cache(self) -> CacheT:
        return self._model.new_cache()

    def fork(self, cache: CacheT, length: int) -> CacheT:
        return self._model.fork(cache, length)

    def adopt(self, cache: CacheT) -> None:
        self._model.adopt(cache)

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
        ends_s = self._clock() + self._step_time_s(batch)
        rows = self._model.step(batch)
        self._hold_until(ends_s)
        return rows

    def _step_time_s(self, batch: Sequence[Extension[CacheT]]) -> float:
        tokens = sum(len(extension.ids) for extension in batch)
        return self._step_s + self._per_session_s * len(batch) + self._per_token_s * tokens

    def _hold_until(self, ends_s: float) -> None:
        """Sleep, but for the last moment: a sleeper is woken late, by a good part of what a fast step takes.

        Giving up the core in that moment would cost a whole time slice where others want it.
        """
        remaining_s = ends_s - self._clock()
        if remaining_s > _WAKE_EARLY_S:
            self._sleep(remaining_s - _WAKE_EARLY_S)
        while self._clock() < ends_s:
            pass


def emulated(
    model: Model[CacheT], *, step_ms: float, per_session_ms: float = 0.0, per_token_ms: float = 0.0
) -> Model[CacheT]:
    """The model with its steps held (`EmulatedModel`), in milliseconds; the model itself if all three are 0."""
    if not (step_ms or per_session_ms or per_token_ms):
        return model
    return EmulatedModel(
        model, step_s=step_ms / 1000, per_session_s=per_session_ms / 1000, per_token_s=per_token_ms / 1000
    )
