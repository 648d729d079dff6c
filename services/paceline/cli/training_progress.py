"""How far `paceline train` is: bars with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import box
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from paceline.cli.terminal import Terminal

if TYPE_CHECKING:
    from paceline.training.evaluation import Evaluation
    from paceline.training.trainer import StepLog

_LINES = 10  # about so many of a stage, where there is no bar
_SMOOTHING = 0.02  # of the loss that is shown: weight of the last step
_SPEED_OVER_S = 120.0  # the time left is what the last two minutes promise


class TrainingProgress:
    """Shows one stage after the other, and passes on the wish to stop (`training.run.Observer`)."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._stop = threading.Event()
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._total, self._done, self._begun = 0, 0, 0
        self._tokens, self._begun_s = 0, 0.0
        self._loss: float | None = None

    @contextmanager
    def stage(self, name: str, *, total: int, done: int) -> Iterator[None]:
        """A stage of `total` answers or steps, of which `done` were done by an earlier run."""
        columns = (
            TextColumn("{task.description:8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
        )
        self._total, self._done, self._begun = total, done, done
        self._tokens, self._begun_s = 0, time.monotonic()
        if done and done < total:
            self._terminal.say(f"{name}: goes on from {done:,} of {total:,}.")
        with Progress(
            *columns,
            console=self._terminal.err,
            transient=True,
            disable=not self._has_bar,
            speed_estimate_period=_SPEED_OVER_S,
        ) as progress:
            self._progress = progress
            self._task = progress.add_task(name, total=total, completed=done, detail="")
            yield
        self._progress = None
        self._terminal.say(f"{name}: {self._done:,} of {total:,} in {time.monotonic() - self._begun_s:.0f} s.")

    def ask_to_stop(self) -> None:
        """End behind this step."""
        if not self._stop.is_set():
            self._terminal.say("Stopping behind this step, and saving.")
        self._stop.set()

    def is_asked_to_stop(self) -> bool:
        return self._stop.is_set()

    def on_answer(self, tokens: int) -> None:
        self._tokens += tokens
        speed = f"{self._tokens / self._seconds:.0f} tokens/s"
        self._advance(speed)
        if not self._has_bar and self._done * _LINES // self._total > (self._done - 1) * _LINES // self._total:
            self._terminal.say(f"{self._done:,} of {self._total:,} answers: {speed}, {self._time_left} left")

    def on_step(self, loss: float) -> None:
        self._loss = loss if self._loss is None else self._loss + _SMOOTHING * (loss - self._loss)
        self._advance(f"loss {self._loss:.2f}")

    def on_log(self, log: StepLog, evaluation: Evaluation | None) -> None:
        if evaluation is None:
            return
        parts = ["" if math.isnan(log.loss) else f"loss {log.loss:.2f}", in_one_line(evaluation)]
        parts.append("" if self._has_bar or self._done == self._begun else f"{self._time_left} left")
        self._terminal.say(f"{log.step:,} of {self._total:,} steps: {', '.join(filter(None, parts))}")

    @property
    def _has_bar(self) -> bool:
        return self._terminal.err.is_terminal

    @property
    def _time_left(self) -> str:
        """At the speed of this run so far."""
        return _duration(self._seconds / (self._done - self._begun) * (self._total - self._done))

    @property
    def _seconds(self) -> float:
        return max(1e-6, time.monotonic() - self._begun_s)

    def _advance(self, detail: str) -> None:
        self._done += 1
        assert self._progress is not None, "within a stage"
        self._progress.update(self._task, completed=self._done, detail=detail)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def in_one_line(evaluation: Evaluation) -> str:
    """The acceptance at each temperature."""
    parts = (f"{result.acceptance:.3f} at {result.temperature:g}" for result in evaluation.results)
    return f"acceptance by temperature {', '.join(parts)}"


def evaluation_table(evaluation: Evaluation) -> Table:
    """A line a temperature, with what speculation is predicted to bring at its best draft length."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=_costs(evaluation), caption_justify="left")
    for name in ("temperature", "acceptance", "tokens per round of 4", "sequential", "pipelined"):
        table.add_column(name, justify="right")
    for result in evaluation.results:
        speed_ups = evaluation.speed_ups(result)
        sequential = max(speed_ups, key=lambda one: one.sequential)
        pipelined = max(speed_ups, key=lambda one: one.pipelined)
        table.add_row(
            f"{result.temperature:g}",
            f"{result.acceptance:.3f}",
            f"{result.tokens_per_round[3]:.2f}",
            f"{sequential.sequential:.2f} ({sequential.draft_length})",
            f"{pipelined.pipelined:.2f} ({pipelined.draft_length})",
        )
    return table


def _costs(evaluation: Evaluation) -> str:
    assert evaluation.costs is not None, "a finished evaluation has costs"
    return (
        f"A step of the drafter takes {evaluation.costs.step:.3f} of the target's. Speeds are predicted, plain decoding "
        "being 1, and in brackets the draft length that gives them."
    )
