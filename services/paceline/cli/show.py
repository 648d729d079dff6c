"""What a person sees besides the text: colours by origin, the small table behind an answer, the demo's comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from paceline.client import Completion, Origin, SpeculationUsage

# Told apart without colours too: corrections are underlined, bonus tokens bold.
ORIGIN_STYLES = {
    Origin.DRAFT: "green",
    Origin.CORRECTION: "underline red",
    Origin.BONUS: "bold cyan",
    Origin.PLAIN: "",
}
_ORIGIN_NAMES = {
    Origin.DRAFT: "accepted draft",
    Origin.CORRECTION: "correction",
    Origin.BONUS: "bonus",
    Origin.PLAIN: "plain",
}


def legend(origins: Iterable[Origin]) -> Text:
    """What the colours mean, and how many tokens came from where."""
    counts = Counter(origins)
    entries = [
        Text.assemble((name, ORIGIN_STYLES[origin]), f" {counts[origin]}") for origin, name in _ORIGIN_NAMES.items()
    ]
    return Text.assemble("tokens by origin: ", Text(" · ").join(entries))


def answer_table(completion: Completion) -> Table:
    """The few numbers that say how an answer was made."""
    speculation = completion.speculation
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=_circumstances(completion), caption_justify="left")
    columns = {
        "tokens": str(completion.usage.completion_tokens),
        "tokens/s": f"{completion.tokens_per_second:.1f}",
        "acceptance": acceptance(speculation),
        "mean acceptance length": mean_acceptance_length(speculation),
        "rounds": str(speculation.rounds),
        "target busy": percent(speculation.target_busy_share),
    }
    for name in columns:
        table.add_column(name, justify="right")
    table.add_row(*columns.values())
    return table


def choices_table(choices: Sequence[Completion]) -> Table:
    """The same numbers for several answers, a line each."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("choice", justify="right")
    for name in ("tokens", "tokens/s", "acceptance", "rounds"):
        table.add_column(name, justify="right")
    table.add_column("finish")
    # A seed that is cut short gives nothing again.
    table.add_column("seed", min_width=max(len(str(completion.seed)) for completion in choices))
    for completion in choices:
        table.add_row(
            str(completion.choice),
            str(completion.usage.completion_tokens),
            f"{completion.tokens_per_second:.1f}",
            acceptance(completion.speculation),
            str(completion.speculation.rounds),
            str(completion.finish_reason),
            str(completion.seed),
        )
    return table


def logprobs_table(completion: Completion, *, of_several: bool) -> Table:
    """A line a token: its log-probability and, if asked for, the most probable tokens in its place."""
    has_top = any(logprobs.top for logprobs in completion.logprobs)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"choice {completion.choice}" if of_several else "token")
    table.add_column("logprob", justify="right")
    if has_top:
        table.add_column("most probable")
    for piece, logprobs in zip(completion.pieces, completion.logprobs, strict=True):
        top = list(zip(logprobs.top, logprobs.top_pieces, strict=True))
        # A token whose text is held back, or hidden, has no piece of its own; among the most probable it has.
        own = next((top_piece for (token_id, _), top_piece in top if token_id == logprobs.token_id), piece)
        most_probable = "  ".join(f"{top_piece!r} {logprob:.2f}" for (_, logprob), top_piece in top)
        table.add_row(Text(repr(own)), f"{logprobs.logprob:.2f}", *([Text(most_probable)] if has_top else []))
    return table


def _circumstances(completion: Completion) -> str:
    speculation = completion.speculation
    words = [
        f"finish: {completion.finish_reason}",
        f"seed: {completion.seed}",
        *([f"rule: {speculation.rule}"] if speculation.rule else []),
        *([f"schedule: {speculation.schedule}"] if speculation.schedule else []),
        *([f"{speculation.fallback_rounds} rounds without the drafter"] if speculation.fallback_rounds else []),
    ]
    return " · ".join(words)


def acceptance(speculation: SpeculationUsage) -> str:
    """Share of drafted tokens that were accepted; a dash where nothing was drafted."""
    return percent(speculation.acceptance_rate) if speculation.num_draft_tokens else "-"


def mean_acceptance_length(speculation: SpeculationUsage) -> str:
    """Tokens a drafted round yields; a dash where nothing was drafted."""
    return f"{speculation.mean_acceptance_length:.2f}" if speculation.num_drafts else "-"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def counted(number: int, noun: str) -> str:
    """Of a noun whose plural takes an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
