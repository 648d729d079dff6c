"""Answers cancelled by their ids: whoever reads them hears of it, and what they held is free, wherever the reader is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from orchestrator.running_answers import RunningAnswers
from paceline.errors import AnswerCancelled, RequestIdTaken
from paceline.generation import Delta, Event, Started

DELTA = Delta(text="a", token_ids=(1,), origins=(), pieces=("a",))


class Endless:
    """The events of an answer without an end; says whether it was closed."""

    def __init__(self, *, request_id: str = "drawn", held: bool = True) -> None:
        self._request_id, self._held = request_id, held
        self.is_closed = False
        self.is_waiting = asyncio.Event()

    async def events(self) -> AsyncGenerator[Event]:
        try:
            yield Started(request_id=self._request_id, seeds=(1,), prompt_tokens=1)
            while True:
                if self._held:
                    self.is_waiting.set()
                    await asyncio.Event().wait()
                yield DELTA
        finally:
            await asyncio.sleep(0)  # freeing takes a moment
            self.is_closed = True


def follow(
    answers: RunningAnswers, endless: Endless, *, caller: str = "a", request_id: str = "", resumes: bool = False
) -> AsyncGenerator[Event]:
    return answers.follow(endless.events(), caller=caller, request_id=request_id, resumes=resumes)


async def read_all(events: AsyncGenerator[Event]) -> None:
    async with aclosing(events):
        async for _ in events:
            pass


@pytest.mark.parametrize("chosen", ["", "mine"])
async def test_reader_who_waits_hears_of_it(chosen: str) -> None:
    """By a drawn id or a chosen one: the answer is closed before the cancellation returns, the reader gets the error."""
    answers, endless = RunningAnswers(), Endless(request_id=chosen or "drawn")
    reader = asyncio.ensure_future(read_all(follow(answers, endless, request_id=chosen)))
    await endless.is_waiting.wait()
    assert await answers.cancel(caller="a", request_id=chosen or "drawn")
    assert endless.is_closed
    with pytest.raises(AnswerCancelled):
        await reader
    assert not reader.cancelled()
    assert not await answers.cancel(caller="a", request_id=chosen or "drawn")


async def test_reader_who_is_elsewhere_hears_of_it_later() -> None:
    """What the answer held is free at once, also while its reader is busy with the last event."""
    answers, endless = RunningAnswers(), Endless(held=False)
    events = follow(answers, endless)
    await anext(events)
    await anext(events)
    assert await answers.cancel(caller="a", request_id="drawn")
    assert endless.is_closed
    with pytest.raises(AnswerCancelled):
        await anext(events)


async def test_answer_is_cancelled_before_it_has_begun() -> None:
    """A chosen id counts from the beginning: a request that still waits for its place can be cancelled too."""
    answers = RunningAnswers()

    async def in_line() -> AsyncGenerator[Event]:
        await asyncio.Event().wait()
        yield DELTA

    reader = asyncio.ensure_future(read_all(answers.follow(in_line(), caller="a", request_id="mine", resumes=False)))
    await asyncio.sleep(0)
    assert await answers.cancel(caller="a", request_id="mine")
    with pytest.raises(AnswerCancelled):
        await reader


async def test_nobody_cancels_anothers_answer() -> None:
    """Ids are each caller's own: another's is not found, and both may have the same."""
    answers, first, second = RunningAnswers(), Endless(), Endless()
    readers = [
        asyncio.ensure_future(read_all(follow(answers, endless, caller=caller, request_id="same")))
        for caller, endless in (("a", first), ("b", second))
    ]
    await first.is_waiting.wait()
    await second.is_waiting.wait()
    assert not await answers.cancel(caller="c", request_id="same")
    assert await answers.cancel(caller="a", request_id="same")
    assert (first.is_closed, second.is_closed) == (True, False)
    assert await answers.cancel(caller="b", request_id="same")
    for reader in readers:
        with pytest.raises(AnswerCancelled):
            await reader


async def test_reader_who_leaves_meanwhile_has_left() -> None:
    """A task that its owner cancels too stays cancelled."""
    answers, endless = RunningAnswers(), Endless()
    reader = asyncio.ensure_future(read_all(follow(answers, endless)))
    await endless.is_waiting.wait()
    cancellation = asyncio.ensure_future(answers.cancel(caller="a", request_id="drawn"))
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await cancellation
    assert endless.is_closed


@pytest.mark.parametrize("way", ["close", "cancel"])
async def test_answer_that_was_left_is_not_there_any_more(way: str) -> None:
    """However its reader leaves."""
    answers, endless = RunningAnswers(), Endless()
    if way == "close":
        events = follow(answers, endless)
        await anext(events)
        await events.aclose()
    else:
        reader = asyncio.ensure_future(read_all(follow(answers, endless)))
        await endless.is_waiting.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
    assert endless.is_closed
    assert not await answers.cancel(caller="a", request_id="drawn")


async def test_id_is_one_running_answers_alone() -> None:
    """A second one is refused, and the first goes on; when it has ended the id is free."""
    answers, first = RunningAnswers(), Endless()
    reader = asyncio.ensure_future(read_all(follow(answers, first, request_id="mine")))
    await first.is_waiting.wait()
    with pytest.raises(RequestIdTaken):
        await anext(follow(answers, Endless(), request_id="mine"))
    assert not first.is_closed
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    events = follow(answers, Endless(), request_id="mine")
    assert isinstance(await anext(events), Started)
    await events.aclose()


async def test_resumption_takes_the_place_of_what_it_resumes() -> None:
    """Its caller has lost the stream of the old one, which may not have been noticed; the id stays the new one's."""
    answers, old, new = RunningAnswers(), Endless(), Endless()
    reader = asyncio.ensure_future(read_all(follow(answers, old, request_id="mine")))
    await old.is_waiting.wait()
    events = follow(answers, new, request_id="mine", resumes=True)
    assert isinstance(await anext(events), Started)
    assert old.is_closed
    with pytest.raises(AnswerCancelled):
        await reader
    assert await answers.cancel(caller="a", request_id="mine")
    assert new.is_closed


async def test_of_two_resumptions_at_once_one_is_left() -> None:
    """Each takes the place of what is there when its turn comes, be it the other one: none goes on unknown to us."""
    answers, old, both = RunningAnswers(), Endless(), [Endless(), Endless()]
    first = asyncio.ensure_future(read_all(follow(answers, old, request_id="mine")))
    await old.is_waiting.wait()
    # Two tasks that begin in the same turn of the loop: the second comes while the first waits for the old one's end.
    readers = [
        asyncio.ensure_future(read_all(follow(answers, endless, request_id="mine", resumes=True))) for endless in both
    ]
    done, _ = await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    assert await answers.cancel(caller="a", request_id="mine")
    for reader in (first, *readers):
        with pytest.raises(AnswerCancelled):
            await reader
    assert not await answers.cancel(caller="a", request_id="mine")


async def test_no_cancellation_is_left_over() -> None:
    """The task's own count of cancellations is as before: a later `asyncio.timeout` in it works."""
    answers, endless = RunningAnswers(), Endless()

    async def read() -> int:
        with pytest.raises(AnswerCancelled):
            await read_all(follow(answers, endless))
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    reader = asyncio.ensure_future(read())
    await endless.is_waiting.wait()
    await answers.cancel(caller="a", request_id="drawn")
    assert await reader == 0
