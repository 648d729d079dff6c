"""Offers a deployment four times what it can answer: who is refused, how fast, what the others notice, and memory.

Real services in processes of their own over real gRPC; the models take no time, and each of their steps is held to a set
time, so what is measured is Paceline under load and no speed of a model. Capacity is measured first, with as many callers
as there are places, each asking again when its answer has ended. Then requests arrive at random (Poisson), whatever becomes
of those before: at a normal load, and at the overload, which several tenants share very unevenly. No request is repeated.

The client shares the machine's cores with the services, so every time contains what the client itself was late.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated

import matplotlib.pyplot as plt
import typer
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

from benchmarks.instant import VOCAB_SIZE
from benchmarks.overhead import Service, start
from benchmarks.report import write_report
from paceline.bench.machine import machine
from paceline.client import GenerationClient
from paceline.errors import PacelineError, QueueFull
from paceline.generation import Delta, GenerationRequest, StopConditions
from paceline.process import new_event_loop
from paceline.types import SamplingParams
from tests.checkpoints import word_tokenizer

FIGURE = Path(__file__).parent.parent / "docs" / "overload.png"
ACCEPTED_COLOUR, REFUSED_COLOUR, LIMIT_COLOUR = "#1f5fa8", "#e08a1e", "#bb3333"

REFUSAL_LIMIT_S = 0.1
SLOWER_LIMIT = 1.5  # p99 of accepted requests, against that at normal load
GROWTH_LIMIT = 1.05  # of resident memory, from the first quarter of the overload to the last
SERVED_LIMIT = 0.95  # of the modest tenant's requests

TENANTS = {"flood": 0.85, "busy": 0.125, "modest": 0.025}
"""Whose requests arrive, by their shares of the overload."""
SHORTEST, LONGEST = 32, 96  # tokens of an answer
PROMPT_TOKENS = 16
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request and what became of it; seconds."""

    tenant: str
    arrived_s: float  # since the phase began
    first_token_s: float | None = None  # since its arrival; None: it was refused
    whole_s: float  # until it was answered or refused

    @property
    def is_accepted(self) -> bool:
        return self.first_token_s is not None


@dataclass(slots=True)
class Phase:
    """One load, and what was seen of it."""

    name: str
    seconds: float
    offered: float  # requests a second; 0: each caller asks again when it has its answer
    calls: list[Call] = field(default_factory=list)
    memory_mib: dict[str, list[float]] = field(default_factory=dict)  # of each service, once a second

    @property
    def accepted(self) -> list[Call]:
        return [call for call in self.calls if call.is_accepted]

    @property
    def refused(self) -> list[Call]:
        return [call for call in self.calls if not call.is_accepted]

    @property
    def answered(self) -> float:
        """Requests a second, of those that arrived in the phase."""
        return len(self.accepted) / self.seconds


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else float("nan")


# ---------------------------------------------------------------------------------------------------------------------
# Load


class Load:
    """Makes requests at one orchestrator, over a connection for each tenant."""

    def __init__(self, clients: Mapping[str, GenerationClient], *, seed: int) -> None:
        self._clients, self._drawn = clients, random.Random(seed)

    async def in_turn(self, phase: Phase, *, callers: int) -> None:
        """So many callers, each of which asks again and again."""
        began_s = time.perf_counter()

        async def caller(tenant: str) -> None:
            while time.perf_counter() - began_s < phase.seconds:
                phase.calls.append(await self._call(tenant, began_s))

        tenants = list(self._clients)
        await asyncio.gather(*(caller(tenants[number % len(tenants)]) for number in range(callers)))

    async def at_random(self, phase: Phase, shares: Mapping[str, float]) -> None:
        """Arrivals of a Poisson process, until the phase is over and its last answer has ended."""
        began_s, due_s = time.perf_counter(), 0.0
        async with asyncio.TaskGroup() as calls:
            while True:
                due_s += self._drawn.expovariate(phase.offered)
                if due_s >= phase.seconds:
                    return
                await asyncio.sleep(began_s + due_s - time.perf_counter())
                (tenant,) = self._drawn.choices(list(shares), list(shares.values()))
                calls.create_task(self._append(phase, self._call(tenant, began_s)))

    async def _append(self, phase: Phase, call: Awaitable[Call]) -> None:
        phase.calls.append(await call)

    async def _call(self, tenant: str, began_s: float) -> Call:
        asked = GenerationRequest(
            token_ids=tuple(self._drawn.choices(range(VOCAB_SIZE), k=PROMPT_TOKENS)),
            sampling=SamplingParams(temperature=1.0),
            stopping=StopConditions(max_tokens=self._drawn.randint(SHORTEST, LONGEST), ignore_eos=True),
            tenant=tenant,
        )
        arrived_s = time.perf_counter()
        first_token_s = None
        try:
            async for event in self._clients[tenant].generate(asked, timeout_s=TIMEOUT_S):
                if first_token_s is None and isinstance(event, Delta):
                    first_token_s = time.perf_counter() - arrived_s
        except QueueFull:
            first_token_s = None
        return Call(
            tenant=tenant,
            arrived_s=arrived_s - began_s,
            first_token_s=first_token_s,
            whole_s=time.perf_counter() - arrived_s,
        )


def resident_mib(service: Service) -> float:
    """Memory of a process that is in RAM."""
    for line in Path(f"/proc/{service.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise PacelineError(f"Process {service.pid} has ended; look at what it said.")


async def watched(phase: Phase, services: Mapping[str, Service], load: Awaitable[None]) -> Phase:
    """Put on the load, and look at the services' memory meanwhile."""

    async def look() -> None:
        while True:
            for name, service in services.items():
                phase.memory_mib.setdefault(name, []).append(resident_mib(service))
            await asyncio.sleep(1.0)

    watcher = asyncio.ensure_future(look())
    try:
        await load
    finally:
        watcher.cancel()
    print(f"{phase.name}: {len(phase.accepted)} answered, {len(phase.refused)} refused")
    return phase


async def run_phases(
    services: Mapping[str, Service], *, places: int, seconds: float, normal: float, times: float, seed: int
) -> list[Phase]:
    """Capacity, normal load, overload, and normal load once more."""
    async with AsyncExitStack() as stack:
        endpoint = services["orchestrator"].address
        clients = {
            tenant: await stack.enter_async_context(GenerationClient(endpoint, max_resumptions=0)) for tenant in TENANTS
        }
        load = Load(clients, seed=seed)
        # Costs are learned and buffers grown before anything is counted.
        await load.in_turn(Phase("warm-up", seconds / 6, 0.0), callers=places)
        full = Phase("all places busy", seconds / 2, 0.0)
        await watched(full, services, load.in_turn(full, callers=places))
        capacity = full.answered
        even = dict.fromkeys(TENANTS, 1.0)
        phases = [full]
        for name, share, tenants in (
            ("normal", normal, even),
            ("overload", times, TENANTS),
            ("normal again", normal, even),
        ):
            phase = Phase(name, seconds, share * capacity)
            phases.append(await watched(phase, services, load.at_random(phase, tenants)))
        return phases


# ---------------------------------------------------------------------------------------------------------------------
# What is said of it


@dataclass(frozen=True, slots=True)
class Claim:
    """What should hold, and what was measured."""

    name: str
    measured: float
    limit: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


def growth(samples: Sequence[float]) -> float:
    """The mean of the last quarter of the samples over that of the first."""
    quarter = max(1, len(samples) // 4)
    return fmean(samples[-quarter:]) / fmean(samples[:quarter])


def claims(phases: Sequence[Phase]) -> list[Claim]:
    _, normal, overload, _ = phases
    refused_s = [call.whole_s for call in overload.refused]
    modest = [call for call in overload.calls if call.tenant == "modest"]

    def slower(value: Callable[[Call], float]) -> float:
        return percentile([*map(value, overload.accepted)], 99) / percentile([*map(value, normal.accepted)], 99)

    return [
        Claim("refused: p99, s", percentile(refused_s, 99), REFUSAL_LIMIT_S),
        Claim("refused: longest, s", max(refused_s, default=float("nan")), REFUSAL_LIMIT_S),
        Claim("accepted: p99 of the whole time, against normal", slower(lambda call: call.whole_s), SLOWER_LIMIT),
        Claim(
            "accepted: p99 of the time to the first token, against normal",
            slower(lambda call: call.first_token_s or 0.0),
            SLOWER_LIMIT,
        ),
        *(
            Claim(f"{name}: memory at the end of the overload, against its beginning", growth(samples), GROWTH_LIMIT)
            for name, samples in overload.memory_mib.items()
        ),
        Claim(
            "modest tenant: share of its requests answered",
            sum(call.is_accepted for call in modest) / max(1, len(modest)),
            SERVED_LIMIT,
            at_least=True,
        ),
    ]


def times_row(name: str, phase: Phase, calls: Sequence[Call]) -> dict[str, object]:
    """Of one load, or of one tenant's part in it."""
    accepted = [call for call in calls if call.is_accepted]
    refused = [call for call in calls if not call.is_accepted]
    row: dict[str, object] = {
        "load": name,
        "offered /s": round(len(calls) / phase.seconds, 1),
        "answered /s": round(len(accepted) / phase.seconds, 1),
        "refused %": round(100 * len(refused) / max(1, len(calls)), 1),
    }
    for title, values in (
        ("first token", [call.first_token_s or 0.0 for call in accepted]),
        ("whole", [call.whole_s for call in accepted]),
        ("refusal", [call.whole_s for call in refused]),
    ):
        for percent in (50, 99):
            row[f"{title} p{percent} ms"] = round(1e3 * percentile(values, percent), 1) if values else None
    row["refusal max ms"] = round(1e3 * max(call.whole_s for call in refused), 1) if refused else None
    return row


def rows_of(phases: Sequence[Phase]) -> list[dict[str, object]]:
    overload = phases[2]
    return [
        *(times_row(phase.name, phase, phase.calls) for phase in phases),
        *(
            times_row(f"  {tenant}", overload, [call for call in overload.calls if call.tenant == tenant])
            for tenant in TENANTS
        ),
    ]


def show(rows: Sequence[Mapping[str, object]], found: Sequence[Claim], *, title: str) -> None:
    console = Console()
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "load" else "right")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    console.print(table)
    verdicts = Table(title="What should hold")
    for column in ("claim", "measured", "limit", ""):
        verdicts.add_column(column, justify="left" if column in ("claim", "") else "right")
    for claim in found:
        sign = ">=" if claim.at_least else "<="
        verdict = "holds" if claim.holds else "DOES NOT HOLD"
        verdicts.add_row(claim.name, f"{claim.measured:.3g}", f"{sign} {claim.limit:g}", verdict)
    console.print(verdicts)
    print(f"{sum(claim.holds for claim in found)} of {len(found)} claims hold")


def draw(phases: Sequence[Phase], *, caption: str) -> None:
    """Every request of the overload by when it came, then the distributions, then memory."""
    _, normal, overload, _ = phases
    figure, panels = plt.subplots(3, 1, figsize=(10, 9), layout="constrained", height_ratios=(3, 2, 2))
    calls, shares, memory = panels
    for chosen, colour, label in (
        (overload.accepted, ACCEPTED_COLOUR, "answered: the whole time"),
        (overload.refused, REFUSED_COLOUR, "refused: until the refusal"),
    ):
        times_ms = [1e3 * call.whole_s for call in chosen]
        calls.scatter([call.arrived_s for call in chosen], times_ms, s=3, color=colour, label=label, linewidths=0)
    calls.axhline(1e3 * REFUSAL_LIMIT_S, color=LIMIT_COLOUR, linewidth=0.8, label="limit for refusals")
    calls.set_yscale("log")
    _dress(calls, "requests of the overload, ms", "seconds since it began")
    for phase, style in ((normal, ":"), (overload, "-")):
        for name, values, colour in (
            ("first token", [call.first_token_s or 0.0 for call in phase.accepted], REFUSED_COLOUR),
            ("whole time", [call.whole_s for call in phase.accepted], ACCEPTED_COLOUR),
        ):
            ordered = sorted(1e3 * value for value in values)
            percents = [100 * (rank + 1) / len(ordered) for rank in range(len(ordered))]
            shares.plot(ordered, percents, color=colour, linestyle=style, label=f"{name}, {phase.name}")
    _dress(shares, "share of the answered requests that took no longer, %", "ms")
    for name, samples in overload.memory_mib.items():
        memory.plot(range(len(samples)), samples, label=name, linewidth=1.2)
    memory.set_ylim(0)
    _dress(memory, "resident memory during the overload, MiB", f"seconds since it began\n{caption}")
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, dpi=110)


def _dress(axes: Axes, title: str, below: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(below, fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main(
    seconds: Annotated[float, typer.Option(help="Of each load.")] = 60.0,
    places: Annotated[int, typer.Option(help="Answers at once: max_sessions of the orchestrator.")] = 16,
    queue: Annotated[str, typer.Option(help="max_queued_requests of the orchestrator.")] = "auto",
    normal: Annotated[float, typer.Option(help="The normal load, as a share of what can be answered.")] = 0.8,
    times: Annotated[float, typer.Option(help="The overload, likewise.")] = 4.0,
    target_step_ms: Annotated[float, typer.Option(help="Emulated: of a target's step.")] = 40.0,
    drafter_step_ms: Annotated[float, typer.Option(help="Emulated: of a drafter's step.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Of arrivals, prompts and lengths.")] = 1,
) -> None:
    """Measure, print the tables, draw `docs/overload.png`, and keep the figures under benchmarks/results/."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        word_tokenizer([f"t{token_id}" for token_id in range(VOCAB_SIZE)]).save_pretrained(folder)
        emulated = "--emulated-step-ms"
        target = start(stack, "benchmarks.instant", "target", emulated, str(target_step_ms))
        drafter = start(stack, "benchmarks.instant", "drafter", emulated, str(drafter_step_ms))
        pools = ("--target", target.address, "--drafter", drafter.address, "--tokenizer", str(folder))
        limits = ("--max-sessions", str(places), "--max-queued-requests", queue)
        services = {"target": target, "drafter": drafter, "orchestrator": start(stack, "orchestrator", *pools, *limits)}
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            phases = runner.run(
                run_phases(services, places=places, seconds=seconds, normal=normal, times=times, seed=seed)
            )
    rows, found = rows_of(phases), claims(phases)
    steps = f"steps held to {target_step_ms:g} ms (target) and {drafter_step_ms:g} ms (drafter)"
    caption = f"emulated: {steps}; {places} places, queue {queue}, {times:g} times capacity\n{machine()}"
    show(rows, found, title=f"{times:g} times what can be answered\n{caption}")
    draw(phases, caption=caption)
    write_report(
        "overload",
        {
            "emulated": True,
            "seconds": seconds,
            "places": places,
            "queue": queue,
            "target_step_ms": target_step_ms,
            "drafter_step_ms": drafter_step_ms,
            "seed": seed,
            "rows": rows,
            "memory_mib": {
                phase.name: {
                    name: [round(min(values), 1), round(max(values), 1)] for name, values in phase.memory_mib.items()
                }
                for phase in phases
            },
            "claims": [
                {"claim": claim.name, "measured": round(claim.measured, 4), "limit": claim.limit, "holds": claim.holds}
                for claim in found
            ],
        },
    )


if __name__ == "__main__":
    typer.run(main)
