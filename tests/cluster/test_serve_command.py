"""`paceline serve` as a person runs it: it starts, answers, stops, and leaves nothing behind, however it ends.

Real processes on a Ray of their own; what is left is looked for by a mark in its environment, the ports and Ray's sessions.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from orchestrator.config import ServeFile
from paceline.client import GenerationRequest, StopConditions, complete
from tests.cluster.applications import tiny_application

START_LIMIT_S = 180.0  # far above what it takes
_MARK = "PACELINE_TESTS_FAMILY"


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """A shell's background jobs ignore Ctrl-C, and so would whatever they start."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def file(tiny_model: Path, tmp_path: Path) -> Path:
    """One target, one drafter, one orchestrator on one node, without labels."""
    one = {"replicas": {"min": 1, "max": 1}, "num_gpus": 0, "labels": {}}
    application = tiny_application(tiny_model, target=one, drafter=one)
    return written(application, tmp_path)


def written(application: ServeFile, folder: Path) -> Path:
    path = folder / "paceline.yaml"
    path.write_text(yaml.safe_dump(application.model_dump(exclude_none=True)))
    return path


class Serving:
    """`paceline serve` in a process of its own, with all that it starts: they inherit a mark in their environment, so none
    is missed, however short its parent lived."""

    def __init__(self, *arguments: str) -> None:
        self.endpoint = ""
        self._lines: list[str] = []
        self._mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "serve", *arguments],
            # Ray's processes give themselves titles, which are written over the environment unless told not to.
            env={**os.environ, _MARK: self._mark, "SPT_NOENV": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._threads = [threading.Thread(target=task, daemon=True) for task in (self._read, self._log)]
        for thread in self._threads:
            thread.start()

    def wait_ready(self) -> str:
        deadline_s = time.monotonic() + START_LIMIT_S
        while not self.endpoint:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline_s, self.log
            time.sleep(0.1)
        return self.endpoint

    def wait_family(self, size: int) -> None:
        """Until so many processes run: somewhere in the middle of the start."""
        deadline_s = time.monotonic() + START_LIMIT_S
        while len(self.family()) < size:
            assert time.monotonic() < deadline_s, self.log
            time.sleep(0.1)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def wait(self, limit_s: float = START_LIMIT_S) -> int:
        return self.process.wait(limit_s)

    @property
    def log(self) -> str:
        return "\n".join(self._lines)

    def survivors(self) -> list[str]:
        """What of the family still runs, once it has had time to end."""
        deadline_s = time.monotonic() + 15
        while True:
            alive = self.family()
            if not alive or time.monotonic() > deadline_s:
                return alive
            time.sleep(0.2)

    def kill(self) -> None:
        for process in self._marked():
            with suppress(psutil.Error):
                process.kill()

    def family(self) -> list[str]:
        """The command lines of all that run, the command itself included."""
        found = []
        for process in self._marked():
            with suppress(psutil.Error):
                found.append(" ".join(process.cmdline())[:120])
        return found

    def _marked(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(_MARK) == self._mark:
                    yield process

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.endpoint = self.process.stdout.readline().strip()

    def _log(self) -> None:
        assert self.process.stderr is not None
        self._lines.extend(line.rstrip() for line in self.process.stderr)


@pytest.fixture
def serving() -> Iterator[list[Serving]]:
    started: list[Serving] = []
    yield started
    for each in started:
        each.kill()


@pytest.mark.timeout(300)
def test_it_answers_and_ctrl_c_leaves_nothing_behind(file: Path, serving: list[Serving]) -> None:
    """It answers; a second one on its port says so; after Ctrl-C no process is left, and the port is free again."""
    first = Serving("--config", str(file))
    serving.append(first)
    endpoint = first.wait_ready()
    request = GenerationRequest(token_ids=(1, 2, 3), seed=1, stopping=StopConditions(max_tokens=8, ignore_eos=True))
    assert len(complete(endpoint, request).token_ids) == 8

    second = Serving("--config", str(file))
    serving.append(second)
    assert second.wait() == 1
    assert endpoint.rpartition(":")[2] in second.log
    assert "taken" in second.log
    assert "Traceback" not in second.log
    assert second.survivors() == []

    first.interrupt()
    assert first.wait() == 130
    assert first.survivors() == []
    assert not is_listening(endpoint)


@pytest.mark.timeout(300)
def test_ctrl_c_in_the_middle_of_the_start_leaves_nothing_behind(file: Path, serving: list[Serving]) -> None:
    """Interrupted while replicas load their models."""
    starting = Serving("--config", str(file))
    serving.append(starting)
    starting.wait_family(9)
    starting.interrupt()
    assert starting.wait() == 130
    assert "Traceback" not in starting.log
    assert starting.survivors() == []


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_failed_start_is_a_sentence_and_leaves_nothing_behind(
    tiny_model: Path, tmp_path: Path, serving: list[Serving]
) -> None:
    """A model that is not there: the replica's own sentence reaches the person."""
    one = {"replicas": {"min": 1, "max": 1}, "num_gpus": 0, "labels": {}}
    missing = tmp_path / "no-such-model"
    failing = Serving("--config", str(written(tiny_application(missing, target=one, drafter=one), tmp_path)))
    serving.append(failing)
    assert failing.wait() == 1
    assert "no-such-model" in failing.log
    assert "Traceback" not in failing.log
    assert failing.survivors() == []


def is_listening(endpoint: str) -> bool:
    port = int(endpoint.rpartition(":")[2])
    return any(
        connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN
        for connection in psutil.net_connections("tcp")
    )
