"""How long a question takes, and what the clock of whoever answers it says."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.doctor.looks import ClockLook

ReplyT = TypeVar("ReplyT")

TRIES = 5


@dataclass(frozen=True, slots=True)
class Timed(Generic[ReplyT]):
    """A reply, and when it was asked for by this machine's clock."""

    reply: ReplyT
    asked_unix_s: float
    round_trip_s: float

    def clock(self, unix_ms: int) -> ClockLook | None:
        """The clock of whoever has written that moment into the reply; None if that one wrote none."""
        if not unix_ms:
            return None
        uncertain_s = self.round_trip_s / 2
        return ClockLook(ahead_s=unix_ms / 1000 - (self.asked_unix_s + uncertain_s), uncertain_s=uncertain_s)


async def quickest(ask: Callable[[], Awaitable[ReplyT]], *, clock: Callable[[], float]) -> Timed[ReplyT]:
    """Of several replies the one that came soonest: the first has to wait for the connection, others for other work."""
    replies = []
    for _ in range(TRIES):
        asked_unix_s, began_s = clock(), time.perf_counter()
        reply = await ask()
        replies.append(Timed(reply, asked_unix_s, time.perf_counter() - began_s))
    return min(replies, key=lambda timed: timed.round_trip_s)
