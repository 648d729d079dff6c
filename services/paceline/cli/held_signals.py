"""Ctrl-C and SIGTERM, held back while something goes on that must not be cut in half."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
PATIENCE_S = 30.0


def _ignore() -> None:
    return None


class HeldSignals:
    """From `with` to its end both signals are remembered instead of acted on, except where `released` or `act` says so.

    Whoever asks again after `PATIENCE_S` of waiting is heard at once: what is held up then has hung. For the main
    thread only, where Python handles signals.
    """

    def __init__(self, *, on_held: Callable[[], None] = _ignore) -> None:
        """`on_held()` is called when a signal is remembered, to tell the person that it was heard."""
        self.on_held = on_held
        self._before = {number: signal.getsignal(number) for number in _NUMBERS}
        self._held: int | None = None
        self._held_since_s: float | None = None

    def __enter__(self) -> Self:
        self.hold()
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def hold(self) -> None:
        """Again, too: libraries install handlers of their own."""
        for number in _NUMBERS:
            if self._before[number] is not signal.SIG_IGN:
                signal.signal(number, self._remember)

    def act(self) -> None:
        """Now is a good moment: do what the remembered signal would have done, if there is one."""
        if self._held is not None:
            number, self._held, self._held_since_s = self._held, None, None
            self._act_on(number)

    @contextmanager
    def released(self) -> Iterator[None]:
        """Nothing is held within this block."""
        self._restore()
        try:
            self.act()
            yield
        finally:
            self.hold()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            if handler is not None:  # somebody else's, set outside Python: it cannot be put back
                signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._held_since_s is not None and now_s - self._held_since_s > PATIENCE_S:
            self._act_on(number)
        self._held = number
        self._held_since_s = self._held_since_s or now_s
        self.on_held()

    def _act_on(self, number: int) -> None:
        before = self._before[signal.Signals(number)]
        if callable(before):
            before(number, None)
        else:
            raise SystemExit(128 + number)
