"""Steps held to a set time: only their duration changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from paceline.engine.emulation import EmulatedModel, emulated
from paceline.engine.interface import Extension
from tests.fakes import FakeCache, FakeModel, hashed_logits

VOCAB_SIZE = 8


@dataclass
class Clock:
    """Time that passes when somebody sleeps."""

    now_s: float = 0.0
    slept_s: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


class TimedModel(FakeModel):
    """A fake whose steps take `step_s` by themselves."""

    def __init__(self, clock: Clock, step_s: float) -> None:
        super().__init__(hashed_logits(VOCAB_SIZE), vocab_size=VOCAB_SIZE, max_context=20)
        self._clock, self._step_s = clock, step_s

    def step(self, batch: Sequence[Extension[FakeCache]]) -> list[Tensor]:
        self._clock.now_s += self._step_s
        return super().step(batch)


def held(clock: Clock, *, own_s: float, step_s: float = 0.05) -> EmulatedModel[FakeCache]:
    return EmulatedModel(TimedModel(clock, own_s), step_s=step_s, clock=clock, sleep=clock.sleep)


@pytest.mark.parametrize(("own_s", "slept_s"), [(0.0, [0.05]), (0.02, [0.03]), (0.05, []), (0.3, [])])
def test_a_step_lasts_as_long_as_set_from_its_start(own_s: float, slept_s: list[float]) -> None:
    """What it needs by itself is part of it; a longer one is not held at all."""
    clock = Clock()
    model = held(clock, own_s=own_s)
    model.step([Extension(model.new_cache(), (1, 2), 1)])
    assert clock.slept_s == pytest.approx(slept_s)
    assert clock.now_s == pytest.approx(max(own_s, 0.05))


def test_a_step_of_many_sessions_is_held_once() -> None:
    """As hardware takes about as long for a batch as for one."""
    clock = Clock()
    model = held(clock, own_s=0.0)
    model.step([Extension(model.new_cache(), (1,), 1) for _ in range(5)])
    assert clock.slept_s == pytest.approx([0.05])


def test_what_is_computed_is_the_models_own() -> None:
    """Rows, sizes, caches and rollback pass through."""
    clock = Clock()
    model, plain = held(clock, own_s=0.0), TimedModel(clock, 0.0)
    assert (model.vocab_size, model.max_context) == (plain.vocab_size, plain.max_context)
    cache, other = model.new_cache(), plain.new_cache()
    for ids, kept_length in (((1, 2, 3), 2), ((4, 5), 4), ((6,), 0)):
        (rows,) = model.step([Extension(cache, ids, len(ids))])
        (expected,) = plain.step([Extension(other, ids, len(ids))])
        assert torch.equal(rows, expected)
        model.truncate(cache, kept_length)
        plain.truncate(other, kept_length)
        assert plain.ids_of(cache) == plain.ids_of(other)


def test_a_model_that_is_not_held_is_left_alone() -> None:
    """0 milliseconds: no wrapper stands between."""
    model = TimedModel(Clock(), 0.0)
    assert emulated(model, step_ms=0.0) is model
    assert isinstance(emulated(model, step_ms=1.0), EmulatedModel)
