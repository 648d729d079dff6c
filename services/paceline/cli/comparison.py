"""The same prompts under several schedules: how fast each was, whether speculation paid, whether the answers agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from paceline.cli.show import percent
from paceline.client import Completion, Schedule

# Differences below this are measurement noise on a machine that does other things too.
NOISE = 0.03
_EXACT_DTYPE = "float32"


@dataclass(frozen=True, slots=True)
class PromptRuns:
    """The answers to one prompt, one a schedule, all at temperature 0."""

    name: str
    answers: Mapping[Schedule, Completion]


@dataclass(frozen=True, slots=True)
class Totals:
    """Several answers of one schedule taken together."""

    answers: Sequence[Completion]

    @property
    def tokens(self) -> int:
        return sum(answer.usage.completion_tokens for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        elapsed_s = sum(answer.speculation.elapsed_s for answer in self.answers)
        return self.tokens / elapsed_s if elapsed_s else 0.0

    @property
    def acceptance(self) -> str:
        """Accepted over drafted tokens; a dash where nothing was drafted."""
        drafted = sum(answer.speculation.num_draft_tokens for answer in self.answers)
        return percent(self._accepted / drafted) if drafted else "-"

    @property
    def mean_acceptance_length(self) -> str:
        """1 + accepted tokens / drafts; a dash where nothing was drafted."""
        drafts = sum(answer.speculation.num_drafts for answer in self.answers)
        return f"{1 + self._accepted / drafts:.2f}" if drafts else "-"

    @property
    def _accepted(self) -> int:
        return sum(answer.speculation.num_accepted_tokens for answer in self.answers)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line of the demo's table: one prompt, or all of them."""

    name: str
    totals: Mapping[Schedule, Totals]

    @classmethod
    def of(cls, name: str, runs: Sequence[PromptRuns]) -> Comparison:
        return cls(name, {schedule: Totals([run.answers[schedule] for run in runs]) for schedule in Schedule})

    def speed(self, schedule: Schedule) -> float:
        """Tokens per second."""
        return self.totals[schedule].tokens_per_second

    def gain(self, schedule: Schedule) -> float:
        """Speed as a multiple of plain decoding's."""
        plain = self.speed(Schedule.PLAIN)
        return self.speed(schedule) / plain if plain else 0.0

    @property
    def outcome(self) -> Text:
        """Whether the better of the two speculative schedules beats plain decoding."""
        best = max(self.gain(Schedule.SEQUENTIAL), self.gain(Schedule.PIPELINED))
        if best > 1 + NOISE:
            return Text("wins", "green")
        return Text("loses", "red") if best < 1 - NOISE else Text("even", "yellow")


def comparison_table(runs: Sequence[PromptRuns]) -> Table:
    """Speeds side by side, a line a prompt and one for all; fits into 80 columns."""
    overall = Comparison.of("all", runs)
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title="tokens per second, and as a multiple of plain decoding",
        title_justify="left",
        caption=f"{overall.totals[Schedule.PLAIN].tokens} tokens a schedule; acceptance and length: pipelined answers",
        caption_justify="left",
    )
    table.add_column("prompt")
    for name in ("plain", "sequential", "pipelined", "acceptance", "mean\nacceptance\nlength"):
        table.add_column(name, justify="right")
    table.add_column("speculation")
    for run in runs:
        table.add_row(*_cells(Comparison.of(run.name, [run])))
    table.add_section()
    table.add_row(*_cells(overall), style="bold")
    return table


def _cells(line: Comparison) -> Iterator[str | Text]:
    pipelined = line.totals[Schedule.PIPELINED]
    yield line.name
    yield f"{line.speed(Schedule.PLAIN):.1f}"
    for schedule in (Schedule.SEQUENTIAL, Schedule.PIPELINED):
        yield f"{line.speed(schedule):.1f} {line.gain(schedule):.2f}x"
    yield pipelined.acceptance
    yield pipelined.mean_acceptance_length
    yield line.outcome


def verdict_on_speed(runs: Sequence[PromptRuns]) -> Iterator[str]:
    """What the table says, in words, also where it says that speculation does not pay."""
    overall = Comparison.of("all", runs)
    for schedule in (Schedule.SEQUENTIAL, Schedule.PIPELINED):
        yield f"Overall, {schedule} speculation is {_in_words(overall.gain(schedule))}."
    losing = [run.name for run in runs if Comparison.of(run.name, [run]).outcome.plain == "loses"]
    if losing:
        yield f"Speculation loses on {_listed(losing)}: plain decoding is the better choice there."


def _in_words(gain: float) -> str:
    if gain > 1 + NOISE:
        return f"{gain:.2f} times as fast as plain decoding"
    if gain < 1 - NOISE:
        return f"slower than plain decoding ({gain:.2f} times its speed)"
    return f"as fast as plain decoding, within the noise of the measurement ({gain:.2f} times)"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(f'"{name}"' for name in names[:-1]), f'"{names[-1]}"')))


# ---------------------------------------------------------------------------------------------------------------------
# Do the answers agree?


def verdict_on_equality(runs: Sequence[PromptRuns], *, dtype: str) -> Iterator[str]:
    """Whether speculation left every token as it was; where not, from which token on, and what that means."""
    differences = [sentence for run in runs for sentence in _differences(run)]
    if not differences:
        yield f"All three schedules gave the same tokens for each of the {len(runs)} prompts."
        return
    yield from differences
    if dtype == _EXACT_DTYPE:
        yield f"In {dtype} only an almost exact tie of two tokens explains that; please report it."
    else:
        yield (
            f"In {dtype} a block of rows is rounded in another way than a single row, so that a near tie of two tokens "
            "can fall either way; float32 shows the exact equality (--dtype float32)."
        )


def _differences(run: PromptRuns) -> Iterator[str]:
    plain = run.answers[Schedule.PLAIN]
    for schedule in (Schedule.SEQUENTIAL, Schedule.PIPELINED):
        answer = run.answers[schedule]
        if answer.token_ids != plain.token_ids:
            index = _first_difference(answer.token_ids, plain.token_ids)
            yield (
                f'"{run.name}": the {schedule} answer differs from the plain one from token {index + 1} on '
                f"({_piece(answer, index)} in place of {_piece(plain, index)})."
            )


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """The first index at which they differ; the shorter length if one begins with the other."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(left), len(right)))


def _piece(answer: Completion, index: int) -> str:
    return repr(answer.pieces[index]) if index < len(answer.pieces) else "the end"
