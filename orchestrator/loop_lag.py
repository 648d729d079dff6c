"""How late an event loop is: what every answer of this process has to wait for, wherever the time went."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PERIOD_S = 0.25


async def measure_lag(observe: Callable[[float], object], *, period_s: float = PERIOD_S) -> None:
    """Tell `observe` again and again by how many seconds this task was taken up too late; until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + period_s
        await asyncio.sleep(period_s)
        observe(max(0.0, loop.time() - due_s))
