"""An end for answers that nobody reads.

A transport takes some bytes ahead of its reader, about 64 KiB a stream over gRPC and as many over HTTP, and then lets
the writer wait; so nothing piles up here, for rounds are made only as they are read. But an answer that waits keeps its
place and its memory at the models, which others want. Knows nothing of transports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager

from paceline.errors import DeadlineExceeded, ReaderStalled


async def taken(write: Awaitable[object], *, within_s: float) -> None:
    """Wait until the transport has taken what is written; raises `ReaderStalled` if it has no room for so long."""
    try:
        async with asyncio.timeout(within_s):
            await write
    except TimeoutError:
        raise ReaderStalled(
            f"Nothing of this answer was read for {within_s:g} s, so it was ended; go on with the seed and the tokens that "
            "you have (output_ids)."
        ) from None


@contextmanager
def deadline_while_unread() -> Iterator[None]:
    """Around the reading of an answer's events and the writing of them; raises `DeadlineExceeded`.

    An answer ends by a timeout of its own, which may strike while its last event is being written. Then it cancels the
    task that writes, takes that back when the answer is closed, and nobody has said yet what it meant.
    """
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise DeadlineExceeded(
            "The time allowed for this answer was used up while nobody read it; read on, or allow more."
        ) from None
