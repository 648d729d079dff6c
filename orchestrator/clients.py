"""The orchestrator's side of the pair streams: clients of target and drafter that satisfy the loop's Protocols.

One connection a replica, kept up in the background. Losing the target fails the sessions that wait for it; losing the
drafter only empties its sessions' stores, and when it is back each session opens there again from its committed
tokens, under a higher epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import grpc.aio
import structlog
from google.protobuf.message import Message

from orchestrator.proposals import ProposalStore
from paceline.errors import (
    LengthMismatch,
    ModelMismatch,
    PacelineError,
    QueueFull,
    SessionNotFound,
    TargetUnavailable,
)
from paceline.prefix import TokenPrefix
from paceline.rpc import open_channel
from paceline.streams import PairStream
from paceline.types import Draft, ModelInfo, SessionSpec, VerdictRows
from paceline.v1 import drafter_service_pb2 as drafter_pb
from paceline.v1 import drafter_service_pb2_grpc as drafter_grpc
from paceline.v1 import session_pb2 as session_pb
from paceline.v1 import target_service_pb2 as target_pb
from paceline.v1 import target_service_pb2_grpc as target_grpc
from paceline.wire import (
    failure_from_proto,
    info_from_proto,
    open_to_proto,
    proposal_from_proto,
    verdict_from_proto,
)

logger = structlog.get_logger(__name__)

_INFO_TIMEOUT_S = 5.0
_RECONNECT_S = 0.25
MAX_REOPENINGS = 3


CommandT = TypeVar("CommandT", bound=Message)
EventT = TypeVar("EventT", bound=Any)


class PeerSession(Protocol):
    """What a client does with the sessions it carries."""

    def on_event(self, event: Any) -> None: ...

    def on_lost(self, reason: str) -> None:
        """The stream has ended; what was asked of the replica will not be answered."""


class ReplicaClient(ABC, Generic[CommandT, EventT]):
    """The connection to one replica: found, identified, streamed with, and found again when it was lost.

    Invariant: `connection` counts the streams opened so far, and `is_connected` says whether the last is open.
    """

    kind: str

    def __init__(self, address: str, *, silence_limit_s: float) -> None:
        self.address = address
        self.connection = 0
        self.info: ModelInfo | None = None
        self.load = session_pb.LoadReport()
        self.stale_items = 0
        self._silence_limit_s = silence_limit_s
        self._stream: PairStream[Any, Any] | None = None
        self._sessions: dict[str, PeerSession] = {}
        self._connected = asyncio.Event()
        self.refusal: PacelineError | None = None  # why the replica that answers is not used

    @property
    def is_connected(self) -> bool:
        return self._stream is not None

    async def wait_connected(self, timeout_s: float) -> bool:
        """Wait for the first stream; False if there is none in time. Raises if the replica is refused."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._connected.wait(), timeout_s)
        if self.refusal is not None:
            raise self.refusal
        return self.is_connected

    async def run(self) -> None:
        """Keep a stream to the replica until cancelled."""
        async with open_channel(self.address) as channel:
            while True:
                ending = await self._run_once(channel)
                if self.connection and ending:
                    logger.warning(f"{self.kind} lost", address=self.address, reason=ending)
                await asyncio.sleep(_RECONNECT_S)

    def send(self, command: CommandT) -> None:
        """Queue a command; while the replica is gone it goes nowhere, and the session is told by `on_lost`."""
        if self._stream is not None:
            self._stream.send(command)

    def attach(self, session_id: str, session: PeerSession) -> None:
        self._sessions[session_id] = session

    def detach(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)

    def check(self, info: ModelInfo) -> None:
        """Refuse a replica that cannot be used, by raising `PacelineError`."""

    @abstractmethod
    async def _fetch_info(self, channel: grpc.aio.Channel) -> session_pb.ModelInfo: ...

    @abstractmethod
    def _open_stream(self, channel: grpc.aio.Channel) -> PairStream[CommandT, EventT]: ...

    async def _run_once(self, channel: grpc.aio.Channel) -> str:
        """One connection, from its identification to its end; says how it ended, or '' if it never was."""
        try:
            info = info_from_proto(await self._fetch_info(channel))
            self.check(info)
        except grpc.aio.AioRpcError:
            return ""
        except PacelineError as error:
            if self.refusal is None:
                logger.error(f"{self.kind} refused", address=self.address, reason=error.message)
            self.refusal = error
            self._connected.set()
            return ""
        self.refusal = None
        self.info = info
        stream = self._open_stream(channel)
        self._stream = stream
        self.connection += 1
        self._connected.set()
        logger.info(f"{self.kind} connected", address=self.address, model=info.model_id)
        try:
            return await stream.run()
        finally:
            self._stream = None
            for session in list(self._sessions.values()):
                session.on_lost("the stream has ended")

    def _on_events(self, events: Sequence[EventT]) -> None:
        for event in events:
            if event.WhichOneof("event") == "load":
                self.load = event.load
            elif event.session_id in self._sessions:
                self._sessions[event.session_id].on_event(event)
            else:
                self.stale_items += 1


# ---------------------------------------------------------------------------------------------------------------------
# Target


class TargetClient(ReplicaClient[target_pb.TargetCommand, target_pb.TargetEvent]):
    """The connection to the target."""

    kind = "target"

    def check(self, info: ModelInfo) -> None:
        """A restarted target must still mean the same tokens by the same ids."""
        if self.info is not None and info.tokenizer_sha256 != self.info.tokenizer_sha256:
            raise ModelMismatch(
                f"The target at {self.address} came back with another tokenizer ({info.tokenizer_sha256[:16]}, not "
                f"{self.info.tokenizer_sha256[:16]}); start the orchestrator again."
            )

    @contextlib.asynccontextmanager
    async def session(
        self, spec: SessionSpec, *, verify_deadline_s: float, deadline_s: float | None
    ) -> AsyncIterator[RemoteTarget]:
        """A session at the target; closed there when the block ends, however it ends.

        `deadline_s` (time.monotonic) is when the caller's time is used up: the target begins no work behind it.
        """
        session = RemoteTarget(self, spec, verify_deadline_s=verify_deadline_s, deadline_s=deadline_s)
        self.attach(spec.session_id, session)
        try:
            yield session
        finally:
            self.detach(spec.session_id)
            session.close()

    async def _fetch_info(self, channel: grpc.aio.Channel) -> session_pb.ModelInfo:
        stub = target_grpc.TargetServiceStub(channel)
        reply: target_pb.GetTargetInfoResponse = await stub.GetTargetInfo(
            target_pb.GetTargetInfoRequest(), timeout=_INFO_TIMEOUT_S
        )
        return reply.info

    def _open_stream(self, channel: grpc.aio.Channel) -> PairStream[target_pb.TargetCommand, target_pb.TargetEvent]:
        return PairStream(
            target_grpc.TargetServiceStub(channel).Verify(),
            wrap=lambda commands: target_pb.VerifyRequest(commands=commands),
            events_of=lambda message: message.events,
            on_events=self._on_events,
            silence_limit_s=self._silence_limit_s,
        )


class RemoteTarget:
    """One session at the target (`loop.Target`). Invariant: at most one draft is being judged."""

    def __init__(
        self, client: TargetClient, spec: SessionSpec, *, verify_deadline_s: float, deadline_s: float | None
    ) -> None:
        self._client, self._spec = client, spec
        self._verify_deadline_s, self._deadline_s = verify_deadline_s, deadline_s
        self._epoch = 0
        self._opened_on = 0  # the client's connection that the session is open on; 0: none
        self._sent_length = 0  # committed tokens that the target has been told
        self._pending: asyncio.Future[VerdictRows] | None = None
        self._pending_base = 0

    async def verify(self, prefix: TokenPrefix, draft: Draft) -> VerdictRows:
        """Ask for a verdict; opens the session first where the target does not hold it.

        Raises `TargetUnavailable` when the target is gone or does not answer.
        """
        for _ in range(MAX_REOPENINGS):
            try:
                return await self._ask(prefix, draft)
            except (SessionNotFound, LengthMismatch) as error:
                logger.warning("session opened again at the target", session_id=self._spec.session_id, why=str(error))
                self._opened_on = 0
        raise TargetUnavailable("The target lost the session again and again; ask once more.")

    def close(self) -> None:
        if self._opened_on == self._client.connection:
            self._client.send(self._command(close=session_pb.CloseSession()))

    def on_event(self, event: target_pb.TargetEvent) -> None:
        pending = self._pending
        if event.epoch != self._epoch or pending is None or pending.done():
            self._client.stale_items += 1
        elif event.WhichOneof("event") == "failed":
            pending.set_exception(failure_from_proto(event.failed))
        elif event.verdict.base_length != self._pending_base:
            self._client.stale_items += 1
        else:
            self._resolve(pending, event.verdict)

    def on_lost(self, reason: str) -> None:
        self._opened_on = 0
        if self._pending is not None and not self._pending.done():
            self._pending.set_exception(TargetUnavailable(f"The target is gone ({reason}); ask again in a moment."))

    async def _ask(self, prefix: TokenPrefix, draft: Draft) -> VerdictRows:
        if not self._client.is_connected:
            raise TargetUnavailable("The target does not answer; ask again in a moment.")
        if self._opened_on != self._client.connection:
            self._open(prefix)
        self._pending = asyncio.get_running_loop().create_future()
        self._pending_base = len(prefix)
        self._client.send(
            self._command(
                verify=target_pb.VerifyDraft(
                    base_length=len(prefix),
                    committed_ids=prefix.ids[self._sent_length :],
                    draft_ids=draft.ids,
                    draft_distributions=draft.distributions,
                    budget_ms=self._budget_ms(),
                )
            )
        )
        self._sent_length = len(prefix)
        try:
            async with asyncio.timeout(self._verify_deadline_s):
                return await self._pending
        except TimeoutError:
            raise TargetUnavailable(
                f"The target gave no verdict within {self._verify_deadline_s:g} s; ask again in a moment."
            ) from None
        finally:
            self._pending = None

    def _budget_ms(self) -> int:
        budget_s = self._verify_deadline_s
        if self._deadline_s is not None:
            budget_s = min(budget_s, self._deadline_s - time.monotonic())
        return max(1, int(budget_s * 1000))

    def _open(self, prefix: TokenPrefix) -> None:
        self._epoch += 1
        self._opened_on = self._client.connection
        self._sent_length = len(prefix)
        self._client.send(self._command(open=open_to_proto(self._spec, prefix.ids)))

    def _resolve(self, pending: asyncio.Future[VerdictRows], message: target_pb.VerdictRows) -> None:
        try:
            pending.set_result(verdict_from_proto(message, vocab_size=self._spec.vocab_size))
        except PacelineError as error:
            pending.set_exception(error)

    def _command(self, **command: Any) -> target_pb.TargetCommand:
        return target_pb.TargetCommand(session_id=self._spec.session_id, epoch=self._epoch, **command)


# ---------------------------------------------------------------------------------------------------------------------
# Drafter


class DrafterClient(ReplicaClient[drafter_pb.DrafterCommand, drafter_pb.DrafterEvent]):
    """The connection to the drafter; refuses one whose token ids mean something else than the target's."""

    kind = "drafter"

    def __init__(self, address: str, *, target_info: ModelInfo, silence_limit_s: float) -> None:
        super().__init__(address, silence_limit_s=silence_limit_s)
        self._target_info = target_info

    def check(self, info: ModelInfo) -> None:
        check_pairing(info, self._target_info)

    @contextlib.contextmanager
    def session(self, spec: SessionSpec, *, draft_deadline_s: float) -> Iterator[RemoteDrafts]:
        """A session at the drafter; closed there when the block ends, however it ends."""
        session = RemoteDrafts(self, spec, draft_deadline_s=draft_deadline_s)
        self.attach(spec.session_id, session)
        try:
            yield session
        finally:
            self.detach(spec.session_id)
            session.close()

    async def _fetch_info(self, channel: grpc.aio.Channel) -> session_pb.ModelInfo:
        stub = drafter_grpc.DrafterServiceStub(channel)
        reply: drafter_pb.GetDrafterInfoResponse = await stub.GetDrafterInfo(
            drafter_pb.GetDrafterInfoRequest(), timeout=_INFO_TIMEOUT_S
        )
        return reply.info

    def _open_stream(self, channel: grpc.aio.Channel) -> PairStream[drafter_pb.DrafterCommand, drafter_pb.DrafterEvent]:
        return PairStream(
            drafter_grpc.DrafterServiceStub(channel).Draft(),
            wrap=lambda commands: drafter_pb.DraftRequest(commands=commands),
            events_of=lambda message: message.events,
            on_events=self._on_events,
            silence_limit_s=self._silence_limit_s,
        )


def check_pairing(drafter: ModelInfo, target: ModelInfo) -> None:
    """Raises `ModelMismatch` unless the two mean the same tokens by the same ids.

    Padding of the output layer behind the tokenizer's last id may differ. A side without a tokenizer, such as prompt
    lookup, works on any ids.
    """
    ours, theirs = drafter.tokenizer_sha256, target.tokenizer_sha256
    if ours and theirs and ours != theirs:
        raise ModelMismatch(
            f"The drafter {drafter.model_id!r} (tokenizer {ours[:16]}) and the target {target.model_id!r} (tokenizer "
            f"{theirs[:16]}) number their tokens differently; choose a drafter with the target's tokenizer."
        )


class RemoteDrafts:
    """One session's drafts from the drafter service.

    Never raises and never holds the session up for long: after a draft that came too late, the next rounds do not wait
    at all, and the pause doubles with each miss in a row.
    """

    def __init__(self, client: DrafterClient, spec: SessionSpec, *, draft_deadline_s: float) -> None:
        self._client, self._spec, self._draft_deadline_s = client, spec, draft_deadline_s
        self._store = ProposalStore()
        self._epoch = 0
        self._opened_on = 0  # the client's connection that the session is open on; 0: none
        self._openings = 0
        self._given_up = False
        self._sent_length = 0
        self._arrived = asyncio.Event()
        self._misses = 0
        self._rounds_to_skip = 0

    @property
    def is_available(self) -> bool:
        """Whether the drafter holds this session, so that its silence means something."""
        return self._opened_on != 0 and self._opened_on == self._client.connection and self._client.is_connected

    def commit(self, prefix: TokenPrefix, *, draft_length: int, credit: int) -> None:
        self._store.prune(len(prefix))
        info = self._client.info
        if self._given_up or not self._client.is_connected or info is None:
            return
        if len(prefix) >= info.max_context:
            self._give_up()
            return
        if self._opened_on != self._client.connection:
            self._open(prefix)
        self._send(
            commit=drafter_pb.Commit(
                base_length=len(prefix),
                committed_ids=prefix.ids[self._sent_length :],
                draft_length=draft_length,
                credit=credit,
            )
        )
        self._sent_length = len(prefix)

    async def draft(self, prefix: TokenPrefix, max_length: int) -> Draft | None:
        """The drafter's draft; empty if it has nothing to offer, None if it is gone or late."""
        draft = self._store.find(prefix.digest(), max_length)
        if draft is not None:
            self._misses = self._rounds_to_skip = 0
            return draft
        if not self.is_available:
            return None
        if self._rounds_to_skip:
            self._rounds_to_skip -= 1
            return None
        return await self._wait_for_draft(prefix.digest(), max_length)

    def continues(self, digest: int) -> bool:
        return self._store.continues(digest)

    def close(self) -> None:
        if self.is_available:
            self._send(close=session_pb.CloseSession())

    def on_event(self, event: drafter_pb.DrafterEvent) -> None:
        if event.epoch != self._epoch:
            self._client.stale_items += 1
        elif event.WhichOneof("event") == "failed":
            self._on_failed(failure_from_proto(event.failed))
        else:
            self._on_proposal(event.proposal)

    def on_lost(self, reason: str) -> None:
        self._opened_on = 0
        self._arrived.set()

    async def _wait_for_draft(self, digest: int, max_length: int) -> Draft | None:
        deadline_s = time.monotonic() + self._draft_deadline_s
        while self.is_available:
            self._arrived.clear()
            try:
                async with asyncio.timeout(deadline_s - time.monotonic()):
                    await self._arrived.wait()
            except TimeoutError:
                self._misses += 1
                self._rounds_to_skip = min(2**self._misses, 64)
                return None
            draft = self._store.find(digest, max_length)
            if draft is not None:
                self._misses = 0
                return draft
        return None

    def _open(self, prefix: TokenPrefix) -> None:
        self._epoch += 1
        self._opened_on = self._client.connection
        self._sent_length = len(prefix)
        self._send(open=open_to_proto(self._spec, prefix.ids))

    def _on_proposal(self, message: drafter_pb.Proposal) -> None:
        try:
            self._store.add(proposal_from_proto(message, vocab_size=self._spec.vocab_size))
        except PacelineError as error:
            self._on_failed(error)
        self._arrived.set()

    def _on_failed(self, error: PacelineError) -> None:
        """The drafter does not hold the session: open it again if that can help, else go on without."""
        logger.info("drafter failed a session", session_id=self._spec.session_id, reason=error.reason, why=str(error))
        self._openings += 1
        if not isinstance(error, (SessionNotFound, LengthMismatch)) or self._openings > MAX_REOPENINGS:
            self._give_up()
        self._opened_on = 0
        self._arrived.set()

    def _give_up(self) -> None:
        self.close()
        self._given_up = True
        self._opened_on = 0

    def _send(self, **command: Any) -> None:
        item = drafter_pb.DrafterCommand(session_id=self._spec.session_id, epoch=self._epoch, **command)
        try:
            self._client.send(item)
        except QueueFull:
            # A drafter that does not read costs speed alone; the session opens there again when it does.
            self._opened_on = 0
