"""Several streams as one: what a request for many answers reads from, at the server and at the client.

Knows nothing of what the streams carry.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

ItemT = TypeVar("ItemT")


async def interleaved(streams: Sequence[AsyncGenerator[ItemT]]) -> AsyncGenerator[ItemT]:
    """The items of all streams, each as soon as it is there; those of one stream keep their order.

    A stream goes on when its last item has been taken, so none runs ahead of a slow reader by more than one. Each is read
    by one task from its beginning to its end: a timeout within it holds, and what it binds in the log, for all of it and
    for no other. All are closed when this generator ends, however it ends: behind the last item, with the first error
    that a stream raises, or because the reader leaves or is cancelled.
    """
    # No TaskGroup: a generator may be left at a `yield`, and a group would cancel the reader's task, wherever that is.
    arrivals: asyncio.Queue[tuple[ItemT, asyncio.Semaphore] | asyncio.Task[None]] = asyncio.Queue()

    async def read(stream: AsyncGenerator[ItemT]) -> None:
        taken = asyncio.Semaphore(0)
        async with aclosing(stream):
            async for item in stream:
                arrivals.put_nowait((item, taken))
                await taken.acquire()

    tasks = [asyncio.create_task(read(stream)) for stream in streams]
    for task in tasks:
        task.add_done_callback(arrivals.put_nowait)
    try:
        running = len(tasks)
        while running:
            arrival = await arrivals.get()
            if isinstance(arrival, asyncio.Task):
                arrival.result()
                running -= 1
            else:
                item, taken = arrival
                yield item
                taken.release()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
