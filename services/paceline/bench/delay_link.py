"""A network between two processes of this machine: a relay that hands every byte on a fixed time after it came.

Order and throughput are those of the loopback: bytes wait side by side, not one behind the other. The relay is a process
of its own, because a busy neighbour in the same interpreter would add delays that nobody set.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import selectors
import signal
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

from paceline.bench.cores import pin
from paceline.errors import StartupFailed

_HOST = "127.0.0.1"
_MAX_WAITING_BYTES = 64 * 1024 * 1024  # of one direction; beyond it the sender is made to wait
_READ_BYTES = 256 * 1024
_REPLY_TIMEOUT_S = 60.0  # a new interpreter may take long on a busy machine

Address = tuple[str, int]


class DelayLink:
    """A relay to `upstream`, HOST:PORT, from `with` to its end; `address` is where to connect instead."""

    def __init__(self, upstream: str, *, cores: Sequence[int] = ()) -> None:
        host, _, port = upstream.rpartition(":")
        context = multiprocessing.get_context("spawn")
        self._control, theirs = context.Pipe()
        self._process = context.Process(
            target=_run_relay, args=(theirs, (host, int(port)), tuple(cores)), name="delay-link", daemon=True
        )
        self._theirs = theirs
        self.address = ""

    def __enter__(self) -> Self:
        self._process.start()
        # With our copy closed, the end of either process is seen by the other.
        self._theirs.close()
        self.address = f"{_HOST}:{self._reply()}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._control.close()
        self._process.join(1.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def delay(self, delay_s: float) -> None:
        """Hold back bytes that come from now on, either way, for `delay_s` seconds."""
        self._control.send(delay_s)
        self._reply()

    def _reply(self) -> object:
        try:
            if self._control.poll(_REPLY_TIMEOUT_S):
                return self._control.recv()
        except (EOFError, OSError):
            pass
        raise StartupFailed("The delay link does not answer; something has ended its process.")


# ---------------------------------------------------------------------------------------------------------------------
# In the relay's process


class Relay:
    """Takes connections on a free port of 127.0.0.1 and joins each to one to `upstream`."""

    def __init__(self, upstream: Address) -> None:
        self.delay_s = 0.0
        self._upstream = upstream
        self._connecting: set[asyncio.Task[None]] = set()

    async def listen(self) -> int:
        """Start; returns the port."""
        server = await asyncio.get_running_loop().create_server(self._accept, _HOST, 0)
        port: int = server.sockets[0].getsockname()[1]
        return port

    def _accept(self) -> _End:
        end = _End(self)
        task = asyncio.get_running_loop().create_task(self._join(end))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return end

    async def _join(self, end: _End) -> None:
        """Connect the other side; what has come meanwhile waits in the socket."""
        try:
            _, other = await asyncio.get_running_loop().create_connection(lambda: _End(self), *self._upstream)
        except OSError:
            end.close()
            return
        end.join(other)
        other.join(end)


class _End(asyncio.Protocol):
    """One of two joined sockets, and the bytes that wait to be written to it. Invariant: they are due in their order."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._other: _End | None = None
        self._early: list[bytes] = []  # read before the other end was there: not every Python pauses from the beginning
        self._waiting: deque[tuple[float, bytes]] = deque()  # due, data; empty data closes
        self._waiting_bytes = 0

    # ---- as a protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.pause_reading()
        self._transport = transport
        if self._other is not None:
            transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            self._early.append(data)
            return
        self._other.write_later(data)
        if self._other.is_full and self._transport is not None:
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Also after half a close, which gRPC does not use."""
        self._transport = None
        if self._other is not None:
            self._other.write_later(b"")

    # ---- for the other end

    def join(self, other: _End) -> None:
        self._other = other
        while self._early:
            other.write_later(self._early.pop(0))
        if self._transport is not None:
            self._transport.resume_reading()
        else:  # it has gone meanwhile
            other.write_later(b"")

    @property
    def is_full(self) -> bool:
        return self._waiting_bytes > _MAX_WAITING_BYTES

    def write_later(self, data: bytes) -> None:
        due_s = self._loop.time() + self._relay.delay_s
        if self._waiting:
            # The delay may have been lowered meanwhile.
            due_s = max(due_s, self._waiting[-1][0])
        self._waiting.append((due_s, data))
        self._waiting_bytes += len(data)
        if len(self._waiting) == 1:
            self._flush()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        now_s = self._loop.time()
        was_full = self.is_full
        while self._waiting and self._waiting[0][0] <= now_s:
            _, data = self._waiting.popleft()
            self._waiting_bytes -= len(data)
            if not data:
                self.close()
            elif self._transport is not None:
                self._transport.write(data)
        if self._waiting:
            self._loop.call_at(self._waiting[0][0], self._flush)
        if was_full and not self.is_full and self._other is not None and self._other._transport is not None:
            self._other._transport.resume_reading()


def _run_relay(control: Connection, upstream: Address, cores: tuple[int, ...]) -> None:
    """The process: relays until the other end of `control` is closed."""
    # Ctrl-C reaches all processes of a terminal; the parent decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pin(cores)
    # select() takes its timeout in microseconds; epoll, and with it the usual loops, in whole milliseconds.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        runner.run(_relay(control, upstream))


async def _relay(control: Connection, upstream: Address) -> None:
    relay = Relay(upstream)
    stopped = asyncio.Event()

    def obey() -> None:
        try:
            relay.delay_s = control.recv()
        except (EOFError, OSError):
            stopped.set()
            return
        control.send(None)

    loop = asyncio.get_running_loop()
    loop.add_reader(control.fileno(), obey)
    with suppress(BrokenPipeError):
        control.send(await relay.listen())
    await stopped.wait()
    loop.remove_reader(control.fileno())
