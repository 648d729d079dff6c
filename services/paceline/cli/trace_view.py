"""What a run of rounds comes to, as a person reads it: where the time went, and where the drafts came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.cli.show import counted, percent
from paceline.client import DraftOrigin, RoundRecord, TracedRounds

_BAR_WIDTH = 24
_DASH = Text("-", "dim")
_ORIGINS = {
    DraftOrigin.AHEAD: ("ahead of the verdict", "green"),
    DraftOrigin.BRANCH: ("on a branch", "cyan"),
    DraftOrigin.REDRAFT: ("waited for", "yellow"),
    DraftOrigin.FALLBACK: ("own lookup", "magenta"),
    DraftOrigin.NONE: ("no draft", ""),
}


def trace_view(traced: TracedRounds) -> RenderableType:
    """All of it; fits into 80 columns."""
    if not traced.records:
        return Text("No round is remembered yet.", "dim")
    blocks: list[RenderableType] = [Text("\n").join(_headline(traced)), "", _time_table(traced.records), ""]
    return Group(*blocks, _draft_table(traced.records), "", _rejections(traced.records))


def _headline(traced: TracedRounds) -> Iterator[Text]:
    records = traced.records
    rounds, requests = len(records), len({record.request_id for record in records})
    emitted = sum(record.emitted for record in records)
    words = f" of {counted(requests, 'request')}, {counted(emitted, 'token')}, {emitted / rounds:.2f} a round"
    yield Text.assemble((counted(rounds, "round"), "bold"), words)
    if traced.is_emulated:
        yield Text("emulated: the models' steps are held to a set time, so no time here is a measurement", "yellow")
    if traced.dropped:
        yield Text(f"{counted(traced.dropped, 'older round')} of this orchestrator forgotten", "dim")


def _time_table(records: Sequence[RoundRecord]) -> Table:
    """The parts of all rounds together: they add up to the whole."""
    whole_s = sum(record.round_s for record in records)
    table = _table("time of a round", "mean ms", "share")
    table.add_column("")
    for name, style, part_s in _parts(records):
        share = part_s / whole_s if whole_s else 0.0
        bar = Text("━" * round(share * _BAR_WIDTH), style)
        table.add_row(name, f"{1000 * part_s / len(records):.2f}", percent(share), bar)
    return table


def _parts(records: Sequence[RoundRecord]) -> Iterator[tuple[str, str, float]]:
    """Each part's name, colour and seconds over all rounds."""
    verify = [record.verify_time for record in records]
    yield "target computes", "green", sum(part.step_s for part in verify)
    yield "queue at the target", "cyan", sum(part.queue_s for part in verify)
    yield "wire to the target", "blue", sum(2 * part.way_s for part in verify)
    yield "waiting for drafts", "yellow", sum(record.draft_wait_s for record in records)
    yield "orchestrator", "magenta", sum(record.commit_s for record in records)


def _draft_table(records: Sequence[RoundRecord]) -> Table:
    table = _table("draft", "rounds", "drafted", "kept", "tokens a round")
    for origin, (name, style) in _ORIGINS.items():
        chosen = [record for record in records if record.draft_origin is origin]
        if chosen:
            drafted = sum(record.draft_length for record in chosen)
            kept = sum(record.kept_length for record in chosen)
            emitted = sum(record.emitted for record in chosen)
            table.add_row(
                Text(name, style),
                str(len(chosen)),
                str(drafted) if drafted else _DASH,
                percent(kept / drafted) if drafted else _DASH,
                f"{emitted / len(chosen):.2f}",
            )
    return table


def _rejections(records: Sequence[RoundRecord]) -> Text:
    hits = sum(record.has_continuation is True for record in records)
    rejections = sum(record.has_continuation is not None for record in records)
    if not rejections:
        return Text("no rejections", "dim")
    return Text.assemble(
        (counted(rejections, "rejection"), "bold"),
        ", drafted tokens there behind ",
        (f"{hits} ({percent(hits / rejections)})", "green"),
        " and missing behind ",
        (str(rejections - hits), "red"),
    )


def _table(first: str, *figures: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(first, min_width=20)
    for name in figures:
        table.add_column(name, justify="right")
    return table
