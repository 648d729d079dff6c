"""Several streams as one: what a request for many answers reads from, at the server and at the client.

Knows nothing of what the streams carry.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


async def interleaved(streams: Sequence[AsyncGenerator[ItemT]]) -> AsyncGenerator[ItemT]:
    """The items of all streams, each as soon as it is there; those of one stream keep their order.

    A stream goes on when its last item has been taken, so none runs ahead of a slow reader by more than one. All are
    closed when this generator ends, however it ends: behind the last item, with the first error that a stream raises,
    or because the reader leaves or is cancelled.
    """
    # No TaskGroup: a generator may be left at a `yield`, and a group would cancel the reader's task, wherever that is.
    steps: dict[asyncio.Task[ItemT | None], _Stream[ItemT]] = {}
    try:
        for stream in streams:
            # A context each: what one of them binds in the log holds for all of its steps, and for no other's.
            alone = _Stream(stream, copy_context())
            steps[alone.step()] = alone
        while steps:
            await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
            for step in [step for step in steps if step.done()]:
                stepping = steps.pop(step)
                item = step.result()
                if item is not None:
                    yield item
                    steps[stepping.step()] = stepping
    finally:
        for step in steps:
            step.cancel()
        await asyncio.gather(*steps, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


@dataclass(frozen=True, slots=True)
class _Stream(Generic[ItemT]):
    items: AsyncGenerator[ItemT]
    context: Context

    def step(self) -> asyncio.Task[ItemT | None]:
        return asyncio.create_task(_next_of(self.items), context=self.context)


async def _next_of(stream: AsyncGenerator[ItemT]) -> ItemT | None:
    """The next item; None behind the last."""
    return await anext(stream, None)
