"""A value that files hold, read again when they change, while whoever uses it runs on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from paceline.errors import PacelineError

logger = structlog.get_logger(__name__)

ValueT = TypeVar("ValueT")

_PERIOD_S = 1.0

# What a change shows by: a file that was replaced has another inode, one that was written to another size or time.
_State = tuple[tuple[int, int, int] | None, ...]


class Watched(Generic[ValueT]):
    """The value that was last read whole; may be asked for it from any thread.

    The files are looked at when somebody asks, at most once a second. What cannot be read changes nothing: the value
    from before holds, the log says so once, and each second another attempt is made, for a file and its neighbour may
    change one after the other.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], ValueT],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads at once; raises what `read` raises."""
        self._paths, self._read, self._clock = tuple(paths), read, clock
        self._lock = threading.Lock()
        # Looked at before reading: what changes in between is read again.
        self._seen = self._look()
        self._refused: _State | None = None
        self._value = read()
        self._looked_s = clock()

    def value(self) -> ValueT:
        with self._lock:
            if self._clock() - self._looked_s >= _PERIOD_S:
                self._looked_s = self._clock()
                self._refresh()
            return self._value

    def _refresh(self) -> None:
        state = self._look()
        if state == self._seen:
            return
        try:
            self._value = self._read()
        except PacelineError as error:
            if state != self._refused:
                logger.error("a changed file cannot be used; what it said before holds", reason=error.message)
            self._refused = state
            return
        self._seen, self._refused = state, None
        logger.info("read again", files=[str(path) for path in self._paths])

    def _look(self) -> _State:
        return tuple(_state_of(path) for path in self._paths)


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
