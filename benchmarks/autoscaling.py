"""Simulates a day of load under the coupled autoscaling policy and under Serve's default; draws `docs/autoscaling.svg`.

Nothing here is measured on hardware: sessions, start-up times and drafters are the model of `tests.load_simulation`.
The default scales each deployment by its leases alone, and must be told how many sessions a drafter carries; it is run
with the limit of a drafter, and with the figures that foresight would give for the usual and for the slow drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated

import matplotlib.pyplot as plt
import typer
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from benchmarks.report import write_report
from orchestrator.scaling import ScalingRules
from tests.load_simulation import (
    HOUR,
    STALL_TARGET,
    PoolSetting,
    Setting,
    Trace,
    a_day,
    coupled,
    direction_changes,
    fewest_drafters,
    leases_alone,
    simulate,
)

FIGURE = Path(__file__).parent.parent / "docs" / "autoscaling.svg"
TARGET_COLOUR, DRAFTER_COLOUR, LOAD_COLOUR = "#1f5fa8", "#e08a1e", "#333333"
OTHER_COLOUR, FEWEST_COLOUR = "#7a7a7a", "#dedede"
BUSY_SESSIONS = 100  # of a busy hour: for so many the default is told the right figure


@dataclass(frozen=True)
class Run:
    name: str
    trace: Trace


def run_all(seed: int) -> list[Run]:
    """The coupled policy first."""
    load, setting = a_day(seed), Setting()
    runs = [Run("coupled", simulate(load, coupled(ScalingRules()), setting))]
    # The work of a draft at midnight is the usual one, that in the afternoon the slow one.
    usual, slow = (BUSY_SESSIONS // fewest_drafters(BUSY_SESSIONS, load.work(hour * HOUR)) for hour in (0.0, 14.0))
    for sessions in (64, usual, slow):
        default = replace(
            setting,
            target=_with_serves_delays(setting.target),
            drafter=replace(_with_serves_delays(setting.drafter), sessions_per_replica=sessions),
        )
        runs.append(Run(f"leases alone, {sessions} a drafter", simulate(load, leases_alone, default)))
    return runs


def _with_serves_delays(setting: PoolSetting) -> PoolSetting:
    """Our configuration's defaults."""
    return replace(setting, upscale_delay_s=10.0, downscale_delay_s=300.0)


def figures(trace: Trace) -> dict[str, float]:
    """What the day cost and how it went. The fewest replicas are known only in hindsight."""
    window = trace.at(600)
    waits_s = sorted(trace.waits_s)
    return {
        "target_hours": round(trace.hours(trace.targets), 1),
        "target_hours_over_fewest": round(trace.hours(trace.targets) / trace.hours(trace.fewest_targets), 3),
        "target_hours_over_fewest_held_10_min": round(
            trace.hours(trace.targets) / trace.hours(trace.held(trace.fewest_targets)), 3
        ),
        "drafter_hours": round(trace.hours(trace.drafters), 1),
        "drafter_hours_over_fewest": round(trace.hours(trace.drafters) / trace.hours(trace.fewest_drafters), 3),
        "drafter_hours_over_fewest_held_10_min": round(
            trace.hours(trace.drafters) / trace.hours(trace.held(trace.fewest_drafters)), 3
        ),
        "mean_stall": round(trace.mean_stall(), 4),
        "share_of_session_time_stalled_over_target": round(trace.stalled_share(), 4),
        "mean_wait_for_a_target_s": round(fmean(waits_s), 2),
        "p99_wait_for_a_target_s": round(waits_s[int(0.99 * len(waits_s))], 1),
        "max_wait_for_a_target_s": round(waits_s[-1], 1),
        "most_direction_changes_of_targets_in_10_min": direction_changes(trace.targets, window=window),
        "most_direction_changes_of_drafters_in_10_min": direction_changes(trace.drafters, window=window),
    }


def draw(runs: Sequence[Run], *, caption: str) -> None:
    """Load, both pools against the fewest replicas, and the stall."""
    coupled_run, limit, usual = runs[:3]
    trace = coupled_run.trace
    figure, panels = plt.subplots(
        4, 1, sharex=True, figsize=(10, 9.5), layout="constrained", height_ratios=(2, 2, 3, 2)
    )
    load, targets, drafters, stall = panels
    load.plot(*_points(trace, _mean_of(trace, trace.offered, 60.0)), color=LOAD_COLOUR, linewidth=1)
    _draw_pool(targets, trace, trace.targets, trace.fewest_targets, TARGET_COLOUR)
    _draw_pool(drafters, trace, trace.drafters, trace.fewest_drafters, DRAFTER_COLOUR)
    for run, style in ((usual, "-"), (limit, ":")):
        hours, counts = _steps(run.trace, run.trace.drafters)
        drafters.step(hours, counts, where="post", color=OTHER_COLOUR, linestyle=style, linewidth=0.7, label=run.name)
    for run, colour, style in (
        (coupled_run, DRAFTER_COLOUR, "-"),
        (usual, OTHER_COLOUR, "-"),
        (limit, OTHER_COLOUR, ":"),
    ):
        percent = [100 * share for share in _mean_of(run.trace, run.trace.stall, 600.0)]
        stall.plot(*_points(run.trace, percent), color=colour, linestyle=style, linewidth=1.2, label=run.name)
    stall.axhline(100 * STALL_TARGET, color="#bb3333", linewidth=0.8, label="stall target")
    titles = (
        "sessions that would be open if nobody had to wait",
        "targets ordered",
        "drafters ordered",
        "share of a round spent waiting for a draft, mean of 10 min, %",
    )
    for axes, title, top, columns in zip(panels, titles, (178, 18, 28, 112), (1, 4, 1, 4), strict=True):
        _dress(axes, title, top)
        if axes is not load:
            axes.legend(fontsize=8, frameon=False, loc="upper left", ncols=columns)
    for hour, text in (
        (10.1, "burst"),
        (20.6, "burst"),
        (14.5, "drafts take 1.6 times as long"),
        (19.5, "long\nprompts"),
    ):
        load.annotate(text, (hour, 175), ha="center", va="top", fontsize=8)
    stall.set_xlabel(f"hour of the day\n{caption}", fontsize=9)
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE)
    figure.savefig(FIGURE.with_suffix(".png"), dpi=110)


def _draw_pool(axes: Axes, trace: Trace, counts: Sequence[int], fewest: Sequence[int], colour: str) -> None:
    hours, held = _steps(trace, trace.held(fewest))
    axes.fill_between(hours, held, step="post", color=FEWEST_COLOUR, label="fewest, held 10 min (hindsight)")
    hours, ordered = _steps(trace, counts)
    axes.step(hours, ordered, where="post", color=colour, linewidth=1.6, label="coupled policy", zorder=3)


def _dress(axes: Axes, title: str, top: float) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlim(0, 24)
    axes.set_xticks(range(0, 25, 2))
    axes.set_ylim(0, top)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
    axes.axvspan(13, 16, color="#fff3d6", zorder=-1, linewidth=0)
    axes.axvspan(19, 20, color="#e6f0fa", zorder=-1, linewidth=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _steps(trace: Trace, counts: Sequence[int]) -> tuple[list[float], list[int]]:
    """Hours and counts, where they change and at both ends."""
    kept = [index for index, count in enumerate(counts) if index in {0, len(counts) - 1} or count != counts[index - 1]]
    return [trace.time_s[index] / HOUR for index in kept], [counts[index] for index in kept]


def _points(trace: Trace, values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Hours and values, a point a minute: more cannot be seen."""
    each_minute = slice(None, None, trace.at(60.0))
    return [time_s / HOUR for time_s in trace.time_s[each_minute]], list(values[each_minute])


def _mean_of(trace: Trace, values: Sequence[float], window_s: float) -> list[float]:
    """The mean of the last `window_s`, for each step."""
    steps, total, means = trace.at(window_s), 0.0, []
    for index, value in enumerate(values):
        total += value - (values[index - steps] if index >= steps else 0.0)
        means.append(total / min(index + 1, steps))
    return means


def main(seed: Annotated[int, typer.Option(help="Of the day's sessions and start-up times.")] = 1) -> None:
    """Simulate the day and draw the figure."""
    runs = run_all(seed)
    caption = (
        "simulated: Poisson sessions of one minute, 16 a target; targets start in 150 to 210 s, drafters in 60 to 120 s; "
        f"seed {seed}"
    )
    draw(runs, caption=caption)
    results = {run.name: figures(run.trace) for run in runs}
    write_report(
        "autoscaling", {"kind": "simulated", "seed": seed, "sessions": len(runs[0].trace.waits_s), "policies": results}
    )
    for name, values in results.items():
        print(name, values)


if __name__ == "__main__":
    typer.run(main)
