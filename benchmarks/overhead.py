"""What one round costs apart from the models: three processes over real gRPC, both models instant.

A round is: commit to the drafter, draft, proposal back, verify at the target, rows back, walk, text to the client.
Measured at the client as the time between two streamed events of one answer, in both schedules and under each rule.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.instant import VOCAB_SIZE
from benchmarks.report import machine, write_report
from paceline.client import GenerationClient
from paceline.generation import (
    Delta,
    GenerationRequest,
    Schedule,
    SpeculationOptions,
    StopConditions,
)
from paceline.types import SamplingParams, VerificationRule
from tests.checkpoints import word_tokenizer

LIMIT_MS = 1.5


def start(stack: ExitStack, module: str, *options: str) -> str:
    """Start a service process for the life of the stack; returns its address."""
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
    address: str = json.loads(process.stdout.readline())["address"]
    return address


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


async def measure(endpoint: str, *, draft_length: int, max_tokens: int, answers: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    async with GenerationClient(endpoint) as client:
        for rule in VerificationRule:
            for schedule in Schedule:
                request = request_for(rule, schedule, draft_length=draft_length, max_tokens=max_tokens)
                await round_times_ms(client, request)
                times: list[float] = []
                for _ in range(answers):
                    times += await round_times_ms(client, request)
                cuts = statistics.quantiles(times, n=100)
                rows.append(
                    {
                        "rule": rule.value,
                        "schedule": schedule.value,
                        "rounds": len(times),
                        "p50_ms": round(statistics.median(times), 3),
                        "p90_ms": round(cuts[89], 3),
                        "p99_ms": round(cuts[98], 3),
                    }
                )
    return rows


def main(
    draft_length: Annotated[int, typer.Option(help="Tokens of one draft.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Tokens of one answer.")] = 600,
    answers: Annotated[int, typer.Option(help="Answers for each row of the table.")] = 5,
) -> None:
    """Measure, print the table, and keep it under benchmarks/results/."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        word_tokenizer([f"t{token_id}" for token_id in range(VOCAB_SIZE)]).save_pretrained(folder)
        target = start(stack, "benchmarks.instant", "target")
        drafter = start(stack, "benchmarks.instant", "drafter")
        endpoint = start(stack, "orchestrator", "--target", target, "--drafter", drafter, "--tokenizer", str(folder))
        rows = asyncio.run(measure(endpoint, draft_length=draft_length, max_tokens=max_tokens, answers=answers))
    table = Table(title=f"One round with instant models, draft length {draft_length} ({machine()})")
    for column in rows[0]:
        table.add_column(column, justify="left" if column in ("rule", "schedule") else "right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
    worst = max(float(str(row["p50_ms"])) for row in rows)
    print(f"largest median: {worst:.2f} ms a round (limit {LIMIT_MS} ms)")
    write_report("overhead", {"draft_length": draft_length, "limit_ms": LIMIT_MS, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
