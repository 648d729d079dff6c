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
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import structlog

from paceline.errors import QueueFull

logger = structlog.get_logger(__name__)

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")
CommandT_contra = TypeVar("CommandT_contra", contravariant=True)
EventT_co = TypeVar("EventT_co", covariant=True)

_HOUSEKEEPING_S = 1.0
MAX_QUEUED = 16_384  # commands not yet applied


class Worker(Protocol[CommandT_contra, EventT_co]):
    """What runs on the model thread. None of its methods raises for anything that a peer sent."""

    def accept(self, command: CommandT_contra) -> Sequence[EventT_co]:
        """Apply one command; model work it asks for waits for a step."""

    def has_work(self) -> bool: ...

    def step(self) -> Sequence[EventT_co]:
        """Do one bounded piece of model work."""

    def expire_idle(self) -> Sequence[EventT_co]:
        """Forget sessions that nobody has used for long; called about once a second."""


class ModelThread(Generic[CommandT, EventT]):
    """Runs a worker until `stop`; `on_events` is called on the event loop, `on_failure` if the worker itself breaks."""

    def __init__(
        self,
        worker: Worker[CommandT, EventT],
        *,
        on_events: Callable[[Sequence[EventT]], None],
        on_failure: Callable[[], None],
        name: str,
    ) -> None:
        self._worker = worker
        self._on_events, self._on_failure = on_events, on_failure
        self._inbox: queue.SimpleQueue[CommandT | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._stopping = False
        self._next_housekeeping_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, command: CommandT) -> None:
        """Queue a command; raises `QueueFull` when the thread has fallen far behind."""
        if self._inbox.qsize() >= MAX_QUEUED:
            raise QueueFull("This replica has fallen behind its peers; try again in a moment.")
        self._inbox.put(command)

    @property
    def queued(self) -> int:
        """Commands not yet applied."""
        return self._inbox.qsize()

    async def stop(self) -> None:
        """Let the running step end, then end the thread."""
        self._stopping = True
        self._inbox.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            while not self._stopping:
                events = self._apply_commands()
                events += self._housekeep()
                if self._worker.has_work():
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

    def _apply_commands(self) -> list[EventT]:
        """Apply what waits; with no model work to do, wait for the next command."""
        events: list[EventT] = []
        command = self._next_command()
        while command is not None:
            events += self._worker.accept(command)
            command = self._next_command(wait=False)
        return events

    def _next_command(self, *, wait: bool = True) -> CommandT | None:
        try:
            if wait and not self._worker.has_work():
                return self._inbox.get(timeout=_HOUSEKEEPING_S)
            return self._inbox.get_nowait()
        except queue.Empty:
            return None
