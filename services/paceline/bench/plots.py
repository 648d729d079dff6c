"""Pictures of a run, as PNG and SVG: speed and share of the limit by delay, and speed by concurrency."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.figures import Cell, ConditionResult
from paceline.bench.plan import PLAIN, Condition
from paceline.errors import PacelineError
from paceline.generation import Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {Schedule.PLAIN: "#7a7a7a", Schedule.SEQUENTIAL: "#e08a1e", Schedule.PIPELINED: "#1f5fa8"}
_LABEL_OFFSETS = {Schedule.PLAIN: (4, -11), Schedule.SEQUENTIAL: (-14, 5), Schedule.PIPELINED: (4, 5)}  # points
_LIMIT_COLOUR = "#333333"
_MOST_COLUMNS = 3
_PANEL_SIZE = (4.4, 3.4)  # inches


class NoPlots(PacelineError):
    """matplotlib is not installed."""

    reason = "NO_PLOTS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Album:
    """Where pictures go, and what all of them say."""

    folder: Path
    caption: str
    is_emulated: bool


def draw_all(results: Sequence[ConditionResult], album: Album) -> list[Path]:
    """Draw what there is enough of for a picture, as PNG and SVG; returns the PNGs. Raises `NoPlots`."""
    try:
        import matplotlib  # noqa: PLC0415 - optional, and slow to load
    except ImportError:
        raise NoPlots("Pictures need matplotlib: install paceline[bench], or give --no-plots.") from None
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "paceline"  # the same picture is the same file
    drawn = []
    delays = {result.condition.delay for result in results}
    for concurrency in dict.fromkeys(result.condition.concurrency for result in results):
        of_load = [result for result in results if result.condition.concurrency == concurrency]
        suffix = "" if concurrency == 1 else f"_{concurrency}_sessions"
        if len(delays) > 1:
            drawn.append(_panels(of_load, f"speed_by_delay{suffix}", album, _draw_speed_by_delay))
            drawn.append(_panels(of_load, f"limit_share_by_delay{suffix}", album, _draw_share_by_delay))
        else:
            drawn.append(_panels(of_load, f"speed{suffix}", album, _draw_bars))
    if len({result.condition.concurrency for result in results}) > 1:
        nearest = [result for result in results if result.condition.delay == results[0].condition.delay]
        drawn.append(_panels(nearest, "speed_by_concurrency", album, _draw_by_concurrency))
    return drawn


# ---------------------------------------------------------------------------------------------------------------------
# Panels


def _panels(
    results: Sequence[ConditionResult],
    name: str,
    album: Album,
    draw: Callable[[Axes, Sequence[ConditionResult]], None],
) -> Path:
    """One picture, a panel for each combination of temperature, rule and drafter."""
    import matplotlib.pyplot as plt  # noqa: PLC0415

    groups: dict[str, list[ConditionResult]] = defaultdict(list)
    for result in results:
        groups[_panel_name(result.condition)].append(result)
    columns = 2 if len(groups) == 4 else min(len(groups), _MOST_COLUMNS)
    rows = -(-len(groups) // columns)
    figure, panels = plt.subplots(
        rows,
        columns,
        figsize=(max(6.4, _PANEL_SIZE[0] * columns), _PANEL_SIZE[1] * rows + 1.0),
        layout="constrained",
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    for panel in panels.flat:
        panel.set_visible(False)
    for panel, (title, of_group) in zip(panels.flat, groups.items(), strict=False):
        panel.set_visible(True)
        draw(panel, of_group)
        panel.set_title(f"emulated, {title}" if album.is_emulated else title, loc="left", fontsize=10)
        panel.label_outer()
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
        panel.grid(axis="y", color="#e6e6e6", linewidth=0.7)
        panel.set_axisbelow(True)
    panels[0][0].set_ylim(bottom=0)  # of all, which share it; earlier, and the rest of their data would not count
    _add_legend(figure, panels.flat, columns=columns)
    figure.supxlabel(album.caption, fontsize=7.5, color="#555555")
    for ending in (".svg", ".png"):
        figure.savefig(album.folder / f"{name}{ending}", dpi=130, metadata={"Date": None} if ending == ".svg" else None)
    plt.close(figure)
    return album.folder / f"{name}.png"


def _add_legend(figure: Figure, panels: Iterable[Axes], *, columns: int) -> None:
    """One for all panels, each label once."""
    handles: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside upper center",
        ncols=min(4, 2 * columns),
        frameon=False,
        fontsize=8.5,
    )


def _panel_name(condition: Condition) -> str:
    words = [f"temperature {condition.temperature:g}"]
    if condition.temperature:
        words.append(condition.rule.value)
    return ", ".join(filter(None, (*words, str(condition.drafter))))


def best_by_schedule(result: ConditionResult) -> Mapping[Schedule, Cell]:
    """The fastest setting of each schedule."""
    best: dict[Schedule, Cell] = {}
    for cell in result.cells:
        fastest = best.get(cell.setting.schedule)
        if fastest is None or fastest.figures.tokens_per_second < cell.figures.tokens_per_second:
            best[cell.setting.schedule] = cell
    return best


def _label(schedule: Schedule) -> str:
    return schedule.value if schedule is Schedule.PLAIN else f"{schedule.value}, best setting"


# ---------------------------------------------------------------------------------------------------------------------
# By delay


def _round_trips(axes: Axes, results: Sequence[ConditionResult]) -> list[float]:
    """Places on the x axis: round trips as they were set, in plain target steps."""
    axes.set_xlabel("round trip to the drafter, in plain target steps", fontsize=9)
    return [2 * result.delay_s / result.costs.plain_step_s for result in results]


def _draw_speed_by_delay(axes: Axes, results: Sequence[ConditionResult]) -> None:
    places = _round_trips(axes, results)
    limits = [result.limit.tokens_per_second for result in results]
    axes.plot(places, limits, color=_LIMIT_COLOUR, linewidth=1.1, linestyle="--", label="limit")
    for schedule, colour in _COLOURS.items():
        best = [best_by_schedule(result).get(schedule) for result in results]
        points = [(place, cell.figures) for place, cell in zip(places, best, strict=True) if cell is not None]
        if not points:
            continue
        x = [place for place, _ in points]
        speeds = [figures.tokens_per_second for _, figures in points]
        spread = [
            [figures.tokens_per_second - figures.slowest_repeat for _, figures in points],
            [figures.fastest_repeat - figures.tokens_per_second for _, figures in points],
        ]
        axes.errorbar(
            x,
            speeds,
            yerr=spread,
            color=colour,
            marker="o",
            markersize=4,
            capsize=2,
            elinewidth=0.8,
            label=_label(schedule),
        )
        for place, speed in zip(x, speeds, strict=True):
            axes.annotate(
                f"{speed:.0f}",
                (place, speed),
                textcoords="offset points",
                xytext=_LABEL_OFFSETS[schedule],
                fontsize=7.5,
                color=colour,
            )
    axes.margins(x=0.1)
    axes.set_ylabel("tokens per second", fontsize=9)


def _draw_share_by_delay(axes: Axes, results: Sequence[ConditionResult]) -> None:
    places = _round_trips(axes, results)
    settings = [cell.setting for cell in results[0].cells if cell.setting != PLAIN]
    shown = {Schedule.SEQUENTIAL: 0, Schedule.PIPELINED: 0}
    for setting in settings:
        shares = [
            cell.figures.limit_share.total for result in results for cell in result.cells if cell.setting == setting
        ]
        number = shown[setting.schedule]
        shown[setting.schedule] += 1
        axes.plot(
            places,
            shares,
            color=_COLOURS[setting.schedule],
            alpha=max(0.35, 1 - 0.2 * number),
            linestyle=("-", "--", ":", "-.")[number % 4],
            marker="o",
            markersize=3.5,
            label=str(setting),
        )
    axes.axhline(1.0, color=_LIMIT_COLOUR, linewidth=0.9, linestyle="--")
    axes.margins(x=0.1)
    axes.set_ylabel("share of the limit, F", fontsize=9)


# ---------------------------------------------------------------------------------------------------------------------
# By setting, and by concurrency


def _draw_bars(axes: Axes, results: Sequence[ConditionResult]) -> None:
    """All settings of the only delay there is."""
    result = results[0]
    names = [str(cell.setting) for cell in result.cells]
    speeds = [cell.figures.tokens_per_second for cell in result.cells]
    colours = [_COLOURS[cell.setting.schedule] for cell in result.cells]
    bars = axes.bar(range(len(names)), speeds, 0.72, color=colours)
    axes.bar_label(bars, [f"{speed:.0f}" for speed in speeds], padding=2, fontsize=8)
    axes.axhline(result.limit.tokens_per_second, color=_LIMIT_COLOUR, linewidth=1.1, linestyle="--", label="limit")
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
    axes.margins(y=0.12)
    axes.set_ylabel("tokens per second", fontsize=9)


def _draw_by_concurrency(axes: Axes, results: Sequence[ConditionResult]) -> None:
    """Against plain decoding at the same load: the controller, and the best that is fixed for that load."""
    loads = [result.condition.concurrency for result in results]
    automatic = [_best_ratio(result, is_fixed=False) for result in results]
    fixed = [_best_ratio(result, is_fixed=True) for result in results]
    for ratios, label, colour, style in (
        (automatic, "auto", _COLOURS[Schedule.PIPELINED], "-"),
        (fixed, "best fixed setting", _COLOURS[Schedule.SEQUENTIAL], "--"),
    ):
        points = [(load, ratio) for load, ratio in zip(loads, ratios, strict=True) if ratio is not None]
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, color=colour, linestyle=style, marker="o", markersize=4, label=label)
    axes.axhline(1.0, color=_COLOURS[Schedule.PLAIN], linewidth=1.2, label="plain")
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [str(load) for load in loads])
    axes.set_xlabel("answers at a time", fontsize=9)
    axes.set_ylabel("speed over plain decoding", fontsize=9)


def _best_ratio(result: ConditionResult, *, is_fixed: bool) -> float | None:
    ratios = [
        cell.figures.ratio_to_plain
        for cell in result.cells
        if cell.setting != PLAIN and (cell.setting.draft_length is not None) == is_fixed
    ]
    return max(ratios, default=None)
