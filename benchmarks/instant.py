"""Target and drafter services whose model takes no time, so that what is left is Paceline's own cost.

Or each step takes a set time, with the services' settings `--emulated-step-ms...`. Run as `python -m benchmarks.instant
target` or `... drafter`; prints the services' ordinary ready line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafter_service.methods.draft_model import DraftModelMethod
from drafter_service.service import serve_drafter
from paceline.engine.emulation import emulated
from paceline.engine.interface import Extension, Model
from paceline.engine.torch_threads import use_threads
from paceline.process import Lifetime, run_service
from paceline.settings import DrafterSettings, ModelServiceSettings, TargetSettings
from paceline.types import ModelInfo
from target_service.service import serve_target

VOCAB_SIZE = 64
MAX_CONTEXT = 1_000_000


@dataclass
class InstantCache:
    """Counts tokens and holds none."""

    length: int = 0


@dataclass(frozen=True, slots=True)
class BoundlessMemory:
    """Never fills, as nothing is kept in it."""

    capacity_tokens: int = 2**40
    held_tokens: int = 0
    reused_tokens: int = 0


class InstantModel:
    """A Markov chain read from a table: a step costs one look-up (`interface.Model`)."""

    vocab_size, max_context = VOCAB_SIZE, MAX_CONTEXT

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._table = 3.0 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator)
        self.memory = BoundlessMemory()

    def new_cache(self) -> InstantCache:
        return InstantCache()

    def fork(self, cache: InstantCache, length: int) -> InstantCache:
        return InstantCache(length)

    def adopt(self, cache: InstantCache) -> None:
        """Nothing is held."""

    def reserve(self, cache: InstantCache, length: int) -> bool:
        return True

    def truncate(self, cache: InstantCache, length: int) -> None:
        cache.length = length

    def release(self, cache: InstantCache) -> None:
        cache.length = 0

    def reuse_prefix(self, cache: InstantCache, ids: Sequence[int]) -> int:
        return cache.length

    def share_prefix(self, cache: InstantCache, ids: Sequence[int]) -> None:
        """Nothing is shared: to compute it again costs less."""

    def step(self, batch: Sequence[Extension[InstantCache]]) -> list[Tensor]:
        for extension in batch:
            extension.cache.length += len(extension.ids)
        return [self._table[list(extension.ids[len(extension.ids) - extension.rows :])] for extension in batch]


def held(settings: ModelServiceSettings) -> Model[Any]:
    """The model, its steps held to the time that the settings say, if they do."""
    return emulated(
        InstantModel(),
        step_ms=settings.emulated_step_ms,
        per_session_ms=settings.emulated_step_ms_per_session,
        per_token_ms=settings.emulated_step_ms_per_token,
    )


def instant_info(settings: ModelServiceSettings, method: str = "") -> ModelInfo:
    return ModelInfo(
        model_id="instant",
        vocab_size=VOCAB_SIZE,
        max_context=MAX_CONTEXT,
        tokenizer_sha256="",
        incarnation="1",
        method=method,
        dtype="float32",
        emulated=settings.is_emulated,
    )


async def _serve_target(lifetime: Lifetime, settings: TargetSettings) -> None:
    await serve_target(lifetime, settings, held(settings), instant_info(settings))


async def _serve_drafter(lifetime: Lifetime, settings: DrafterSettings) -> None:
    method = DraftModelMethod(held(settings), distribution_entries=64)
    await serve_drafter(lifetime, settings, method, instant_info(settings, "draft_model"))


def main() -> None:
    kind = sys.argv.pop(1)
    use_threads(1)
    if kind == "target":
        run_service("target", TargetSettings, lambda settings: lambda lifetime: _serve_target(lifetime, settings))
    else:
        run_service("drafter", DrafterSettings, lambda settings: lambda lifetime: _serve_drafter(lifetime, settings))


if __name__ == "__main__":
    main()
