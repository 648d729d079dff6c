"""The door to the model: order, the right thread on each side, and an end in every case.

Nothing here depends on timing: where one side must be ahead of the other, it waits for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from paceline.errors import QueueFull
from paceline.model_thread import ModelThread, StepClock

WAIT_S = 20.0  # for what comes at once unless something is broken


class RecordingWorker:
    """Notes what it is asked to do; each command is work for one step, and each step one event."""

    def __init__(self, *, break_in: str = "") -> None:
        self.log: list[str] = []
        self.threads: set[int] = set()
        self.steps_left = 0
        self.may_step = threading.Event()
        self.may_step.set()
        self.is_stepping = threading.Event()
        self._break_in = break_in

    def accept(self, command: str) -> Sequence[str]:
        self._enter("accept", command)
        self.steps_left += 1
        return [f"accepted {command}"]

    def has_work(self) -> bool:
        return self.steps_left > 0

    @property
    def waiting(self) -> int:
        return self.steps_left

    def step(self) -> Sequence[str]:
        self._enter("step", "step")
        self.is_stepping.set()
        assert self.may_step.wait(WAIT_S)
        self.steps_left -= 1
        return ["stepped"]

    def expire_idle(self) -> Sequence[str]:
        self.threads.add(threading.get_ident())
        if self._break_in == "expire_idle":
            raise RuntimeError("broken on purpose")
        return []

    def _enter(self, place: str, entry: str) -> None:
        self.threads.add(threading.get_ident())
        self.log.append(entry)
        if self._break_in == place:
            raise RuntimeError("broken on purpose")


class EndlessWorker(RecordingWorker):
    """Always has work."""

    def has_work(self) -> bool:
        return True


class Listener:
    """What arrives on the event loop."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.threads: set[int] = set()
        self.failures = 0
        self._changed = asyncio.Event()

    def on_events(self, events: Sequence[str]) -> None:
        self.threads.add(threading.get_ident())
        self.events += events
        self._changed.set()

    def on_failure(self) -> None:
        self.threads.add(threading.get_ident())
        self.failures += 1
        self._changed.set()

    async def until(self, is_reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not is_reached():
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def running(
    worker: RecordingWorker, listener: Listener, *, patience_s: Callable[[], float] = lambda: 0.0
) -> AsyncIterator[ModelThread[str, str]]:
    thread = model_thread(worker, listener, patience_s=patience_s)
    thread.start()
    try:
        yield thread
    finally:
        worker.may_step.set()
        await thread.stop()


def model_thread(
    worker: RecordingWorker, listener: Listener, *, patience_s: Callable[[], float] = lambda: 0.0
) -> ModelThread[str, str]:
    return ModelThread(
        worker,
        on_events=listener.on_events,
        on_failure=listener.on_failure,
        name="test-model",
        patience_s=patience_s,
    )


def is_running() -> bool:
    return any(thread.name == "test-model" for thread in threading.enumerate())


async def test_commands_and_events_keep_their_order() -> None:
    """Also commands that were submitted before the thread started."""
    worker, listener = RecordingWorker(), Listener()
    thread = model_thread(worker, listener)
    for command in "abc":
        thread.submit(command)
    assert thread.queued == 3
    thread.start()
    for command in "de":
        thread.submit(command)
    await listener.until(lambda: listener.events.count("stepped") == 5)
    assert thread.queued == 0  # before the end, whose own sign may stay in the queue
    await thread.stop()
    assert [entry for entry in worker.log if entry != "step"] == list("abcde")
    assert [event for event in listener.events if event != "stepped"] == [f"accepted {command}" for command in "abcde"]


async def test_waiting_commands_are_applied_between_two_steps() -> None:
    """All of them: this is how a drafter learns of a rejection between two of its own steps."""
    worker, listener = RecordingWorker(), Listener()
    worker.may_step.clear()
    async with running(worker, listener) as thread:
        thread.submit("a")
        assert await asyncio.to_thread(worker.is_stepping.wait, WAIT_S)
        for command in "bcd":
            thread.submit(command)
        assert worker.log == ["a", "step"]
        worker.may_step.set()
        await listener.until(lambda: listener.events.count("stepped") == 4)
    assert worker.log == ["a", "step", "b", "c", "d", "step", "step", "step"]


async def test_a_step_waits_for_commands_as_long_as_it_is_told_to() -> None:
    """What there is to tell is told meanwhile, and each command asks anew."""
    worker, listener = RecordingWorker(), Listener()
    async with running(worker, listener, patience_s=lambda: WAIT_S if worker.steps_left < 3 else 0.0) as thread:
        thread.submit("a")
        await listener.until(lambda: listener.events == ["accepted a"])
        thread.submit("b")
        await listener.until(lambda: listener.events == ["accepted a", "accepted b"])
        assert worker.log == ["a", "b"]
        thread.submit("c")
        await listener.until(lambda: "stepped" in listener.events)
        assert worker.log[:4] == ["a", "b", "c", "step"]


async def test_a_step_begins_when_the_waiting_is_over() -> None:
    """Though no command has come."""
    worker, listener = RecordingWorker(), Listener()
    patience_s = iter([0.001, 0.0])
    async with running(worker, listener, patience_s=lambda: next(patience_s)) as thread:
        thread.submit("a")
        await listener.until(lambda: "stepped" in listener.events)
    assert worker.log == ["a", "step"]


async def test_stop_ends_a_thread_that_waits_for_commands() -> None:
    """At once, and its work is dropped."""
    worker, listener = RecordingWorker(), Listener()
    async with running(worker, listener, patience_s=lambda: WAIT_S) as thread:
        thread.submit("a")
        await listener.until(lambda: "accepted a" in listener.events)
        async with asyncio.timeout(WAIT_S / 2):
            await thread.stop()
    assert worker.log == ["a"]


async def test_the_model_has_one_thread_and_events_come_on_the_loop() -> None:
    """The loop is never blocked by a step, and the model never touched by two threads."""
    worker, listener = RecordingWorker(), Listener()
    async with running(worker, listener) as thread:
        for command in "abc":
            thread.submit(command)
        await listener.until(lambda: listener.events.count("stepped") == 3)
    assert listener.threads == {threading.get_ident()}
    assert len(worker.threads) == 1
    assert worker.threads.isdisjoint(listener.threads)


@pytest.mark.parametrize("place", ["accept", "step", "expire_idle"])
async def test_a_worker_that_breaks_is_reported_and_the_thread_ends(place: str) -> None:
    """Once, on the loop, wherever it broke; stopping still works."""
    worker, listener = RecordingWorker(break_in=place), Listener()
    async with running(worker, listener) as thread:
        thread.submit("a")
        await listener.until(lambda: listener.failures > 0)
        await thread.stop()
        assert not is_running()
    assert listener.failures == 1
    assert listener.threads == {threading.get_ident()}


async def test_stop_ends_an_idle_thread() -> None:
    """It does not wait for a command that never comes."""
    worker, listener = RecordingWorker(), Listener()
    async with running(worker, listener) as thread:
        thread.submit("a")
        await listener.until(lambda: "stepped" in listener.events)
        assert is_running()
    assert not is_running()
    assert listener.failures == 0


async def test_stop_lets_the_running_step_end_and_begins_no_other() -> None:
    """Work that is left over is dropped."""
    worker, listener = EndlessWorker(), Listener()
    worker.may_step.clear()
    thread = model_thread(worker, listener)
    thread.start()
    assert await asyncio.to_thread(worker.is_stepping.wait, WAIT_S)
    stopping = asyncio.ensure_future(thread.stop())
    await asyncio.sleep(0)
    assert is_running()
    worker.may_step.set()
    async with asyncio.timeout(WAIT_S):
        await stopping
    assert worker.log == ["step"]
    assert not is_running()


async def test_a_thread_that_never_started_can_be_stopped() -> None:
    """A service may fail before it gets that far."""
    await model_thread(RecordingWorker(), Listener()).stop()


async def test_a_thread_that_falls_behind_takes_no_more_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever submits hears of it at once, and no memory grows without bound."""
    monkeypatch.setattr("paceline.model_thread.MAX_QUEUED", 2)
    thread = ModelThread[str, str](RecordingWorker(), on_events=print, on_failure=print, name="never started")
    thread.submit("a")
    thread.submit("b")
    with pytest.raises(QueueFull):
        thread.submit("c")


async def test_what_is_queued_are_commands_and_work_that_waits_for_a_step() -> None:
    """Taking a command up makes it no less waiting."""
    worker, listener = RecordingWorker(), Listener()
    worker.may_step.clear()
    async with running(worker, listener) as thread:
        thread.submit("a")
        assert await asyncio.to_thread(worker.is_stepping.wait, WAIT_S)
        for command in "bcd":
            thread.submit(command)
        assert thread.queued == 4
        worker.may_step.set()
        await listener.until(lambda: listener.events.count("stepped") == 4)
        assert thread.queued == 0


async def test_a_step_that_hangs_is_seen_from_outside() -> None:
    """Its time grows while it runs, and is 0 before and behind it."""
    worker, listener = RecordingWorker(), Listener()
    worker.may_step.clear()
    async with running(worker, listener) as thread:
        assert thread.seconds_in_step == 0.0
        thread.submit("a")
        assert await asyncio.to_thread(worker.is_stepping.wait, WAIT_S)
        earlier_s = thread.seconds_in_step
        await asyncio.sleep(0.01)
        assert thread.seconds_in_step >= earlier_s + 0.01
        worker.may_step.set()
        await listener.until(lambda: "stepped" in listener.events)
        assert thread.seconds_in_step == 0.0


async def test_stopping_a_thread_that_hangs_can_be_given_up() -> None:
    """And leaves no other thread behind that waits for it."""
    worker, listener = RecordingWorker(), Listener()
    worker.may_step.clear()
    thread = model_thread(worker, listener)
    thread.start()
    thread.submit("a")
    assert await asyncio.to_thread(worker.is_stepping.wait, WAIT_S)
    before = threading.active_count()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await thread.stop()
    assert threading.active_count() == before
    worker.may_step.set()
    await thread.stop()
    assert not is_running()


@dataclass
class Clock:
    """Time that passes when told to."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_busy_share_is_that_of_about_the_last_second() -> None:
    """It changes once a second and forgets what was before."""
    clock = Clock(100.0)
    step_clock = StepClock(clock=clock)
    assert step_clock.busy_share == 0.0
    with step_clock.step():
        clock.now_s += 0.5
    clock.now_s += 0.3
    assert step_clock.busy_share == 0.0, "no second has passed"
    clock.now_s += 0.2
    assert step_clock.busy_share == pytest.approx(0.5)
    with step_clock.step():
        clock.now_s += 0.9
    assert step_clock.busy_share == pytest.approx(0.5), "no second has passed since"
    clock.now_s += 0.3
    assert step_clock.busy_share == pytest.approx(0.75)
    clock.now_s += 1.0
    assert step_clock.busy_share == 0.0


def test_a_step_that_runs_counts_as_busy() -> None:
    """One that takes many seconds is not a thread at rest, and is counted once when it ends."""
    clock = Clock()
    step_clock = StepClock(clock=clock)
    clock.now_s = 1.0
    with step_clock.step():
        clock.now_s = 4.0
        assert step_clock.seconds_in_step == 3.0
        assert step_clock.busy_share == pytest.approx(0.75)
        clock.now_s = 5.0
    clock.now_s = 6.0
    assert step_clock.busy_share == pytest.approx(0.5)
    assert step_clock.seconds_in_step == 0.0


def test_a_step_that_fails_has_ended() -> None:
    """Or a thread at rest would look as if it hung."""
    clock = Clock()
    step_clock = StepClock(clock=clock)

    def fail() -> None:
        with step_clock.step():
            clock.now_s = 1.0
            raise RuntimeError("broken on purpose")

    with pytest.raises(RuntimeError):
        fail()
    clock.now_s = 9.0
    assert step_clock.seconds_in_step == 0.0
