"""What the measured services are told: which processes there are, where, and with which options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import pytest

from paceline.bench import stack as stack_module
from paceline.bench.plan import DrafterVariant
from paceline.bench.stack import BenchStack, StackSettings, StepTime


@dataclass
class FakeProcess:
    """Starts nothing and remembers what it was to be."""

    name: str
    arguments: list[str]
    on_log: Any
    address: str = "127.0.0.1:7"
    pid: int = 1
    events: list[str] = field(default_factory=list)

    def terminate(self) -> None:
        started[self.name].events.append("terminated")

    def wait(self, timeout_s: float) -> None: ...

    def kill(self) -> None: ...


started: dict[str, FakeProcess] = {}  # emptied by the fixture


class FakeLink:
    address = "127.0.0.1:8"

    def __init__(self, address: str, *, cores: tuple[int, ...]) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, ...]]:
    """Where each process was put, by name; nothing is started."""
    places: dict[str, tuple[int, ...]] = {}
    pinned: list[tuple[int, ...]] = []

    @contextmanager
    def pin(where: tuple[int, ...]) -> Iterator[None]:
        pinned.append(where)
        yield

    def start(name: str, arguments: list[str], *, on_log: Any) -> FakeProcess:
        places[name] = pinned[-1]
        started[name] = FakeProcess(name, arguments, on_log)
        return started[name]

    started.clear()
    monkeypatch.setattr(stack_module, "pinned", pin)
    monkeypatch.setattr(stack_module, "ServiceProcess", start)
    monkeypatch.setattr(stack_module, "DelayLink", FakeLink)
    monkeypatch.setattr(stack_module, "await_ready", lambda *_, **__: None)
    return places


def settings(*, is_colocated: bool) -> StackSettings:
    return StackSettings(
        target="big",
        drafter="small",
        dtype="float32",
        threads=1,
        target_cores=(0,),
        drafter_cores=(1,),
        orchestrator_cores=(2,),
        is_colocated=is_colocated,
        target_step=StepTime(step_ms=30.0),
        drafter_step=StepTime(),
        max_sessions=64,
    )


def option(process: FakeProcess, name: str) -> str:
    return process.arguments[process.arguments.index(name) + 1]


def test_each_service_is_a_process_on_its_own_cores(cores: dict[str, tuple[int, ...]]) -> None:
    """The orchestrator is told of the target by its address."""
    with BenchStack(settings(is_colocated=False), on_log=lambda *_: None) as stack:
        with stack.deployed(DrafterVariant()) as deployment:
            assert set(deployment.processes) == set(cores) == {"target", "drafter", "orchestrator"}
            assert deployment.ports == {"target": 7, "drafter": 8}
        assert [started[name].events for name in ("drafter", "orchestrator")] == [["terminated"]] * 2
        assert not started["target"].events  # the next drafter gets the same one
    assert cores == {"target": (0,), "drafter": (1,), "orchestrator": (2,)}
    assert option(started["orchestrator"], "--target") == "127.0.0.1:7"
    assert option(started["target"], "--emulated-step-ms") == "30.0"


def test_a_colocated_target_lives_in_the_orchestrator_on_the_targets_cores(cores: dict[str, tuple[int, ...]]) -> None:
    """With the very options of a target of its own; there is no port whose bytes could be counted."""
    with (
        BenchStack(settings(is_colocated=True), on_log=lambda *_: None) as stack,
        stack.deployed(DrafterVariant()) as deployment,
    ):
        assert set(deployment.processes) == {"drafter", "orchestrator"}
        assert deployment.ports == {"drafter": 8}
    assert cores == {"drafter": (1,), "orchestrator": (0,)}
    orchestrator = started["orchestrator"]
    assert "--target" not in orchestrator.arguments
    assert option(orchestrator, "--colocated-target.model") == "big"
    assert option(orchestrator, "--colocated-target.emulated-step-ms") == "30.0"
