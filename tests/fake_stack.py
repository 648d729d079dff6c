"""Stand-ins for the three service processes (`tests.stand_in`), and what a test asks of them.

`install` writes packages named like the real ones into a folder and puts that folder first on PYTHONPATH, so that
whoever starts `python -m target_service` starts a stand-in. Each writes what it was told into `SERVICE.json` there.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.stand_in import FOLDER_VARIABLE, Behaviour, options_of

_MODULES = {"target": "target_service", "drafter": "drafter_service", "orchestrator": "orchestrator"}


@dataclass(frozen=True, slots=True)
class FakeStack:
    """Where the stand-ins of one test are, and what they were told."""

    folder: Path

    def behave(self, service: str, behaviour: Behaviour) -> None:
        """From its next start on."""
        (self.folder / f"{service}.behaviour").write_text(json.dumps(asdict(behaviour)), encoding="utf-8")

    def started(self, service: str) -> bool:
        return (self.folder / f"{service}.json").exists()

    def arguments(self, service: str) -> dict[str, str]:
        """Option to value, as the service was started last; an option without a value maps to an empty string."""
        return options_of(self._report(service)["arguments"])

    def pid(self, service: str) -> int:
        return int(self._report(service)["pid"])

    def stopped_s(self, service: str) -> float:
        """When SIGTERM or the end of standard input came, on the clock that all processes share."""
        return float((self.folder / f"{service}.stopped").read_text(encoding="utf-8"))

    def _report(self, service: str) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.folder / f"{service}.json").read_text(encoding="utf-8"))
        return report


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeStack:
    """Let stand-ins be started instead of services until the end of the test."""
    for service, module in _MODULES.items():
        package = folder / module
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        main = f"from tests.stand_in import run_stand_in\n\nrun_stand_in({service!r})\n"
        (package / "__main__.py").write_text(main, encoding="utf-8")
    root = Path(__file__).resolve().parent.parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(root), str(root / "services")]))
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    return FakeStack(folder)


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    # The state stands behind the name, which is in parentheses.
    return not status.exists() or status.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pid: int, *, timeout_s: float = 30.0) -> bool:
    """Whether the process has ended within the time."""
    deadline_s = time.monotonic() + timeout_s
    while is_alive(pid):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True
