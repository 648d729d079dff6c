"""Steps held to a set time: only their duration changes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from paceline.engine.emulation import EmulatedModel, emulated
from paceline.engine.interface import Extension
from paceline.settings import DrafterSettings, ModelServiceSettings, TargetSettings
from tests.fakes import FakeCache, FakeModel, hashed_logits

VOCAB_SIZE = 8
LATE_S = 4e-5
LOOK_S = 1e-7


@dataclass
class Clock:
    """Time that passes when somebody sleeps, and a little whenever it is looked at."""

    now_s: float = 0.0
    slept_s: list[float] = field(default_factory=list)
    looks: int = 0

    def __call__(self) -> float:
        self.looks += 1
        self.now_s += LOOK_S
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Woken late, as by any system."""
        self.slept_s.append(seconds)
        self.now_s += seconds + LATE_S


class TimedModel(FakeModel):
    """A fake whose steps take `step_s` by themselves."""

    def __init__(self, clock: Clock, step_s: float) -> None:
        super().__init__(hashed_logits(VOCAB_SIZE), vocab_size=VOCAB_SIZE, max_context=20)
        self._clock, self._step_s = clock, step_s

    def step(self, batch: Sequence[Extension[FakeCache]]) -> list[Tensor]:
        self._clock.now_s += self._step_s
        return super().step(batch)


def held(clock: Clock, *, own_s: float = 0.0, **times_s: float) -> EmulatedModel[FakeCache]:
    return EmulatedModel(TimedModel(clock, own_s), **{"step_s": 0.05, **times_s}, clock=clock, sleep=clock.sleep)


@pytest.mark.parametrize(("own_s", "lasts_s"), [(0.0, 0.05), (0.02, 0.05), (0.0499, 0.05), (0.05, 0.05), (0.3, 0.3)])
def test_a_step_lasts_as_long_as_set_from_its_start(own_s: float, lasts_s: float) -> None:
    """What it needs by itself is part of it; a longer one is not held at all."""
    clock = Clock()
    model = held(clock, own_s=own_s)
    model.step([Extension(model.new_cache(), (1, 2), 1)])
    assert lasts_s <= clock.now_s <= lasts_s + 1e-5
    assert len(clock.slept_s) == (own_s < 0.0499)


def test_a_held_step_sleeps_and_is_awake_for_its_end() -> None:
    """One sleep that ends in time, so that waking late costs nothing; at most 0.2 ms of the processor for the rest."""
    clock = Clock()
    model = held(clock)
    model.step([Extension(model.new_cache(), (1,), 1)])
    (slept_s,) = clock.slept_s
    assert 0.05 - 2e-4 < slept_s < 0.05 - LATE_S
    assert 2 < clock.looks < 2e-4 / LOOK_S


@pytest.mark.parametrize(
    ("counts", "lasts_s"), [([1], 0.0531), ([1, 1, 1], 0.0593), ([4], 0.0534), ([2, 5, 1], 0.0598)]
)
def test_a_step_lasts_longer_for_each_session_and_token(counts: list[int], lasts_s: float) -> None:
    """50 ms, 3 ms for each extension and 0.1 ms for each token fed; forks are sessions of their own."""
    clock = Clock()
    model = held(clock, per_session_s=0.003, per_token_s=0.0001)
    root = model.new_cache()
    model.step([Extension(model.fork(root, 0), (1,) * count, 1) for count in counts])
    assert lasts_s <= clock.now_s <= lasts_s + 1e-5


def test_what_is_computed_is_the_models_own() -> None:
    """Rows, sizes, caches and rollback pass through."""
    clock = Clock()
    model, plain = held(clock), TimedModel(clock, 0.0)
    assert (model.vocab_size, model.max_context) == (plain.vocab_size, plain.max_context)
    cache, other = model.new_cache(), plain.new_cache()
    for ids, kept_length in (((1, 2, 3), 2), ((4, 5), 4), ((6,), 0)):
        (rows,) = model.step([Extension(cache, ids, len(ids))])
        (expected,) = plain.step([Extension(other, ids, len(ids))])
        assert torch.equal(rows, expected)
        model.truncate(cache, kept_length)
        plain.truncate(other, kept_length)
        cache, other = model.fork(cache, kept_length), plain.fork(other, kept_length)
        assert plain.ids_of(cache) == plain.ids_of(other)


def test_a_model_that_is_not_held_is_left_alone() -> None:
    """0 milliseconds: no wrapper stands between."""
    model = TimedModel(Clock(), 0.0)
    assert emulated(model, step_ms=0.0) is model


@pytest.mark.parametrize("times_ms", [{"step_ms": 9.0}, {"step_ms": 5.0, "per_session_ms": 4.0}, {"per_token_ms": 4.5}])
def test_times_are_given_in_milliseconds(times_ms: dict[str, float]) -> None:
    """On the real clock; a step of two tokens lasts at least 9 ms."""
    model = emulated(TimedModel(Clock(), 0.0), **{"step_ms": 0.0, **times_ms})
    before_s = time.perf_counter()
    model.step([Extension(model.new_cache(), (1, 2), 1)])
    assert time.perf_counter() - before_s >= 0.009


@pytest.mark.parametrize("kind", [TargetSettings, DrafterSettings])
@pytest.mark.parametrize("name", ["emulated_step_ms", "emulated_step_ms_per_session", "emulated_step_ms_per_token"])
def test_any_of_the_three_times_makes_a_service_emulated(kind: type[ModelServiceSettings], name: str) -> None:
    """So that what is measured there is called so, whichever is set."""
    assert not kind.model_validate({}).is_emulated
    assert kind.model_validate({name: 0.5}).is_emulated
