"""How much of their time sessions lack a drafter: the signal that the pool of drafters is scaled by. Pure."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_BUCKET_S = 1.0


class StallMeter:
    """Stalled time over round time, of the rounds that ended in the last seconds and wanted a draft.

    A round is stalled while it waits for the drafter's draft. If none came from a drafter (none has a seat for the
    session, or it was late, or was not waited for after it had been late), the whole round counts, whatever stood in:
    so a pool without drafters reads 1, not 0. A session that no drafter could serve does not count.
    """

    def __init__(self, *, window_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s, self.clock = window_s, clock
        self._buckets: deque[list[float]] = deque()  # start, stalled, total; in seconds

    def record(self, *, stalled_s: float, round_s: float) -> None:
        """One round has ended."""
        now_s = self.clock()
        if not self._buckets or now_s - self._buckets[-1][0] >= _BUCKET_S:
            self._buckets.append([now_s, 0.0, 0.0])
        self._buckets[-1][1] += min(stalled_s, round_s)
        self._buckets[-1][2] += round_s
        self._drop_old(now_s)

    @property
    def fraction(self) -> float | None:
        """From 0 to 1; None if no round wanted a draft lately."""
        self._drop_old(self.clock())
        total_s = sum(total for _, _, total in self._buckets)
        return sum(stalled for _, stalled, _ in self._buckets) / total_s if total_s else None

    def _drop_old(self, now_s: float) -> None:
        while self._buckets and self._buckets[0][0] <= now_s - self._window_s:
            self._buckets.popleft()
