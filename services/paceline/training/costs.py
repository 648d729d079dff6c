"""What steps cost on this machine: the drafter's in units of the target's, and the target's by the tokens it verifies."""

from __future__ import annotations

import time
from typing import Generic

from paceline.engine.interface import CacheT, Extension, Model


def step_costs(
    target: Model[CacheT],
    drafter: Model[CacheT],
    *,
    context: int = 256,
    repeats: int = 20,
    max_draft_length: int = 8,
) -> tuple[float, tuple[float, ...]]:
    """The drafter's step over the target's, one token each, and the target's steps with 1, 2, ... up to one more than
    `max_draft_length` tokens over that with one.

    Behind `context` tokens of one session. All kinds of step take turns, `repeats` times, and the fastest of each kind
    counts: what else the machine does only ever adds.
    """
    longest = max_draft_length + 1
    context = max(1, min(context, target.max_context - longest, drafter.max_context - 1))
    prompt = [token_id % min(target.vocab_size, drafter.vocab_size) for token_id in range(context)]
    measured = [_Session(target, prompt), _Session(drafter, prompt)]
    kinds = [(measured[1], 1), *((measured[0], count) for count in range(1, longest + 1))]
    times_s = [[session.time_step(count) for session, count in kinds] for _ in range(repeats)]
    for session in measured:
        session.end()
    drafter_s, *target_s = map(min, zip(*times_s, strict=True))
    return drafter_s / target_s[0], tuple(one / target_s[0] for one in target_s)


class _Session(Generic[CacheT]):
    """A session that is always as long as its prompt, but within a step."""

    def __init__(self, model: Model[CacheT], prompt: list[int]) -> None:
        self._model, self._prompt = model, prompt
        self._cache = model.new_cache()
        model.step([Extension(self._cache, prompt, 0)])

    def time_step(self, count: int) -> float:
        """Seconds of a step with so many tokens and a row of logits for each."""
        started_s = time.perf_counter()
        self._model.step([Extension(self._cache, self._prompt[:1] * count, count)])
        elapsed_s = time.perf_counter() - started_s
        self._model.truncate(self._cache, len(self._prompt))
        return elapsed_s

    def end(self) -> None:
        self._model.release(self._cache)
