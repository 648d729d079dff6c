"""The three services as processes on this machine: started together, stopped in order, none left behind.

Every child runs in a session of its own, so that Ctrl-C in a terminal reaches the parent alone, and stops by itself
when its standard input ends, which is what happens when the parent is killed. Knows nothing of gRPC or of models.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.errors import StartupFailed

NO_DRAFTER = "none"
NGRAM_DRAFTER = "ngram"
SUFFIX_DRAFTER = "suffix"
_HYBRID_PREFIX = "hybrid:"
_HOST = "127.0.0.1"
_END_TIMEOUT_S = 5.0
_CGROUP_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")

ProgressReport = Callable[[str], None]
LogReport = Callable[[str, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStackSettings:
    """What to start; None leaves a choice to the service."""

    target: str | None = None  # model id or folder
    # "ngram", "suffix", "none", or a model id or folder, which "hybrid:" before it combines with suffix decoding
    drafter: str = NGRAM_DRAFTER
    schedule: str | None = None
    rule: str | None = None
    draft_length: int | None = None  # tokens
    dtype: str = "auto"
    logit_noise: float = 0.0  # standard deviation of noise on the drafter's logits, to study lower acceptance
    port: int = 0  # of the orchestrator; 0: any free one
    http_port: int | None = None  # of the orchestrator's HTTP API; 0: any free one, None: it has none
    reflection: bool = False  # the orchestrator describes its protocol to clients that ask, such as grpcurl
    log_level: str = "warning"
    start_timeout_s: float = 600.0  # the first start may have to fetch or convert a model
    stop_grace_s: float = 8.0  # between SIGTERM and SIGKILL

    @property
    def has_drafter(self) -> bool:
        return self.drafter != NO_DRAFTER

    @property
    def has_neural_drafter(self) -> bool:
        return self.drafter not in (NO_DRAFTER, NGRAM_DRAFTER, SUFFIX_DRAFTER)

    @property
    def drafter_method(self) -> str:
        """The drafting method, by the name that the drafter service knows."""
        if not self.has_neural_drafter:
            return self.drafter
        return "hybrid" if self.drafter.startswith(_HYBRID_PREFIX) else "draft_model"

    @property
    def drafter_model(self) -> str:
        """The model id or folder of a neural drafter."""
        return self.drafter.removeprefix(_HYBRID_PREFIX)


# ---------------------------------------------------------------------------------------------------------------------
# Cores


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """How many threads each model computes with."""

    cores: int
    target: int
    drafter: int


def plan_threads(cores: int, *, has_neural_drafter: bool) -> ThreadPlan:
    """All cores to the target, unless a neural drafter computes beside it: then halves, an odd core to the target."""
    if not has_neural_drafter:
        return ThreadPlan(cores=cores, target=cores, drafter=1)
    drafter = max(1, cores // 2)
    return ThreadPlan(cores=cores, target=max(1, cores - drafter), drafter=drafter)


def available_cores() -> int:
    """Cores this process may use: its CPU affinity, and the limit of its container if that is lower; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, _container_cores() or allowed))


def _container_cores() -> int | None:
    """The CPU limit of the control group, rounded down to whole cores; None without one."""
    try:
        quota, period = _CGROUP_CPU_LIMIT.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, int(quota) // int(period))


# ---------------------------------------------------------------------------------------------------------------------
# One process


class ServiceProcess:
    """One child process: its address once it is ready, the last line of its log, its end."""

    def __init__(self, name: str, arguments: Sequence[str], *, on_log: LogReport) -> None:
        """Start `python -m ARGUMENTS`; `on_log(name, line)` is called on a thread of its own."""
        self.name = name
        self.address = ""
        self.http_url = ""  # of a service that answers HTTP too
        self._on_log = on_log
        self._last_log_line = ""
        self._process = subprocess.Popen(
            # -P: a file in the current folder must not stand in for one of our modules.
            [sys.executable, "-P", "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self._log_reader = threading.Thread(target=self._read_log, daemon=True)
        self._log_reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def is_ready(self) -> bool:
        return bool(self.address)

    def settle_into(self, settled: queue.SimpleQueue[ServiceProcess]) -> None:
        """Put this process on the queue once: when it is ready, or when its standard output has ended without that."""
        threading.Thread(target=self._read_output, args=(settled,), daemon=True).start()

    def explain_end(self) -> str:
        """Why it ended: the signal that killed it, or the last line of its log, which our services make a sentence."""
        self.wait(_END_TIMEOUT_S)
        self._log_reader.join(_END_TIMEOUT_S)
        status = self._process.poll()
        if status is not None and status < 0:
            return f"It was killed by {signal.Signals(-status).name}."
        return self._last_log_line or f"It ended with status {status} and said nothing."

    def terminate(self) -> None:
        if self.is_running:
            self._process.terminate()

    def wait(self, timeout_s: float) -> None:
        """Return when the process has ended or the time is up."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, timeout_s))

    def kill(self) -> None:
        """End the process and whatever it has started, and reap it; nothing happens to one that has ended."""
        if self.is_running:
            # It may have ended just now, which some systems call a lack of permission.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _read_output(self, settled: queue.SimpleQueue[ServiceProcess]) -> None:
        """Read to the end, so that a service which prints more than its ready line never blocks on a full pipe."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if not self.is_ready:
                    message = _ready_message(line)
                    self.http_url = str(message.get("http", ""))
                    self.address = str(message.get("address", ""))
                    if self.is_ready:
                        settled.put(self)
        if not self.is_ready:
            settled.put(self)

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                if line.strip():
                    self._last_log_line = line.strip()
                    self._on_log(self.name, line.rstrip())


def _ready_message(line: str) -> dict[str, object]:
    """What a ready line says; nothing for any other line, such as the chatter of a library."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    is_ready_line = isinstance(message, dict) and message.get("event") == "ready"
    return message if is_ready_line else {}


def _ignore(*_: str) -> None:
    return None


def await_ready(
    processes: Sequence[ServiceProcess],
    *,
    deadline_s: float,
    timeout_s: float,
    on_progress: ProgressReport = _ignore,
) -> None:
    """Wait for all at once, so that the first to fail is heard even while another still loads its model.

    `deadline_s` is a moment of `time.monotonic`, `timeout_s` what was allowed in all. Raises `StartupFailed` with the
    sentence of a service that could not start, or for those that are too slow.
    """
    settled: queue.SimpleQueue[ServiceProcess] = queue.SimpleQueue()
    waiting = [process.name for process in processes]
    for process in processes:
        process.settle_into(settled)
    while waiting:
        on_progress(f"Starting {' and '.join(waiting)}")
        try:
            process = settled.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise _too_slow(waiting, timeout_s) from None
        if not process.is_ready:
            raise StartupFailed(
                f"The {process.name} cannot start: {process.explain_end()}", details={"service": process.name}
            )
        waiting.remove(process.name)


def _too_slow(waiting: Sequence[str], timeout_s: float) -> StartupFailed:
    names = " and ".join(waiting)
    return StartupFailed(f"The {names} did not get ready within {timeout_s:g} s.", details={"service": names})


# ---------------------------------------------------------------------------------------------------------------------
# All of them


class LocalStack:
    """Target, drafter and orchestrator on this machine, from `with` to its end.

    Entering blocks until all answer; raises `StartupFailed` with the sentence of the service that could not start, and
    then, as after any other exception, none is left running.
    """

    def __init__(
        self,
        settings: LocalStackSettings,
        *,
        on_progress: ProgressReport = _ignore,
        on_log: LogReport = _ignore,
    ) -> None:
        """`on_progress(sentence)` is called while the services start; `on_log(service, line)` on threads, until the end."""
        self.settings = settings
        self.threads = plan_threads(available_cores(), has_neural_drafter=settings.has_neural_drafter)
        self.target: ServiceProcess | None = None
        self.drafter: ServiceProcess | None = None
        self.orchestrator: ServiceProcess | None = None
        self._on_progress, self._on_log = on_progress, on_log

    @property
    def endpoint(self) -> str:
        """HOST:PORT of the orchestrator; empty until it is ready."""
        return self.orchestrator.address if self.orchestrator is not None else ""

    @property
    def http_url(self) -> str:
        """Where the orchestrator answers HTTP; empty until it is ready, and without a port for it."""
        return self.orchestrator.http_url if self.orchestrator is not None else ""

    @property
    def processes(self) -> tuple[ServiceProcess, ...]:
        started = (self.orchestrator, self.target, self.drafter)
        return tuple(process for process in started if process is not None)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End every process: the orchestrator first, so that no request meets a missing model, then both models."""
        models = [process for process in (self.target, self.drafter) if process is not None]
        try:
            for wave in ([self.orchestrator] if self.orchestrator is not None else [], models):
                self._stop_together(wave)
        finally:
            # Also when a second Ctrl-C cuts the waiting short.
            for process in self.processes:
                process.kill()

    def _stop_together(self, wave: Sequence[ServiceProcess]) -> None:
        deadline_s = time.monotonic() + self.settings.stop_grace_s
        for process in wave:
            process.terminate()
        for process in wave:
            process.wait(deadline_s - time.monotonic())

    def _start(self) -> None:
        deadline_s = time.monotonic() + self.settings.start_timeout_s
        refuse_taken_port(self.settings.port, option="--port")
        refuse_taken_port(self.settings.http_port or 0, option="--http-port")
        models = [self._start_target()]
        if self.settings.has_drafter:
            models.append(self._start_drafter())
        self._await_ready(models, deadline_s=deadline_s)
        self._await_ready([self._start_orchestrator()], deadline_s=deadline_s)

    def _start_target(self) -> ServiceProcess:
        self.target = self._spawn("target", "target_service", _target_options(self.settings, self.threads))
        return self.target

    def _start_drafter(self) -> ServiceProcess:
        self.drafter = self._spawn("drafter", "drafter_service", _drafter_options(self.settings, self.threads))
        return self.drafter

    def _start_orchestrator(self) -> ServiceProcess:
        assert self.target is not None, "the orchestrator is started behind the target"
        options = _orchestrator_options(
            self.settings, target=self.target.address, drafter=self.drafter.address if self.drafter else None
        )
        self.orchestrator = self._spawn("orchestrator", "orchestrator", options)
        return self.orchestrator

    def _spawn(self, name: str, module: str, options: Options) -> ServiceProcess:
        common: Options = {
            "--host": _HOST,
            "--log-level": self.settings.log_level,
        }
        arguments = [module, "--stop-with-parent", *_flatten(common | options)]
        return ServiceProcess(name, arguments, on_log=self._on_log)

    def _await_ready(self, processes: Sequence[ServiceProcess], *, deadline_s: float) -> None:
        await_ready(
            processes,
            deadline_s=deadline_s,
            timeout_s=self.settings.start_timeout_s,
            on_progress=self._on_progress,
        )


def refuse_taken_port(port: int, *, option: str) -> None:
    """Say so at once, and not when the models are loaded; whoever takes the port meanwhile is caught by the service.

    Raises `StartupFailed`.
    """
    with socket.socket() as probe:
        # A port that a stopped server has just left is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except (OSError, OverflowError) as error:
            raise StartupFailed(
                f"Port {port} on {_HOST} cannot be opened ({getattr(error, 'strerror', None) or error}); choose another "
                f"with {option}, or 0 for any free one."
            ) from error


# ---------------------------------------------------------------------------------------------------------------------
# Their options

Options = dict[str, object]


def _flatten(options: Options) -> Iterator[str]:
    for option, value in options.items():
        if value is True:
            yield option
        elif value is not None and value is not False:  # 0 is a value
            yield from (option, str(value))


def _target_options(settings: LocalStackSettings, threads: ThreadPlan) -> Options:
    return {"--port": 0, "--threads": threads.target, "--model": settings.target, "--dtype": settings.dtype}


def _drafter_options(settings: LocalStackSettings, threads: ThreadPlan) -> Options:
    common: Options = {"--port": 0, "--threads": threads.drafter, "--method": settings.drafter_method}
    if not settings.has_neural_drafter:
        return common
    return common | {
        "--model": settings.drafter_model,
        "--dtype": settings.dtype,
        "--logit-noise": settings.logit_noise,
    }


def _orchestrator_options(settings: LocalStackSettings, *, target: str, drafter: str | None) -> Options:
    return {
        "--port": settings.port,
        "--http-port": settings.http_port,
        "--reflection": settings.reflection,
        "--threads": 1,
        "--target": target,
        "--drafter": drafter,
        "--schedule": settings.schedule,
        "--rule": settings.rule,
        "--draft-length": settings.draft_length,
    }
