"""The model card of a drafter: what it is for, how it was made, how good it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.training.evaluation import Acceptance, Evaluation
from paceline.training.settings import TrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a training has made."""

    command: str
    layers: tuple[int, ...]
    parameters: int  # trained
    draft_vocab_size: int
    coverage: float  # share of held-out tokens that it can propose
    trained_answers: int
    trained_tokens: int  # of these answers
    held_out_answers: int
    seconds: float  # of training


def model_card(settings: TrainingSettings, made: Made, evaluation: Evaluation) -> str:
    """Markdown."""
    return "\n".join(_lines(settings, made, evaluation)) + "\n"


def _lines(settings: TrainingSettings, made: Made, evaluation: Evaluation) -> Iterator[str]:
    layers = ", ".join(map(str, made.layers))
    prompts = "its own prompts" if settings.prompts is None else "the prompts of a file"
    mix = ", ".join(f"{share:.0%} at temperature {temperature:g}" for temperature, share in settings.temperatures)
    yield f"# A drafter for {settings.target}"
    yield ""
    yield (
        f"A shallow copy of its target (layers {layers}; the last {settings.trained_layers} trained, {made.parameters:,} "
        f"parameters) that proposes {made.draft_vocab_size:,} tokens, {made.coverage:.1%} of those in held-out answers. "
        "Embedding, head and the other layers are read from the target's checkpoint. It changes the speed of answers and "
        "never their law. Use it by `--drafter` and the path of this folder."
    )
    yield ""
    yield "## How it was made"
    yield ""
    yield "```"
    yield made.command
    yield "```"
    yield ""
    yield (
        f"* Data: the target's answers to {prompts}, {mix}: {made.trained_answers:,} of them with {made.trained_tokens:,} "
        f"tokens were trained on, {made.held_out_answers:,} held out."
    )
    yield f"* Training: {settings.trained_steps:,} steps of {settings.batch_samples} answers, {made.seconds / 60:.0f} minutes."
    yield ""
    yield "## How good it is"
    yield ""
    yield "On the held-out answers:"
    yield ""
    yield from _table(evaluation)


def _table(evaluation: Evaluation) -> Iterator[str]:
    lengths = range(1, len(evaluation.results[0].by_position) + 1)
    yield f"| temperature | rows | acceptance | by position | tokens per round, drafts of 1 to {lengths[-1]} |"
    yield "| --- | --- | --- | --- | --- |"
    for result in evaluation.results:
        cells = (f"{result.temperature:g}", f"{result.rows:,}", f"{result.acceptance:.3f}")
        yield f"| {' | '.join(cells)} | {_numbers(result.by_position)} | {_numbers(result.tokens_per_round)} |"
    if evaluation.costs is None:
        return
    yield ""
    yield (
        f"A step of the drafter took {evaluation.costs.step:.3f} of the target's where it was trained. Predicted speeds, "
        "plain decoding being 1, with the best draft length of each:"
    )
    yield ""
    yield "| temperature | sequential | pipelined |"
    yield "| --- | --- | --- |"
    for result in evaluation.results:
        yield f"| {result.temperature:g} | {' | '.join(_best_speeds(evaluation, result))} |"


def _best_speeds(evaluation: Evaluation, result: Acceptance) -> Iterator[str]:
    speed_ups = evaluation.speed_ups(result)
    best = max(speed_ups, key=lambda one: one.sequential)
    yield f"{best.sequential:.2f} (drafts of {best.draft_length})"
    best = max(speed_ups, key=lambda one: one.pipelined)
    yield f"{best.pipelined:.2f} (drafts of {best.draft_length})"


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.2f}" for value in values)
