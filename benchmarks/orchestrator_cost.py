"""What one round costs the orchestrator in processor time, with many sessions at once and models that take no time.

Two figures, which count different things. *Process*: the whole orchestrator process, its answers' beginnings and ends,
text and the stream to the client included; a client in a process of its own keeps all sessions busy over one channel.
*Loop*: the sessions' loop with its two streams alone, without client and text events, as one thread of this process.
Processor time, not duration: on a machine where the four processes share the cores it is the steadier of the two, and
rounds per second are what all of them reach together.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.overhead import Service, connected, loop_times_ms, request_for, start
from benchmarks.report import write_report
from orchestrator.drafter_pool import DrafterPool
from orchestrator.target_pool import TargetPool
from orchestrator.text import Tokenizer
from paceline.bench.machine import machine
from paceline.bench.meters import cpu_seconds
from paceline.client import GenerationClient
from paceline.generation import Finished, GenerationRequest, Schedule
from paceline.process import new_event_loop
from paceline.types import VerificationRule
from tests.checkpoints import tiny_tokenizer

LIMIT_US = 150
_MICROSECONDS = 1e6


def cpu_s_of(service: Service) -> float:
    """Processor time since its start, of all its threads."""
    spent_s = cpu_seconds(service.pid)
    assert spent_s is not None, "this benchmark needs a system that counts it"
    return spent_s


async def rounds_at_client(client: GenerationClient, request: GenerationRequest, *, sessions: int) -> int:
    """Have so many answers made at once; the rounds they took, as their usage says."""

    async def answer() -> int:
        rounds = 0
        async for event in client.generate(request):
            if isinstance(event, Finished):
                rounds = event.speculation.rounds
        return rounds

    return sum(await asyncio.gather(*(answer() for _ in range(sessions))))


async def rounds_in_loop(
    request: GenerationRequest, tokenizer: Tokenizer, target: TargetPool, drafter: DrafterPool, *, sessions: int
) -> int:
    """The same in this process, without a client."""
    answers = (loop_times_ms(request, tokenizer, target, drafter) for _ in range(sessions))
    return sum(len(between_rounds) + 1 for between_rounds in await asyncio.gather(*answers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is run for each row of the table."""

    sessions: int
    answers: int  # of each session, one after another; one more goes before to warm up
    draft_length: int
    max_tokens: int


async def measure(
    load: Load, tokenizer: Tokenizer, *, orchestrator: Service, target: Service, drafter: Service
) -> list[dict[str, object]]:
    """A row for each schedule that rounds differ in, greedy and coupled."""
    rows: list[dict[str, object]] = []
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(GenerationClient(orchestrator.address))
        pools = await connected(stack, target.address, drafter.address)
        for rule in (VerificationRule.GREEDY, VerificationRule.COUPLED):
            for schedule in (Schedule.PLAIN, Schedule.PIPELINED):
                request = request_for(rule, schedule, draft_length=load.draft_length, max_tokens=load.max_tokens)
                row: dict[str, object] = {"rule": rule.value, "schedule": schedule.value}
                row |= await _process_figures(load, client, request, orchestrator, target, drafter)
                row |= await _loop_figures(load, request, tokenizer, *pools)
                rows.append(row)
    return rows


async def _process_figures(
    load: Load, client: GenerationClient, request: GenerationRequest, *services: Service
) -> dict[str, object]:
    await rounds_at_client(client, request, sessions=load.sessions)
    before_s = [cpu_s_of(service) for service in services]
    started_s, rounds = time.perf_counter(), 0
    for _ in range(load.answers):
        rounds += await rounds_at_client(client, request, sessions=load.sessions)
    elapsed_s = time.perf_counter() - started_s
    used_s = [cpu_s_of(service) - before for service, before in zip(services, before_s, strict=True)]
    orchestrator_us, target_us, drafter_us = (round(cpu_s / rounds * _MICROSECONDS) for cpu_s in used_s)
    return {
        "rounds": rounds,
        "process us": orchestrator_us,
        "target us": target_us,
        "drafter us": drafter_us,
        "rounds/s": round(rounds / elapsed_s),
    }


async def _loop_figures(
    load: Load, request: GenerationRequest, tokenizer: Tokenizer, target: TargetPool, drafter: DrafterPool
) -> dict[str, object]:
    await rounds_in_loop(request, tokenizer, target, drafter, sessions=load.sessions)
    started_s, before_s, rounds = time.perf_counter(), time.thread_time(), 0
    for _ in range(load.answers):
        rounds += await rounds_in_loop(request, tokenizer, target, drafter, sessions=load.sessions)
    cpu_s, elapsed_s = time.thread_time() - before_s, time.perf_counter() - started_s
    return {"loop us": round(cpu_s / rounds * _MICROSECONDS), "loop rounds/s": round(rounds / elapsed_s)}


def main(
    sessions: Annotated[int, typer.Option(help="Answers made at once.")] = 64,
    answers: Annotated[int, typer.Option(help="Answers of each session for a row of the table.")] = 3,
    draft_length: Annotated[int, typer.Option(help="Tokens of one draft.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Tokens of one answer.")] = 256,
) -> None:
    """Measure, print the table, and keep it under benchmarks/results/."""
    load = Load(sessions=sessions, answers=answers, draft_length=draft_length, max_tokens=max_tokens)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        tiny_tokenizer().save_pretrained(folder)
        target = start(stack, "benchmarks.instant", "target")
        drafter = start(stack, "benchmarks.instant", "drafter")
        pools = ("--target", target.address, "--drafter", drafter.address)
        orchestrator = start(stack, "orchestrator", *pools, "--tokenizer", folder)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            rows = runner.run(
                measure(load, Tokenizer.load(folder), orchestrator=orchestrator, target=target, drafter=drafter)
            )
    table = Table(title=f"Processor time of one round, {sessions} sessions, draft length {draft_length}\n{machine()}")
    for column in rows[0]:
        table.add_column(column, justify="left" if column in ("rule", "schedule") else "right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
    within = [row for row in rows if int(str(row["process us"])) <= LIMIT_US]
    print(f"{len(within)} of {len(rows)} rows take the orchestrator's process at most {LIMIT_US} us a round")
    write_report(
        "orchestrator_cost",
        {
            "sessions": sessions,
            "draft_length": draft_length,
            "max_tokens": max_tokens,
            "limit_us": LIMIT_US,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    typer.run(main)
