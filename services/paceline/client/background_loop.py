"""An event loop on a thread of its own, for callers who have none: they hand it coroutines and wait."""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, TypeVar

from paceline.client.failures import ClientClosed

ResultT = TypeVar("ResultT")

_LONGEST_END_S = 10.0  # that whoever closes the loop, the interpreter at its exit too, waits for its last task


class BackgroundLoop:
    """Runs coroutines for any number of threads, within one asynchronous context that it enters and leaves.

    Once it is closed nothing of it is left: the context was left, every task has ended, and whoever waited for one has got
    `ClientClosed`. It closes by itself when nobody refers to it any more, and when the interpreter exits.
    """

    def __init__(self, context: AbstractAsyncContextManager[object]) -> None:
        """Raises what entering `context` raises."""
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(_live(context, started)), name="paceline-client", daemon=True
        )
        self._thread.start()
        try:
            self._loop, self._end = started.result()
        except Exception:
            self._thread.join(_LONGEST_END_S)
            raise
        # Reentrant: the garbage collector may close a forgotten answer within any line of this class.
        self._lock = threading.RLock()
        self._finalizer = weakref.finalize(self, _stop, self._loop, self._end, self._thread)

    def run(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """What the coroutine returns or raises; an interrupted wait (Ctrl-C) cancels it. Raises `ClientClosed`."""
        with self._lock:
            if not self._finalizer.alive:
                coroutine.close()
                raise ClientClosed
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ClientClosed from None
        except BaseException:
            future.cancel()
            raise

    def clean_up(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run what only frees something, from wherever a forgotten object happens to be collected."""
        if threading.current_thread() is self._thread:
            asyncio.run_coroutine_threadsafe(coroutine, self._loop)  # waiting would be for ever
        elif sys.is_finalizing():
            coroutine.close()  # the loop is gone, and all connections with it
        else:
            with suppress(ClientClosed):
                self.run(coroutine)

    def close(self) -> None:
        with self._lock:
            self._finalizer()


async def _live(
    context: AbstractAsyncContextManager[object], started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]
) -> None:
    """From `started` until its event is set; `asyncio.run` then cancels what still runs and waits for it."""
    end = asyncio.Event()
    try:
        async with context:
            started.set_result((asyncio.get_running_loop(), end))
            await end.wait()
    except BaseException as error:
        if started.done():
            raise
        started.set_exception(error)


def _stop(loop: asyncio.AbstractEventLoop, end: asyncio.Event, thread: threading.Thread) -> None:
    with suppress(RuntimeError):  # the loop has ended already
        loop.call_soon_threadsafe(end.set)
    if threading.current_thread() is not thread:
        thread.join(_LONGEST_END_S)
