"""Each pool follows its own signal under `paceline serve`, under the policy for the whole application.

Tiny models whose steps are held stand for GPUs. Counts are those that `paceline status` shows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from paceline.client import GenerationClient, GenerationRequest, SpeculationOptions, StopConditions
from paceline.generation import Completion
from paceline.types import VerificationRule
from tests.cluster.serving import Served

LIMIT_S = 150.0  # far above what a change takes
Counts = tuple[int, int]
"""Connected replicas that do not drain: targets, drafters."""


async def counts(client: GenerationClient) -> Counts:
    pools = {pool.name: pool.replicas for pool in (await client.pool_status()).pools}
    targets, drafters = (
        sum(replica.is_connected and not replica.is_draining for replica in pools[name])
        for name in ("target", "drafter")
    )
    return targets, drafters


async def until_counts(served: Served, wanted: Counts, *, never: tuple[int | None, int | None]) -> None:
    """Wait for the counts; meanwhile neither pool may have more than `never` allows (None: not looked at)."""
    deadline_s = time.monotonic() + LIMIT_S
    async with served.client() as client:
        while (seen := await counts(client)) != wanted:
            for count, most in zip(seen, never, strict=True):
                assert most is None or count <= most, f"{seen} on the way to {wanted}"
            assert time.monotonic() < deadline_s, f"{seen} and not {wanted} after {LIMIT_S:g} s"
            await asyncio.sleep(0.2)


@asynccontextmanager
async def steady_sessions(served: Served, number: int, *, draft_length: int) -> AsyncIterator[list[Completion]]:
    """That many answers at any time; what comes out are the completions so far."""
    completions: list[Completion] = []
    async with served.client() as client, asyncio.TaskGroup() as group:
        is_over = asyncio.Event()

        async def keep_asking(seed: int) -> None:
            while not is_over.is_set():
                request = GenerationRequest(
                    token_ids=(seed + 1, 2, 3),
                    stopping=StopConditions(max_tokens=200, ignore_eos=True),
                    speculation=SpeculationOptions(rule=VerificationRule.COUPLED, draft_length=draft_length),
                    seed=seed,
                )
                completions.append(await client.complete(request, timeout_s=LIMIT_S))

        for seed in range(number):
            group.create_task(keep_asking(seed))
        yield completions
        is_over.set()


def by_seed(completions: list[Completion]) -> dict[int, set[str]]:
    texts: dict[int, set[str]] = {}
    for completion in completions:
        texts.setdefault(completion.seed, set()).add(completion.text)
    return texts


@pytest.mark.timeout(400)
async def test_sessions_scale_the_targets_and_nothing_else(served: Served) -> None:
    """Targets 1, 2, 1 as sessions come and go, drafters stay; the target that goes takes no answer with it.

    The answers are decoded plainly: beside real load on this machine the wait for drafts could call for drafters as well.
    """
    await until_counts(served, (1, 1), never=(1, 1))
    async with steady_sessions(served, 10, draft_length=0) as completions:
        await until_counts(served, (2, 1), never=(2, 1))
    async with steady_sessions(served, 4, draft_length=0) as fewer:
        # The load falls, but does not end: open sessions have to leave the target that goes.
        await until_counts(served, (1, 1), never=(2, 1))
    assert all(len(texts) == 1 for texts in by_seed([*completions, *fewer]).values())


@pytest.mark.timeout(400)
@pytest.mark.slow
async def test_stall_scales_the_drafters_and_nothing_else(served: Served) -> None:
    """Drafters 1, 3, 1 as sessions wait for drafts and cease to, targets stay."""
    await until_counts(served, (1, 1), never=(1, None))
    async with steady_sessions(served, 4, draft_length=12) as completions:
        await until_counts(served, (1, 3), never=(1, 3))
    await until_counts(served, (1, 1), never=(1, 3))
    assert all(len(texts) == 1 for texts in by_seed(completions).values())
