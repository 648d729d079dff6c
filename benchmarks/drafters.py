"""What each drafting method is worth: speed against plain decoding, acceptance, and where the drafts come from.

    python -m benchmarks.drafters --method suffix --method draft_model --drafter NAME --check

Real services, one session at a time. The target computes with one thread on a core of its own; the drafter has one
thread on a second core, which it shares with the orchestrator and this client. Plain decoding is measured on the very
same services: each prompt is answered plainly and under every setting, in an order that rotates from prompt to prompt,
so whatever the machine does meanwhile happens to all. The speed of an answer is that behind its first token; each prompt
is put through once before, so no answer pays for it. Ratios are of sums: all tokens over all seconds.

No answer helps itself: what one setting's answers teach a drafter is kept from the others (`tenant`), and each has every
prompt once. Seeds are fixed, so that under the rules `greedy` and `coupled` every setting decodes the text that plain
decoding does, but for near ties of two tokens, which bfloat16 rounds differently in a block; how many answers are the
same is in the report.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import typer
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.overhead import start
from benchmarks.report import write_report
from benchmarks.workloads import FOLDER, Workload, load_workload
from paceline.bench.cores import pinned
from paceline.bench.limits import estimated_acceptance
from paceline.bench.machine import machine
from paceline.bench.plan import in_rotation
from paceline.bench.prompts import BenchPrompt
from paceline.client import GenerationClient
from paceline.generation import (
    Delta,
    Finished,
    GenerationRequest,
    Schedule,
    SpeculationOptions,
    SpeculationUsage,
    StopConditions,
)
from paceline.types import FinishReason, Origin, SamplingParams, VerificationRule

FIGURE = Path(__file__).parent.parent / "docs" / "drafters.svg"
HELD_OUT, REPETITIVE = "held_out", "repetitive"  # workloads that have limits
WARM_UP_TOKENS = 8

# Where a method stops by itself, as suffix decoding does, a long draft length is a bound and costs nothing.
USUAL_DRAFT_LENGTHS = {"draft_model": 4, "ngram": 8, "suffix": 16, "hybrid": 8}
DEFAULT_DRAFT_LENGTH = 8  # of a method that another package brings
METHODS_WITH_A_MODEL = ("draft_model", "hybrid")
COLOURS = ("#1f5fa8", "#e08a1e", "#3f8f5f", "#7a7a7a", "#9a4f96")


# ---------------------------------------------------------------------------------------------------------------------
# What is measured


@dataclass(frozen=True, slots=True)
class Setting:
    """How an answer is drafted; plain decoding is a setting too."""

    schedule: Schedule
    draft_length: int  # tokens

    def __str__(self) -> str:
        return self.schedule.value if self == PLAIN else f"{self.schedule.value} {self.draft_length}"


PLAIN = Setting(Schedule.PLAIN, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What every method is put through."""

    workloads: tuple[Workload, ...]
    temperatures: tuple[float, ...]
    schedules: tuple[Schedule, ...]
    draft_lengths: tuple[int, ...]  # empty: each method's usual one
    rule: VerificationRule  # above temperature 0
    max_tokens: int
    ignore_eos: bool
    repeats: int

    def settings(self, method: str) -> tuple[Setting, ...]:
        """Plain decoding first."""
        lengths = self.draft_lengths or (USUAL_DRAFT_LENGTHS.get(method, DEFAULT_DRAFT_LENGTH),)
        return (PLAIN, *(Setting(schedule, length) for schedule, length in product(self.schedules, lengths)))

    def answers(self, method: str) -> int:
        prompts = sum(len(workload.prompts) for workload in self.workloads)
        return prompts * len(self.temperatures) * self.repeats * len(self.settings(method))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer as the client saw it."""

    prompt: str
    kind: str
    decode_s: float  # from the arrival of the first token to that of the last
    decoded_tokens: int  # in that time
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]  # one a token
    finish_reason: FinishReason
    speculation: SpeculationUsage


@dataclass(frozen=True, slots=True)
class Case:
    """What one line of the report is about."""

    method: str
    workload: str
    temperature: float
    setting: Setting


Answers = dict[Case, list[Answer]]


def request_for(
    prompt: BenchPrompt, plan: Plan, setting: Setting, *, temperature: float, seed: int, tenant: str
) -> GenerationRequest:
    return GenerationRequest(
        messages=prompt.messages,
        sampling=SamplingParams(temperature=temperature),
        stopping=StopConditions(max_tokens=plan.max_tokens, ignore_eos=plan.ignore_eos),
        speculation=SpeculationOptions(
            rule=plan.rule if temperature else VerificationRule.GREEDY,
            schedule=setting.schedule,
            draft_length=setting.draft_length,
        ),
        seed=seed,
        tenant=tenant,
    )


async def answer(client: GenerationClient, prompt: BenchPrompt, request: GenerationRequest) -> Answer:
    """Ask, and time what comes."""
    arrivals: list[tuple[float, Delta]] = []
    finished: Finished | None = None
    async for event in client.generate(request):
        if isinstance(event, Delta) and event.token_ids:
            arrivals.append((time.perf_counter(), event))
        elif isinstance(event, Finished):
            finished = event
    assert finished is not None, "a stream without its end raises"
    (first_s, first), (last_s, _) = arrivals[0], arrivals[-1]
    token_ids = tuple(token_id for _, delta in arrivals for token_id in delta.token_ids)
    return Answer(
        prompt=prompt.id,
        kind=prompt.kind,
        decode_s=last_s - first_s,
        decoded_tokens=len(token_ids) - len(first.token_ids),
        token_ids=token_ids,
        origins=tuple(origin for _, delta in arrivals for origin in delta.origins),
        finish_reason=finished.finish_reason,
        speculation=finished.speculation,
    )


async def measure(endpoint: str, method: str, plan: Plan, *, on_answer: Callable[[str], None]) -> Answers:
    """All answers of one method, whose services are behind the endpoint; `on_answer` is called with what comes next."""
    answers: Answers = defaultdict(list)
    settings = plan.settings(method)
    async with GenerationClient(endpoint) as client:
        for workload, number, prompt in _numbered(plan.workloads):
            await _warm_up(client, prompt, plan, settings[-1])
            for temperature, repeat in product(plan.temperatures, range(plan.repeats)):
                for setting in in_rotation(settings, number + repeat):
                    on_answer(f"{method}, {prompt.id}, temperature {temperature:g}, {setting}")
                    tenant = f"{workload} {temperature:g} {repeat} {setting}"
                    request = request_for(
                        prompt, plan, setting, temperature=temperature, seed=repeat + 1, tenant=tenant
                    )
                    case = Case(method, workload, temperature, setting)
                    answers[case].append(await answer(client, prompt, request))
    return dict(answers)


def _numbered(workloads: Iterable[Workload]) -> Iterator[tuple[str, int, BenchPrompt]]:
    """Every prompt, behind the name of its workload and its number there."""
    for workload in workloads:
        for number, prompt in enumerate(workload.prompts):
            yield workload.name, number, prompt


async def _warm_up(client: GenerationClient, prompt: BenchPrompt, plan: Plan, setting: Setting) -> None:
    """Let target and drafter read the prompt; their prefix caches hold it from now on."""
    short = replace(plan, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
    await client.complete(request_for(prompt, short, setting, temperature=0.0, seed=1, tenant=f"warm-up {prompt.id}"))


# ---------------------------------------------------------------------------------------------------------------------
# Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the answers of one case come to, beside the plain answers to the same prompts."""

    answers: int
    tokens_per_answer: float
    tokens_per_second: float
    plain_tokens_per_second: float
    speed_up: float  # of all answers together
    median_speed_up: float  # of the answers one by one
    acceptance: float  # `a` of design section 6
    mean_acceptance_length: float  # tokens that a round with a draft yields
    acceptance_by_position: tuple[float, ...]  # drafts that were kept up to there over drafts that reached there
    drafts_by_position: tuple[int, ...]
    rounds_by_origin: Mapping[str, float]  # shares: "drafter", "fallback" (the orchestrator's own), "none" (no draft)
    tokens_by_origin: Mapping[str, float]  # shares (`types.Origin`)
    waiting_share: float  # of the time, for drafts
    same_text_share: float  # of the answers, that hold the tokens of the plain ones
    ended_share: float  # of the answers, that ended by themselves and not at the limit


def figures_of(answers: Sequence[Answer], plain: Sequence[Answer]) -> Figures:
    """`plain` are the plain answers to the same prompts in the same order."""
    usages = [each.speculation for each in answers]
    speed, plain_speed = tokens_per_second(answers), tokens_per_second(plain)
    accepted = sum(usage.num_accepted_tokens for usage in usages)
    drafts = sum(usage.num_drafts for usage in usages)
    kept = _by_position(usage.num_accepted_tokens_per_pos for usage in usages)
    drafted = _by_position(usage.num_draft_tokens_per_pos for usage in usages)
    pairs = list(zip(answers, plain, strict=True))
    single = [tokens_per_second([one]) / tokens_per_second([other]) for one, other in pairs if _have_speed(one, other)]
    return Figures(
        answers=len(answers),
        tokens_per_answer=statistics.mean(len(each.token_ids) for each in answers),
        tokens_per_second=speed,
        plain_tokens_per_second=plain_speed,
        speed_up=_share(speed, plain_speed),
        median_speed_up=statistics.median(single) if single else 0.0,
        acceptance=estimated_acceptance(accepted, sum(usage.num_rejections for usage in usages)),
        mean_acceptance_length=1 + _share(accepted, drafts),
        acceptance_by_position=tuple(map(_share, kept, drafted)),
        drafts_by_position=drafted,
        rounds_by_origin=_rounds_by_origin(usages),
        tokens_by_origin=_shares(Counter(origin.value for each in answers for origin in each.origins)),
        waiting_share=_share(sum(usage.draft_wait_s for usage in usages), sum(usage.elapsed_s for usage in usages)),
        same_text_share=statistics.mean(one.token_ids == other.token_ids for one, other in pairs),
        ended_share=statistics.mean(each.finish_reason is FinishReason.STOP for each in answers),
    )


def tokens_per_second(answers: Iterable[Answer]) -> float:
    """Behind the first tokens; 0 where no answer has more than that."""
    answers = list(answers)
    return _share(sum(each.decoded_tokens for each in answers), sum(each.decode_s for each in answers))


def _have_speed(*answers: Answer) -> bool:
    return all(each.decoded_tokens and each.decode_s for each in answers)


def _by_position(counts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    total: Counter[int] = Counter()
    for of_answer in counts:
        total.update(dict(enumerate(of_answer)))
    return tuple(total[position] for position in range(len(total)))


def _rounds_by_origin(usages: Sequence[SpeculationUsage]) -> Mapping[str, float]:
    fallback = sum(usage.fallback_rounds for usage in usages)
    drafter = sum(usage.num_drafts for usage in usages) - fallback
    return _shares({"drafter": drafter, "fallback": fallback, "none": sum(usage.plain_rounds for usage in usages)})


def _shares(counts: Mapping[str, int]) -> dict[str, float]:
    total = sum(counts.values())
    return {name: _share(count, total) for name, count in counts.items()}


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """One case, as a whole and by kind of prompt."""

    case: Case
    figures: Figures
    by_kind: Mapping[str, Figures]


def results_of(answers: Answers) -> list[Result]:
    """One for each case that speculates, in their order."""
    results = []
    for case, of_case in answers.items():
        if case.setting == PLAIN:
            continue
        plain = answers[Case(case.method, case.workload, case.temperature, PLAIN)]
        pairs = list(zip(of_case, plain, strict=True))
        by_kind = {
            kind: figures_of(*zip(*[pair for pair in pairs if pair[0].kind == kind], strict=True))
            for kind in dict.fromkeys(each.kind for each in of_case)
        }
        results.append(Result(case, figures_of(of_case, plain), by_kind))
    return sorted(results, key=lambda result: (result.case.workload, result.case.temperature))


# ---------------------------------------------------------------------------------------------------------------------
# Limits


@dataclass(frozen=True, slots=True)
class Check:
    """A speed-up that must be reached; `value` is None where nothing was measured that it is about."""

    what: str
    value: float | None
    limit: float

    @property
    def passes(self) -> bool:
        return self.value is None or self.value >= self.limit

    def __str__(self) -> str:
        if self.value is None:
            return f"[dim]not measured[/]  {self.what} (≥ {self.limit:g})"
        return (
            f"{'[green]pass[/]' if self.passes else '[red]FAIL[/]'}  {self.what}: {self.value:.2f} (≥ {self.limit:g})"
        )


def checks_of(results: Sequence[Result]) -> list[Check]:
    """What the drafters promise: the gains by the best setting, that nothing is lost by every setting."""
    trained = [
        result.figures.speed_up
        for result in results
        if (result.case.method, result.case.workload, result.case.temperature) == ("draft_model", HELD_OUT, 0.0)
    ]
    suffix = [result for result in results if result.case.method == "suffix"]
    repetitive = [
        result.figures.speed_up
        for result in suffix
        if (result.case.workload, result.case.temperature) == (REPETITIVE, 0.0)
    ]
    chat = [result.by_kind["chat"].speed_up for result in suffix if result.case.workload == HELD_OUT]
    return [
        Check("draft_model, temperature 0, best setting / plain", max(trained, default=None), 1.5),
        Check("suffix, repetitive, temperature 0, best setting / plain", max(repetitive, default=None), 2.0),
        Check("suffix, held-out chat, worst setting / plain", min(chat, default=None), 0.98),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Tables and figure


def speed_table(workload: str, results: Sequence[Result]) -> Table:
    """A line a case, with a ratio for each kind of prompt; fits into 80 columns."""
    kinds = list(dict.fromkeys(kind for result in results for kind in result.by_kind))
    table = _table(
        f"{workload}: tokens a second behind the first, and ratios to plain",
        ("plain", "drafted", "ratio", *(kind.replace("_", "\n") for kind in kinds), "same\ntext"),
    )
    for result in results:
        figures = result.figures
        table.add_row(
            *_names(result.case),
            f"{figures.plain_tokens_per_second:.1f}",
            f"{figures.tokens_per_second:.1f}",
            f"[bold]{figures.speed_up:.2f}[/]",
            *(f"{result.by_kind[kind].speed_up:.2f}" if kind in result.by_kind else "" for kind in kinds),
            f"{figures.same_text_share:.0%}",
        )
    return table


def acceptance_table(workload: str, results: Sequence[Result], *, positions: int = 5) -> Table:
    """A line a case, with percentages of rounds by the origin of their draft; fits into 80 columns."""
    table = _table(
        f"{workload}: what is accepted, and who drafted (of the rounds: drafter, orchestrator, nobody)",
        ("a", "tokens\na draft", "% drafted\nby", "%\nwaiting", f"% kept up to\nposition 1-{positions}"),
    )
    for result in results:
        figures = result.figures
        table.add_row(
            *_names(result.case),
            f"{figures.acceptance:.3f}",
            f"{figures.mean_acceptance_length:.2f}",
            _percentages(figures.rounds_by_origin.values()),
            _percentages([figures.waiting_share]),
            _percentages(figures.acceptance_by_position[:positions]),
        )
    return table


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("method", "T", "setting"):
        table.add_column(column)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _percentages(shares: Iterable[float]) -> str:
    return " ".join(f"{share * 100:.0f}" for share in shares)


def _names(case: Case) -> tuple[str, str, str]:
    return case.method, f"{case.temperature:g}", str(case.setting)


def best_by_temperature(results: Sequence[Result]) -> dict[tuple[str, float], Result]:
    """Of each method at each temperature the setting with the highest speed-up."""
    best: dict[tuple[str, float], Result] = {}
    for result in results:
        key = (result.case.method, result.case.temperature)
        if key not in best or best[key].figures.speed_up < result.figures.speed_up:
            best[key] = result
    return best


def draw(results: Sequence[Result], *, caption: str) -> None:
    """A column a workload: above the best speed-ups, below what is accepted by position at the lowest temperature."""
    workloads = list(dict.fromkeys(result.case.workload for result in results))
    figure, panels = plt.subplots(
        2, len(workloads), figsize=(5.6 * len(workloads), 7.6), layout="constrained", squeeze=False
    )
    for column, workload in enumerate(workloads):
        best = best_by_temperature([result for result in results if result.case.workload == workload])
        _draw_speed_ups(panels[0][column], workload, best)
        _draw_positions(panels[1][column], best)
    panels[0][0].set_ylabel("speed-up over plain decoding")
    panels[1][0].set_ylabel("kept, of the drafts that reach the position")
    figure.supxlabel(caption, fontsize=8)
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE)
    figure.savefig(FIGURE.with_suffix(".png"), dpi=110)
    plt.close(figure)


def _draw_speed_ups(axes: Axes, workload: str, best: Mapping[tuple[str, float], Result]) -> None:
    methods, temperatures = (list(dict.fromkeys(names)) for names in zip(*best, strict=True))
    width = 0.8 / len(methods)
    for number, method in enumerate(methods):
        heights = [best[method, temperature].figures.speed_up for temperature in temperatures]
        places = [place + (number - (len(methods) - 1) / 2) * width for place in range(len(temperatures))]
        bars = axes.bar(places, heights, width * 0.92, color=COLOURS[number % len(COLOURS)], label=method)
        axes.bar_label(bars, [f"{height:.2f}" for height in heights], padding=2, fontsize=8)
    axes.axhline(1.0, color="#333333", linewidth=0.8, linestyle="--")
    axes.set_title(f"{workload.replace('_', '-')} prompts, best setting", loc="left", fontsize=10)
    axes.set_xticks(range(len(temperatures)), [f"temperature {temperature:g}" for temperature in temperatures])
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.12)
    axes.legend(frameon=False, fontsize=8, ncols=2)
    _without_frame(axes)


def _draw_positions(axes: Axes, best: Mapping[tuple[str, float], Result]) -> None:
    lowest = min(temperature for _, temperature in best)
    of_lowest = [result for (_, temperature), result in best.items() if temperature == lowest]
    for number, result in enumerate(of_lowest):
        shares = result.figures.acceptance_by_position
        label = f"{result.case.method}, {result.case.setting}"
        axes.plot(
            range(1, len(shares) + 1),
            shares,
            marker="o",
            markersize=3,
            color=COLOURS[number % len(COLOURS)],
            label=label,
        )
    axes.set_ylim(0, 1.05)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("position in the draft", fontsize=9)
    axes.set_title(f"temperature {lowest:g}", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    _without_frame(axes)


def _without_frame(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


# ---------------------------------------------------------------------------------------------------------------------
# Services


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """What the services run; None and 0 leave it to them."""

    target: str | None
    drafter: str | None
    logit_noise: float
    dtype: str

    def target_options(self) -> list[str]:
        return [*_option("--model", self.target), "--dtype", self.dtype]

    def drafter_options(self, method: str) -> list[str]:
        options = ["--method", method]
        if method in METHODS_WITH_A_MODEL:
            options += [*_option("--model", self.drafter), "--dtype", self.dtype]
            options += ["--logit-noise", str(self.logit_noise)]
        return options


def _option(name: str, value: str | None) -> list[str]:
    return [] if value is None else [name, value]


async def target_dtype(endpoint: str) -> str:
    async with GenerationClient(endpoint) as client:
        return (await client.server_info()).target.dtype


# ---------------------------------------------------------------------------------------------------------------------
# The whole


def report_body(
    plan: Plan, models: Models, results: Sequence[Result], checks: Sequence[Check], *, dtype: str
) -> dict[str, object]:
    described = {name: value for name, value in asdict(plan).items() if name not in ("workloads", "draft_lengths")}
    return {
        "models": asdict(models),
        "target_dtype": dtype,
        "prompts": {workload.name: Counter(prompt.kind for prompt in workload.prompts) for workload in plan.workloads},
        **described,
        "results": [asdict(result) for result in results],
        "checks": [{**asdict(check), "passes": check.passes} for check in checks],
    }


def keep(body: dict[str, object], output: Path | None) -> None:
    """Under benchmarks/results/, or, of a trial, in the file that was asked for."""
    if output is None:
        write_report("drafters", body)
        return
    trial = {"command": f"python -m benchmarks.drafters {shlex.join(sys.argv[1:])}", "machine": machine(), **body}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(trial, indent=1) + "\n")


def cores_of(text: str) -> tuple[int, int]:
    """The target's core and that of all others; without a text, the first two that this process may use."""
    allowed = sorted(os.sched_getaffinity(0))
    names = text.split(",") if text else [str(core) for core in allowed[:2]]
    if len(names) != 2 or not set(names) <= {str(core) for core in allowed}:
        found = ", ".join(map(str, allowed))
        raise typer.BadParameter(f"two cores are needed; this process may use {found}", param_hint="--cores")
    return int(names[0]), int(names[1])


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Call what this gives before each answer; it leaves no trace on the terminal."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=total)
        begun = 0

        def begin(description: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=description)
            begun += 1

        yield begin


def main(
    method: Annotated[list[str] | None, typer.Option(help="Drafting method; repeatable.")] = None,
    target: Annotated[str | None, typer.Option(help="The target's model, as for `paceline up`.")] = None,
    drafter: Annotated[str | None, typer.Option(help="The model of draft_model and hybrid.")] = None,
    logit_noise: Annotated[float, typer.Option(help="Noise on the drafter's logits, for trials.")] = 0.0,
    dtype: Annotated[str, typer.Option(help="Of weights and activations.")] = "auto",
    prompts: Annotated[list[Path] | None, typer.Option(help="Workload; repeatable.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Prompts of each workload; 0: all.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of one answer.")] = 128,
    ignore_eos: Annotated[bool, typer.Option(help="Go on behind the end of an answer.")] = False,
    temperatures: Annotated[str, typer.Option(help="Comma-separated.")] = "0,0.7,1.0",
    schedules: Annotated[str, typer.Option(help="Comma-separated.")] = "sequential,pipelined",
    draft_lengths: Annotated[str, typer.Option(help="Comma-separated; none: each method's usual one.")] = "",
    rule: Annotated[VerificationRule, typer.Option(help="Above temperature 0.")] = VerificationRule.COUPLED,
    repeats: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 1,
    cores: Annotated[
        str, typer.Option(help="The target's core, and that of all others: 0,1; one core twice tries it out.")
    ] = "",
    output: Annotated[Path | None, typer.Option(help="Keep the figures there, and draw nothing.")] = None,
    check: Annotated[bool, typer.Option(help="Exit with 1 if a limit is missed, or none was measured.")] = False,
) -> None:
    """Measure, print the tables, draw `docs/drafters.svg`, and keep the figures under benchmarks/results/."""
    if rule is VerificationRule.GREEDY:
        raise typer.BadParameter("greedy is the rule of temperature 0 alone", param_hint="--rule")
    methods = list(dict.fromkeys(method or USUAL_DRAFT_LENGTHS))
    paths = prompts or [FOLDER / f"{name}.jsonl" for name in (HELD_OUT, REPETITIVE)]
    plan = Plan(
        workloads=tuple(load_workload(path).limited(limit) for path in paths),
        temperatures=tuple(map(float, temperatures.split(","))),
        schedules=tuple(map(Schedule, schedules.split(","))),
        draft_lengths=tuple(map(int, filter(None, draft_lengths.split(",")))),
        rule=rule,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        repeats=repeats,
    )
    models = Models(target=target, drafter=drafter, logit_noise=logit_noise, dtype=dtype)
    results = run_all(methods, plan, models, cores=cores_of(cores), output=output)
    checks = checks_of(results)
    for each in checks:
        Console().print(str(each))
    if check and not (all(each.passes for each in checks) and any(each.value is not None for each in checks)):
        raise typer.Exit(1)


def run_all(
    methods: Sequence[str], plan: Plan, models: Models, *, cores: tuple[int, int], output: Path | None
) -> list[Result]:
    """Every method in turn beside the same target; figures are kept after each, should a later one be broken off."""
    target_core, other_core = cores
    results: list[Result] = []
    with ExitStack() as stack:
        begin = stack.enter_context(progress_bar(sum(map(plan.answers, methods))))
        with pinned([target_core]):
            target = start(stack, "target_service", "--threads", "1", *models.target_options())
        for method in methods:
            with pinned([other_core]), ExitStack() as of_method:
                drafter = start(of_method, "drafter_service", "--threads", "1", *models.drafter_options(method))
                options = ("--threads", "1", "--target", target.address, "--drafter", drafter.address)
                orchestrator = start(of_method, "orchestrator", *options, *_option("--tokenizer", models.target))
                endpoint = orchestrator.address
                dtype = asyncio.run(target_dtype(endpoint))
                results += results_of(asyncio.run(measure(endpoint, method, plan, on_answer=begin)))
            keep(report_body(plan, models, results, checks_of(results), dtype=dtype), output)
    for workload in plan.workloads:
        of_workload = [result for result in results if result.case.workload == workload.name]
        Console().print(speed_table(workload.name, of_workload), acceptance_table(workload.name, of_workload))
    if output is None:
        draw(results, caption=f"one session, target and drafter one thread each, {dtype}; {machine()}")
    return results


if __name__ == "__main__":
    typer.run(main)
