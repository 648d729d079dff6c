"""The questions over gRPC that our client has no words for: a server's health, and model services themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import grpc
import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from paceline.client.connection import Connection
from paceline.doctor.looks import Health, ServerLook, ServiceLook
from paceline.doctor.timing import quickest
from paceline.rpc import open_channel
from paceline.tls import ClientTls
from paceline.v1 import drafter_service_pb2, generation_service_pb2, target_service_pb2
from paceline.v1.drafter_service_pb2_grpc import DrafterServiceStub
from paceline.v1.target_service_pb2_grpc import TargetServiceStub
from paceline.wire import info_from_proto

_GENERATION = generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
_MODEL_SERVICES = {
    "target": target_service_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name,
    "drafter": drafter_service_pb2.DESCRIPTOR.services_by_name["DrafterService"].full_name,
}
# What a server says that has no such service, or no health at all.
_UNKNOWN = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED)


async def look_at_server(connection: Connection, *, timeout_s: float) -> ServerLook:
    """Who answers there; needs no token."""
    async with connection.open() as channel:
        health, trouble = await _health(channel, _GENERATION, connection, timeout_s=timeout_s)
        answers_as = ""
        if health is Health.UNKNOWN_SERVICE:
            for kind, service in _MODEL_SERVICES.items():
                its_health, _ = await _health(channel, service, connection, timeout_s=timeout_s)
                if its_health in (Health.SERVING, Health.NOT_SERVING):
                    answers_as = kind
        return ServerLook(health=health, answers_as=answers_as, trouble=trouble)


async def _health(
    channel: grpc.aio.Channel, service: str, connection: Connection, *, timeout_s: float
) -> tuple[Health, str]:
    try:
        reply = await HealthStub(channel).Check(
            HealthCheckRequest(service=service), timeout=timeout_s, metadata=connection.metadata
        )
    except grpc.aio.AioRpcError as error:
        words = error.details() or error.code().name
        return (Health.UNKNOWN_SERVICE if error.code() in _UNKNOWN else Health.NO_ANSWER), words
    serving = HealthCheckResponse.SERVING
    return (Health.SERVING if reply.status == serving else Health.NOT_SERVING), ""


async def look_at_model_service(
    look: ServiceLook, tls: ClientTls | None, *, timeout_s: float, clock: Callable[[], float]
) -> ServiceLook:
    """The same with what the service says of itself; with `tls` it must bear the name that `tls` has for it."""
    try:
        async with open_channel(look.address, tls) as channel:
            timed = await quickest(lambda: _info(look.kind, channel, timeout_s=timeout_s), clock=clock)
    except grpc.aio.AioRpcError as error:
        return replace(look, trouble=error.details() or error.code().name)
    reply = timed.reply
    return replace(look, info=info_from_proto(reply.info), clock=timed.clock(reply.clock_unix_ms))


async def _info(
    kind: str, channel: grpc.aio.Channel, *, timeout_s: float
) -> target_service_pb2.GetTargetInfoResponse | drafter_service_pb2.GetDrafterInfoResponse:
    if kind == "target":
        asked = target_service_pb2.GetTargetInfoRequest()
        target: target_service_pb2.GetTargetInfoResponse = await TargetServiceStub(channel).GetTargetInfo(
            asked, timeout=timeout_s
        )
        return target
    drafter: drafter_service_pb2.GetDrafterInfoResponse = await DrafterServiceStub(channel).GetDrafterInfo(
        drafter_service_pb2.GetDrafterInfoRequest(), timeout=timeout_s
    )
    return drafter
