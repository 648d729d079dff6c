"""A progress bar for what usually takes no time: it appears on a terminal when the wait gets long, and leaves no trace."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from types import TracebackType
from typing import Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

SHOWN_AFTER_S = 2.0

ItemT = TypeVar("ItemT")


class PatientBar:
    """A bar around some work: `with PatientBar("Loading x") as bar: for item in bar.track(items): ...`.

    It moves while items are tracked and pulses before, so that it also stands for a download. Without a terminal
    nothing is ever written.
    """

    def __init__(self, description: str, *, console: Console, shown_after_s: float = SHOWN_AFTER_S) -> None:
        # No redirection: standard output belongs to whoever reads it, and ours is read by machines.
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task(description, total=None)
        self._timer = threading.Timer(shown_after_s, self.show)
        self._timer.daemon = True
        self.is_possible = console.is_interactive

    def __enter__(self) -> Self:
        if self.is_possible:
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.is_possible:
            self._timer.cancel()
            self._timer.join()  # it may be about to show the bar
            self._progress.stop()

    def show(self) -> None:
        """Without waiting any longer."""
        self._progress.start()

    def track(self, items: Collection[ItemT]) -> Iterator[ItemT]:
        """The items, and the bar moves with them."""
        self._progress.update(self._task, total=len(items))
        for item in items:
            yield item
            self._progress.advance(self._task)
