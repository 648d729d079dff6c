"""What the person who ran a benchmark reads: for each condition how fast each setting was, and why. 80 columns wide."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from paceline.bench.figures import Cell, ConditionResult
from paceline.bench.plan import PLAIN, Setting
from paceline.generation import Schedule
from paceline.types import DraftOrigin

_NOISE = 0.03  # differences below are measurement noise on a machine that does other things too
_SHORT_WORDS = {"sequential": "sequ.", "pipelined": "pipe.", "no branches": "fan 0", "fan-out": "fan"}
_SHOWN_VERIFY_TOKENS = (2, 3, 5, 9)


def condition_view(result: ConditionResult, *, is_emulated: bool) -> Group:
    """Speeds, what became of the drafts, and the costs behind the limit."""
    name = f"{'EMULATED, ' if is_emulated else ''}{result.condition}"
    sentences = Text(f"{costs_sentence(result)}\n{limit_sentence(result)}\n", "dim")
    return Group(Text(f"\n{name}", "bold"), _speed_table(result), _draft_table(result), sentences)


# ---------------------------------------------------------------------------------------------------------------------
# Speed


def _speed_table(result: ConditionResult) -> Table:
    """Settings below one another, the fastest in bold, then the peers. F is the product of the three shares behind it:
    of the time in which the target computes, of the tokens of a step, and the limit's step time over the measured one.
    """
    table = _table(
        ("tok/s", "over\nplain", "over\nsequ.", "F", "busy", "tok.", "time", "first\nms", "gap ms p50\np90 p99")
    )
    fastest = max(result.cells, key=lambda cell: cell.figures.tokens_per_second)
    for cell in result.cells:
        table.add_row(*_speed_cells(cell), style="bold" if cell is fastest else "")
    if result.peers:
        table.add_section()
    plain = result.cells[0].figures.tokens_per_second
    for peer in result.peers:
        ratio = f"{peer.tokens_per_second / plain:.2f}" if plain else ""
        table.add_row(f"peer {peer.name}", f"{peer.tokens_per_second:.1f}", ratio, style="dim")
    return table


def _speed_cells(cell: Cell) -> Iterator[str | Text]:
    figures, share = cell.figures, cell.figures.limit_share
    yield short_name(cell.setting)
    yield f"{figures.tokens_per_second:.1f}"
    yield _gain(figures.ratio_to_plain) if cell.setting != PLAIN else ""
    yield f"{figures.ratio_to_sequential:.2f}" if figures.ratio_to_sequential is not None else ""
    yield from (f"{factor:.2f}" for factor in (share.total, share.busy, share.tokens, share.step_time))
    yield f"{figures.first_token_s * 1e3:.0f}"
    yield " ".join(f"{seconds * 1e3:.0f}" for seconds in figures.delivery_gap_s)


def _gain(ratio: float) -> Text:
    style = "green" if ratio > 1 + _NOISE else "red" if ratio < 1 - _NOISE else ""
    return Text(f"{ratio:.2f}", style)


# ---------------------------------------------------------------------------------------------------------------------
# Drafts


def _draft_table(result: ConditionResult) -> Table:
    """Of each setting that drafts: what was accepted, where the drafts of its rounds came from, and what they cost:
    waiting, tokens that were drafted in vain for each token of an answer, and bytes on the drafter's link."""
    table = _table(
        (
            "a",
            "h",
            "tok./\nround",
            "len.",
            "% ahead branch\nredraft own none",
            "wait\n%",
            "vain",
            "bytes\n/tok.",
            "same\n%",
        )
    )
    for cell in result.cells:
        if cell.setting != PLAIN:
            table.add_row(*_draft_cells(cell))
    return table


def _draft_cells(cell: Cell) -> Iterator[str]:
    figures = cell.figures
    has_branches = cell.setting.schedule is Schedule.PIPELINED and figures.hit_rate is not None
    yield short_name(cell.setting)
    yield f"{figures.acceptance:.2f}"
    yield f"{figures.hit_rate:.2f}" if has_branches else ""
    yield f"{figures.tokens_per_round:.2f}"
    yield f"{figures.mean_draft_length:.1f}"
    yield " ".join(f"{figures.rounds_by_origin[origin.value] * 100:.0f}" for origin in DraftOrigin)
    yield f"{figures.draft_wait * 100:.0f}"
    yield f"{figures.drafted_in_vain:.1f}"
    link_bytes = figures.link_bytes_per_token.get("drafter")
    yield "" if link_bytes is None else f"{link_bytes:.0f}"
    yield "" if figures.same_text is None else f"{figures.same_text * 100:.0f}"


# ---------------------------------------------------------------------------------------------------------------------
# Words


def short_name(setting: Setting) -> str:
    """As `Setting.__str__`, in a third of the line."""
    name = str(setting)
    for word, short in _SHORT_WORDS.items():
        name = name.replace(word, short)
    return name


def one_line(result: ConditionResult) -> str:
    """The fastest setting of a condition, while others are still to be measured."""
    best = max(result.cells, key=lambda cell: cell.figures.tokens_per_second)
    figures = best.figures
    return (
        f"{result.condition}: {best.setting} {figures.tokens_per_second:.1f} tokens/s, {figures.ratio_to_plain:.2f} of "
        f"plain, {figures.limit_share.total:.2f} of the limit"
    )


def costs_sentence(result: ConditionResult) -> str:
    """What the limit follows from."""
    costs = result.costs
    verify = ", ".join(
        f"t_v({tokens}) {costs.verify_s[tokens] * 1e3:.1f}"
        for tokens in _SHOWN_VERIFY_TOKENS
        if tokens in costs.verify_s
    )
    round_trip = "" if costs.round_trip_s is None else f", R {costs.round_trip_s * 1e3:.1f}"
    return (
        f"T1 {costs.plain_step_s * 1e3:.1f} ms, {verify}, t_d {costs.draft_step_s * 1e3:.2f}{round_trip}; "
        f"a {costs.acceptance:.3f}"
    )


def limit_sentence(result: ConditionResult) -> str:
    bound = result.limit
    return (
        f"limit {bound.tokens_per_second:.1f} tokens/s at draft length {bound.draft_length}: "
        f"E {bound.tokens_per_step:.2f} in {bound.step_s * 1e3:.1f} ms"
    )


def differing_texts(results: Sequence[ConditionResult]) -> list[str]:
    """The cells in which an answer has other tokens than plain decoding, where the rule promises the same."""
    return [
        f"{result.condition}: {cell.setting} ({cell.figures.same_text:.0%} the same)"
        for result in results
        for cell in result.cells
        if cell.figures.same_text is not None and cell.figures.same_text < 1
    ]


def _table(columns: Iterable[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column("setting", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
