"""The orchestrator's gRPC face: translation between messages and the values of `paceline.generation`, nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from orchestrator.generator import Generator
from paceline.generation_wire import event_to_proto, request_from_proto, server_info_to_proto
from paceline.rpc import Context, mapped_errors
from paceline.v1 import generation_service_pb2 as generation_pb
from paceline.v1 import generation_service_pb2_grpc as generation_grpc


class GenerationServicer(generation_grpc.GenerationServiceServicer):
    """Serves `paceline.v1.GenerationService`."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def Generate(  # noqa: N802 - the name is the contract's
        self, request: generation_pb.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb.GenerateResponse]:
        async with mapped_errors(context, rpc="Generate"):
            answer = self._generator.generate(request_from_proto(request), timeout_s=context.time_remaining())
            async with aclosing(answer) as events:
                async for event in events:
                    yield event_to_proto(event)

    async def GetServerInfo(  # noqa: N802 - the name is the contract's
        self, request: generation_pb.GetServerInfoRequest, context: Context
    ) -> generation_pb.GetServerInfoResponse:
        async with mapped_errors(context, rpc="GetServerInfo"):
            return server_info_to_proto(self._generator.info())
        raise AssertionError("mapped_errors ends the call")
