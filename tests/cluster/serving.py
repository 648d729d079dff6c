"""`paceline serve` as a person runs it: a real process on a Ray of its own, and all that it starts.

What is left of it is looked for by a mark in its environment, its ports and Ray's sessions.
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
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from orchestrator.config import ServeFile
from paceline.client import GenerationClient
from paceline.tokens import TokenEntry, TokenFile, hash_token, new_token, write_tokens
from tests.certificates import DRAFTER, ORCHESTRATOR, TARGET, Authority
from tests.cluster.applications import tiny_application

START_LIMIT_S = 180.0  # far above what it takes
_MARK = "PACELINE_TESTS_FAMILY"
_ONE_NODE = {"num_gpus": 0, "labels": {}}


def written(application: ServeFile, folder: Path) -> Path:
    path = folder / "paceline.yaml"
    path.write_text(yaml.safe_dump(application.model_dump(exclude_none=True)))
    return path


def one_of_each(model: Path, folder: Path) -> Path:
    """One target, one drafter, one orchestrator on one node, without labels."""
    one = {"replicas": {"min": 1, "max": 1}, **_ONE_NODE}
    return written(tiny_application(model, target=one, drafter=one), folder)


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


@dataclass(slots=True)
class Served:
    """A pool of each model on one node that follow their load, protected as in production: mutual TLS between the services,
    tokens before them. It starts when a test first asks, and again if one has ended it."""

    config: Path
    http_url: str
    authority: Authority
    token: str
    _serving: list[Serving] = field(default_factory=list)

    def running(self) -> Serving:
        if not self._serving or self._serving[-1].process.poll() is not None:
            self._serving.append(Serving("--config", str(self.config)))
        self._serving[-1].wait_ready()
        return self._serving[-1]

    def client(self) -> GenerationClient:
        return GenerationClient(self.running().endpoint, token=self.token)

    def kill(self) -> None:
        for serving in self._serving:
            serving.kill()


# Seconds where production takes minutes.
_POLICY = {
    "stall_target": 0.4,
    "initial_ratio": 0.5,
    "judge_interval_s": 3,
    "settle_s": 4,
    "raise_delay_s": 1,
    "target_hold_s": 8,
    "drafter_hold_s": 8,
    "max_raise": 2.0,
    "least_gain": 0,  # the machine itself may be what is missing
}
_AT_ONCE = {"upscale_delay_s": 0, "downscale_delay_s": 0, "look_back_period_s": 11}


def served_application(model: Path, folder: Path) -> Served:
    authority, token = Authority(folder / "authority"), new_token()
    tokens = folder / "tokens.yaml"
    write_tokens(tokens, TokenFile(tokens=(TokenEntry(name="tests", sha256=hash_token(token)),)))

    def identity(name: str) -> dict[str, str]:
        return {setting: str(path) for setting, path in authority.issue(name).settings.items()}

    file = tiny_application(
        model,
        target={"replicas": {"min": 1, "max": 2, "sessions_per_replica": 6, **_AT_ONCE}, **_ONE_NODE},
        drafter={"replicas": {"min": 1, "max": 3, "sessions_per_replica": 64, **_AT_ONCE}, **_ONE_NODE},
        target_service=identity(TARGET),
        drafter_service={"emulated_step_ms": 6, "logit_noise": 0.0, **identity(DRAFTER)},
        orchestrator_service={"tokens_file": str(tokens), **identity(ORCHESTRATOR)},
        policy=_POLICY,
    )
    return Served(written(file, folder), f"http://127.0.0.1:{file.http_options.port}", authority, token)
