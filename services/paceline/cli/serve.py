"""`paceline serve`: an application on Ray Serve, on this machine or on a cluster, until Ctrl-C."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.laptop import laptop_configuration
from paceline.cli.pools import ReplicaState, count_in_words, status_view
from paceline.cli.serving import free_port, running_application
from paceline.cli.terminal import Terminal, with_plain_errors
from paceline.client import DeploymentStatus, GenerationClient
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from orchestrator.config import ServeFile

_FIRST_LOOK_LIMIT_S = 15.0  # for the proxy to hear of the orchestrators, and these of the models
_LOOK_INTERVAL_S = 1.0


@with_plain_errors
def serve(
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="A Serve configuration, such as those in deploy/serve; without it one target with the default model "
            "and one drafter with prompt lookup.",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address", metavar="ADDRESS", help="An existing Ray cluster; without it Ray is started on this machine."
        ),
    ] = None,
    sim_cluster: Annotated[
        bool,
        typer.Option("--sim-cluster", help="Simulate a node for each pool on this machine, labelled and with GPUs."),
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=0, max=65535, help="Port of the endpoint instead of the configured one; 0 takes any free one."
        ),
    ] = None,
) -> None:
    """Start pools of targets and drafters on Ray Serve and print the endpoint; Ctrl-C stops them again."""
    if address is not None and sim_cluster:
        raise typer.BadParameter("--sim-cluster starts a cluster of its own; --address names one that runs.")
    file = _configuration(config, port)
    terminal = Terminal.open()
    with running_application(file, terminal, address=address, is_simulated=sim_cluster) as endpoint:
        asyncio.run(_attend(endpoint, f"http://127.0.0.1:{file.http_options.port}", terminal))


def _configuration(path: Path | None, port: int | None) -> ServeFile:
    from orchestrator.config import ConfigInvalid, load_serve_file, parse_serve_file  # noqa: PLC0415 - for `serve` only

    if path is None:
        # Whoever chooses a port has a server at the usual one, whose port for HTTP is taken too.
        content = laptop_configuration() if port is None else laptop_configuration(http_port=free_port())
        return _on_port(parse_serve_file(content), port)
    try:
        return _on_port(load_serve_file(path), port)
    except ConfigInvalid as error:
        raise typer.BadParameter(error.message, param_hint="--config") from error


def _on_port(file: ServeFile, port: int | None) -> ServeFile:
    """The same with another endpoint; Serve itself takes no 0."""
    if port is None:
        return file
    grpc_options = file.grpc_options.model_copy(update={"port": port or free_port()})
    return file.model_copy(update={"grpc_options": grpc_options})


# ---------------------------------------------------------------------------------------------------------------------
# While it runs


async def _attend(endpoint: str, http_url: str, terminal: Terminal) -> None:
    """Say what there is, and then for ever what changes."""
    terminal.write_line(endpoint)
    async with GenerationClient(endpoint) as client:
        first = await _first_look(client)
        if first is not None:
            terminal.err.print(status_view(first, width=terminal.err.width))
        terminal.say(f'\nTry: paceline generate --endpoint {endpoint} "Why is the sky blue?"')
        terminal.say(f"     paceline status --endpoint {endpoint} --watch    Ctrl-C stops.")
        terminal.say(f"OpenAI-compatible HTTP at {http_url}/v1")
        port = endpoint.rpartition(":")[2]
        terminal.say(f"Ray Serve opens port {port} on every network interface, without encryption.", "dim")
        changes = Changes(first)
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            try:
                sentences = changes.since_last(await client.pool_status())
            except PacelineError as error:
                sentences = changes.since_failure(error)
            for sentence in sentences:
                terminal.say(f"{time.strftime('%H:%M:%S')}  {sentence}")


async def _first_look(client: GenerationClient) -> DeploymentStatus | None:
    """The state once the orchestrator knows the models; what there is when the time is up, and None for nothing."""
    seen = None
    deadline_s = time.monotonic() + _FIRST_LOOK_LIMIT_S
    while time.monotonic() < deadline_s:
        try:
            seen = await client.pool_status()
            states = [ReplicaState.of(replica) for pool in seen.pools for replica in pool.replicas]
            if states and ReplicaState.STARTING not in states:
                return seen
        except PacelineError:
            pass
        await asyncio.sleep(0.2)
    return seen


class Changes:
    """What is worth a line of the log: other numbers of replicas, and whether the application answers at all."""

    def __init__(self, first: DeploymentStatus | None) -> None:
        self._counts = _counts(first) if first is not None else {}
        self._answers = True

    def since_last(self, status: DeploymentStatus) -> list[str]:
        before, self._counts = self._counts, _counts(status)
        returned = [] if self._answers else ["The application answers again."]
        self._answers = True
        return returned + [f"{name}: {words}" for name, words in self._counts.items() if before.get(name) != words]

    def since_failure(self, error: PacelineError) -> list[str]:
        answered, self._answers = self._answers, False
        return [f"The application does not answer: {error.message}"] if answered else []


def _counts(status: DeploymentStatus) -> dict[str, str]:
    return {pool.name: count_in_words(pool) for pool in status.pools}
