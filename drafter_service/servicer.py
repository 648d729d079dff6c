"""The drafter's gRPC face: translation between stream items and the model thread's commands and events, nothing else."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence

from drafter_service.drafter import Command, DrafterEvent
from drafter_service.session import Commit, Drafted
from paceline.errors import PacelineError, PayloadInvalid
from paceline.packing import pack_distribution
from paceline.rpc import Context, mapped_errors
from paceline.sampling import DraftedToken
from paceline.sessions import Address, Close, Open, PeerGone
from paceline.streams import PeerStreams
from paceline.telemetry import ServiceMetrics
from paceline.types import MAX_BRANCHES, MAX_CREDIT, MAX_DRAFT_LENGTH, MAX_FAN_OUT, Branch, Draft, ModelInfo, Proposal
from paceline.v1 import drafter_service_pb2 as drafter_pb
from paceline.v1 import drafter_service_pb2_grpc as drafter_grpc
from paceline.v1 import session_pb2 as session_pb
from paceline.wire import (
    check_ids,
    failure_to_proto,
    info_to_proto,
    open_from_proto,
    proposal_to_proto,
)

_ANY_VOCABULARY = 2**32  # a method without a model takes any ids


class DrafterServicer(drafter_grpc.DrafterServiceServicer):
    """Serves `paceline.v1.DrafterService`: `submit` takes commands to the model thread, `on_events` brings events."""

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
        self.streams = PeerStreams[drafter_pb.DrafterCommand, drafter_pb.DrafterEvent](
            on_item=self._on_item,
            failed=_failed_event,
            heartbeat=lambda: drafter_pb.DrafterEvent(load=load()),
            heartbeat_s=heartbeat_s,
            on_peer_gone=lambda peer: submit(PeerGone(peer)),
            orphan_grace_s=orphan_grace_s,
        )

    async def GetDrafterInfo(  # noqa: N802 - the name is the contract's
        self, request: drafter_pb.GetDrafterInfoRequest, context: Context
    ) -> drafter_pb.GetDrafterInfoResponse:
        return drafter_pb.GetDrafterInfoResponse(
            info=info_to_proto(self._info), clock_unix_ms=time.time_ns() // 1_000_000
        )

    async def Draft(  # noqa: N802 - the name is the contract's
        self, request_iterator: AsyncIterator[drafter_pb.DraftRequest], context: Context
    ) -> None:
        async with mapped_errors(context, rpc="Draft"):
            await self.streams.serve(
                (message.commands async for message in request_iterator),
                write=lambda events: context.write(drafter_pb.DraftResponse(events=events)),
            )

    def on_events(self, events: Sequence[DrafterEvent]) -> None:
        for event in events:
            self.streams.send(event.address.peer, self._to_proto(event))

    def _on_item(self, peer: int, item: drafter_pb.DrafterCommand) -> None:
        address = Address(peer, item.session_id, item.epoch)
        match item.WhichOneof("command"):
            case "open":
                # A method without a model (vocabulary size 0) takes whatever ids the target has.
                vocab_size = self._info.vocab_size or item.open.vocab_size
                spec, ids = open_from_proto(item.session_id, item.open, vocab_size=vocab_size)
                self._submit(Open(address, spec, ids))
            case "commit":
                self._submit(_commit_command(address, item.commit, vocab_size=self._info.vocab_size or _ANY_VOCABULARY))
            case "close":
                self._submit(Close(address))
            case _:
                raise PayloadInvalid("The item holds no command; send open, commit or close.")

    def _to_proto(self, event: DrafterEvent) -> drafter_pb.DrafterEvent:
        if isinstance(event.outcome, PacelineError):
            self._metrics.failed_sessions.labels(reason=event.outcome.reason).inc()
            return _failed_event(event.address, event.outcome)
        return drafter_pb.DrafterEvent(
            session_id=event.address.session_id,
            epoch=event.address.epoch,
            proposal=proposal_to_proto(proposal_of(event.outcome)),
        )


def _commit_command(address: Address, message: drafter_pb.Commit, *, vocab_size: int) -> Commit:
    if message.draft_length > MAX_DRAFT_LENGTH or message.credit > MAX_CREDIT:
        raise PayloadInvalid(
            f"A draft holds at most {MAX_DRAFT_LENGTH} tokens and credit at most {MAX_CREDIT}, "
            f"not {message.draft_length} and {message.credit}."
        )
    if message.branches > MAX_BRANCHES or message.fan_out > MAX_FAN_OUT:
        raise PayloadInvalid(
            f"A session has at most {MAX_BRANCHES} branches and {MAX_FAN_OUT} guesses at one position, "
            f"not {message.branches} and {message.fan_out}."
        )
    if not 0.0 <= message.acceptance <= 1.0:
        raise PayloadInvalid(f"The acceptance must lie in [0, 1], not {message.acceptance}.")
    return Commit(
        address=address,
        base_length=message.base_length,
        committed_ids=check_ids(message.committed_ids, vocab_size=vocab_size, what="The committed tokens"),
        draft_length=message.draft_length,
        credit=message.credit,
        branches=message.branches,
        fan_out=message.fan_out,
        acceptance=message.acceptance,
        is_resend=message.resend,
    )


def proposal_of(drafted: Drafted) -> Proposal:
    """What was drafted, as it travels."""
    return Proposal(
        base_length=drafted.base_length,
        prefix_digest=drafted.prefix_digest,
        draft=_packed(drafted.tokens, vocab_size=drafted.vocab_size),
        draft_time_s=drafted.draft_time_s,
        draft_steps=drafted.draft_steps,
        branches=tuple(
            [
                Branch(run.base_length, run.prefix_digest, _packed(run.tokens, vocab_size=drafted.vocab_size))
                for run in drafted.branches
            ]
        ),
    )


def _packed(tokens: Sequence[DraftedToken], *, vocab_size: int) -> Draft:
    distributions = [
        pack_distribution(token.distribution, vocab_size=vocab_size)
        for token in tokens
        if token.distribution is not None
    ]
    return Draft(tuple([token.token_id for token in tokens]), tuple(distributions))


def _failed_event(address: Address, error: PacelineError) -> drafter_pb.DrafterEvent:
    return drafter_pb.DrafterEvent(session_id=address.session_id, epoch=address.epoch, failed=failure_to_proto(error))
