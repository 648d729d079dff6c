"""What one round costs apart from the models: real services over real gRPC, both models instant.

A round is: commit to the drafter, draft, proposal back, verify at the target, rows back, walk, end of the answer
checked. It is measured in the orchestrator, as the time between two rounds of one session (this process runs the
orchestrator's own parts), and once more at a client of an orchestrator process, as the time between two streamed
events; the difference is the third hop. A drafted token costs its sampling twice, at drafter and target: under
`greedy` next to nothing, under the other rules most of what a round takes beyond it.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from benchmarks.instant import VOCAB_SIZE
from benchmarks.report import write_report
from orchestrator.board import PoolBoard, most_room_first, nearest_first
from orchestrator.directory import StaticDirectory
from orchestrator.drafter_pool import DrafterPool
from orchestrator.drafting import DraftsWithFallback, NoDrafts
from orchestrator.finish import EndConditions, OutputTracker
from orchestrator.fixed_planner import FixedPlanner
from orchestrator.loop import run_session
from orchestrator.remote_target import FailoverLimits
from orchestrator.target_pool import TargetPool
from orchestrator.text import IncrementalDetokenizer, Tokenizer
from paceline.bench.machine import machine
from paceline.client import GenerationClient
from paceline.generation import (
    Delta,
    GenerationRequest,
    Schedule,
    SpeculationOptions,
    StopConditions,
)
from paceline.process import new_event_loop
from paceline.telemetry import PoolMetrics
from paceline.types import SamplingParams, SessionSpec, SpeculationStats, VerificationRule
from tests.checkpoints import word_tokenizer

LIMIT_MS = 1.5
SILENCE_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Service:
    """A service process, and where it answers."""

    address: str
    pid: int


def start(stack: ExitStack, module: str, *options: str) -> Service:
    """Start a service process for the life of the stack."""
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-m", module, *options, "--stop-with-parent", "--log-level", "error"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    )
    stack.callback(process.terminate)
    assert process.stdout is not None
    return Service(json.loads(process.stdout.readline())["address"], process.pid)


async def round_times_ms(client: GenerationClient, request: GenerationRequest) -> list[float]:
    """Between consecutive events of one answer, the prompt's round left out."""
    times: list[float] = []
    last_s = None
    async for event in client.generate(request):
        now_s = time.perf_counter()
        if isinstance(event, Delta):
            if last_s is not None:
                times.append((now_s - last_s) * 1e3)
            last_s = now_s
    return times


def request_for(rule: VerificationRule, schedule: Schedule, *, draft_length: int, max_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        token_ids=(1, 2, 3),
        sampling=SamplingParams(temperature=0.0 if rule is VerificationRule.GREEDY else 1.0),
        stopping=StopConditions(max_tokens=max_tokens, ignore_eos=True),
        speculation=SpeculationOptions(rule=rule, schedule=schedule, draft_length=draft_length),
        seed=1,
    )


async def loop_times_ms(
    request: GenerationRequest, tokenizer: Tokenizer, target: TargetPool, drafter: DrafterPool
) -> list[float]:
    """Between consecutive rounds of one session run by this process, the prompt's round left out."""
    assert request.token_ids is not None
    options, max_tokens = request.speculation, request.stopping.max_tokens
    assert options.rule and options.schedule and options.draft_length and max_tokens  # noqa: PT018 - set by `request_for`
    spec = SessionSpec(
        session_id=uuid.uuid4().hex,
        prompt_length=len(request.token_ids),
        sampling=request.sampling,
        seed=1,
        rule=options.rule,
        vocab_size=VOCAB_SIZE,
    )
    times: list[float] = []
    with (
        target.session(spec, verify_deadline_s=60, deadline_s=None) as at_target,
        drafter.session(spec) as at_drafter,
    ):
        rounds = run_session(
            spec,
            request.token_ids,
            FixedPlanner(schedule=options.schedule, draft_length=options.draft_length, rule=spec.effective_rule),
            target=at_target,
            drafts=NoDrafts() if options.schedule is Schedule.PLAIN else DraftsWithFallback(at_drafter, None),
            output=OutputTracker(IncrementalDetokenizer(tokenizer), EndConditions(max_tokens=max_tokens)),
            stats=SpeculationStats(),
        )
        last_s = None
        async for _ in rounds:
            now_s = time.perf_counter()
            if last_s is not None:
                times.append((now_s - last_s) * 1e3)
            last_s = now_s
    return times


async def measure(
    endpoint: str,
    target_address: str,
    drafter_address: str,
    tokenizer: Tokenizer,
    *,
    draft_length: int,
    max_tokens: int,
    answers: int,
) -> list[dict[str, object]]:
    """A row for each rule and schedule; the first answer of each kind warms up."""
    rows: list[dict[str, object]] = []
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(GenerationClient(endpoint))
        target, drafter = await connected(stack, target_address, drafter_address)
        for rule in VerificationRule:
            for schedule in Schedule:
                request = request_for(rule, schedule, draft_length=draft_length, max_tokens=max_tokens)
                in_loop: list[float] = []
                at_client: list[float] = []
                for number in range(answers + 1):
                    loop_times = await loop_times_ms(request, tokenizer, target, drafter)
                    client_times = await round_times_ms(client, request)
                    if number:
                        in_loop += loop_times
                        at_client += client_times
                cuts = statistics.quantiles(in_loop, n=100)
                rows.append(
                    {
                        "rule": rule.value,
                        "schedule": schedule.value,
                        "rounds": len(in_loop),
                        "p50 ms": round(statistics.median(in_loop), 2),
                        "p90 ms": round(cuts[89], 2),
                        "p99 ms": round(cuts[98], 2),
                        "p50 ms at client": round(statistics.median(at_client), 2),
                    }
                )
    return rows


async def connected(stack: AsyncExitStack, target_address: str, drafter_address: str) -> tuple[TargetPool, DrafterPool]:
    """The orchestrator's pools of one replica each, kept connected for the life of the stack."""
    metrics = PoolMetrics(CollectorRegistry())
    target = TargetPool(
        StaticDirectory([target_address], PoolBoard(most_room_first)),
        limits=FailoverLimits(timeout_s=1.0, max_migrations=0),
        silence_limit_s=SILENCE_LIMIT_S,
        metrics=metrics,
    )
    stack.callback(asyncio.ensure_future(target.run()).cancel)
    await target.wait_connected(SILENCE_LIMIT_S)
    assert target.info is not None
    drafter = DrafterPool(
        StaticDirectory([drafter_address], PoolBoard(nearest_first)),
        target_info=target.info,
        silence_limit_s=SILENCE_LIMIT_S,
        metrics=metrics,
    )
    stack.callback(asyncio.ensure_future(drafter.run()).cancel)
    await drafter.wait_connected(SILENCE_LIMIT_S)
    return target, drafter


def main(
    draft_length: Annotated[int, typer.Option(help="Tokens of one draft.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Tokens of one answer.")] = 600,
    answers: Annotated[int, typer.Option(help="Answers for each row of the table.")] = 5,
) -> None:
    """Measure, print the table, and keep it under benchmarks/results/."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        word_tokenizer([f"t{token_id}" for token_id in range(VOCAB_SIZE)]).save_pretrained(folder)
        tokenizer = Tokenizer.load(str(folder))
        target = start(stack, "benchmarks.instant", "target")
        drafter = start(stack, "benchmarks.instant", "drafter")
        pools = ("--target", target.address, "--drafter", drafter.address)
        orchestrator = start(stack, "orchestrator", *pools, "--tokenizer", str(folder))
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            rows = runner.run(
                measure(
                    orchestrator.address,
                    target.address,
                    drafter.address,
                    tokenizer,
                    draft_length=draft_length,
                    max_tokens=max_tokens,
                    answers=answers,
                )
            )
    table = Table(title=f"One round with instant models, draft length {draft_length}\n{machine()}")
    for column in rows[0]:
        table.add_column(column, justify="left" if column in ("rule", "schedule") else "right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
    within = [row for row in rows if float(str(row["p50 ms"])) <= LIMIT_MS]
    print(f"{len(within)} of {len(rows)} rows have a median of at most {LIMIT_MS} ms a round")
    write_report("overhead", {"draft_length": draft_length, "limit_ms": LIMIT_MS, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
