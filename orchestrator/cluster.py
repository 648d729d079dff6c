"""A Paceline application on Ray, from `with` to its end: on a cluster of its own, a simulated one, or one that exists.

Whatever is started here is stopped here, also when the start fails half-way. Deploys by the same configuration as
`serve deploy`, so both give the same application.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve._private.api import serve_start
from ray.serve.config import gRPCOptions
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from orchestrator.config import ConfigInvalid, Pool, ServeFile, on_loopback
from paceline.errors import ModelMismatch, ModelUnavailable, StartupFailed

SERVE_NAMESPACE = "serve"
LOOPBACK = "127.0.0.1"
_POLL_S = 0.25

# Serve's autoscaler hears of load every ten seconds by default, which is a long time for a session. Every process of
# the cluster must agree; on an existing cluster its operator decides.
_METRIC_PUSH_S = "2"
_LOCAL_ENVIRONMENT = {
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": _METRIC_PUSH_S,
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": _METRIC_PUSH_S,
    "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(8 * 1024 * 1024),
    # A cluster on loopback needs no token, and must not leave one in the user's home.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Deployed:
    """Where the application answers."""

    grpc_endpoint: str
    http_url: str
    replicas: Mapping[str, int]  # running, by deployment


@contextmanager
def deployed(
    file: ServeFile,
    *,
    address: str | None = None,
    is_simulated: bool = False,
    start_timeout_s: float = 600.0,
    on_progress: Progress = lambda _: None,
) -> Iterator[Deployed]:
    """Run the application until the block ends.

    `address` names an existing Ray cluster; without one Ray is started on this machine, with `is_simulated` as one node
    for each pool, labelled and equipped as the pools ask, whatever hardware there is. Raises `StartupFailed` or
    `ConfigInvalid` in a sentence.
    """
    with ExitStack() as stack:
        stack.enter_context(_environment({} if address else _LOCAL_ENVIRONMENT))
        on_progress("Starting Ray")
        if address is None:
            _refuse_taken_ports(file)
            file = on_loopback(file)  # all nodes are this machine, also simulated ones
        if is_simulated:
            stack.enter_context(_simulated_cluster(file))
        elif address is None:
            stack.enter_context(_local_cluster(file))
        else:
            stack.enter_context(_existing_cluster(address))
        on_progress("Starting Serve")
        stack.callback(_shut_down_application, file, whole_serve=address is None)
        _deploy(file)
        replicas = _await_running(file, start_timeout_s, on_progress)
        stack.callback(on_progress, "Stopping")
        yield Deployed(
            grpc_endpoint=f"{LOOPBACK}:{file.grpc_options.port}",
            http_url=f"http://{LOOPBACK}:{file.http_options.port}",
            replicas=replicas,
        )


# ---------------------------------------------------------------------------------------------------------------------
# Ray


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables that Ray's processes inherit, except where the user has decided; put back at the end."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def _local_cluster(file: ServeFile) -> Iterator[None]:
    labels = _labels_of_one_node(file)
    try:
        _require_hardware(file)
        ray.init(
            address="local",
            namespace=SERVE_NAMESPACE,
            labels=labels or None,
            num_cpus=max(os.cpu_count() or 1, _cpus_wanted(file.application.pools.values())),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        yield
    finally:
        ray.shutdown()


@contextmanager
def _existing_cluster(address: str) -> Iterator[None]:
    try:
        ray.init(address=address, namespace=SERVE_NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise StartupFailed(f"No Ray cluster answers at {address}: {_first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _simulated_cluster(file: ServeFile) -> Iterator[None]:
    """A head, and nodes for each pool of models, all on this machine; orchestrators fit on the nodes they prefer."""
    cluster = Cluster()
    try:
        orchestrators = file.application.orchestrator
        cluster.add_node(num_cpus=_cpus_wanted([orchestrators]), include_dashboard=False)
        for name, pool in file.application.pools.items():
            for _ in range(_nodes_wanted(pool) if name != "Orchestrator" else 0):
                guests = [orchestrators] if orchestrators.prefers.items() <= pool.labels.items() else []
                cluster.add_node(
                    num_cpus=_cpus_wanted([pool, *guests]),
                    num_gpus=math.ceil(pool.num_gpus * pool.replicas.max),
                    labels=dict(pool.labels),
                )
        ray.init(address=cluster.address, namespace=SERVE_NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]


def _nodes_wanted(pool: Pool) -> int:
    return math.ceil(pool.replicas.max / (pool.max_replicas_per_node or pool.replicas.max))


def _cpus_wanted(pools: Iterable[Pool]) -> int:
    return max(1, math.ceil(sum(pool.num_cpus * pool.replicas.max for pool in pools)))


def _labels_of_one_node(file: ServeFile) -> dict[str, str]:
    """The labels that this machine gets as the only node; raises `ConfigInvalid` if the pools want different nodes."""
    labels: dict[str, str] = {}
    for pool in file.application.pools.values():
        for name, value in pool.labels.items():
            if labels.setdefault(name, value) != value:
                raise ConfigInvalid(
                    f"The pools want nodes with {name} {labels[name]!r} and {value!r}, and this machine is one node; add "
                    "--sim-cluster to simulate one node for each pool, or name a cluster with --address."
                )
    return labels


def _require_hardware(file: ServeFile) -> None:
    needed = sum(pool.num_gpus * max(1, pool.replicas.min) for pool in file.application.pools.values())
    if needed and not _has_gpu():
        raise StartupFailed(
            f"The pools ask for {needed:g} GPUs and this machine has none; set num_gpus to 0, add --sim-cluster, or name a "
            "cluster with --address."
        )


def _has_gpu() -> bool:
    return os.path.exists("/dev/nvidia0") or os.path.exists("/dev/kfd")


# ---------------------------------------------------------------------------------------------------------------------
# Serve


def _refuse_taken_ports(file: ServeFile) -> None:
    """Say so at once: Serve's proxies would only log it."""
    for port, option in (
        (file.grpc_options.port, "grpc_options.port, or --port"),
        (file.http_options.port, "http_options.port"),
    ):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError as error:
                raise StartupFailed(
                    f"Port {port} on {LOOPBACK} is taken ({error.strerror}): is Paceline running already? Stop it, or "
                    f"choose another {option}."
                ) from error


def _deploy(file: ServeFile) -> None:
    schema = ServeDeploySchema.model_validate(file.model_dump(exclude_none=True))
    client = serve_start(
        http_options=schema.http_options.model_dump(),
        proxy_location=schema.proxy_location,
        grpc_options=gRPCOptions(**schema.grpc_options.model_dump()),
        controller_options=schema.controller_options,
    )
    # A policy for the whole application can be deployed by a configuration alone, which is what `serve run` does too.
    client.deploy_apps(schema)


def _await_running(file: ServeFile, timeout_s: float, on_progress: Progress) -> dict[str, int]:
    name = file.applications[0].name
    deadline_s, said = time.monotonic() + timeout_s, ""
    while time.monotonic() < deadline_s:
        application = serve.status().applications.get(name)
        if application is not None:
            running = {
                deployment: sum(count for state, count in status.replica_states.items() if state == "RUNNING")
                for deployment, status in application.deployments.items()
            }
            if application.status == ApplicationStatus.RUNNING:
                return running
            hopeless = _hopeless_reason_in(application)
            if hopeless or application.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
                raise StartupFailed(f"The application cannot start: {hopeless or _reason_in(application)}")
            waiting = [deployment.lower() for deployment, count in running.items() if count == 0]
            sentence = f"Starting {' and '.join(waiting) or 'the application'}"
            if sentence != said:
                on_progress(sentence)
                said = sentence
        time.sleep(_POLL_S)
    raise StartupFailed(f"The application was not running within {timeout_s:g} s; is there room for its replicas?")


def _hopeless_reason_in(application: Any) -> str:
    """The sentence of a replica that will fail in the same way each time Serve starts it again; empty if none has."""
    for line in _lines_of(application):
        kind, _, sentence = line.removeprefix("paceline.errors.").partition(": ")
        if kind in (ModelUnavailable.__name__, ModelMismatch.__name__):
            return sentence
    return ""


def _reason_in(application: Any) -> str:
    """The last line that says something: Serve wraps the replica's own sentence in a traceback."""
    lines = _lines_of(application)
    errors = [line for line in lines if "Error" in line or "errors." in line or "Failed" in line]
    return (errors or lines or ["Serve gave no reason."])[-1]


def _lines_of(application: Any) -> list[str]:
    messages = [application.message, *(status.message for status in application.deployments.values())]
    return [line.strip() for message in messages for line in (message or "").splitlines() if line.strip()]


def _shut_down_application(file: ServeFile, *, whole_serve: bool) -> None:
    with suppress(Exception):
        if whole_serve:
            serve.shutdown()  # type: ignore[no-untyped-call]
        else:
            serve.delete(file.applications[0].name)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
