"""Small applications on simulated clusters: tiny models whose steps are held stand for hardware this machine lacks."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock

from orchestrator.config import ServeFile, parse_serve_file

TARGET_STEP_MS, DRAFTER_STEP_MS = 20.0, 4.0  # emulated

# Replicas of tests come and go within seconds.
_PATIENCE = {"upscale_delay_s": 1, "downscale_delay_s": 3, "look_back_period_s": 11}


def tiny_application(
    model: Path,
    *,
    target: Mapping[str, Any] | None = None,
    drafter: Mapping[str, Any] | None = None,
    orchestrator: Mapping[str, Any] | None = None,
    target_service: Mapping[str, Any] | None = None,
    drafter_service: Mapping[str, Any] | None = None,
    orchestrator_service: Mapping[str, Any] | None = None,
    policy: Mapping[str, float] | None = None,
) -> ServeFile:
    """Two targets and two drafters unless the options say otherwise, on free ports."""
    models = {"model": str(model), "dtype": "float32", "threads": 1, "heartbeat_s": 0.25}
    pool = {"num_cpus": 0.1, "health_check_period_s": 1, "drain_s": 20, "replicas": {"min": 2, "max": 2, **_PATIENCE}}
    application: dict[str, Any] = {
        "import_path": "orchestrator.app:build",
        "args": {
            "target": {
                **pool,
                "num_gpus": 1,
                "service": {**models, "emulated_step_ms": TARGET_STEP_MS, **(target_service or {})},
                **(target or {}),
            },
            "drafter": {
                **pool,
                "num_gpus": 0.25,
                "service": {
                    **models,
                    "emulated_step_ms": DRAFTER_STEP_MS,
                    "logit_noise": 1.0,
                    **(drafter_service or {}),
                },
                **(drafter or {}),
            },
            "orchestrator": {
                **pool,
                "replicas": {"min": 1, "max": 1, **_PATIENCE},
                "service": {"failover_timeout_s": 180, **(orchestrator_service or {})},
                **(orchestrator or {}),
            },
        },
    }
    if policy is not None:
        application["autoscaling_policy"] = {
            "policy_function": "orchestrator.app:PoolPolicy",
            "policy_kwargs": dict(policy),
        }
    return parse_serve_file(
        {
            "proxy_location": "HeadOnly",
            "http_options": {"port": free_port()},
            "grpc_options": {"port": free_port()},
            "applications": [application],
        }
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def one_cluster_at_a_time(folder: Path) -> Iterator[None]:
    """Two clusters at once would only hold each other up: test processes take turns."""
    with FileLock(folder / "paceline-cluster-tests.lock"), _fast_metrics():
        yield


@contextmanager
def _fast_metrics() -> Iterator[None]:
    """Serve's processes report load every second; set before Ray starts, for they inherit it."""
    names = [f"RAY_SERVE_{kind}_AUTOSCALING_METRIC_PUSH_INTERVAL_S" for kind in ("HANDLE", "REPLICA")]
    with ExitStack() as stack:
        for name in names:
            stack.callback(_restore, name, os.environ.get(name))
            os.environ[name] = "1"
        yield


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def process_at(address: str) -> int:
    """The id of the process that listens at HOST:PORT."""
    port = int(address.rpartition(":")[2])
    for connection in psutil.net_connections("tcp"):
        is_there = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
        if is_there and connection.pid is not None:
            return int(connection.pid)
    raise ProcessLookupError(f"nothing listens at {address}")


def kill_process_at(address: str) -> None:
    """SIGKILL, which gives nobody time to say goodbye."""
    os.kill(process_at(address), signal.SIGKILL)
