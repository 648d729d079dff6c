"""`paceline bench`: how fast these models answer, plain and drafted, beside the limit of what drafting can give."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self, TypeVar

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from paceline.bench.cores import allowed_cores, cores_from, pin
from paceline.bench.emulated import TINY, write_pair
from paceline.bench.figures import ConditionResult
from paceline.bench.machine import machine
from paceline.bench.peers import Peer
from paceline.bench.plan import AUTO, Delay, DrafterVariant, Plan, settings_of
from paceline.bench.plots import Album, NoPlots, draw_all
from paceline.bench.prompts import BUILT_IN, limited, read_prompts
from paceline.bench.report import CELLS, EMULATED, REPORT, Report
from paceline.bench.run import Bench
from paceline.bench.stack import BenchStack, StackSettings, StepTime
from paceline.bench.tables import condition_view, differing_texts, one_line
from paceline.cli import options
from paceline.cli.terminal import EXIT_FAILED, Terminal, with_plain_errors
from paceline.errors import InvalidRequest
from paceline.generation import Schedule
from paceline.types import VerificationRule

SWEEP, MACHINE, EMULATION = "What is compared", "The machine", "Emulated devices"
_DEFAULT_DELAYS_STEPS = "0,0.5,1"
_EMULATED_TARGET_MS, _EMULATED_DRAFTER_MS = 30.0, 1.5
_FEWEST_SESSIONS = 64
_EXACT_DTYPE = "float32"

ValueT = TypeVar("ValueT")


class PeerChoice(StrEnum):
    """Other implementations that can be measured beside ours."""

    TRANSFORMERS = "transformers"


Target = Annotated[str, typer.Option("--target", metavar="MODEL", help="The target.", rich_help_panel=options.MODELS)]
Drafter = Annotated[
    str,
    typer.Option(
        "--drafter",
        metavar="MODEL|hybrid:MODEL|suffix|ngram",
        help="The drafter, as for `paceline up`.",
        rich_help_panel=options.MODELS,
    ),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help='Lines of {"id": ..., "messages": [{"role": ..., "content": ...}]}; without it, six that come along.',
        rich_help_panel=SWEEP,
    ),
]
Limit = Annotated[int, typer.Option("--limit", min=0, help="Prompts at most; 0: all.", rich_help_panel=SWEEP)]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=16, help="Tokens of one answer.", rich_help_panel=SWEEP)]
IgnoreEos = Annotated[
    bool, typer.Option(help="Go on behind the end of an answer, so that all are as long.", rich_help_panel=SWEEP)
]
Temperatures = Annotated[
    str, typer.Option("--temperatures", metavar="T,...", help="Of the answers.", rich_help_panel=SWEEP)
]
Rules = Annotated[
    str,
    typer.Option("--rules", metavar="RULE,...", help="Above temperature 0: coupled, rejection.", rich_help_panel=SWEEP),
]
Schedules = Annotated[
    str,
    typer.Option(
        "--schedules",
        metavar="NAME,...",
        help="Beside plain, which is always measured: sequential, pipelined.",
        rich_help_panel=SWEEP,
    ),
]
DraftLengths = Annotated[
    str, typer.Option("--draft-lengths", metavar="N|auto,...", help="Tokens of one draft.", rich_help_panel=SWEEP)
]
FanOuts = Annotated[
    str,
    typer.Option(
        "--fan-outs",
        metavar="N|auto,...",
        help="Most guesses at one position, pipelined; 0: no branches.",
        rich_help_panel=SWEEP,
    ),
]
DelaysMs = Annotated[
    str, typer.Option("--delays-ms", metavar="MS,...", help="Before the drafter, one way.", rich_help_panel=SWEEP)
]
DelaysSteps = Annotated[
    str,
    typer.Option(
        "--delays-steps",
        metavar="STEPS,...",
        help=f"The same in plain steps of the target; {_DEFAULT_DELAYS_STEPS} if no delay is given.",
        rich_help_panel=SWEEP,
    ),
]
Concurrency = Annotated[
    str, typer.Option("--concurrency", metavar="N,...", help="Answers at a time.", rich_help_panel=SWEEP)
]
LogitNoise = Annotated[
    str,
    typer.Option(
        "--logit-noise", metavar="SIGMA,...", help="On the drafter, for a lower acceptance.", rich_help_panel=SWEEP
    ),
]
Repeats = Annotated[
    int, typer.Option("--repeats", min=1, help="Of every answer; medians are shown.", rich_help_panel=SWEEP)
]
PeerOption = Annotated[
    PeerChoice | None,
    typer.Option(
        "--peer", help="Measure its generation too, with the same pair on all cores named.", rich_help_panel=SWEEP
    ),
]
TargetCores = Annotated[
    str, typer.Option("--target-cores", metavar="CORE,...", help="Of the target.", rich_help_panel=MACHINE)
]
DrafterCores = Annotated[
    str, typer.Option("--drafter-cores", metavar="CORE,...", help="Of the drafter.", rich_help_panel=MACHINE)
]
OrchestratorCores = Annotated[
    str,
    typer.Option(
        "--orchestrator-cores",
        metavar="CORE,...",
        help="Of the orchestrator, the link to the drafter, and this client.",
        rich_help_panel=MACHINE,
    ),
]
Colocated = Annotated[
    bool,
    typer.Option(
        "--colocated", help="Run the target in the orchestrator's process, on its own cores.", rich_help_panel=MACHINE
    ),
]
Emulated = Annotated[
    bool,
    typer.Option(
        "--emulated",
        help=f"A tiny pair in place of --target and --drafter, with steps of {_EMULATED_TARGET_MS:g} and "
        f"{_EMULATED_DRAFTER_MS:g} ms if none are given.",
        rich_help_panel=EMULATION,
    ),
]
Acceptance = Annotated[
    str,
    typer.Option(
        "--acceptance",
        metavar="A,...",
        help="With --emulated: what the drafter's noise is set for, 0.05 to 0.99.",
        rich_help_panel=EMULATION,
    ),
]
TargetStepMs = Annotated[
    float, typer.Option("--target-step-ms", min=0, help="Hold target steps to this.", rich_help_panel=EMULATION)
]
TargetStepMsPerSession = Annotated[
    float,
    typer.Option(
        "--target-step-ms-per-session", min=0, help="And so much longer for each session.", rich_help_panel=EMULATION
    ),
]
TargetStepMsPerToken = Annotated[
    float,
    typer.Option(
        "--target-step-ms-per-token", min=0, help="And so much longer for each token.", rich_help_panel=EMULATION
    ),
]
DrafterStepMs = Annotated[
    float, typer.Option("--drafter-step-ms", min=0, help="Hold drafter steps to this.", rich_help_panel=EMULATION)
]
DrafterStepMsPerSession = Annotated[
    float,
    typer.Option(
        "--drafter-step-ms-per-session", min=0, help="And so much longer for each line.", rich_help_panel=EMULATION
    ),
]
Output = Annotated[
    Path,
    typer.Option(
        "--output", metavar="FOLDER", help="Where report, cells and pictures go.", rich_help_panel=options.OUTPUT
    ),
]
Plots = Annotated[bool, typer.Option(help="Draw pictures.", rich_help_panel=options.OUTPUT)]


@with_plain_errors
def bench(
    *,
    target: Target = "smollm2",
    drafter: Drafter = "smollm2-drafter",
    dtype: options.Dtype = None,
    prompts: PromptFile = None,
    limit: Limit = 4,
    max_tokens: MaxTokens = 64,
    ignore_eos: IgnoreEos = True,
    temperatures: Temperatures = "0,1",
    rules: Rules = VerificationRule.COUPLED,
    schedules: Schedules = "sequential,pipelined",
    draft_lengths: DraftLengths = "auto,2,4",
    fan_outs: FanOuts = AUTO,
    delays_ms: DelaysMs = "",
    delays_steps: DelaysSteps = "",
    concurrency: Concurrency = "1",
    logit_noise: LogitNoise = "0",
    repeats: Repeats = 2,
    peer: PeerOption = None,
    target_cores: TargetCores = "",
    drafter_cores: DrafterCores = "",
    orchestrator_cores: OrchestratorCores = "",
    colocated: Colocated = False,
    emulated: Emulated = False,
    acceptance: Acceptance = "0.8",
    target_step_ms: TargetStepMs = 0.0,
    target_step_ms_per_session: TargetStepMsPerSession = 0.0,
    target_step_ms_per_token: TargetStepMsPerToken = 0.0,
    drafter_step_ms: DrafterStepMs = 0.0,
    drafter_step_ms_per_session: DrafterStepMsPerSession = 0.0,
    output: Output = Path("bench"),
    plots: Plots = True,
) -> None:
    """Measure plain, sequential and pipelined decoding side by side, against the limit of what drafting can give."""
    if emulated and peer is not None:
        raise InvalidRequest("--peer computes for real, so it has no place beside --emulated.", parameter="peer")
    plan = Plan(
        prompts=limited(read_prompts(prompts) if prompts else BUILT_IN, limit),
        settings=settings_of(
            _listed(schedules, Schedule, "schedules"),
            _listed(draft_lengths, _number_or_auto, "draft_lengths"),
            _listed(fan_outs, _number_or_auto, "fan_outs"),
        ),
        drafters=tuple(DrafterVariant(logit_noise=noise) for noise in _listed(logit_noise, float, "logit_noise")),
        temperatures=_listed(temperatures, float, "temperatures"),
        rules=_listed(rules, VerificationRule, "rules"),
        delays=_delays(delays_ms, delays_steps),
        concurrencies=_listed(concurrency, int, "concurrency"),
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        repeats=repeats,
    )
    stack = StackSettings(
        target=TINY if emulated else target,
        drafter=TINY if emulated else drafter,
        dtype=options.DtypeChoice.FLOAT32 if emulated else dtype or options.DtypeChoice.AUTO,
        threads=1,
        target_cores=cores_from(target_cores, parameter="target_cores") or _usual_cores(0),
        drafter_cores=cores_from(drafter_cores, parameter="drafter_cores") or _usual_cores(1),
        orchestrator_cores=cores_from(orchestrator_cores, parameter="orchestrator_cores") or _usual_cores(2),
        is_colocated=colocated,
        target_step=StepTime(
            step_ms=target_step_ms or emulated * _EMULATED_TARGET_MS,
            per_session_ms=target_step_ms_per_session,
            per_token_ms=target_step_ms_per_token,
        ),
        drafter_step=StepTime(
            step_ms=drafter_step_ms or emulated * _EMULATED_DRAFTER_MS, per_session_ms=drafter_step_ms_per_session
        ),
        max_sessions=max(_FEWEST_SESSIONS, 2 * max(plan.concurrencies)),
    )
    acceptances = _listed(acceptance, float, "acceptance") if emulated else ()
    _run(Report(plan=plan, stack=stack, machine=machine()), acceptances, output, peer=peer, plots=plots)


# ---------------------------------------------------------------------------------------------------------------------
# Options


def _listed(text: str, parse: Callable[[str], ValueT], parameter: str) -> tuple[ValueT, ...]:
    """The values between the commas, each once. Raises `InvalidRequest`, naming the parameter."""
    option = f"--{parameter.replace('_', '-')}"
    words = [word.strip() for word in text.split(",") if word.strip()]
    try:
        values = tuple(dict.fromkeys(parse(word) for word in words))
    except ValueError as error:
        raise InvalidRequest(f"{option} does not take {text!r}: {error}.", parameter=parameter) from error
    if not values:
        raise InvalidRequest(f"{option} needs at least one value.", parameter=parameter)
    return values


def _number_or_auto(word: str) -> int | None:
    return None if word == AUTO else int(word)


def _delays(milliseconds: str, steps: str) -> tuple[Delay, ...]:
    delays: list[Delay] = []
    if milliseconds:
        delays += [Delay(milliseconds=value) for value in _listed(milliseconds, float, "delays_ms")]
    if steps or not milliseconds:
        delays += [Delay(steps=value) for value in _listed(steps or _DEFAULT_DELAYS_STEPS, float, "delays_steps")]
    return tuple(dict.fromkeys(delays))


def _usual_cores(place: int) -> tuple[int, ...]:
    """By default the target has the first core, the drafter the next, and the others a third or, where there is none,
    the drafter's."""
    allowed = allowed_cores()
    return allowed[place : place + 1] or allowed[-1:]


# ---------------------------------------------------------------------------------------------------------------------
# The run


def _run(report: Report, acceptances: tuple[float, ...], output: Path, *, peer: PeerChoice | None, plots: bool) -> None:
    """Measure, and show and keep what was measured, also where Ctrl-C or a failure cuts it short."""
    terminal = Terminal.open()
    if os.getloadavg()[0] > len(allowed_cores() or (0,)):
        terminal.say("The machine is busy with other work, which falsifies the speeds.", "yellow")
    try:
        _measure(report, acceptances, output, terminal, peer=peer)
    finally:
        _finish(report, output, terminal, plots=plots)
    if not _is_exact(report, terminal):
        raise typer.Exit(EXIT_FAILED)


def _measure(
    report: Report, acceptances: tuple[float, ...], output: Path, terminal: Terminal, *, peer: PeerChoice | None
) -> None:
    with ExitStack() as until_end:
        if acceptances:
            folder = Path(until_end.enter_context(tempfile.TemporaryDirectory())) / TINY
            with terminal.spinner("Preparing the emulated pair"):
                _prepare_pair(report, folder, acceptances)
        terminal.say(f"{report.machine}; {report.plan.measured_waves()} measurements, about one prompt's answer each")
        bar = until_end.enter_context(_Bar(terminal, total=report.plan.measured_waves()))
        until_end.callback(pin, allowed_cores())
        # The client shares the orchestrator's cores.
        pin(report.stack.orchestrator_cores)
        stack = until_end.enter_context(BenchStack(report.stack, on_log=bar.note))
        source = until_end.enter_context(_started_peer(report.stack)) if peer else None

        def on_result(result: ConditionResult) -> None:
            report.server = measured.server
            report.add(result)
            report.write(output)
            bar.say(one_line(result))

        measured = Bench(report.plan, stack, peer=source, on_result=on_result, progress=bar)
        asyncio.run(measured.run())


def _prepare_pair(report: Report, folder: Path, acceptances: tuple[float, ...]) -> None:
    """Write the tiny target, and take for drafters its noisy copies, one for each acceptance and temperature."""
    try:
        drafters = write_pair(folder, acceptances=acceptances, temperatures=report.plan.temperatures)
    except ValueError as error:
        raise InvalidRequest(f"--acceptance: {error}.", parameter="acceptance") from error
    report.plan = replace(report.plan, drafters=drafters)
    report.stack = replace(report.stack, folders={TINY: folder})


def _started_peer(stack: StackSettings) -> Peer:
    """On all cores that our services have together."""
    cores = sorted({*stack.target_cores, *stack.drafter_cores, *stack.orchestrator_cores})
    return Peer(stack.target, stack.drafter, dtype=stack.dtype, cores=cores)


def _finish(report: Report, output: Path, terminal: Terminal, *, plots: bool) -> None:
    """Show what there is and draw it."""
    if not report.results:
        terminal.say("Nothing was measured.", "yellow")
        return
    for result in report.results:
        terminal.out.print(condition_view(result, is_emulated=report.stack.is_emulated))
    written = [output / REPORT, output / CELLS]
    if plots:
        try:
            album = Album(folder=output, caption=_caption(report), is_emulated=report.stack.is_emulated)
            written += draw_all(report.results, album)
        except NoPlots as error:
            terminal.say(error.message, "yellow")
    terminal.say("Written: " + ", ".join(map(str, written)))


def _caption(report: Report) -> str:
    stack = report.stack
    emulated = f"EMULATED: {EMULATED}\n" if stack.is_emulated else ""
    dtype = f", {report.server.target.dtype}" if report.server else ""
    return f"{emulated}{stack.target} drafted by {stack.drafter}, one thread each{dtype}; {report.machine}"


def _is_exact(report: Report, terminal: Terminal) -> bool:
    """Whether every answer has the tokens of plain decoding, where the arithmetic leaves no excuse."""
    different = differing_texts(report.results)
    if not different:
        return True
    is_exact_arithmetic = report.server is not None and report.server.target.dtype == _EXACT_DTYPE
    terminal.say("Other tokens than plain decoding in: " + "; ".join(different), "red" if is_exact_arithmetic else "")
    if not is_exact_arithmetic:
        terminal.say("In this arithmetic near ties of two tokens can fall either way; float32 shows the equality.")
    return not is_exact_arithmetic


class _Bar:
    """A progress bar that leaves no trace on the terminal (`run.BenchProgress`); elsewhere, lines."""

    def __init__(self, terminal: Terminal, *, total: int) -> None:
        self._terminal = terminal
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=terminal.err,
            transient=True,
            disable=not terminal.err.is_terminal,
        )
        self._task = self._bar.add_task("starting the target", total=total)
        self._begun = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def begin(self, description: str) -> None:
        self._bar.update(self._task, completed=self._begun, description=description)
        self._begun += 1

    def prepare(self, description: str) -> None:
        self._bar.update(self._task, description=description)

    def note(self, service: str, line: str) -> None:
        """A service's log: sentences are for people (a model is being unpacked, say), structured lines are not."""
        if not line.startswith("{"):
            self.prepare(f"{service}: {line}")

    def say(self, sentence: str) -> None:
        """What a condition has come to, above the bar."""
        self._terminal.say(sentence)
