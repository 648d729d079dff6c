"""What runs in place of a service process: it keeps the contract of the command line, and holds no model.

Imports little, because every test that starts a stack starts three of these.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

FOLDER_VARIABLE = "PACELINE_FAKE_STACK"
HTTP_URL = "http://127.0.0.1:1"
"""Where a stand-in that was given a port for HTTP says that it answers."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How one stand-in departs from a service that is well."""

    failure: str = ""  # said on standard error instead of getting ready
    never_ready: bool = False
    ignores_terminate: bool = False
    chatter: str = ""  # printed on standard output before the ready line
    log: str = ""  # printed on standard error before it
    generates: bool = False  # answers as an orchestrator does, instead of only holding its port


def run_stand_in(service: str) -> None:
    folder = Path(os.environ[FOLDER_VARIABLE])
    behaviour = _behaviour(folder, service)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour.ignores_terminate else lambda *_: stopping.set())
    report = {"arguments": sys.argv[1:], "pid": os.getpid(), "session": os.getsid(0)}
    (folder / f"{service}.json").write_text(json.dumps(report), encoding="utf-8")
    if behaviour.log:
        print(behaviour.log, file=sys.stderr, flush=True)
    if behaviour.failure:
        sys.exit(behaviour.failure)
    threading.Thread(target=_watch_parent, args=(stopping,), daemon=True).start()
    port = int(options_of(sys.argv[1:])["--port"])
    with _generating(port) if behaviour.generates else _listening(port) as address:
        if behaviour.chatter:
            print(behaviour.chatter)
        if not behaviour.never_ready:
            ready = {"event": "ready", "service": service, "address": address}
            if "--http-port" in sys.argv:
                ready["http"] = HTTP_URL
            print(json.dumps(ready), flush=True)
        # In short waits, so that a signal handler gets its turn.
        while not stopping.wait(0.05):
            pass
    (folder / f"{service}.stopped").write_text(str(time.monotonic()), encoding="utf-8")


def _behaviour(folder: Path, service: str) -> Behaviour:
    path = folder / f"{service}.behaviour"
    return Behaviour(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else Behaviour()


def _watch_parent(stopping: threading.Event) -> None:
    # Below Python's buffers, whose lock would hold up the interpreter's end.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    stopping.set()


def options_of(arguments: list[str]) -> dict[str, str]:
    options = {}
    for index, argument in enumerate(arguments):
        if argument.startswith("--"):
            following = arguments[index + 1 : index + 2]
            options[argument] = following[0] if following and not following[0].startswith("--") else ""
    return options


@contextmanager
def _listening(port: int) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", port)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def _generating(port: int) -> AbstractContextManager[str]:
    from tests.fake_generation import FakeGenerationService, serving  # noqa: PLC0415 (slow, and seldom needed)

    return serving(FakeGenerationService(), port=port)
