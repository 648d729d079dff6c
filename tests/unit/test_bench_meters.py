"""What processes and connections are charged with, as far as this system says."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from paceline.bench.meters import bytes_to_port, cpu_seconds

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux counts so; elsewhere nothing is reported")


def test_processor_time_is_that_of_the_process() -> None:
    """As the process itself sees it, and growing with its work."""
    before = cpu_seconds(os.getpid())
    assert before is not None
    assert before == pytest.approx(time.process_time(), abs=0.05)
    while time.process_time() < before + 0.02:
        pass
    after = cpu_seconds(os.getpid())
    assert after is not None
    assert after >= before + 0.02


def test_a_process_that_is_gone_has_no_processor_time() -> None:
    """Nothing is made up."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert cpu_seconds(process.pid) is None


@pytest.mark.skipif(sys.platform != "linux", reason="other systems list their sockets in other ways")
def test_bytes_are_counted_both_ways() -> None:
    """1000 there and 500 back, on the connection to the port and on no other."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        port = server.getsockname()[1]
        with (
            socket.create_connection(server.getsockname()) as connection,
            socket.create_connection(other.getsockname()) as elsewhere,
        ):
            far, _ = server.accept()
            with far:
                connection.sendall(b"a" * 1000)
                elsewhere.sendall(b"c" * 4000)
                assert len(_read(far, 1000)) == 1000
                far.sendall(b"b" * 500)
                assert len(_read(connection, 500)) == 500
                deadline_s = time.monotonic() + 5
                # What was sent counts once the other side has acknowledged it.
                while bytes_to_port(port) != 1500 and time.monotonic() < deadline_s:
                    time.sleep(0.01)
                assert bytes_to_port(port) == 1500


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += connection.recv(count - len(data))
    return data
