"""Several streams read as one: order, errors, and that nothing is left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from paceline.interleaving import interleaved


class Source:
    """A stream of numbers that waits for `gate` before each, and knows whether it was closed."""

    def __init__(self, *numbers: int, error: Exception | None = None) -> None:
        self.gate = asyncio.Semaphore(0)
        self.taken = 0
        self.is_closed = False
        self._numbers, self._error = numbers, error

    def open(self, *, items: int = 0) -> None:
        for _ in range(items or len(self._numbers) + 1):
            self.gate.release()

    async def stream(self) -> AsyncGenerator[int]:
        try:
            for number in self._numbers:
                await self.gate.acquire()
                self.taken += 1
                yield number
            await self.gate.acquire()
            if self._error is not None:
                raise self._error
        finally:
            self.is_closed = True


async def test_items_come_as_soon_as_they_are_there() -> None:
    """A stream that waits holds up no other, and the end of one does not end the rest."""
    slow, quick = Source(1, 2), Source(10, 20, 30)
    quick.open()
    async with aclosing(interleaved([slow.stream(), quick.stream()])) as items:
        assert [await anext(items) for _ in range(3)] == [10, 20, 30]
        slow.open()
        assert [item async for item in items] == [1, 2]
    assert slow.is_closed
    assert quick.is_closed


async def test_slow_reader_holds_the_streams_back() -> None:
    """No stream is more than one item ahead of what has been taken."""
    sources = [Source(*range(10)), Source(*range(10))]
    for source in sources:
        source.open()
    async with aclosing(interleaved([source.stream() for source in sources])) as items:
        for taken in range(1, 6):
            await anext(items)
            for _ in range(20):
                await asyncio.sleep(0)
            assert sum(source.taken for source in sources) <= taken + 1


async def test_error_of_one_closes_all() -> None:
    """It is raised as it is, behind what came before it."""
    waiting, failing = Source(1), Source(7, error=ValueError("broken"))
    failing.open()
    items = interleaved([waiting.stream(), failing.stream()])
    assert await anext(items) == 7
    with pytest.raises(ValueError, match="broken"):
        await anext(items)
    assert waiting.is_closed


@pytest.mark.parametrize("taken", [0, 1])
async def test_reader_that_leaves_closes_all(taken: int) -> None:
    """Also the stream whose item it has, and those that still wait."""
    first, second = Source(1, 2), Source(3)
    first.open()
    items = interleaved([first.stream(), second.stream()])
    for _ in range(taken):
        await anext(items)
    await items.aclose()
    assert (first.is_closed, second.is_closed) == (taken > 0, taken > 0), (
        "a stream that never began has nothing to close"
    )


async def test_reader_that_is_cancelled_closes_all() -> None:
    """The cancellation passes through."""
    sources = [Source(1), Source(2)]
    items = interleaved([source.stream() for source in sources])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await anext(items)
    assert all(source.is_closed for source in sources)


async def test_no_streams_are_no_items() -> None:
    """It ends at once."""
    nothing: list[AsyncGenerator[int]] = []
    assert [item async for item in interleaved(nothing)] == []
