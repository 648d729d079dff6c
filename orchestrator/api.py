"""The orchestrator's gRPC face: translation between messages and the values of `paceline.generation`, nothing else.

It has two doors. `GenerationServicer` serves a port of our own. The `ingress_...` functions answer behind an ingress that
forwards calls, as Ray Serve's does: its context hides the caller's deadline and cannot abort a call, and a status
reaches the caller only with a message that is yielded or returned after it was set. Knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, NoReturn, Protocol

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from orchestrator.door import Caller, Door
from orchestrator.generator import Generator
from orchestrator.slow_reader import taken
from paceline.errors import InvalidRequest
from paceline.generation import DeploymentStatus, require_request_id
from paceline.generation_wire import (
    deployment_status_to_proto,
    event_to_proto,
    request_from_proto,
    served_models_to_proto,
    server_info_to_proto,
    traced_rounds_to_proto,
)
from paceline.rounds import TracedRounds
from paceline.rpc import (
    AUTHORIZATION_METADATA_KEY,
    DEADLINE_METADATA_KEY,
    TRACEPARENT_METADATA_KEY,
    CallCheck,
    Context,
    mapped_errors,
)
from paceline.v1 import generation_service_pb2 as generation_pb
from paceline.v1 import generation_service_pb2_grpc as generation_grpc

SERVICE_NAME: str = generation_pb.DESCRIPTOR.services_by_name["GenerationService"].full_name

_LONGEST_DEADLINE = 16  # digits: some thousand years from now
_HEALTH_PERIOD_S = 1.0
_HEALTH_METHODS = "/grpc.health.v1.Health/"


class GenerationServicer(generation_grpc.GenerationServiceServicer):
    """Serves `paceline.v1.GenerationService` on a port of our own."""

    def __init__(self, door: Door) -> None:
        self._door, self._generator = door, door.generator

    async def Generate(  # noqa: N802 - the name is the contract's
        self, request: generation_pb.GenerateRequest, context: Context
    ) -> None:
        # Written, not yielded: only so is it known here how long the caller has not read.
        async with (
            mapped_errors(context, rpc="Generate"),
            aclosing(_answer(self._door, request, context, context.time_remaining())) as responses,
        ):
            async for response in responses:
                try:
                    await taken(context.write(response), within_s=self._generator.reader_timeout_s)
                except grpc.aio.BaseError:
                    return  # the caller has gone; gRPC cancels the call in a moment

    async def Cancel(  # noqa: N802 - the name is the contract's
        self, request: generation_pb.CancelRequest, context: Context
    ) -> generation_pb.CancelResponse:
        async with mapped_errors(context, rpc="Cancel"):
            return await _cancel(self._door, request, _caller(self._door, context))

    async def ListModels(  # noqa: N802 - the name is the contract's
        self, request: generation_pb.ListModelsRequest, context: Context
    ) -> generation_pb.ListModelsResponse:
        async with mapped_errors(context, rpc="ListModels"):
            _caller(self._door, context)
            return served_models_to_proto(self._generator.models())

    async def GetServerInfo(  # noqa: N802 - the name is the contract's
        self, request: generation_pb.GetServerInfoRequest, context: Context
    ) -> generation_pb.GetServerInfoResponse:
        async with mapped_errors(context, rpc="GetServerInfo"):
            _caller(self._door, context)
            return server_info_to_proto(self._generator.info())

    async def GetPoolStatus(  # noqa: N802 - the name is the contract's
        self, request: generation_pb.GetPoolStatusRequest, context: Context
    ) -> generation_pb.GetPoolStatusResponse:
        async with mapped_errors(context, rpc="GetPoolStatus"):
            _caller(self._door, context)
            return deployment_status_to_proto(self._generator.status())

    async def GetRoundTrace(  # noqa: N802 - the name is the contract's
        self, request: generation_pb.GetRoundTraceRequest, context: Context
    ) -> generation_pb.GetRoundTraceResponse:
        async with mapped_errors(context, rpc="GetRoundTrace"):
            _caller(self._door, context)
            return await _round_trace(self._generator, request, lambda traced: traced)


async def _answer(
    door: Door, message: generation_pb.GenerateRequest, context: _CallContext, timeout_s: float | None
) -> AsyncGenerator[generation_pb.GenerateResponse]:
    caller, traceparent = _caller(door, context), _stated(context, TRACEPARENT_METADATA_KEY)
    with door.counting_refusals(caller):
        request = request_from_proto(message)
    async with aclosing(door.generate(request, caller=caller, timeout_s=timeout_s, traceparent=traceparent)) as events:
        async for event in events:
            yield event_to_proto(event)


async def _cancel(door: Door, message: generation_pb.CancelRequest, caller: Caller) -> generation_pb.CancelResponse:
    require_request_id(message.request_id)
    return generation_pb.CancelResponse(was_running=await door.cancel(message.request_id, caller=caller))


async def _round_trace(
    generator: Generator,
    request: generation_pb.GetRoundTraceRequest,
    annotate: Callable[[TracedRounds], TracedRounds],
) -> generation_pb.GetRoundTraceResponse:
    response = generation_pb.GetRoundTraceResponse()
    for piece in generator.round_trace(request_id=request.request_id, limit=request.limit):
        response.MergeFrom(traced_rounds_to_proto(annotate(piece)))
        await asyncio.sleep(0)  # the answers that run come first
    return response


# ---------------------------------------------------------------------------------------------------------------------
# Behind an ingress


class IngressContext(Protocol):
    """What is used of a forwarded call's context (`ray.serve.grpc_util.RayServegRPCContext`)."""

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]: ...

    def peer(self) -> str:
        """Who called the ingress."""

    def set_code(self, code: grpc.StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, Any]]) -> None: ...


async def ingress_generate(
    door: Door, request: generation_pb.GenerateRequest, context: IngressContext
) -> AsyncGenerator[generation_pb.GenerateResponse]:
    """`Generate` behind an ingress; an error ends it with one empty response, which carries the status."""
    try:
        async with (
            mapped_errors(_StatusSetter(context), rpc="Generate"),
            aclosing(_answer(door, request, context, _time_remaining_s(context))) as responses,
        ):
            async for response in responses:
                yield response
    except _StatusIsSet:
        yield generation_pb.GenerateResponse()


async def _nowhere(_caller: Caller, _request_id: str) -> bool:
    return False


async def ingress_cancel(
    door: Door,
    request: generation_pb.CancelRequest,
    context: IngressContext,
    *,
    elsewhere: Callable[[Caller, str], Awaitable[bool]] = _nowhere,
) -> generation_pb.CancelResponse:
    """`Cancel` behind an ingress; `elsewhere` asks the other orchestrators behind it, where the answer does not run here."""
    try:
        async with mapped_errors(_StatusSetter(context), rpc="Cancel"):
            caller = _caller(door, context)
            response = await _cancel(door, request, caller)
            if not response.was_running:
                response.was_running = await elsewhere(caller, request.request_id)
            return response
    except _StatusIsSet:
        return generation_pb.CancelResponse()


async def ingress_list_models(door: Door, context: IngressContext) -> generation_pb.ListModelsResponse:
    """`ListModels` behind an ingress."""
    try:
        async with mapped_errors(_StatusSetter(context), rpc="ListModels"):
            _caller(door, context)
            return served_models_to_proto(door.generator.models())
    except _StatusIsSet:
        return generation_pb.ListModelsResponse()


async def ingress_get_server_info(door: Door, context: IngressContext) -> generation_pb.GetServerInfoResponse:
    """`GetServerInfo` behind an ingress."""
    try:
        async with mapped_errors(_StatusSetter(context), rpc="GetServerInfo"):
            _caller(door, context)
            return server_info_to_proto(door.generator.info())
    except _StatusIsSet:
        return generation_pb.GetServerInfoResponse()


async def _as_it_is(status: DeploymentStatus) -> DeploymentStatus:
    return status


async def ingress_get_pool_status(
    door: Door,
    context: IngressContext,
    *,
    annotate: Callable[[DeploymentStatus], Awaitable[DeploymentStatus]] = _as_it_is,
) -> generation_pb.GetPoolStatusResponse:
    """`GetPoolStatus` behind an ingress; `annotate` adds what only the control plane knows, for whoever was let in."""
    try:
        async with mapped_errors(_StatusSetter(context), rpc="GetPoolStatus"):
            _caller(door, context)
            return deployment_status_to_proto(await annotate(door.generator.status()))
    except _StatusIsSet:
        return generation_pb.GetPoolStatusResponse()


async def ingress_get_round_trace(
    door: Door,
    request: generation_pb.GetRoundTraceRequest,
    context: IngressContext,
    *,
    annotate: Callable[[TracedRounds], TracedRounds] = lambda traced: traced,
) -> generation_pb.GetRoundTraceResponse:
    """`GetRoundTrace` behind an ingress; `annotate` adds what only the control plane knows."""
    try:
        async with mapped_errors(_StatusSetter(context), rpc="GetRoundTrace"):
            _caller(door, context)
            return await _round_trace(door.generator, request, annotate)
    except _StatusIsSet:
        return generation_pb.GetRoundTraceResponse()


async def ingress_check(
    generator: Generator, request: HealthCheckRequest, context: IngressContext
) -> HealthCheckResponse:
    """`grpc.health.v1.Health.Check` behind an ingress: serving while there is a target to answer with."""
    status = _health(generator, request.service)
    if status == HealthCheckResponse.SERVICE_UNKNOWN:
        context.set_code(grpc.StatusCode.NOT_FOUND)
        context.set_details(f"There is no service {request.service!r} here; ask for {SERVICE_NAME!r}.")
        return HealthCheckResponse()
    return HealthCheckResponse(status=status)


async def ingress_watch(generator: Generator, request: HealthCheckRequest) -> AsyncGenerator[HealthCheckResponse]:
    """`grpc.health.v1.Health.Watch` behind an ingress: the health now, and each change until the caller leaves."""
    told: int | None = None
    while True:
        status = _health(generator, request.service)
        if status != told:
            yield HealthCheckResponse(status=status)
            told = status
        await asyncio.sleep(_HEALTH_PERIOD_S)


def _health(generator: Generator, service: str) -> int:
    if service not in ("", SERVICE_NAME):
        status = HealthCheckResponse.SERVICE_UNKNOWN
    elif generator.is_ready:
        status = HealthCheckResponse.SERVING
    else:
        status = HealthCheckResponse.NOT_SERVING
    return int(status)


class _StatusIsSet(Exception):
    """The call is over; its status waits in the context for the last message."""


class _StatusSetter:
    """Ends a call whose context cannot abort it (`rpc.Abortable`)."""

    def __init__(self, context: IngressContext) -> None:
        self._context = context

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        self._context.set_code(status.code)
        self._context.set_details(status.details)
        self._context.set_trailing_metadata(list(status.trailing_metadata))
        raise _StatusIsSet


class _CallContext(Protocol):
    """What both contexts, of our own port and of an ingress, say of a call."""

    def invocation_metadata(self) -> Any: ...

    def peer(self) -> str: ...


def _caller(door: Door, context: _CallContext) -> Caller:
    return door.caller(_stated(context, AUTHORIZATION_METADATA_KEY), peer=context.peer())


def let_in_by(door: Door) -> CallCheck:
    """What a server of our own asks before every call but those for its health, whatever services it has."""

    def check(method: str, context: Context) -> None:
        if not method.startswith(_HEALTH_METHODS):
            _caller(door, context)

    return check


def _stated(context: _CallContext, key: str) -> str | None:
    stated = dict(context.invocation_metadata() or ()).get(key)
    return stated.decode("utf-8", "replace") if isinstance(stated, bytes) else stated


def _time_remaining_s(context: IngressContext) -> float | None:
    """Until the caller stops waiting, by the clocks of both machines; None if it did not say."""
    stated = dict(context.invocation_metadata()).get(DEADLINE_METADATA_KEY)
    if stated is None:
        return None
    digits = stated.decode("ascii", "replace") if isinstance(stated, bytes) else stated
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _LONGEST_DEADLINE):
        raise InvalidRequest(
            f"The metadata {DEADLINE_METADATA_KEY} must be milliseconds since 1970, in digits.",
            parameter=DEADLINE_METADATA_KEY,
        )
    return int(digits) / 1000 - time.time()
