"""The one door between the event loop and the model: a thread that owns the model and runs one step after another.

Commands go in from the event loop, events come back on it; between two steps every waiting command is applied, which
is how a drafter learns of a rejection between two of its own steps. The loop never blocks and the model is never
touched by two threads. Knows nothing of gRPC or of what commands and events mean.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import structlog

from paceline.errors import QueueFull

logger = structlog.get_logger(__name__)

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")
CommandT_contra = TypeVar("CommandT_contra", contravariant=True)
EventT_co = TypeVar("EventT_co", covariant=True)

_HOUSEKEEPING_S = 1.0
_SHARE_WINDOW_S = 1.0
_POLL_S = 0.005
MAX_QUEUED = 16_384  # commands not yet applied


class Worker(Protocol[CommandT_contra, EventT_co]):
    """What runs on the model thread. None of its methods raises for anything that a peer sent."""

    def accept(self, command: CommandT_contra) -> Sequence[EventT_co]:
        """Apply one command; model work it asks for waits for a step."""

    def has_work(self) -> bool: ...

    @property
    def waiting(self) -> int:
        """How many items wait for a step; read by other threads."""

    def step(self) -> Sequence[EventT_co]:
        """Do one bounded piece of model work."""

    def expire_idle(self) -> Sequence[EventT_co]:
        """Forget sessions that nobody has used for long; called about once a second."""


@dataclass(frozen=True, slots=True)
class _Progress:
    """What the thread has done so far; replaced as a whole, so that other threads read values that belong together."""

    busy_s: float = 0.0  # in steps that have ended
    step_started_s: float | None = None  # the step that runs


class StepClock:
    """How long one thread has been in steps; that thread tells it, any other may ask.

    `clock` gives seconds that never run backwards.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._progress = _Progress()
        self._window = (clock(), 0.0)  # when it began, and the busy seconds until then
        self._share = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        started_s = self._clock()
        busy_s = self._progress.busy_s
        self._progress = _Progress(busy_s, started_s)
        try:
            yield
        finally:
            self._progress = _Progress(busy_s + self._clock() - started_s)

    @property
    def seconds_in_step(self) -> float:
        """How long the step that runs has taken so far; 0 between steps."""
        started_s = self._progress.step_started_s
        return 0.0 if started_s is None else max(0.0, self._clock() - started_s)

    @property
    def busy_share(self) -> float:
        """Share of time in steps, 0 to 1: from one reading to the next one at least a second later."""
        now_s, progress = self._clock(), self._progress
        window_started_s, busy_before_s = self._window
        elapsed_s = now_s - window_started_s
        if elapsed_s >= _SHARE_WINDOW_S:
            running_s = 0.0 if progress.step_started_s is None else now_s - progress.step_started_s
            busy_s = progress.busy_s + running_s
            self._share = min(1.0, max(0.0, (busy_s - busy_before_s) / elapsed_s))
            self._window = (now_s, busy_s)
        return self._share


class ModelThread(Generic[CommandT, EventT]):
    """Runs a worker from `start` to `stop`; `on_events` is called on the event loop that started it, `on_failure` if the
    worker itself breaks.
    """

    def __init__(
        self,
        worker: Worker[CommandT, EventT],
        *,
        on_events: Callable[[Sequence[EventT]], None],
        on_failure: Callable[[], None],
        name: str,
        patience_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`patience_s` says, on the thread, how long a step should wait for more commands, in seconds (0: not at all); it
        is asked again behind each of them.
        """
        self._worker, self._patience_s = worker, patience_s
        self._on_events, self._on_failure = on_events, on_failure
        self._inbox: queue.SimpleQueue[CommandT | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop
        self._step_clock = StepClock()
        self._stopping = False
        self._next_housekeeping_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, command: CommandT) -> None:
        """Queue a command; raises `QueueFull` when the thread has fallen far behind."""
        if self._inbox.qsize() >= MAX_QUEUED:
            raise QueueFull("This replica has fallen behind its peers; try again in a moment.")
        self._inbox.put(command)

    @property
    def queued(self) -> int:
        """Commands not yet applied, and work that waits for a step."""
        return self._inbox.qsize() + self._worker.waiting

    @property
    def seconds_in_step(self) -> float:
        """How long the step that runs has taken so far; 0 between steps. Grows without end if the model hangs."""
        return self._step_clock.seconds_in_step

    @property
    def step_busy_share(self) -> float:
        """Share of about the last second spent in steps, 0 to 1."""
        return self._step_clock.busy_share

    async def stop(self) -> None:
        """Let the running step end, then end the thread."""
        self._stopping = True
        self._inbox.put(None)
        # Not joined on a thread of the pool: that one would outlive a caller that gives up on a model that hangs, and
        # keep the process from ending.
        while self._thread.is_alive():  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    def _run(self) -> None:
        pause_s = 0.0
        try:
            while not self._stopping:
                events = self._apply_commands(pause_s)
                events += self._housekeep()
                pause_s = self._pause_s()
                if pause_s == 0.0:
                    with self._step_clock.step():
                        events += self._worker.step()
                if events:
                    self._loop.call_soon_threadsafe(self._on_events, events)
        except Exception:
            logger.exception("the model thread broke")
            self._loop.call_soon_threadsafe(self._on_failure)

    def _housekeep(self) -> Sequence[EventT]:
        now_s = time.monotonic()
        if now_s < self._next_housekeeping_s:
            return ()
        self._next_housekeeping_s = now_s + _HOUSEKEEPING_S
        return self._worker.expire_idle()

    def _pause_s(self) -> float:
        """How long to wait for commands before the next step; 0: begin it now."""
        return min(self._patience_s(), _HOUSEKEEPING_S) if self._worker.has_work() else _HOUSEKEEPING_S

    def _apply_commands(self, pause_s: float) -> list[EventT]:
        """Apply what waits, or else the first that comes within the pause and what has come with it."""
        events: list[EventT] = []
        command = self._next_command(pause_s)
        while command is not None:
            events += self._worker.accept(command)
            command = self._next_command(0.0)
        return events

    def _next_command(self, pause_s: float) -> CommandT | None:
        try:
            return self._inbox.get(timeout=pause_s) if pause_s else self._inbox.get_nowait()
        except queue.Empty:
            return None
