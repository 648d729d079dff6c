"""A target in the orchestrator's own process: the same commands and events, and nothing between that packs or sends them.

The model runs on its thread as in a service of its own, and sessions are opened, judged and failed by the very same code.
What is left out is gRPC, and with it the target's port: no other orchestrator can use this target. Wiring; the one module
besides `app` that knows the target's service.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

from orchestrator.board import PoolBoard, Replica
from orchestrator.replica_client import TargetClient
from paceline.model_service import ModelService, PeerService
from paceline.settings import TargetSettings
from paceline.types import ModelInfo
from paceline.v1 import session_pb2 as session_pb
from paceline.v1 import target_service_pb2 as target_pb
from paceline.wire import info_to_proto
from target_service.service import prepare

ADDRESS = "this-process"
"""Stands where another target has its HOST:PORT."""


def load_target(settings: TargetSettings) -> ModelService[Any, Any]:
    """Load the model; blocks for as long as that takes."""
    return prepare(settings)


@asynccontextmanager
async def target_here(
    service: ModelService[Any, Any], *, on_broken: Callable[[], None]
) -> AsyncIterator[ColocatedTargets]:
    """Run the target's model thread until the block ends; what is given makes the clients of its pool.

    Its metrics are served on a port of their own, as those of a target service are. `on_broken` is called if the thread
    breaks; leaving the block then raises `PacelineError`.
    """
    service.serve_metrics()
    async with service.running(on_broken):
        yield ColocatedTargets(service)


class ColocatedTargets:
    """Makes the client of the one target here (`target_pool.NewTargetClient`)."""

    def __init__(self, service: PeerService) -> None:
        self._service = service

    def __call__(
        self,
        replica: Replica,
        board: PoolBoard,
        *,
        admit: Callable[[Replica, ModelInfo], None],
        silence_limit_s: float,
    ) -> TargetClient:
        return ColocatedClient(self._service, replica, board, admit=admit, silence_limit_s=silence_limit_s)


class ColocatedClient(TargetClient):
    """The connection to a target in this process; it cannot be lost."""

    def __init__(
        self,
        service: PeerService,
        replica: Replica,
        board: PoolBoard,
        *,
        admit: Callable[[Replica, ModelInfo], None],
        silence_limit_s: float,
    ) -> None:
        super().__init__(replica, board, admit=admit, silence_limit_s=silence_limit_s)
        self._service = service

    def _open_channel(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def _fetch_info(self, channel: object) -> session_pb.ModelInfo:
        return info_to_proto(self._service.info)

    def _open_stream(self, channel: object) -> ColocatedStream:
        return ColocatedStream(self._service, on_events=self._on_events)


class ColocatedStream:
    """What a `PairStream` is to a target elsewhere, from `run` to its end.

    Commands that are sent in one turn of the event loop arrive together, as they would in one message. The target refuses
    what is too much for it, so that there is no bound here.
    """

    def __init__(self, service: PeerService, *, on_events: Callable[[Sequence[target_pb.TargetEvent]], None]) -> None:
        self._service, self._on_events = service, on_events
        self._commands: list[target_pb.TargetCommand] = []
        self._is_waiting = asyncio.Event()  # a command, to be taken

    def send(self, item: target_pb.TargetCommand) -> None:
        self._commands.append(item)
        self._is_waiting.set()

    async def run(self) -> str:
        """Exchange commands and events until cancelled."""
        await self._service.serve_peer(self._batches(), self._deliver)
        return "the target has stopped"

    async def _batches(self) -> AsyncIterator[list[target_pb.TargetCommand]]:
        while True:
            await self._is_waiting.wait()
            self._is_waiting.clear()
            batch, self._commands = self._commands, []
            yield batch

    async def _deliver(self, events: list[target_pb.TargetEvent]) -> None:
        self._on_events(events)
