"""The answers that run or wait here, by caller and id, so that others than their readers can cancel them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from paceline.errors import AnswerCancelled, RequestIdTaken
from paceline.generation import Event, Started


class RunningAnswers:
    """Invariant: an answer is held here from its beginning, or from when its id is told, until its end."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, str], _Answer] = {}

    async def follow(
        self, events: AsyncGenerator[Event], *, caller: str, request_id: str, resumes: bool
    ) -> AsyncGenerator[Event]:
        """The events of one answer, which can be cancelled meanwhile; closes `events`.

        `request_id` is what the caller chose, or "": then the one in `Started` counts. Where the caller has an answer of
        that id already, one that `resumes` it takes its place, for whoever resumes has lost the stream of the other.
        Raises `RequestIdTaken` if it does not, and `AnswerCancelled`.
        """
        answer = _Answer(events)
        key = (caller, request_id)
        try:
            if request_id:
                await self._make_room(key, resumes=resumes)
                self._answers[key] = answer
            async for event in answer.events():
                if not key[1] and isinstance(event, Started):
                    key = (caller, event.request_id)
                    self._answers[key] = answer
                yield event
        finally:
            if self._answers.get(key) is answer:
                del self._answers[key]
            await answer.close()

    async def cancel(self, *, caller: str, request_id: str) -> bool:
        """End that answer and free what it holds; whether there was one."""
        answer = self._answers.pop((caller, request_id), None)
        if answer is None:
            return False
        await answer.cancel()
        return True

    async def _make_room(self, key: tuple[str, str], *, resumes: bool) -> None:
        # Again and again: while one is being ended another may come.
        while key in self._answers:
            if not resumes:
                raise RequestIdTaken(
                    f"Another answer with the request_id {key[1]!r} is running; choose another, or cancel that one."
                )
            await self.cancel(caller=key[0], request_id=key[1])


class _Answer:
    """One answer. Invariant: `_waiter` is the task that waits for its next event, None while its reader is elsewhere."""

    def __init__(self, events: AsyncGenerator[Event]) -> None:
        self._events = events
        self._waiter: asyncio.Task[object] | None = None
        self._is_cancelled = False
        self._turn = asyncio.Lock()  # of those who close `_events`
        self._is_closed = asyncio.Event()

    async def events(self) -> AsyncGenerator[Event]:
        """Raises `AnswerCancelled`."""
        self._waiter = task = asyncio.current_task()
        try:
            async for event in self._events:
                if self._is_cancelled:
                    # What was asked of the task has been done: it goes on to say so.
                    _take_back(task)
                    break
                self._waiter = None
                yield event
                if self._is_cancelled:
                    break
                self._waiter = task = asyncio.current_task()
        except asyncio.CancelledError:
            if not self._is_cancelled or self._waiter is None or _take_back(task) > 0:
                raise  # the caller has left as well
        finally:
            self._waiter = None
        if self._is_cancelled:
            raise AnswerCancelled("The answer was cancelled by its request_id; ask again.")

    async def cancel(self) -> None:
        """Interrupt whoever waits for an event, or close the events under a reader who is elsewhere."""
        self._is_cancelled = True
        if self._waiter is None:
            await self.close()
        else:
            self._waiter.cancel()
            await self._is_closed.wait()

    async def close(self) -> None:
        try:
            async with self._turn:
                await self._events.aclose()
        finally:
            self._is_closed.set()


def _take_back(task: asyncio.Task[object] | None) -> int:
    """Take back one request to cancel the task; how many are left."""
    return 0 if task is None else task.uncancel()
