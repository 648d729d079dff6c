"""The target's gRPC face: translation between stream items and the model thread's commands and events, nothing else."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence

from paceline.errors import PacelineError, PayloadInvalid
from paceline.packing import unpack_distribution
from paceline.rpc import Context, mapped_errors
from paceline.sessions import Address, Close, Open, PeerGone
from paceline.streams import PeerStreams
from paceline.telemetry import ServiceMetrics
from paceline.types import MAX_DRAFT_LENGTH, ModelInfo, SessionSpec
from paceline.v1 import session_pb2 as session_pb
from paceline.v1 import target_service_pb2 as target_pb
from paceline.v1 import target_service_pb2_grpc as target_grpc
from paceline.wire import (
    check_ids,
    draft_from_proto,
    failure_to_proto,
    info_to_proto,
    open_from_proto,
    verdict_to_proto,
)
from target_service.scheduler import Command, Judge, TargetEvent
from target_service.verifier import DraftToJudge


class TargetServicer(target_grpc.TargetServiceServicer):
    """Serves `paceline.v1.TargetService`: `submit` takes commands to the model thread, `on_events` brings events."""

    def __init__(
        self,
        info: ModelInfo,
        *,
        submit: Callable[[Command], None],
        load: Callable[[], session_pb.LoadReport],
        metrics: ServiceMetrics,
        heartbeat_s: float,
        orphan_grace_s: float,
    ) -> None:
        self._info, self._submit, self._metrics = info, submit, metrics
        self.streams = PeerStreams[target_pb.TargetCommand, target_pb.TargetEvent](
            on_item=self._on_item,
            failed=_failed_event,
            heartbeat=lambda: target_pb.TargetEvent(load=load()),
            heartbeat_s=heartbeat_s,
            on_peer_gone=lambda peer: submit(PeerGone(peer)),
            orphan_grace_s=orphan_grace_s,
        )

    async def GetTargetInfo(  # noqa: N802 - the name is the contract's
        self, request: target_pb.GetTargetInfoRequest, context: Context
    ) -> target_pb.GetTargetInfoResponse:
        return target_pb.GetTargetInfoResponse(
            info=info_to_proto(self._info), clock_unix_ms=time.time_ns() // 1_000_000
        )

    async def Verify(  # noqa: N802 - the name is the contract's
        self, request_iterator: AsyncIterator[target_pb.VerifyRequest], context: Context
    ) -> None:
        async with mapped_errors(context, rpc="Verify"):
            await self.streams.serve(
                (message.commands async for message in request_iterator),
                write=lambda events: context.write(target_pb.VerifyResponse(events=events)),
            )

    def on_events(self, events: Sequence[TargetEvent]) -> None:
        for event in events:
            self.streams.send(event.address.peer, self._to_proto(event))

    def _on_item(self, peer: int, item: target_pb.TargetCommand) -> None:
        address = Address(peer, item.session_id, item.epoch)
        match item.WhichOneof("command"):
            case "open":
                spec, ids = open_from_proto(item.session_id, item.open, vocab_size=self._info.vocab_size)
                self._require_own_vocabulary(spec)
                self._submit(Open(address, spec, ids))
            case "verify":
                self._submit(_judge_command(address, item.verify, vocab_size=self._info.vocab_size))
            case "close":
                self._submit(Close(address))
            case _:
                raise PayloadInvalid("The item holds no command; send open, verify or close.")

    def _require_own_vocabulary(self, spec: SessionSpec) -> None:
        if spec.vocab_size != self._info.vocab_size:
            raise PayloadInvalid(
                f"The session is over {spec.vocab_size} tokens, but this target has {self._info.vocab_size}; "
                "ask the target for its vocabulary."
            )

    def _to_proto(self, event: TargetEvent) -> target_pb.TargetEvent:
        if isinstance(event.outcome, PacelineError):
            self._metrics.failed_sessions.labels(reason=event.outcome.reason).inc()
            return _failed_event(event.address, event.outcome)
        self._metrics.queue_seconds.observe(event.outcome.queue_time_s)
        return target_pb.TargetEvent(
            session_id=event.address.session_id, epoch=event.address.epoch, verdict=verdict_to_proto(event.outcome)
        )


def _judge_command(address: Address, message: target_pb.VerifyDraft, *, vocab_size: int) -> Judge:
    draft = draft_from_proto(
        message.draft_ids, message.draft_distributions, vocab_size=vocab_size, max_length=MAX_DRAFT_LENGTH
    )
    rows = tuple(unpack_distribution(row, vocab_size=vocab_size) for row in draft.distributions)
    now_s = time.monotonic()
    return Judge(
        address=address,
        draft=DraftToJudge(
            base_length=message.base_length,
            committed_ids=check_ids(message.committed_ids, vocab_size=vocab_size, what="The committed tokens"),
            draft_ids=draft.ids,
            distributions=rows or None,
        ),
        arrived_s=now_s,
        deadline_s=now_s + message.budget_ms / 1000 if message.budget_ms else None,
    )


def _failed_event(address: Address, error: PacelineError) -> target_pb.TargetEvent:
    return target_pb.TargetEvent(session_id=address.session_id, epoch=address.epoch, failed=failure_to_proto(error))
