"""Draws `docs/pipeline.svg`: when target and drafter compute, in both schedules, as measured on this machine.

The target is the default model on one thread, the drafter a noisy copy of it on another; both are real processes, and
this process plays the orchestrator with the orchestrator's own parts.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import typer
from matplotlib.axes import Axes

from benchmarks.overhead import connected, start
from benchmarks.report import write_report
from orchestrator.drafter_pool import DrafterPool
from orchestrator.drafting import DraftsWithFallback
from orchestrator.finish import EndConditions, OutputTracker
from orchestrator.fixed_planner import FixedPlanner
from orchestrator.loop import Target, TimedRows, run_session
from orchestrator.remote_drafts import RemoteDrafts
from orchestrator.target_pool import TargetPool
from orchestrator.text import IncrementalDetokenizer, Tokenizer
from paceline.bench.machine import machine
from paceline.engine.checkpoint import DEFAULT_MODEL, resolve_checkpoint
from paceline.generation import Schedule
from paceline.prefix import TokenPrefix
from paceline.types import Draft, SamplingParams, SessionSpec, SpeculationStats, VerificationRule

FIGURE = Path(__file__).parent.parent / "docs" / "pipeline.svg"
PROMPT = "Name the planets of the solar system, from the Sun outwards, and say one thing about each."
TARGET_COLOUR, DRAFTER_COLOUR, TOKEN_COLOUR = "#1f5fa8", "#e08a1e", "#333333"


@dataclass
class Timeline:
    """Bars and ticks of one run, in seconds from its first verified draft."""

    schedule: Schedule
    target: list[tuple[float, float]] = field(default_factory=list)  # start, duration
    drafter: list[tuple[float, float]] = field(default_factory=list)
    tokens: list[tuple[float, int]] = field(default_factory=list)  # time, how many
    stats: SpeculationStats = field(default_factory=SpeculationStats)


class WatchedTarget:
    """Notes when the target computed."""

    def __init__(self, inner: Target, timeline: Timeline) -> None:
        self._inner, self._timeline = inner, timeline

    def ask(self, prefix: TokenPrefix, draft: Draft) -> None:
        self._inner.ask(prefix, draft)

    async def verify(self, prefix: TokenPrefix, draft: Draft) -> TimedRows:
        judged = await self._inner.verify(prefix, draft)
        step_time_s = judged.rows.step_time_s
        self._timeline.target.append((judged.arrived_s - step_time_s, step_time_s))
        return judged


class WatchedDrafts(RemoteDrafts):
    """Notes when the drafter computed."""

    def __init__(self, drafter: DrafterPool, spec: SessionSpec, timeline: Timeline) -> None:
        super().__init__(drafter, spec)
        self._timeline = timeline

    def on_event(self, event: Any) -> None:
        if event.WhichOneof("event") == "proposal":
            duration_s = event.proposal.draft_time_us / 1e6
            self._timeline.drafter.append((time.perf_counter() - duration_s, duration_s))
        super().on_event(event)


async def record(
    schedule: Schedule,
    target: TargetPool,
    drafter: DrafterPool,
    tokenizer: Tokenizer,
    *,
    draft_length: int,
    max_tokens: int,
) -> Timeline:
    """Run one answer and note who computed when."""
    prompt_ids = tokenizer.encode_chat([("user", PROMPT)])
    assert target.info is not None
    spec = SessionSpec(
        session_id=uuid.uuid4().hex,
        prompt_length=len(prompt_ids),
        sampling=SamplingParams(temperature=0.0),
        seed=1,
        rule=VerificationRule.COUPLED,
        vocab_size=target.info.vocab_size,
    )
    timeline = Timeline(schedule)
    output = OutputTracker(IncrementalDetokenizer(tokenizer), EndConditions(max_tokens=max_tokens))
    with (
        target.session(spec, verify_deadline_s=60, deadline_s=None) as at_target,
        closing(WatchedDrafts(drafter, spec, timeline)) as at_drafter,
    ):
        at_drafter.ask()
        rounds = run_session(
            spec,
            prompt_ids,
            FixedPlanner(schedule=schedule, draft_length=draft_length, rule=spec.effective_rule),
            target=WatchedTarget(at_target, timeline),
            drafts=DraftsWithFallback(at_drafter, None),
            output=output,
            stats=timeline.stats,
        )
        async for result in rounds:
            timeline.tokens.append((time.perf_counter(), len(result.delivery.token_ids)))
    return timeline


def draw(timelines: list[Timeline], *, shown_s: float, caption: str) -> None:
    """One panel a schedule: a lane for the target, one for the drafter, and the tokens as they are committed."""
    figure, panels = plt.subplots(len(timelines), 1, sharex=True, figsize=(10, 4.2), layout="constrained")
    for panel, timeline in zip(panels, timelines, strict=True):
        # The first round ingests the prompt; the picture begins with the first draft.
        origin_s = timeline.tokens[0][0]
        _draw_lane(panel, timeline.target, origin_s, row=1, colour=TARGET_COLOUR)
        _draw_lane(panel, timeline.drafter, origin_s, row=0, colour=DRAFTER_COLOUR)
        total = 0
        for at_s, count in timeline.tokens[1:]:
            if at_s - origin_s > shown_s:
                break
            total += count
            panel.text(at_s - origin_s, 1.5, f"+{count}", ha="center", va="bottom", fontsize=8, color=TOKEN_COLOUR)
        panel.set_yticks([0, 1], ["drafter", "target"])
        panel.set_ylim(-0.5, 1.95)
        panel.set_xlim(0, shown_s)
        panel.set_title(f"{timeline.schedule.value}: {total} tokens in {shown_s:g} s", loc="left", fontsize=11)
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
        panel.tick_params(axis="y", length=0)
    panels[-1].set_xlabel(f"seconds\n{caption}", fontsize=9)
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE)
    figure.savefig(FIGURE.with_suffix(".png"), dpi=110)


def _draw_lane(panel: Axes, bars: list[tuple[float, float]], origin_s: float, *, row: int, colour: str) -> None:
    panel.broken_barh(
        [(start_s - origin_s, duration_s) for start_s, duration_s in bars],
        (row - 0.36, 0.72),
        facecolors=colour,
        edgecolor="white",
        linewidth=0.8,
    )


async def measure(
    target_address: str, drafter_address: str, tokenizer: Tokenizer, *, draft_length: int, max_tokens: int
) -> list[Timeline]:
    async with AsyncExitStack() as stack:
        target, drafter = await connected(stack, target_address, drafter_address)
        timelines = []
        for schedule in (Schedule.SEQUENTIAL, Schedule.PIPELINED):
            for _ in range(2):  # the first run warms up
                timeline = await record(
                    schedule, target, drafter, tokenizer, draft_length=draft_length, max_tokens=max_tokens
                )
            timelines.append(timeline)
        return timelines


def main(
    draft_length: Annotated[int, typer.Option(help="Tokens of one draft.")] = 3,
    logit_noise: Annotated[float, typer.Option(help="Noise on the drafter's logits.")] = 0.8,
    shown_s: Annotated[float, typer.Option(help="Seconds that the figure shows.")] = 2.5,
) -> None:
    """Measure both schedules and draw the figure."""
    tokenizer = Tokenizer.load(str(resolve_checkpoint(DEFAULT_MODEL)))
    with ExitStack() as stack:
        target = start(stack, "target_service", "--threads", "1")
        drafter = start(stack, "drafter_service", "--threads", "1", "--logit-noise", str(logit_noise))
        timelines = asyncio.run(
            measure(target.address, drafter.address, tokenizer, draft_length=draft_length, max_tokens=96)
        )
    caption = (
        f"SmolLM2-135M as target, a noisy copy of it as drafter, one core each ({machine()}); draft length "
        f"{draft_length}, temperature 0; '+n': tokens committed"
    )
    draw(timelines, shown_s=shown_s, caption=caption)
    rates = {
        timeline.schedule.value: round(
            sum(count for _, count in timeline.tokens[1:]) / (timeline.tokens[-1][0] - timeline.tokens[0][0]), 2
        )
        for timeline in timelines
    }
    acceptance = {timeline.schedule.value: round(timeline.stats.acceptance_rate, 3) for timeline in timelines}
    write_report("timeline", {"tokens_per_second": rates, "acceptance_rate": acceptance, "draft_length": draft_length})
    print(rates, acceptance)


if __name__ == "__main__":
    typer.run(main)
