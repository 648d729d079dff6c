"""What a person sees besides the text: colours by origin, the small table behind an answer, the demo's comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

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
