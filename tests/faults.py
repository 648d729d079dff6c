"""Networks that misbehave, for tests: a TCP link with random delay, a drafter whose items get lost and mixed up, and a
target that lives but keeps its verdicts to itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from paceline.rpc import Server, open_channel
from paceline.v1 import drafter_service_pb2 as drafter_pb
from paceline.v1 import drafter_service_pb2_grpc as drafter_grpc
from paceline.v1 import target_service_pb2 as target_pb
from paceline.v1 import target_service_pb2_grpc as target_grpc


@asynccontextmanager
async def delayed_link(address: str, *, longest_delay_s: float, seed: int) -> AsyncIterator[str]:
    """The address of a proxy before `address` that holds up every chunk of bytes for a random time, in order."""
    host, _, port = address.rpartition(":")
    generator = random.Random(seed)
    open_tasks: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(65536):
                await asyncio.sleep(generator.uniform(0, longest_delay_s))
                writer.write(chunk)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        for task in (pump(reader, there_writer), pump(there_reader, writer)):
            running = asyncio.ensure_future(task)
            open_tasks.add(running)
            running.add_done_callback(open_tasks.discard)

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(open_tasks):
            task.cancel()
        await asyncio.gather(*open_tasks, return_exceptions=True)


class Mixer:
    """Loses, repeats and reorders the items of one direction."""

    def __init__(self, generator: random.Random, *, lost: float, repeated: float, reordered: float) -> None:
        self._generator = generator
        self._lost, self._repeated, self._reordered = lost, repeated, reordered
        self._held: list[Any] = []
        self.mistreated = 0

    def pass_on(self, item: Any) -> list[Any]:
        """What comes out when `item` goes in."""
        draw = self._generator.random
        if draw() < self._lost:
            self.mistreated += 1
            return []
        out = [item]
        if draw() < self._repeated:
            self.mistreated += 1
            out.append(item)
        if draw() < self._reordered:
            # Held back until another item has overtaken it.
            self.mistreated += 1
            self._held += out
            return []
        out += self._held
        self._held = []
        return out


class MixedUpDrafter(drafter_grpc.DrafterServiceServicer):
    """Stands before a drafter service and mistreats the items between it and the orchestrator, in both directions."""

    def __init__(self, channel: grpc.aio.Channel, *, seed: int, lost: float, repeated: float, reordered: float) -> None:
        self._stub = drafter_grpc.DrafterServiceStub(channel)
        generator = random.Random(seed)
        self.there = Mixer(generator, lost=lost, repeated=repeated, reordered=reordered)
        self.back = Mixer(generator, lost=lost, repeated=repeated, reordered=reordered)

    async def GetDrafterInfo(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name is the contract's
        return await self._stub.GetDrafterInfo(request)

    async def Draft(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async def requests() -> AsyncIterator[Any]:
            async for message in request_iterator:
                commands = [out for item in message.commands for out in self.there.pass_on(item)]
                yield drafter_pb.DraftRequest(commands=commands)

        async for message in self._stub.Draft(requests()):
            events = [out for item in message.events for out in self._mixed(item)]
            yield drafter_pb.DraftResponse(events=events)

    def _mixed(self, item: Any) -> list[Any]:
        return [item] if item.WhichOneof("event") == "load" else self.back.pass_on(item)


@asynccontextmanager
async def mixed_up_drafter(
    address: str, *, seed: int, lost: float = 0.1, repeated: float = 0.1, reordered: float = 0.1
) -> AsyncIterator[tuple[str, MixedUpDrafter]]:
    """The address of a `MixedUpDrafter` before the drafter at `address`."""
    async with open_channel(address) as channel:
        drafter = MixedUpDrafter(channel, seed=seed, lost=lost, repeated=repeated, reordered=reordered)
        server = Server(host="127.0.0.1", port=0)
        drafter_grpc.add_DrafterServiceServicer_to_server(drafter, server.registrar)
        await server.start("paceline.v1.DrafterService")
        try:
            yield server.address, drafter
        finally:
            await server.stop(0)


class HoldingTarget(target_grpc.TargetServiceServicer):
    """Stands before a target service; while told to hold, it passes on signs of life but no verdict.

    What it has held goes out, late, just before the next verdict that it does not hold.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = target_grpc.TargetServiceStub(channel)
        self.is_holding = False
        self.held: list[Any] = []
        self.verdicts = 0  # passed on
        self.late_verdicts = 0  # of those, the ones that were held

    async def GetTargetInfo(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name is the contract's
        return await self._stub.GetTargetInfo(request)

    async def Verify(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for message in self._stub.Verify(request_iterator):
            events = [out for item in message.events for out in self._pass_on(item)]
            if events:
                yield target_pb.VerifyResponse(events=events)

    def _pass_on(self, item: Any) -> list[Any]:
        if item.WhichOneof("event") != "verdict":
            return [item]
        if self.is_holding:
            self.held.append(item)
            return []
        out = [*self.held, item]
        self.held = []
        self.verdicts += len(out)
        self.late_verdicts += len(out) - 1
        return out


@asynccontextmanager
async def holding_target(address: str) -> AsyncIterator[tuple[str, HoldingTarget]]:
    """The address of a `HoldingTarget` before the target at `address`."""
    async with open_channel(address) as channel:
        target = HoldingTarget(channel)
        server = Server(host="127.0.0.1", port=0)
        target_grpc.add_TargetServiceServicer_to_server(target, server.registrar)
        await server.start("paceline.v1.TargetService")
        try:
            yield server.address, target
        finally:
            await server.stop(0)
