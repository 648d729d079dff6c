"""The one writer of a stream: nothing lost, nothing overtaken, batches of bounded size, and a clean end."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import QueueFull
from paceline.rpc import Outbox
from paceline.v1.drafter_service_pb2 import DrafterEvent

WAIT_S = 20.0  # for what comes at once unless something is broken


def item(number: int, *, size: int = 0) -> DrafterEvent:
    """An item that can be told from others, of at least so many bytes."""
    return DrafterEvent(session_id="x" * size, epoch=number + 1)


class Stream:
    """Where batches go; holds up every write until told otherwise."""

    def __init__(self) -> None:
        self.batches: list[list[DrafterEvent]] = []
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.began = asyncio.Event()
        self.writers = 0

    async def write(self, items: list[DrafterEvent]) -> None:
        self.writers += 1
        assert self.writers == 1, "two writes at once"
        self.batches.append(items)
        self.began.set()
        await self.is_open.wait()
        self.writers -= 1

    @property
    def numbers(self) -> list[list[int]]:
        return [[event.epoch - 1 for event in batch] for batch in self.batches]


async def finish(outbox: Outbox[DrafterEvent]) -> None:
    """Close, and write out what is left."""
    outbox.close()
    async with asyncio.timeout(WAIT_S):
        await outbox.run()


async def test_what_is_ready_when_a_write_ends_leaves_next() -> None:
    """One message, in the order of arrival; an idle stream writes at once."""
    stream = Stream()
    outbox = Outbox[DrafterEvent](stream.write)
    stream.is_open.clear()
    running = asyncio.ensure_future(outbox.run())
    outbox.put(item(0))
    async with asyncio.timeout(WAIT_S):
        await stream.began.wait()
        for number in range(1, 6):
            outbox.put(item(number))
        stream.is_open.set()
        outbox.close()
        await running
    assert stream.numbers == [[0], [1, 2, 3, 4, 5]]


async def test_closing_writes_what_is_queued_first() -> None:
    """Also what is put while the last write runs; then `run` returns."""
    stream = Stream()
    outbox = Outbox[DrafterEvent](stream.write)
    stream.is_open.clear()
    outbox.put(item(0))
    outbox.close()
    running = asyncio.ensure_future(outbox.run())
    async with asyncio.timeout(WAIT_S):
        await stream.began.wait()
        outbox.put(item(1))
        stream.is_open.set()
        await running
    assert stream.numbers == [[0], [1]]


async def test_closing_an_empty_outbox_writes_nothing() -> None:
    """No empty message."""
    stream = Stream()
    await finish(Outbox[DrafterEvent](stream.write))
    assert stream.batches == []


async def test_an_item_larger_than_a_batch_travels_alone() -> None:
    """It is not refused here, and does not take others along."""
    stream = Stream()
    outbox = Outbox[DrafterEvent](stream.write, max_bytes=100)
    for number, size in enumerate((10, 500, 10, 10)):
        outbox.put(item(number, size=size))
    await finish(outbox)
    assert stream.numbers == [[0], [1], [2, 3]]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(0, 60), max_size=20), max_bytes=st.integers(1, 150))
def test_batches_are_split_by_bytes_and_no_earlier(sizes: list[int], max_bytes: int) -> None:
    """100 drawn queues: all items, in order, and each batch as full as it may be."""

    async def batches() -> list[list[DrafterEvent]]:
        stream = Stream()
        outbox = Outbox[DrafterEvent](stream.write, max_bytes=max_bytes)
        for number, size in enumerate(sizes):
            outbox.put(item(number, size=size))
        await finish(outbox)
        return stream.batches

    written = asyncio.run(batches())
    assert [event for batch in written for event in batch] == [
        item(number, size=size) for number, size in enumerate(sizes)
    ]
    batch_bytes = [sum(event.ByteSize() for event in batch) for batch in written]
    assert all(size <= max_bytes or len(batch) == 1 for size, batch in zip(batch_bytes, written, strict=True))
    assert all(
        size + following[0].ByteSize() > max_bytes for size, following in zip(batch_bytes, written[1:], strict=False)
    )


async def test_a_peer_that_does_not_read_fills_the_queue() -> None:
    """The queue has a bound; once the peer reads again there is room."""
    stream = Stream()
    outbox = Outbox[DrafterEvent](stream.write, max_items=2)
    outbox.put(item(0))
    outbox.put(item(1))
    with pytest.raises(QueueFull):
        outbox.put(item(2))
    running = asyncio.ensure_future(outbox.run())
    async with asyncio.timeout(WAIT_S):
        await stream.began.wait()
        outbox.put(item(3))
        outbox.close()
        await running
    assert stream.numbers == [[0, 1], [3]]


async def test_a_write_that_fails_ends_the_writer() -> None:
    """The error reaches whoever runs it, and nothing is written behind it."""
    written: list[list[DrafterEvent]] = []

    async def write(items: list[DrafterEvent]) -> None:
        written.append(items)
        raise ConnectionError("the peer is gone")

    outbox = Outbox[DrafterEvent](write, max_bytes=1)
    outbox.put(item(0))
    outbox.put(item(1))
    with pytest.raises(ConnectionError):
        await outbox.run()
    assert written == [[item(0)]]
