"""`paceline demo`: the same prompts plain, sequential and pipelined on one stack, with the speeds side by side."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from paceline.cli import options
from paceline.cli.answers import stream_answer
from paceline.cli.comparison import PromptRuns, comparison_table, verdict_on_equality, verdict_on_speed
from paceline.cli.laptop import laptop_configuration
from paceline.cli.serving import free_port, running_application, running_stack
from paceline.cli.show import counted, legend
from paceline.cli.terminal import Terminal, with_plain_errors
from paceline.client import (
    DEFAULT_TIMEOUT_S,
    ChatMessage,
    Completion,
    Delta,
    GenerationClient,
    GenerationRequest,
    SamplingParams,
    Schedule,
    ServerInfo,
    SpeculationOptions,
    StopConditions,
)
from paceline.generation import CompletionBuilder
from paceline.local_stack import (
    NGRAM_DRAFTER,
    NO_DRAFTER,
    SUFFIX_DRAFTER,
    LocalStackSettings,
    ThreadPlan,
    available_cores,
    plan_threads,
)


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A prompt, and what kind of work it stands for."""

    name: str
    text: str


PROMPTS = (
    DemoPrompt(
        "edit code",
        "Rewrite this Python function with the variable `total` renamed to `price_sum`. Answer with the code only.\n\n"
        "def receipt(items):\n"
        "    total = 0.0\n"
        "    for name, price, count in items:\n"
        '        print(f"{count} x {name}: {price * count:.2f}")\n'
        "        total = total + price * count\n"
        '    print(f"Sum: {total:.2f}")\n'
        "    return total\n",
    ),
    DemoPrompt(
        "quote",
        "Repeat the following paragraph word for word.\n\n"
        "In a paceline, cyclists take turns in front, so that the one behind rides in the draft of the one ahead. "
        "The rider in front works hard and the rider behind saves strength, and after a while they change places. "
        "In this way the group is faster than any of its riders would be alone.",
    ),
    DemoPrompt("explain", "Explain in a few sentences why the sky is blue."),
    DemoPrompt("advice", "Give me three tips for a good night's sleep."),
)
SCHEDULES = (Schedule.PLAIN, Schedule.SEQUENTIAL, Schedule.PIPELINED)


@with_plain_errors
def demo(
    *,
    target: options.Target = None,
    drafter: options.Drafter = None,
    dtype: options.Dtype = None,
    draft_length: options.DraftLength = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens of each answer.")] = 64,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Run the services on Ray Serve, which takes longer to start: a minute or two in all."
        ),
    ] = False,
) -> None:
    """Watch a model answer through three services, then compare plain, sequential and pipelined decoding."""
    if drafter == NO_DRAFTER or draft_length == 0:
        raise typer.BadParameter("the demo compares decoding with drafts and without; it needs a drafter that drafts.")
    terminal = Terminal.open()
    settings = LocalStackSettings(
        target=target,
        drafter=drafter or NGRAM_DRAFTER,
        dtype=dtype or options.DtypeChoice.AUTO,
        draft_length=draft_length,
    )
    # Before the services start, so that it is the load of others.
    load = os.getloadavg()[0]
    stage = _stage_on_ray(settings, terminal) if ray else _stage_of_processes(settings, terminal)
    with stage as running:
        asyncio.run(_run(running, terminal, load=load, max_tokens=max_tokens))


# ---------------------------------------------------------------------------------------------------------------------
# What it runs on


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the answers come from, and what their speed depends on."""

    endpoint: str
    threads: ThreadPlan
    has_neural_drafter: bool
    services: str  # how they run, in words


@contextmanager
def _stage_of_processes(settings: LocalStackSettings, terminal: Terminal) -> Iterator[Stage]:
    with running_stack(settings, terminal) as stack:
        services = "three processes that talk gRPC"
        yield Stage(stack.endpoint, stack.threads, settings.has_neural_drafter, services)


@contextmanager
def _stage_on_ray(settings: LocalStackSettings, terminal: Terminal) -> Iterator[Stage]:
    from orchestrator.config import parse_serve_file  # noqa: PLC0415 - for Ray only

    threads = plan_threads(available_cores(), has_neural_drafter=settings.has_neural_drafter)
    file = parse_serve_file(ray_configuration(settings, threads))
    with running_application(file, terminal) as endpoint:
        services = "three Ray Serve deployments that talk gRPC"
        yield Stage(endpoint, threads, settings.has_neural_drafter, services)


def ray_configuration(settings: LocalStackSettings, threads: ThreadPlan) -> dict[str, Any]:
    """The laptop's configuration with the models of the demo, on ports that nobody has."""
    dtype = {"dtype": settings.dtype}
    neural = {"model": settings.drafter_model, **dtype} if settings.has_neural_drafter else {}
    return laptop_configuration(
        grpc_port=free_port(),
        http_port=free_port(),
        target={"threads": threads.target, **_given(model=settings.target), **dtype},
        drafter={"threads": threads.drafter, "method": settings.drafter_method, **neural},
        orchestrator=_given(draft_length=settings.draft_length),
    )


def _given(**values: object) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


# ---------------------------------------------------------------------------------------------------------------------
# What it shows


async def _run(stage: Stage, terminal: Terminal, *, load: float, max_tokens: int) -> None:
    async with GenerationClient(stage.endpoint) as client:
        info = await client.server_info()
        _say(terminal, circumstances(stage, info))
        _say(terminal, load_warning(load, cores=stage.threads.cores))
        terminal.out.print()
        await _watch_one(client, terminal, max_tokens=max_tokens)
        runs = await _run_all(client, terminal, max_tokens=max_tokens)
    terminal.out.print(comparison_table(runs))
    _say(terminal, verdict_on_speed(runs))
    if stage.has_neural_drafter:
        threads = stage.threads
        _say(terminal, [f"Plain decoding used {threads.target} of {threads.cores} cores: the drafter has the others."])
    _say(terminal, verdict_on_equality(runs, dtype=info.target.dtype))


def _say(terminal: Terminal, sentences: Iterable[str]) -> None:
    for sentence in sentences:
        terminal.out.print(Text(sentence), soft_wrap=True)


def circumstances(stage: Stage, info: ServerInfo) -> Iterator[str]:
    """What the numbers of the demo are measured with, a line each."""
    threads = stage.threads
    target_threads, drafter_threads = counted(threads.target, "thread"), counted(threads.drafter, "thread")
    yield f"target   {info.target.model_id}, {info.target.dtype}, {target_threads}"
    drafter = info.drafter.model_id if info.drafter is not None else NO_DRAFTER
    if stage.has_neural_drafter:
        yield f"drafter  {drafter}, {drafter_threads}, {_draft_length(info)}"
    else:
        lookup = "suffix decoding" if drafter == SUFFIX_DRAFTER else "prompt lookup (n-gram)"
        yield f"drafter  {lookup}, {_draft_length(info)}"
    yield f"machine  {platform.machine()}, {counted(threads.cores, 'core')}; {stage.services}"


def _draft_length(info: ServerInfo) -> str:
    length = info.speculation.draft_length
    return "drafts as long as pays" if length is None else f"drafts of {counted(length, 'token')}"


def load_warning(load: float, *, cores: int) -> Iterator[str]:
    """A line if others keep the machine busy: `load` is the average number of processes that wanted to run."""
    if load > cores:
        yield f"caution  the machine is busy with other work (load {load:.1f}), which falsifies the speeds below"


def _request(prompt: DemoPrompt, schedule: Schedule, *, max_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        messages=(ChatMessage("user", prompt.text),),
        sampling=SamplingParams(temperature=0.0),
        stopping=StopConditions(max_tokens=max_tokens),
        speculation=SpeculationOptions(schedule=schedule),
    )


async def _watch_one(client: GenerationClient, terminal: Terminal, *, max_tokens: int) -> None:
    """The first prompt, streamed in colours; the models are warm afterwards."""
    prompt = PROMPTS[0]
    terminal.out.print(Panel(Text(prompt.text.strip()), title=prompt.name, title_align="left", style="dim"))
    request = _request(prompt, Schedule.PIPELINED, max_tokens=max_tokens)
    completion = await stream_answer(client, request, terminal, show_drafts=True, timeout_s=DEFAULT_TIMEOUT_S)
    terminal.out.print(legend(completion.origins), soft_wrap=True, end="\n\n")


async def _run_all(client: GenerationClient, terminal: Terminal, *, max_tokens: int) -> list[PromptRuns]:
    """Every prompt under every schedule, one request at a time, each prompt in another order of schedules."""
    runs = []
    with _progress(terminal, answers=len(PROMPTS) * len(SCHEDULES)) as progress:
        for turn, prompt in enumerate(PROMPTS):
            answers = {}
            for offset in range(len(SCHEDULES)):
                schedule = SCHEDULES[(turn + offset) % len(SCHEDULES)]
                request = _request(prompt, schedule, max_tokens=max_tokens)
                progress.begin(f"{prompt.name}, {schedule}")
                answers[schedule] = await _complete(client, request, on_tokens=progress.count)
            runs.append(PromptRuns(prompt.name, answers))
    return runs


async def _complete(
    client: GenerationClient, request: GenerationRequest, *, on_tokens: Callable[[int], None]
) -> Completion:
    builder = CompletionBuilder()
    async with aclosing(client.generate(request)) as events:
        async for event in events:
            builder.add(event)
            if isinstance(event, Delta):
                on_tokens(len(event.token_ids))
    return builder.build()


class _DemoProgress:
    """A bar over all answers, with the speed of the one that is coming now."""

    def __init__(self, progress: Progress, *, answers: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=answers, speed="")
        self._begun = 0
        self._begin_s, self._tokens = 0.0, 0

    def begin(self, description: str) -> None:
        """The next answer."""
        self._progress.update(self._task, description=description, completed=self._begun, speed="")
        self._begun += 1
        self._begin_s, self._tokens = time.monotonic(), 0

    def count(self, tokens: int) -> None:
        """More tokens of it."""
        self._tokens += tokens
        speed = self._tokens / max(time.monotonic() - self._begin_s, 1e-6)
        self._progress.update(self._task, speed=f"{speed:.0f} tokens/s")


@contextmanager
def _progress(terminal: Terminal, *, answers: int) -> Iterator[_DemoProgress]:
    columns = (
        TextColumn("{task.description:28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=terminal.err, transient=True, disable=not terminal.err.is_terminal) as progress:
        yield _DemoProgress(progress, answers=answers)
