"""The connection to one replica of a pool: found, identified, streamed with, and found again when it was lost.

What it learns of the replica goes to the pool's board. Knows nothing of other replicas, or of what a session means.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, Protocol, TypeVar

import grpc.aio
import structlog
from google.protobuf.message import Message

from orchestrator.board import Link, Load, PoolBoard, Replica
from paceline.errors import PacelineError, PeerRefused
from paceline.rpc import open_channel
from paceline.streams import PairStream
from paceline.tls import ClientTls
from paceline.types import ModelInfo
from paceline.v1 import drafter_service_pb2 as drafter_pb
from paceline.v1 import drafter_service_pb2_grpc as drafter_grpc
from paceline.v1 import session_pb2 as session_pb
from paceline.v1 import target_service_pb2 as target_pb
from paceline.v1 import target_service_pb2_grpc as target_grpc
from paceline.wire import info_from_proto

logger = structlog.get_logger(__name__)

_INFO_TIMEOUT_S = 5.0
_RECONNECT_S = 0.25
# What gRPC says where we have looked at a server's certificate and do not believe it.
_UNBELIEVED = ("Hostname Verification Check failed", "CERTIFICATE_VERIFY_FAILED")

CommandT = TypeVar("CommandT", bound=Message)
CommandT_contra = TypeVar("CommandT_contra", bound=Message, contravariant=True)
EventT = TypeVar("EventT", bound=Any)


class Stream(Protocol[CommandT_contra]):
    """An open stream to a replica (`streams.PairStream`)."""

    def send(self, item: CommandT_contra) -> None: ...

    async def run(self) -> str:
        """Exchange items until the stream ends; says in a few words how it did."""


class PeerSession(Protocol):
    """What a client does with the sessions it carries; a session may be detached from within any of these."""

    def on_event(self, event: Any) -> None: ...

    def on_lost(self, reason: str) -> None:
        """The replica is gone; what was asked of it will not be answered."""

    def on_draining(self) -> None:
        """The replica is about to stop: leave it as soon as nothing is awaited from it."""


class ReplicaClient(ABC, Generic[CommandT, EventT]):
    """The connection to one replica. Invariant: `is_connected` says whether the last stream opened is open still."""

    kind: str

    def __init__(
        self,
        replica: Replica,
        board: PoolBoard,
        *,
        admit: Callable[[Replica, ModelInfo], None],
        silence_limit_s: float,
        tls: ClientTls | None = None,
    ) -> None:
        """`admit` raises `PacelineError` for a model that cannot be used in this pool; without `tls` it is plaintext."""
        self.replica = replica
        self.info: ModelInfo | None = None
        self.refusal: PacelineError | None = None  # why the replica that answers is not used
        self.last_failure = ""  # how the last attempt to reach it ended, in gRPC's words
        self._tls = tls
        self.stale_items = 0
        self._board, self._admit, self._silence_limit_s = board, admit, silence_limit_s
        self._stream: Stream[Any] | None = None
        self._sessions: dict[str, PeerSession] = {}
        self._settled = asyncio.Event()

    @property
    def is_connected(self) -> bool:
        return self._stream is not None

    async def settle(self) -> bool:
        """Wait for the outcome of the first attempt to connect; then says whether the stream is open."""
        await self._settled.wait()
        return self.is_connected

    async def run(self) -> None:
        """Keep a stream to the replica until cancelled."""
        try:
            while True:
                await self._connect_once()
                await asyncio.sleep(_RECONNECT_S)
        finally:
            self._settled.set()

    async def _connect_once(self) -> None:
        """A channel for each attempt, which then shows and believes the certificates of that moment."""
        try:
            channel = self._open_channel()
        except PacelineError as error:  # what was renewed cannot be used
            self._refuse(error)
            self._settled.set()
            return
        async with channel as opened:
            await self._run_once(opened)

    def send(self, command: CommandT) -> None:
        """Queue a command; once the replica is gone it goes nowhere. Raises `QueueFull` if the replica does not read."""
        if self._stream is not None:
            self._stream.send(command)

    def attach(self, session_id: str, session: PeerSession) -> None:
        self._sessions[session_id] = session

    def detach(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)

    def announce_draining(self) -> None:
        """Tell the sessions here to leave."""
        for session in list(self._sessions.values()):
            session.on_draining()

    def _open_channel(self) -> AbstractAsyncContextManager[Any]:
        """What the replica is reached through until the block ends."""
        return open_channel(self.replica.address, self._tls)

    @abstractmethod
    async def _fetch_info(self, channel: grpc.aio.Channel) -> session_pb.ModelInfo: ...

    @abstractmethod
    def _open_stream(self, channel: grpc.aio.Channel) -> Stream[CommandT]: ...

    async def _run_once(self, channel: grpc.aio.Channel) -> None:
        """One connection, from its identification to its end."""
        try:
            if await self._identify(channel):
                await self._serve(self._open_stream(channel))
        finally:
            self._stream = None
            if self._board.standing(self.replica.replica_id).link is not Link.REFUSED:
                self._board.lose(self.replica.replica_id)
            self._settled.set()
            for session in list(self._sessions.values()):
                session.on_lost("its stream has ended")

    async def _identify(self, channel: grpc.aio.Channel) -> bool:
        """Whether the replica answers and may be used."""
        try:
            info = info_from_proto(await self._fetch_info(channel))
            self._admit(self.replica, info)
        except grpc.aio.AioRpcError as error:
            self.last_failure = error.details() or error.code().name
            distrust = self._distrust(error)
            if distrust is not None:
                self._refuse(distrust)
            return False
        except PacelineError as error:
            self._refuse(error)
            return False
        self.info, self.refusal, self.last_failure = info, None, ""
        return True

    def _refuse(self, error: PacelineError) -> None:
        if self.refusal is None:
            logger.error(f"{self.kind} refused", address=self.replica.address, reason=error.message)
        self.refusal = error
        self._board.refuse(self.replica.replica_id)

    def _distrust(self, error: grpc.aio.AioRpcError) -> PeerRefused | None:
        """Who of the two does not believe the other; None if the replica may only be away."""
        if error.code() is grpc.StatusCode.PERMISSION_DENIED:
            return PeerRefused(
                f"The {self.kind} at {self.replica.address} refuses this orchestrator: {error.details()}"
            )
        if self._tls is not None and any(words in self.last_failure for words in _UNBELIEVED):
            return PeerRefused(
                f"The certificate of the {self.kind} at {self.replica.address} is not believed: it must bear the name "
                f"{self._tls.server_name}, be signed by the authority in {self._tls.ca}, and not have expired "
                f"({self.last_failure})."
            )
        return None

    async def _serve(self, stream: Stream[CommandT]) -> None:
        assert self.info is not None, "identified before it is streamed with"
        self._stream = stream
        self._board.connect(self.replica.replica_id)
        self._settled.set()
        logger.info(f"{self.kind} connected", address=self.replica.address, model=self.info.model_id)
        ending = await stream.run()
        logger.warning(f"{self.kind} lost", address=self.replica.address, reason=ending)

    def _on_events(self, events: Sequence[EventT]) -> None:
        for event in events:
            session = self._sessions.get(event.session_id)
            if session is not None:
                session.on_event(event)
            elif event.WhichOneof("event") == "load":
                self._on_load(event.load)
            else:
                self.stale_items += 1

    def _on_load(self, report: session_pb.LoadReport) -> None:
        self._board.report(self.replica.replica_id, _load_from_proto(report))
        if report.draining:
            self.announce_draining()


def _load_from_proto(report: session_pb.LoadReport) -> Load:
    return Load(
        sessions=report.sessions,
        max_sessions=report.max_sessions,
        queued=report.queued,
        kv_used_tokens=report.kv_used_tokens,
        kv_capacity_tokens=report.kv_capacity_tokens,
        num_draft_tokens=report.num_draft_tokens,
        num_accepted_tokens=report.num_accepted_tokens,
        step_busy_share=report.step_busy_share,
        is_draining=report.draining,
        stale_items=report.stale_items,
        preemptions=report.preemptions,
    )


class TargetClient(ReplicaClient[target_pb.TargetCommand, target_pb.TargetEvent]):
    """The connection to one target."""

    kind = "target"

    async def _fetch_info(self, channel: grpc.aio.Channel) -> session_pb.ModelInfo:
        stub = target_grpc.TargetServiceStub(channel)
        reply: target_pb.GetTargetInfoResponse = await stub.GetTargetInfo(
            target_pb.GetTargetInfoRequest(), timeout=_INFO_TIMEOUT_S
        )
        return reply.info

    def _open_stream(self, channel: grpc.aio.Channel) -> Stream[target_pb.TargetCommand]:
        return PairStream(
            target_grpc.TargetServiceStub(channel).Verify(),
            wrap=lambda commands: target_pb.VerifyRequest(commands=commands),
            events_of=lambda message: message.events,
            on_events=self._on_events,
            silence_limit_s=self._silence_limit_s,
        )


class DrafterClient(ReplicaClient[drafter_pb.DrafterCommand, drafter_pb.DrafterEvent]):
    """The connection to one drafter."""

    kind = "drafter"

    async def _fetch_info(self, channel: grpc.aio.Channel) -> session_pb.ModelInfo:
        stub = drafter_grpc.DrafterServiceStub(channel)
        reply: drafter_pb.GetDrafterInfoResponse = await stub.GetDrafterInfo(
            drafter_pb.GetDrafterInfoRequest(), timeout=_INFO_TIMEOUT_S
        )
        return reply.info

    def _open_stream(self, channel: grpc.aio.Channel) -> Stream[drafter_pb.DrafterCommand]:
        return PairStream(
            drafter_grpc.DrafterServiceStub(channel).Draft(),
            wrap=lambda commands: drafter_pb.DraftRequest(commands=commands),
            events_of=lambda message: message.events,
            on_events=self._on_events,
            silence_limit_s=self._silence_limit_s,
        )
