"""The delay before the drafter: every byte arrives, in order, and never before its time."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from paceline.bench.delay_link import DelayLink, Relay, _End

DELAY_S = 0.02


@pytest.fixture(scope="module")
def echo_address() -> Iterator[str]:
    """A server that sends back what it gets."""

    def answer(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(65536):
                connection.sendall(data)

    def accept(server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, args=(server,), daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(scope="module")
def link(echo_address: str) -> Iterator[DelayLink]:
    with DelayLink(echo_address) as link:
        yield link


@pytest.fixture
def connection(link: DelayLink) -> Iterator[socket.socket]:
    host, port = link.address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield connection


def received(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = connection.recv(65536)
        assert chunk, "the link has closed the connection"
        data += chunk
    return data


def echoed_s(connection: socket.socket, message: bytes) -> float:
    begun_s = time.perf_counter()
    connection.sendall(message)
    assert received(connection, len(message)) == message
    return time.perf_counter() - begun_s


def test_an_echo_takes_both_delays(link: DelayLink, connection: socket.socket) -> None:
    """Twenty round trips, none of which is shorter than twice the delay."""
    link.delay(DELAY_S)
    assert min(echoed_s(connection, bytes([number])) for number in range(20)) >= 2 * DELAY_S


def test_bytes_wait_side_by_side(link: DelayLink, connection: socket.socket) -> None:
    """Fifty messages sent one after another are not delayed fifty times: together they take less than five round
    trips, even on a machine that is busy."""
    link.delay(DELAY_S)
    begun_s = time.perf_counter()
    for number in range(50):
        connection.sendall(bytes([number]))
    assert received(connection, 50) == bytes(range(50))
    assert time.perf_counter() - begun_s < 5 * 2 * DELAY_S + 1.0


def test_every_byte_arrives_in_order(link: DelayLink, connection: socket.socket) -> None:
    """Four megabytes of noise in pieces of all sizes, while the delay goes up and down."""
    generator = random.Random(3)
    sent = generator.randbytes(4_000_000)

    def send() -> None:
        place = 0
        for delay_s in (0.005, 0.0, 0.002, 0.0):
            link.delay(delay_s)
            end = place + len(sent) // 4
            while place < end:
                size = min(generator.choice((1, 100, 10_000, 300_000)), end - place)
                connection.sendall(sent[place : place + size])
                place += size

    sender = threading.Thread(target=send)
    sender.start()
    back = received(connection, len(sent))
    sender.join()
    assert hashlib.sha256(back).digest() == hashlib.sha256(sent).digest()


def test_the_delay_can_be_taken_away(link: DelayLink, connection: socket.socket) -> None:
    """Of 20 round trips the fastest is far below the delay that was set before."""
    link.delay(DELAY_S)
    echoed_s(connection, b"slow")
    link.delay(0.0)
    assert min(echoed_s(connection, b"fast") for _ in range(20)) < DELAY_S


def test_the_end_of_one_side_is_the_end_of_the_other(link: DelayLink) -> None:
    """A server that hangs up is seen to, behind what it has sent."""
    link.delay(0.001)
    host, port = link.address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"last words")
        assert received(connection, 10) == b"last words"
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""


def test_nobody_upstream_is_a_closed_connection() -> None:
    """As it would be without the link, but for who says so."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    with DelayLink(f"127.0.0.1:{free}") as link:
        host, port = link.address.split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            assert connection.recv(1) == b""


class Written(asyncio.Transport):
    """Remembers what was written to it, and whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.data, self.is_closed = b"", False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.data += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    def resume_reading(self) -> None:
        """Nothing was ever paused."""


@pytest.mark.parametrize("has_gone", [False, True])
async def test_what_comes_before_the_other_side_is_there_is_handed_on(has_gone: bool) -> None:
    """In its order, and behind it the end, if the caller has gone by then: not every Python pauses from the beginning."""
    relay = Relay(("127.0.0.1", 1))
    early, other = _End(relay), _End(relay)
    early._transport, written = Written(), Written()
    other._transport = written
    for data in (b"last ", b"words"):
        early.data_received(data)
    if has_gone:
        early.connection_lost(None)
    early.join(other)
    assert (written.data, written.is_closed) == (b"last words", has_gone)
