"""In place of `orchestrator.cluster`: an application that is only a port, and what a test asks of it.

`python -m tests.fake_cluster serve ...` is the command `paceline` with it; what happens there is told on standard
error, a line each. Within a test, `install` does the same.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from orchestrator.config import ServeFile
from paceline.cli import main
from paceline.errors import StartupFailed
from tests.fake_generation import FakeGenerationService, serving

BEHAVIOUR_VARIABLE = "PACELINE_FAKE_CLUSTER"
STEP_S = 0.5
_FINISHED_BY_RAY = 99  # exit status


@dataclass(slots=True)
class FakeCluster:
    """`deployed` that does "well", is "failing" or "starting" for ever, or is "taking SIGTERM" for itself as Ray does."""

    behaviour: str = "well"
    tell: Callable[[str], None] = lambda _: None
    service: FakeGenerationService = field(default_factory=FakeGenerationService)
    files: list[ServeFile] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    is_running: bool = False

    @contextmanager
    def deployed(
        self, file: ServeFile, *, on_progress: Callable[[str], None], **options: Any
    ) -> Iterator[_FakeDeployed]:
        self.files.append(file)
        self.options.append(options)
        try:
            self.is_running = True
            on_progress("Starting Ray")
            self._step("starting Ray")
            if self.behaviour in ("taking SIGTERM", "starting"):
                # As Ray does while it starts.
                signal.signal(signal.SIGTERM, lambda *_: os._exit(_FINISHED_BY_RAY))
            on_progress("Starting Serve")
            if self.behaviour == "failing":
                raise StartupFailed("The application cannot start: there is no model 'bigg'.")
            self.tell("starting Target ...")
            while self.behaviour == "starting":
                on_progress("Starting Target")
                time.sleep(0.02)
            port = file.grpc_options.port
            with serving(self.service, port=port):
                yield _FakeDeployed(f"127.0.0.1:{port}")
        finally:
            self._step("stopping")
            self.is_running = False

    def _step(self, name: str) -> None:
        """Something that must not be cut in half, with the chatter on standard output that Ray is not above."""
        print(f"(raylet) {name}")
        self.tell(f"{name} ...")
        time.sleep(STEP_S if self.behaviour != "well" else 0.0)
        self.tell(f"{name}: done")

    def as_module(self) -> ModuleType:
        module = ModuleType("orchestrator.cluster")
        module.deployed = self.deployed  # type: ignore[attr-defined]
        return module


@dataclass(frozen=True, slots=True)
class _FakeDeployed:
    grpc_endpoint: str


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    cluster = FakeCluster(behaviour=os.environ.get(BEHAVIOUR_VARIABLE, "well"), tell=_tell)
    sys.modules["orchestrator.cluster"] = cluster.as_module()
    main()
