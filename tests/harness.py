"""Whole systems for tests: the three services in one process over real gRPC on loopback, with any model or method."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from drafter_service.method import DraftMethod
from drafter_service.methods.draft_model import DraftModelMethod
from drafter_service.methods.ngram import NgramMethod
from drafter_service.service import serve_drafter
from orchestrator.board import PoolBoard, most_room_first, nearest_first
from orchestrator.directory import StaticDirectory
from orchestrator.generator import Generator
from orchestrator.service import open_generator, serve_orchestrator
from paceline.client import GenerationClient
from paceline.generation import (
    Completion,
    CompletionBuilder,
    GenerationRequest,
    Schedule,
    SpeculationOptions,
    StopConditions,
)
from paceline.process import Lifetime, Serve
from paceline.rpc import open_channel
from paceline.settings import DrafterSettings, OrchestratorSettings, TargetSettings
from paceline.types import ModelInfo, SamplingParams, VerificationRule
from paceline.v1.drafter_service_pb2_grpc import DrafterServiceStub
from paceline.v1.session_pb2 import LoadReport
from paceline.v1.target_service_pb2_grpc import TargetServiceStub
from target_service.service import serve_target
from tests.fakes import fake_info

START_LIMIT_S = 60.0
KILL_LIMIT_S = 10.0
LIMIT_S = 60.0
"""Longest wait for one answer; a test that gets there has failed."""


@dataclass
class Running:
    """One service that runs in this process."""

    address: str
    lifetime: Lifetime
    task: asyncio.Task[None]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    async def stop(self) -> None:
        self.lifetime.stop()
        await self.task

    async def kill(self) -> None:
        """End it without a word to anyone, as far as that is possible within one process; then its port is free."""
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        async with asyncio.timeout(KILL_LIMIT_S):
            while not is_free(self.port):
                # A server that nobody has stopped ends with its last reference, which may be part of a cycle.
                gc.collect()
                await asyncio.sleep(0.01)


def is_free(port: int) -> bool:
    """Whether a server could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


async def start(serve: Serve) -> Running:
    lifetime = Lifetime()
    task = asyncio.ensure_future(_as_coroutine(serve, lifetime))
    both: set[asyncio.Future[Any]] = {task, lifetime.address}
    done, _ = await asyncio.wait(both, timeout=START_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
    if task in done:
        await task
    assert lifetime.address in done, "the service did not start in time"
    return Running(lifetime.address.result(), lifetime, task)


async def _as_coroutine(serve: Serve, lifetime: Lifetime) -> None:
    await serve(lifetime)


@asynccontextmanager
async def running(serve: Serve) -> AsyncIterator[Running]:
    service = await start(serve)
    try:
        yield service
    finally:
        service.lifetime.stop()
        with suppress(asyncio.CancelledError):
            await service.task


def target_of(model: Any, info: ModelInfo | None = None, **settings: Any) -> Serve:
    """A target service over any model behind the narrow interface."""
    options = TargetSettings(**{"drain_s": 0, **settings})
    return lambda lifetime: serve_target(lifetime, options, model, info or fake_info(model))


def drafter_of(method: DraftMethod[Any], info: ModelInfo, **settings: Any) -> Serve:
    """A drafter service over any drafting method."""
    options = DrafterSettings(**{"drain_s": 0, **settings})
    return lambda lifetime: serve_drafter(lifetime, options, method, info)


def model_drafter_of(model: Any, info: ModelInfo | None = None, **settings: Any) -> Serve:
    method = DraftModelMethod(model, distribution_entries=64)
    return drafter_of(method, info or fake_info(model, method="draft_model"), **settings)


def ngram_drafter(**settings: Any) -> Serve:
    info = ModelInfo(
        model_id="ngram", vocab_size=0, max_context=2**31 - 1, tokenizer_sha256="", incarnation="1", method="ngram"
    )
    return drafter_of(NgramMethod(prompt_lookup_min=1, prompt_lookup_max=3), info, **settings)


def orchestrator_of(target: str, drafter: str | None, tokenizer: str, **settings: Any) -> Serve:
    options = OrchestratorSettings(
        target=target, drafter=drafter, tokenizer=tokenizer, **{"drain_s": 0, "connect_timeout_s": 5, **settings}
    )
    return lambda lifetime: serve_orchestrator(lifetime, options)


@asynccontextmanager
async def system(target: Serve, drafter: Serve | None, tokenizer: str, **settings: Any) -> AsyncIterator[System]:
    """Target, drafter and orchestrator, and a client of the latter."""
    async with AsyncExitStack() as services:
        running_target = await services.enter_async_context(running(target))
        running_drafter = await services.enter_async_context(running(drafter)) if drafter else None
        orchestrator = await services.enter_async_context(
            running(
                orchestrator_of(
                    running_target.address, running_drafter.address if running_drafter else None, tokenizer, **settings
                )
            )
        )
        # What the orchestrator makes of a fault is to be seen, not how a client gets over it.
        client = await services.enter_async_context(GenerationClient(orchestrator.address, max_resumptions=0))
        yield System(running_target, running_drafter, orchestrator, client)


@dataclass
class System:
    target: Running
    drafter: Running | None
    orchestrator: Running
    client: GenerationClient

    async def loads(self) -> list[LoadReport]:
        """What target and drafter say of themselves once they hold no session, or after a while if they do."""
        assert self.drafter is not None
        return [
            await _settled_load(self.target.address, "target"),
            await _settled_load(self.drafter.address, "drafter"),
        ]


async def _settled_load(address: str, kind: str) -> LoadReport:
    """Connect again until the greeting heartbeat reports no session; bounded at ten seconds."""
    load = LoadReport()
    for _ in range(100):
        load = await _greeting(address, kind)
        if load.sessions == 0:
            break
        await asyncio.sleep(0.1)
    return load


async def _greeting(address: str, kind: str) -> LoadReport:
    async with open_channel(address) as channel:
        call = TargetServiceStub(channel).Verify() if kind == "target" else DrafterServiceStub(channel).Draft()
        message = await call.read()
        call.cancel()
        load: LoadReport = message.events[0].load
        return load


# ---------------------------------------------------------------------------------------------------------------------
# Pools


@dataclass
class Fleet:
    """Pools of targets and drafters, with the orchestrator's own parts before them in this process."""

    targets: list[Running]
    drafters: list[Running]
    generator: Generator
    target_directory: StaticDirectory
    drafter_directory: StaticDirectory | None
    registry: CollectorRegistry

    async def complete(self, asked: GenerationRequest, *, timeout_s: float | None = LIMIT_S) -> Completion:
        """One whole answer."""
        builder = CompletionBuilder()
        async with aclosing(self.generator.generate(asked, timeout_s=timeout_s)) as events:
            async for event in events:
                builder.add(event)
        return builder.build()

    async def until_connected(self, address: str) -> None:
        """Wait until the orchestrator has a stream to that replica."""
        async with asyncio.timeout(LIMIT_S):
            while not any(  # noqa: ASYNC110 - there is no event to wait for
                replica.is_connected
                for pool in self.generator.status().pools
                for replica in pool.replicas
                if replica.address == address
            ):
                await asyncio.sleep(0.01)

    def moves(self, pool: str = "target", reason: str | None = None) -> int:
        """Sessions that went on at another replica of the pool, for one reason or for any."""
        samples = [sample for metric in self.registry.collect() for sample in metric.samples]
        return sum(
            int(sample.value)
            for sample in samples
            if sample.name == "paceline_migrations_total"
            and sample.labels["pool"] == pool
            and reason in (None, sample.labels["reason"])
        )

    @property
    def leases(self) -> int:
        """Held now, of both pools."""
        return sum(directory.leases for directory in (self.target_directory, self.drafter_directory) if directory)


@asynccontextmanager
async def fleet(
    targets: Sequence[Serve],
    drafters: Sequence[Serve],
    tokenizer: str,
    *,
    more_targets: Sequence[str] = (),
    more_drafters: Sequence[str] = (),
    directory_type: type[StaticDirectory] = StaticDirectory,
    **settings: Any,
) -> AsyncIterator[Fleet]:
    """Start all services and open a generator over them, connected to each; `more_...` are addresses at which nobody
    need answer yet.
    """
    async with AsyncExitStack() as services:
        running_targets = [await services.enter_async_context(running(serve)) for serve in targets]
        running_drafters = [await services.enter_async_context(running(serve)) for serve in drafters]
        target_addresses = [*(service.address for service in running_targets), *more_targets]
        drafter_addresses = [*(service.address for service in running_drafters), *more_drafters]
        target_directory = directory_type(target_addresses, PoolBoard(most_room_first))
        drafter_directory = directory_type(drafter_addresses, PoolBoard(nearest_first)) if drafter_addresses else None
        registry = CollectorRegistry()
        generator = await services.enter_async_context(
            open_generator(
                OrchestratorSettings(
                    target=",".join(target_addresses), tokenizer=tokenizer, **{"connect_timeout_s": 10, **settings}
                ),
                targets=target_directory,
                drafters=drafter_directory,
                registry=registry,
            )
        )
        opened = Fleet(running_targets, running_drafters, generator, target_directory, drafter_directory, registry)
        for service in (*running_targets, *running_drafters):
            await opened.until_connected(service.address)
        yield opened


# ---------------------------------------------------------------------------------------------------------------------
# Requests


def request(
    ids: tuple[int, ...],
    *,
    max_tokens: int = 24,
    temperature: float = 1.0,
    seed: int | None = 7,
    schedule: Schedule | None = None,
    rule: VerificationRule | None = None,
    draft_length: int | None = 4,
    fan_out: int | None = None,
    sampling: SamplingParams | None = None,
    **stopping: Any,
) -> GenerationRequest:
    """A request on token ids, with the defaults of tests: a draft length, or models without weights, which take no time,
    would not be drafted for; None leaves it to the controller."""
    return GenerationRequest(
        token_ids=ids,
        sampling=sampling or SamplingParams(temperature=temperature),
        stopping=StopConditions(max_tokens=max_tokens, **{"ignore_eos": True, **stopping}),
        speculation=SpeculationOptions(rule=rule, draft_length=draft_length, schedule=schedule, fan_out=fan_out),
        seed=seed,
    )


async def complete_all(
    client: GenerationClient, requests: list[GenerationRequest], *, concurrency: int = 8
) -> list[Completion]:
    """All answers, in the order of the requests."""
    gate = asyncio.Semaphore(concurrency)

    async def one(item: GenerationRequest) -> Completion:
        async with gate:
            return await client.complete(item, timeout_s=120)

    return list(await asyncio.gather(*(one(item) for item in requests)))
