"""Several streams as one: what a request for many answers reads from, at the server and at the client.

Knows nothing of what the streams carry.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

ItemT = TypeVar("ItemT")


async def interleaved(streams: Sequence[AsyncGenerator[ItemT]]) -> AsyncGenerator[ItemT]:
    """The items of all streams, each as soon as it is there; those of one stream keep their order.

    A stream goes on when its last item has been taken, so none runs ahead of a slow reader by more than one. All are
    closed when this generator ends, however it ends: behind the last item, with the first error that a stream raises,
    or because the reader leaves or is cancelled.
    """
    # No TaskGroup: a generator may be left at a `yield`, and a group would cancel the reader's task, wherever that is.
    steps: dict[asyncio.Task[ItemT | None], AsyncGenerator[ItemT]] = {}
    try:
        steps |= {asyncio.create_task(_next_of(stream)): stream for stream in streams}
        while steps:
            await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
            for step in [step for step in steps if step.done()]:
                stream = steps.pop(step)
                item = step.result()
                if item is not None:
                    yield item
                    steps[asyncio.create_task(_next_of(stream))] = stream
    finally:
        for step in steps:
            step.cancel()
        await asyncio.gather(*steps, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next_of(stream: AsyncGenerator[ItemT]) -> ItemT | None:
    """The next item; None behind the last."""
    return await anext(stream, None)
