"""`paceline train`: a drafter for a target of one's own, from the target's answers to a folder that a drafter loads."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.cli.held_signals import HeldSignals
from paceline.cli.terminal import Terminal, with_plain_errors
from paceline.cli.training_progress import TrainingProgress, evaluation_table
from paceline.local_stack import available_cores
from paceline.training.prompt_file import PromptFile, read_prompt_file
from paceline.training.settings import TrainingSettings

if TYPE_CHECKING:
    from paceline.training.run import Training

DATA, DRAFTER, TRAINING, MACHINE = "The answers", "The drafter", "The training", "The machine"
_MOST_SEED = 2**31 - 1


@with_plain_errors
def train(
    context: typer.Context,
    *,
    target: Annotated[
        str,
        typer.Option(
            "--target", metavar="MODEL", help="What to train a drafter for: Hugging Face model id or local folder."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", metavar="FOLDER", help="Where all goes; the same command goes on from there.")
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help='Prompts: one a line, or in a .jsonl file {"prompt": ...} or {"messages": ...} a line. Without it the '
            "target writes its own.",
            rich_help_panel=DATA,
        ),
    ] = None,
    answers: Annotated[
        int,
        typer.Option("--answers", min=8, help="Answers of the target, at most one a prompt.", rich_help_panel=DATA),
    ] = 4096,
    answer_tokens: Annotated[
        int, typer.Option("--answer-tokens", min=2, help="Most tokens of an answer.", rich_help_panel=DATA)
    ] = 160,
    temperatures: Annotated[
        str,
        typer.Option(
            "--temperatures",
            metavar="T[:SHARE],...",
            help="What the answers are drawn at, best what will be served, and which share of them.",
            rich_help_panel=DATA,
        ),
    ] = "0:0.5,0.7:0.3,1:0.2",
    held_out: Annotated[
        int | None,
        typer.Option(
            "--held-out",
            min=1,
            help="Answers for evaluation alone: 160, or an eighth of a small number.",
            rich_help_panel=DATA,
        ),
    ] = None,
    sessions: Annotated[
        int, typer.Option("--sessions", min=1, help="Answers that are made at once.", rich_help_panel=DATA)
    ] = 128,
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers",
            metavar="N,...",
            help="The target's layers that the drafter begins as, from 0: its first two and its last.",
            rich_help_panel=DRAFTER,
        ),
    ] = None,
    trained_layers: Annotated[
        int,
        typer.Option(
            "--trained-layers",
            min=1,
            help="How many of them learn, the last ones; the others stay the target's.",
            rich_help_panel=DRAFTER,
        ),
    ] = 2,
    draft_vocab_size: Annotated[
        int,
        typer.Option(
            "--draft-vocab-size",
            min=0,
            help="Tokens that it can propose, the most frequent ones; 0: all.",
            rich_help_panel=DRAFTER,
        ),
    ] = 8192,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, help="Batches: ten passes over the answers.", rich_help_panel=TRAINING),
    ] = None,
    batch_samples: Annotated[
        int, typer.Option("--batch-samples", min=1, help="Answers of a batch.", rich_help_panel=TRAINING)
    ] = 4,
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", min=0.0, help="The highest one.", rich_help_panel=TRAINING)
    ] = 1.5e-3,
    seed: Annotated[
        int,
        typer.Option(
            "--seed", min=0, max=_MOST_SEED, help="Another one gives other answers.", rich_help_panel=TRAINING
        ),
    ] = 0,
    threads: Annotated[
        int, typer.Option("--threads", min=0, help="For arithmetic; 0: one a core.", rich_help_panel=MACHINE)
    ] = 0,
    dtype: Annotated[
        options.DtypeChoice,
        typer.Option(
            "--dtype",
            help="Arithmetic of the target; auto measures which is faster here.",
            rich_help_panel=MACHINE,
        ),
    ] = options.DtypeChoice.AUTO,
    device: Annotated[
        str,
        typer.Option(
            "--device",
            help="Where the target answers: auto, cpu or cuda. The drafter learns on the CPU.",
            rich_help_panel=MACHINE,
        ),
    ] = "auto",
    cache_dir: Annotated[
        Path | None,
        typer.Option("--cache-dir", metavar="FOLDER", help="Where GGUF files are unpacked.", rich_help_panel=MACHINE),
    ] = None,
) -> None:
    """Train a drafter on the target's own answers; Ctrl-C saves, and the same command goes on from there."""
    file = read_prompt_file(prompts) if prompts is not None else None
    settings = TrainingSettings(
        target=target,
        prompts=file.sha256 if file else None,
        answers=min(answers, len(file.prompts)) if file else answers,
        answer_tokens=answer_tokens,
        temperatures=parse_temperatures(temperatures),
        layers=parse_layers(layers),
        trained_layers=trained_layers,
        draft_vocab_size=draft_vocab_size,
        steps=steps,
        batch_samples=batch_samples,
        learning_rate=learning_rate,
        held_out=held_out,
        sessions=sessions,
        seed=seed,
        dtype=dtype.value,
        device=device,
    )
    settings.check()
    terminal = Terminal.open()
    try:
        _run(
            output, settings, file, terminal,
            threads=threads or available_cores(), cache_dir=cache_dir, command=_command(context),
        )  # fmt: skip
    except (KeyboardInterrupt, SystemExit):
        terminal.say("Stopped. The same command goes on from here.")
        raise


def _run(
    output: Path,
    settings: TrainingSettings,
    file: PromptFile | None,
    terminal: Terminal,
    *,
    threads: int,
    cache_dir: Path | None,
    command: str,
) -> None:
    with terminal.spinner("Loading PyTorch"):
        from paceline.training import run  # noqa: PLC0415 - loads torch, which no other command needs

    run.use_threads(threads)
    progress = TrainingProgress(terminal)
    with run.opened(output, settings):
        with progress.stage("answers", total=settings.answers, done=run.answers_made(output, settings)):
            prompts = file.prompts if file else None
            run.make_answers(output, settings, progress, prompts=prompts, cache_dir=cache_dir)
        with terminal.spinner("Loading the answers"):
            training = run.Training(output, settings, cache_dir=cache_dir)
        _train(training, settings, progress)
        with terminal.spinner("Evaluating, and measuring steps"):
            evaluation = training.finish(command=command)
    terminal.err.print(evaluation_table(evaluation))
    terminal.say(f"The drafter is in {output}.")
    terminal.write_line(str(output))


def _train(training: Training, settings: TrainingSettings, progress: TrainingProgress) -> None:
    """Raises what a signal stands for, once what was learned is saved."""
    with (
        HeldSignals(on_held=progress.ask_to_stop) as signals,
        progress.stage("training", total=settings.trained_steps, done=training.step),
    ):
        training.run(progress)
        signals.act()


def parse_temperatures(text: str) -> tuple[tuple[float, float], ...]:
    """Pairs (temperature, share) of "0:0.5,0.7:0.3,1:0.2"; shares are all given or none, and are made to sum to 1."""
    pairs = [part.partition(":") for part in text.split(",")]
    try:
        temperatures = [float(temperature) for temperature, _, _ in pairs]
        shares = [float(share) if colon else 1.0 for _, colon, share in pairs]
    except ValueError:
        temperatures, shares = [], []
    are_numbers = all(0.0 <= each <= 1.0 for each in temperatures) and all(0.0 <= each < math.inf for each in shares)
    has_mixture = len({colon for _, colon, _ in pairs}) > 1
    if not are_numbers or has_mixture or len(set(temperatures)) < len(pairs) or not sum(shares):
        raise typer.BadParameter(
            "--temperatures are numbers from 0 to 1, each once, such as 0,0.7,1, or each with its share, such as 0:0.5,0.7:0.3,1:0.2."
        )
    total = sum(shares)
    return tuple(zip(temperatures, (share / total for share in shares), strict=True))


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """The numbers of "0,1,29", each once, in ascending order."""
    if text is None:
        return None
    numbers = text.split(",")
    layers = tuple(int(number) for number in numbers if number.strip().isdecimal())
    if len(layers) < len(numbers) or list(layers) != sorted(set(layers)):
        raise typer.BadParameter("--layers are numbers in ascending order, such as 0,1,29.")
    return layers


def _command(context: typer.Context) -> str:
    """The command as it can be given again: the options that were given, in their order of declaration."""
    words = ["paceline", "train"]
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            words += [parameter.opts[0], str(context.params[parameter.name or ""])]
    return shlex.join(words)
