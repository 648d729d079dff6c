"""Chaos: replicas of both pools are killed at random under steady load; not one request may fail or change its text.

A simulated cluster on this machine, tiny models whose steps are held for a configured time (emulated). Eight sessions
at any time; a random drafter is killed every 10 s and a random target every 30 s, by SIGKILL. The answers are compared
with those of an undisturbed run. `python -m benchmarks.chaos --seconds 300`
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from benchmarks.report import write_report
from orchestrator.cluster import deployed
from paceline.client import GenerationClient, GenerationRequest, StopConditions, VerificationRule
from paceline.errors import PacelineError
from paceline.generation import Completion, SpeculationOptions
from tests.checkpoints import save_tiny_checkpoint
from tests.cluster.applications import kill_process_at, tiny_application

SESSIONS = 8  # at any time
REQUESTS = 16  # different ones, asked again and again
MAX_TOKENS = 150
ANSWER_LIMIT_S = 300.0


@dataclass
class ChaosOutcome:
    """What happened."""

    seconds: float = 0.0
    answers: int = 0
    failed: list[str] = field(default_factory=list)
    changed_texts: int = 0
    resumptions: int = 0
    drafters_killed: int = 0
    targets_killed: int = 0
    slowest_answer_s: float = 0.0
    median_answer_s: float = 0.0
    undisturbed_median_answer_s: float = 0.0
    accepted_draft_tokens: int = 0


def request_of(index: int) -> GenerationRequest:
    return GenerationRequest(
        token_ids=(index + 1, 2, 3),
        stopping=StopConditions(max_tokens=MAX_TOKENS, ignore_eos=True),
        speculation=SpeculationOptions(rule=VerificationRule.COUPLED),
        seed=index,
    )


async def run_chaos(
    endpoint: str,
    *,
    seconds: float,
    seed: int,
    drafter_every_s: float = 10.0,
    target_every_s: float = 30.0,
    on_progress: Callable[[ChaosOutcome], None] = lambda _: None,
) -> ChaosOutcome:
    """Undisturbed answers first, then steady load for `seconds` while replicas are killed."""
    outcome, durations_s = ChaosOutcome(seconds=seconds), list[float]()
    async with GenerationClient(endpoint) as client:
        undisturbed, quiet_s = await _undisturbed(client)
        deadline_s = time.monotonic() + seconds
        turns = iter(range(10**9))

        async def keep_asking() -> None:
            while time.monotonic() < deadline_s:
                index = next(turns) % REQUESTS
                started_s = time.monotonic()
                try:
                    completion = await client.complete(request_of(index), timeout_s=ANSWER_LIMIT_S)
                except PacelineError as error:
                    outcome.failed.append(f"{error.reason}: {error.message}")
                    continue
                durations_s.append(time.monotonic() - started_s)
                _count(outcome, completion, undisturbed[index])
                on_progress(outcome)

        generator = random.Random(seed)
        killers = [
            asyncio.ensure_future(_keep_killing(client, pool, every_s, least, generator, outcome))
            for pool, every_s, least in (("drafter", drafter_every_s, 1), ("target", target_every_s, 2))
        ]
        try:
            await asyncio.gather(*(keep_asking() for _ in range(SESSIONS)))
        finally:
            for killer in killers:
                killer.cancel()
            await asyncio.gather(*killers, return_exceptions=True)
    outcome.slowest_answer_s = max(durations_s, default=0.0)
    outcome.median_answer_s = _median(durations_s)
    outcome.undisturbed_median_answer_s = _median(quiet_s)
    return outcome


def _count(outcome: ChaosOutcome, completion: Completion, undisturbed: Completion) -> None:
    outcome.answers += 1
    outcome.resumptions += completion.resumptions
    outcome.accepted_draft_tokens += completion.speculation.num_accepted_tokens
    outcome.changed_texts += (completion.token_ids, completion.text) != (undisturbed.token_ids, undisturbed.text)


async def _undisturbed(client: GenerationClient) -> tuple[list[Completion], list[float]]:
    gate, durations_s = asyncio.Semaphore(SESSIONS), list[float]()

    async def ask(index: int) -> Completion:
        async with gate:
            started_s = time.monotonic()
            completion = await client.complete(request_of(index), timeout_s=ANSWER_LIMIT_S)
            durations_s.append(time.monotonic() - started_s)
            return completion

    return list(await asyncio.gather(*(ask(index) for index in range(REQUESTS)))), durations_s


async def _keep_killing(
    client: GenerationClient, pool: str, every_s: float, least: int, generator: random.Random, outcome: ChaosOutcome
) -> None:
    """Kill a random replica of the pool at each tick, or as soon behind it as at least so many are connected."""
    while True:
        await asyncio.sleep(every_s)
        while len(addresses := await _connected_addresses(client, pool)) < least:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.5)
        # It may have gone by itself a moment ago.
        with suppress(ProcessLookupError):
            await asyncio.to_thread(kill_process_at, generator.choice(addresses))
            if pool == "target":
                outcome.targets_killed += 1
            else:
                outcome.drafters_killed += 1


async def _connected_addresses(client: GenerationClient, pool: str) -> list[str]:
    status = await client.pool_status()
    replicas = next(entry.replicas for entry in status.pools if entry.name == pool)
    return sorted(replica.address for replica in replicas if replica.is_connected and not replica.is_draining)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def main(
    seconds: Annotated[float, typer.Option(help="How long replicas are killed.")] = 300.0,
    seed: Annotated[int, typer.Option(help="Of the choice of victims.")] = 1,
) -> None:
    """Run the chaos and write results/chaos.json; exits with 1 if a request failed or a text changed."""
    console = Console()
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as progress,
    ):
        task = progress.add_task("starting", total=None)
        model = save_tiny_checkpoint(Path(folder) / "target", seed=1)

        def show(outcome: ChaosOutcome) -> None:
            progress.update(
                task,
                description=f"{outcome.answers} answers, {len(outcome.failed)} failed, {outcome.changed_texts} changed; "
                f"{outcome.drafters_killed} drafters and {outcome.targets_killed} targets killed",
            )

        with deployed(tiny_application(model), is_simulated=True) as application:
            outcome = asyncio.run(run_chaos(application.grpc_endpoint, seconds=seconds, seed=seed, on_progress=show))
    path = write_report("chaos", {"emulated": "tiny models with held steps, simulated cluster", **asdict(outcome)})
    console.print(asdict(outcome))
    console.print(f"written to {path}")
    raise typer.Exit(1 if outcome.failed or outcome.changed_texts else 0)


if __name__ == "__main__":
    typer.run(main)
