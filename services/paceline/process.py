"""What the three service processes share: start-up errors in a sentence, signals, the ready line, the end."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import structlog
from pydantic import ValidationError
from pydantic_settings import CliApp

from paceline.errors import PacelineError
from paceline.exposure import refuse_exposure
from paceline.logs import configure_logging
from paceline.settings import ServiceSettings

logger = structlog.get_logger(__name__)

SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


class Lifetime:
    """From ready to asked to stop; this one belongs to whoever runs a service inside another program."""

    def __init__(self) -> None:
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.details: dict[str, object] = {}  # what else the service says of itself when it is ready
        self._stopped = asyncio.Event()

    def ready(self, service: str, address: str, **fields: object) -> None:
        """Said once, by the service, when it answers at `address`."""
        self.details = fields
        self.address.set_result(address)

    def stop(self) -> None:
        self._stopped.set()

    async def until_stopped(self) -> None:
        await self._stopped.wait()


class ProcessLifetime(Lifetime):
    """The lifetime of a process: ended by a signal, or because the parent process is gone."""

    def __init__(self, *, stop_with_parent: bool) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self.stop)
        if stop_with_parent:
            threading.Thread(target=self._watch_parent, name="parent-watch", daemon=True).start()

    def ready(self, service: str, address: str, **fields: object) -> None:
        """Print the one line that a service writes on standard output."""
        super().ready(service, address, **fields)
        print(json.dumps({"event": "ready", "service": service, "address": address, **fields}), flush=True)

    def _watch_parent(self) -> None:
        # The parent holds the other end of our standard input: end of file means that it has ended.
        # Read below Python's buffers, whose lock would hold up the interpreter's end.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        self._loop.call_soon_threadsafe(self.stop)


async def until_idle(count_running: Callable[[], int], *, limit_s: float) -> None:
    """Wait until nothing is running, but no longer than `limit_s`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while count_running():  # noqa: ASYNC110 - the end of a process need not be prompt
                await asyncio.sleep(0.02)


Serve = Callable[[Lifetime], Awaitable[None]]
"""Runs a prepared service for the given lifetime."""


def run_service(service: str, settings_type: type[SettingsT], prepare: Callable[[SettingsT], Serve]) -> NoReturn:
    """Read the settings, prepare (where models load), then serve until asked to stop; exits the process."""
    try:
        settings = CliApp.run(settings_type)
    except ValidationError as error:
        _exit_with("; ".join(_setting_sentence(problem) for problem in error.errors()), status=2)
    configure_logging(settings.log_level, service=service, takes_libraries=True)
    try:
        refuse_exposure(settings)  # before a model loads, which may take minutes
        serve = prepare(settings)
        # What the libraries have made lives for ever: without it a full collection takes microseconds, not a tenth of
        # a second in the middle of somebody's round.
        gc.collect()
        gc.freeze()
        _run_loop(_run(serve, settings))
    except PacelineError as error:
        _exit_with(error.message, status=1)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(0)


async def _run(serve: Serve, settings: ServiceSettings) -> None:
    await serve(ProcessLifetime(stop_with_parent=settings.stop_with_parent))


def _run_loop(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """The fastest event loop there is here."""
    try:
        import uvloop  # noqa: PLC0415 - absent on Windows
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _setting_sentence(problem: object) -> str:
    assert isinstance(problem, dict)
    option = "--" + ".".join(str(part) for part in problem["loc"]).replace("_", "-")
    return f"{option}: {problem['msg']}"


def _exit_with(sentence: str, *, status: int) -> NoReturn:
    print(sentence, file=sys.stderr, flush=True)
    raise SystemExit(status)
