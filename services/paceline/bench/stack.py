"""The services that are measured: real processes, each on cores of its own, with a delay before the drafter."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from paceline.bench.cores import pinned
from paceline.bench.delay_link import DelayLink
from paceline.bench.plan import DrafterVariant
from paceline.local_stack import LocalStackSettings, LogReport, ServiceProcess, await_ready

_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """To what every step of an emulated device is held, in milliseconds; all 0: it computes as fast as it can."""

    step_ms: float = 0.0
    per_session_ms: float = 0.0
    per_token_ms: float = 0.0

    @property
    def is_emulated(self) -> bool:
        return bool(self.step_ms or self.per_session_ms or self.per_token_ms)

    def options(self) -> dict[str, object]:
        if not self.is_emulated:
            return {}
        return {
            "--emulated-step-ms": self.step_ms,
            "--emulated-step-ms-per-session": self.per_session_ms,
            "--emulated-step-ms-per-token": self.per_token_ms,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """What runs, and where; no cores: wherever the system likes."""

    target: str  # model id or folder, or a name among `folders`
    drafter: str  # as for `paceline up`, likewise
    dtype: str
    threads: int  # of each model
    target_cores: tuple[int, ...]
    drafter_cores: tuple[int, ...]
    orchestrator_cores: tuple[int, ...]
    is_colocated: bool  # the target runs in the orchestrator's process, on the target's cores
    target_step: StepTime
    drafter_step: StepTime
    max_sessions: int
    folders: Mapping[str, Path] = field(default_factory=dict)  # where models are that this run has made, by name
    start_timeout_s: float = 600.0  # the first start may have to fetch or convert a model
    stop_grace_s: float = 8.0  # between SIGTERM and SIGKILL

    @property
    def is_emulated(self) -> bool:
        return self.target_step.is_emulated or self.drafter_step.is_emulated

    def target_options(self) -> dict[str, object]:
        common = {"--model": self._located(self.target), "--dtype": self.dtype, "--threads": self.threads}
        return common | self.target_step.options()

    def drafter_options(self, variant: DrafterVariant) -> dict[str, object]:
        names = LocalStackSettings(drafter=self.drafter)
        options: dict[str, object] = {"--method": names.drafter_method, "--threads": self.threads}
        if names.has_neural_drafter:
            options |= {
                "--model": self._located(names.drafter_model),
                "--dtype": self.dtype,
                "--logit-noise": variant.logit_noise,
            }
        return options | self.drafter_step.options()

    def _located(self, model: str) -> str:
        return str(self.folders.get(model, model))


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The services that answer, and the link to the drafter."""

    endpoint: str  # of the orchestrator
    link: DelayLink
    processes: Mapping[str, int]  # service -> process id
    ports: Mapping[
        str, int
    ]  # "drafter", and "target" if it is a process -> port that the orchestrator's connection leads to


class BenchStack:
    """One target for the whole run, from `with` to its end, and one drafter after another beside it.

    A target in the orchestrator's process comes and goes with each drafter.
    """

    def __init__(self, settings: StackSettings, *, on_log: LogReport) -> None:
        """`on_log(service, line)` is called on threads, until the end."""
        self.settings = settings
        self._on_log = on_log
        self._until_end = ExitStack()
        self._target: ServiceProcess | None = None

    def __enter__(self) -> Self:
        if self.settings.is_colocated:
            return self
        try:
            options = self.settings.target_options()
            self._target = self._started(self._until_end, "target", "target_service", options)
            self._await_ready(self._target)
        except BaseException:
            self._until_end.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._until_end.close()

    @contextmanager
    def deployed(self, variant: DrafterVariant) -> Iterator[Deployment]:
        """A drafter, the link to it and an orchestrator, stopped in the opposite order. Raises `StartupFailed`."""
        with ExitStack() as until_end:
            options = self.settings.drafter_options(variant)
            drafter = self._started(until_end, "drafter", "drafter_service", options)
            self._await_ready(drafter)
            link = until_end.enter_context(DelayLink(drafter.address, cores=self.settings.orchestrator_cores))
            options = {"--threads": 1, **self._where_target_is(), "--drafter": link.address}
            orchestrator = self._started(until_end, "orchestrator", "orchestrator", options)
            self._await_ready(orchestrator)
            processes, ports = [drafter, orchestrator], {"drafter": _port(link.address)}
            if self._target is not None:
                processes.append(self._target)
                ports["target"] = _port(self._target.address)
            yield Deployment(
                endpoint=orchestrator.address,
                link=link,
                processes={process.name: process.pid for process in processes},
                ports=ports,
            )

    def _where_target_is(self) -> dict[str, object]:
        """The options that tell the orchestrator."""
        if self._target is not None:
            return {"--target": self._target.address}
        return {
            option.replace("--", "--colocated-target.", 1): value
            for option, value in self.settings.target_options().items()
        }

    def _started(self, until_end: ExitStack, name: str, module: str, options: Mapping[str, object]) -> ServiceProcess:
        common = {"--host": _HOST, "--port": 0, "--log-level": "warning", "--max-sessions": self.settings.max_sessions}
        words = [str(word) for option in {**common, **options}.items() for word in option]
        with pinned(self._cores(name)):
            process = ServiceProcess(name, [module, "--stop-with-parent", *words], on_log=self._on_log)
        until_end.callback(self._stop, process)
        return process

    def _cores(self, name: str) -> Sequence[int]:
        settings = self.settings
        return {
            "target": settings.target_cores,
            "drafter": settings.drafter_cores,
            "orchestrator": settings.target_cores if settings.is_colocated else settings.orchestrator_cores,
        }[name]

    def _await_ready(self, process: ServiceProcess) -> None:
        timeout_s = self.settings.start_timeout_s
        await_ready([process], deadline_s=time.monotonic() + timeout_s, timeout_s=timeout_s)

    def _stop(self, process: ServiceProcess) -> None:
        process.terminate()
        process.wait(self.settings.stop_grace_s)
        process.kill()


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
