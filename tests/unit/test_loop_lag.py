"""The lag of an event loop: what holds it up is seen."""

from __future__ import annotations

import asyncio
import time

from orchestrator.loop_lag import measure_lag


async def test_blocked_loop_is_late() -> None:
    """Whatever holds the loop for 50 ms makes what was due after 10 ms late by the rest."""
    lag: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def observe(lag_s: float) -> None:
        if not lag.done():
            lag.set_result(lag_s)

    task = asyncio.ensure_future(measure_lag(observe, period_s=0.01))
    await asyncio.sleep(0)  # now it sleeps
    asyncio.get_running_loop().call_soon(time.sleep, 0.05)
    assert await lag >= 0.035
    task.cancel()
    assert await asyncio.gather(task, return_exceptions=True)
