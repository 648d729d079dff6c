"""The orchestrator's face behind an ingress: deadlines come as metadata, and a status leaves with the last message."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from orchestrator import api
from orchestrator.access import LoopbackGate, TokenGate
from orchestrator.api import (
    SERVICE_NAME,
    IngressContext,
    ingress_cancel,
    ingress_check,
    ingress_generate,
    ingress_get_pool_status,
    ingress_get_server_info,
    ingress_list_models,
    ingress_watch,
)
from orchestrator.door import Caller, Door, OpenGate
from orchestrator.generator import Generator
from orchestrator.request_watch import OnRound
from paceline.errors import QueueFull, TargetUnavailable
from paceline.generation import (
    DeploymentStatus,
    Event,
    Finished,
    GenerationRequest,
    OrchestratorStatus,
    ServedModel,
    ServerInfo,
    SpeculationOptions,
    SpeculationUsage,
    Started,
    Usage,
)
from paceline.generation_wire import event_from_proto
from paceline.tokens import TokenEntry, TokenFile, hash_token, new_token, write_tokens
from paceline.types import FinishReason, ModelInfo
from paceline.v1 import generation_service_pb2 as pb
from tests.watching import watch_alone

REQUEST = pb.GenerateRequest(text="Why?")
EVENTS: tuple[Event, ...] = (
    Started(request_id="r1", seeds=(7,), prompt_tokens=3),
    Finished(
        finish_reason=FinishReason.STOP,
        text="Because.",
        usage=Usage(prompt_tokens=3, completion_tokens=2),
        speculation=SpeculationUsage(),
    ),
)


class FakeContext:
    """What the ingress hands to a handler, and what it would send: the status as it stood at each message."""

    def __init__(self, *, peer: str = "ipv4:10.0.0.9:40000", **metadata: str | bytes) -> None:
        self._peer = peer
        self._metadata = [(key.replace("_", "-"), value) for key, value in metadata.items()]
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.trailing_metadata: list[tuple[str, Any]] = []

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        return self._metadata

    def peer(self) -> str:
        return self._peer

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, Any]]) -> None:
        self.trailing_metadata = trailing_metadata

    @property
    def rich_status(self) -> status_pb2.Status:
        return status_pb2.Status.FromString(dict(self.trailing_metadata)["grpc-status-details-bin"])

    @property
    def error_info(self) -> error_details_pb2.ErrorInfo:
        info = error_details_pb2.ErrorInfo()
        for detail in self.rich_status.details:
            detail.Unpack(info)
        return info


class FakeGenerator:
    """Gives canned events, then fails if it has a failure."""

    def __init__(self, events: Sequence[Event] = EVENTS, failure: Exception | None = None) -> None:
        self._events, self._failure = events, failure
        self.timeouts_s: list[float | None] = []
        self.is_closed = False
        self.is_ready = True
        self.watch = watch_alone()

    async def generate(
        self, request: GenerationRequest, *, timeout_s: float | None, share: str, on_round: OnRound
    ) -> AsyncGenerator[Event]:
        assert request.text == "Why?"
        self.timeouts_s.append(timeout_s)
        try:
            for event in self._events:
                yield event
            self._fail()
        finally:
            self.is_closed = True

    def info(self) -> ServerInfo:
        self._fail()
        target = ModelInfo(model_id="m", vocab_size=8, max_context=16, tokenizer_sha256="", incarnation="1")
        return ServerInfo(target=target, drafter=None, speculation=SpeculationOptions())

    def models(self) -> tuple[ServedModel, ...]:
        info = self.info()
        served = ServedModel(
            name="m",
            target=info.target,
            drafter=None,
            speculation=info.speculation,
            default_max_tokens=5,
            max_prompt_tokens=15,
            max_choices=2,
        )
        return (served,)

    def status(self) -> DeploymentStatus:
        self._fail()
        return DeploymentStatus(pools=(), orchestrator=OrchestratorStatus(running_answers=2, max_answers=9))

    def _fail(self) -> None:
        if self._failure is not None:
            raise self._failure


def door_of(fake: FakeGenerator) -> Door:
    return Door(generator_of(fake), OpenGate())


def generator_of(fake: FakeGenerator) -> Generator:
    return cast(Generator, fake)


async def responses_to(
    fake: FakeGenerator, context: IngressContext, request: pb.GenerateRequest = REQUEST
) -> list[pb.GenerateResponse]:
    return [response async for response in ingress_generate(door_of(fake), request, context)]


async def test_answer_passes_through_and_leaves_the_status_alone() -> None:
    """A whole answer has no status of its own: the ingress says OK."""
    context = FakeContext()
    responses = await responses_to(FakeGenerator(), context)
    assert tuple(event_from_proto(response) for response in responses) == EVENTS
    assert (context.code, context.trailing_metadata) == (None, [])


@pytest.mark.parametrize("count", [0, 1])
async def test_error_leaves_as_a_status_with_one_last_empty_message(count: int) -> None:
    """Before and after the first event: code, sentence and details are set before the message that carries them."""
    fake, context = FakeGenerator(EVENTS[:count], QueueFull("Full.", retry_after_s=2.5)), FakeContext()
    codes = [(response, context.code) async for response in ingress_generate(door_of(fake), REQUEST, context)]
    assert [code for _, code in codes] == [None] * count + [grpc.StatusCode.RESOURCE_EXHAUSTED]
    assert codes[-1][0] == pb.GenerateResponse()
    assert event_from_proto(codes[-1][0]) is None
    assert (context.details, context.rich_status.message) == ("Full.", "Full.")
    assert (context.error_info.reason, context.error_info.domain) == ("QUEUE_FULL", "paceline")


async def test_malformed_request_is_refused_by_name() -> None:
    """What cannot be translated never reaches the generator."""
    fake, context = FakeGenerator(), FakeContext()
    assert await responses_to(fake, context, pb.GenerateRequest()) == [pb.GenerateResponse()]
    assert (context.code, context.error_info.metadata["parameter"]) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt")
    assert fake.timeouts_s == []


async def test_fault_of_ours_tells_nothing_of_itself() -> None:
    """An ingress would show a raised exception, with names of hosts and processes; the caller gets one sentence."""
    context = FakeContext()
    responses = await responses_to(FakeGenerator(EVENTS[:1], RuntimeError("secret words")), context)
    assert responses[1:] == [pb.GenerateResponse()]
    assert context.code is grpc.StatusCode.INTERNAL
    assert "secret" not in context.details + str(context.rich_status)


@pytest.mark.parametrize("encode", [str, lambda text: text.encode()], ids=["text", "bytes"])
async def test_deadline_comes_from_the_metadata(encode: Any) -> None:
    """The generator is told how long the caller will wait, which gRPC itself does not say here."""
    fake = FakeGenerator()
    await responses_to(fake, FakeContext(deadline_unix_ms=encode(str(int((time.time() + 50) * 1000)))))
    (timeout_s,) = fake.timeouts_s
    assert timeout_s is not None
    assert 20 < timeout_s <= 50


async def test_deadline_in_the_past_leaves_no_time() -> None:
    """The generator then refuses the work, as it does for any caller whose time is used up."""
    fake = FakeGenerator()
    await responses_to(fake, FakeContext(deadline_unix_ms="1000"))
    assert fake.timeouts_s[0] is not None
    assert fake.timeouts_s[0] < 0


async def test_caller_without_a_deadline_may_wait() -> None:
    """No metadata, no limit."""
    fake = FakeGenerator()
    await responses_to(fake, FakeContext(application="paceline"))
    assert fake.timeouts_s == [None]


@pytest.mark.parametrize("stated", ["", "soon", "-1", "1.5", "9" * 17, "١٢", b"\xff"])
async def test_malformed_deadline_is_refused_by_name(stated: str | bytes) -> None:
    """A deadline that nobody can read is no reason to work without one."""
    fake, context = FakeGenerator(), FakeContext(deadline_unix_ms=stated)
    assert await responses_to(fake, context) == [pb.GenerateResponse()]
    assert context.error_info.metadata["parameter"] == "deadline-unix-ms"
    assert fake.timeouts_s == []


async def test_leaving_the_stream_ends_the_answer() -> None:
    """The ingress closes the handler when the caller goes; the session must not live on."""
    fake, context = FakeGenerator(), FakeContext()
    async with aclosing(ingress_generate(door_of(fake), REQUEST, context)) as responses:
        await anext(responses)
        assert not fake.is_closed
    assert fake.is_closed
    assert context.code is None


async def test_unary_methods_answer_or_set_a_status() -> None:
    """Their message carries the status: they return an empty one with it."""
    context = FakeContext()
    info = await ingress_get_server_info(door_of(FakeGenerator()), context)
    status = await ingress_get_pool_status(door_of(FakeGenerator()), context)
    assert (info.target.model_id, status.orchestrator.running_answers, context.code) == ("m", 2, None)
    failing = FakeGenerator(failure=TargetUnavailable("Gone."))
    for respond, empty in (
        (ingress_get_server_info, pb.GetServerInfoResponse()),
        (ingress_get_pool_status, pb.GetPoolStatusResponse()),
    ):
        context = FakeContext()
        assert await respond(door_of(failing), context) == empty
        assert (context.code, context.error_info.reason) == (grpc.StatusCode.UNAVAILABLE, "TARGET_UNAVAILABLE")


async def test_control_plane_is_asked_for_those_alone_who_are_let_in() -> None:
    """What a stranger calls costs it nothing; what it says is in the answer."""
    asked = 0

    async def annotate(status: DeploymentStatus) -> DeploymentStatus:
        nonlocal asked
        asked += 1
        return replace(status, orchestrator=replace(status.orchestrator, replica_id="o1"))

    door = Door(generator_of(FakeGenerator()), LoopbackGate())
    assert await ingress_get_pool_status(door, FakeContext(), annotate=annotate) == pb.GetPoolStatusResponse()
    assert asked == 0
    near = FakeContext(peer="ipv4:127.0.0.1:40000")
    status = await ingress_get_pool_status(door, near, annotate=annotate)
    assert (status.orchestrator.replica_id, asked) == ("o1", 1)


async def test_models_are_listed_or_a_status_is_set() -> None:
    """As every unary method answers."""
    context = FakeContext()
    (model,) = (await ingress_list_models(door_of(FakeGenerator()), context)).models
    assert (model.name, model.target.max_context, model.default_max_tokens, context.code) == ("m", 16, 5, None)
    failing = door_of(FakeGenerator(failure=TargetUnavailable("Gone.")))
    assert await ingress_list_models(failing, context) == pb.ListModelsResponse()
    assert (context.code, context.error_info.reason) == (grpc.StatusCode.UNAVAILABLE, "TARGET_UNAVAILABLE")


async def test_cancelled_answer_ends_with_its_status() -> None:
    """The stream's last, empty message carries it; the cancellation itself says that there was an answer."""
    door, context = door_of(FakeGenerator()), FakeContext()
    async with aclosing(ingress_generate(door, REQUEST, context)) as responses:
        started = await anext(responses)
        request = pb.CancelRequest(request_id=started.started.request_id)
        cancelling = FakeContext()
        assert (await ingress_cancel(door, request, cancelling)).was_running
        assert cancelling.code is None
        assert [response async for response in responses] == [pb.GenerateResponse()]
    assert (context.code, context.error_info.reason) == (grpc.StatusCode.CANCELLED, "CANCELLED")


@pytest.mark.parametrize("is_there", [True, False])
async def test_answer_of_another_orchestrator_is_asked_for_there(is_there: bool) -> None:
    """In its caller's name, and only where it does not run here; what can be no id is asked for nowhere."""
    asked: list[tuple[Caller, str]] = []

    async def elsewhere(caller: Caller, request_id: str) -> bool:
        asked.append((caller, request_id))
        return is_there

    door, context = door_of(FakeGenerator()), FakeContext()
    response = await ingress_cancel(door, pb.CancelRequest(request_id="far"), context, elsewhere=elsewhere)
    assert (response.was_running, asked) == (is_there, [(Caller(), "far")])
    async with aclosing(ingress_generate(door, REQUEST, FakeContext())) as responses:
        started = await anext(responses)
        here = pb.CancelRequest(request_id=started.started.request_id)
        assert (await ingress_cancel(door, here, context, elsewhere=elsewhere)).was_running
    await ingress_cancel(door, pb.CancelRequest(), context, elsewhere=elsewhere)
    assert context.error_info.metadata["parameter"] == "request_id"
    assert len(asked) == 1


@pytest.mark.parametrize("service", ["", SERVICE_NAME])
async def test_health_follows_the_target(service: str) -> None:
    """An orchestrator without a target is up, but cannot serve."""
    fake, context = FakeGenerator(), FakeContext()
    request = HealthCheckRequest(service=service)
    assert (await ingress_check(generator_of(fake), request, context)).status == HealthCheckResponse.SERVING
    fake.is_ready = False
    assert (await ingress_check(generator_of(fake), request, context)).status == HealthCheckResponse.NOT_SERVING
    assert context.code is None


async def test_health_of_an_unknown_service_is_not_found() -> None:
    """As the health protocol wants it: a status for Check, a value for Watch."""
    fake, context = FakeGenerator(), FakeContext()
    request = HealthCheckRequest(service="no.such.Service")
    assert await ingress_check(generator_of(fake), request, context) == HealthCheckResponse()
    assert context.code is grpc.StatusCode.NOT_FOUND
    async with aclosing(ingress_watch(generator_of(fake), request)) as changes:
        assert (await anext(changes)).status == HealthCheckResponse.SERVICE_UNKNOWN


async def test_watched_health_is_told_at_once_and_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes while nothing changes."""
    monkeypatch.setattr(api, "_HEALTH_PERIOD_S", 0.001)
    fake = FakeGenerator()
    async with aclosing(ingress_watch(generator_of(fake), HealthCheckRequest())) as changes:
        assert (await anext(changes)).status == HealthCheckResponse.SERVING
        following = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0.05)
        assert not following.done()
        fake.is_ready = False
        assert (await asyncio.wait_for(following, 30)).status == HealthCheckResponse.NOT_SERVING


def test_context_of_ray_serve_has_what_is_used() -> None:
    """The Protocol names methods of the real class, with the parameters that are given."""
    grpc_util = pytest.importorskip("ray.serve.grpc_util")
    context = grpc_util.RayServegRPCContext.__new__(grpc_util.RayServegRPCContext)
    context._trailing_metadata, context._invocation_metadata = [], [("a", "b")]
    context.set_code(grpc.StatusCode.UNAVAILABLE)
    context.set_details("Gone.")
    context.set_trailing_metadata([("grpc-status-details-bin", b"\x01")])
    assert (context.code(), context.details()) == (grpc.StatusCode.UNAVAILABLE, "Gone.")
    assert context.trailing_metadata() == [("grpc-status-details-bin", b"\x01")]
    assert list(context.invocation_metadata()) == [("a", "b")]


async def test_every_method_behind_the_ingress_needs_the_token(tmp_path: Path) -> None:
    """UNAUTHENTICATED without, and for a wrong one; health needs none."""
    path, token = tmp_path / "tokens.yaml", new_token()
    write_tokens(path, TokenFile(tokens=(TokenEntry(name="a", sha256=hash_token(token)),)))
    door = Door(generator_of(FakeGenerator()), TokenGate(path))

    async def first(responses: AsyncGenerator[Any]) -> Any:
        async with aclosing(responses):
            return await anext(responses)

    calls: dict[str, Callable[[FakeContext], Awaitable[Any]]] = {
        "Generate": lambda context: first(ingress_generate(door, REQUEST, context)),
        "GetServerInfo": lambda context: ingress_get_server_info(door, context),
        "GetPoolStatus": lambda context: ingress_get_pool_status(door, context),
        "GetRoundTrace": lambda context: api.ingress_get_round_trace(door, pb.GetRoundTraceRequest(), context),
        "ListModels": lambda context: api.ingress_list_models(door, context),
        "Cancel": lambda context: api.ingress_cancel(door, pb.CancelRequest(request_id="r"), context),
    }
    assert calls.keys() == {method.name for method in pb.DESCRIPTOR.services_by_name["GenerationService"].methods}
    for name, call in calls.items():
        for metadata in ({}, {"authorization": "Bearer wrong"}, {"authorization": token}):
            context = FakeContext(**metadata)
            await call(context)
            assert (context.code, context.error_info.reason) == (
                grpc.StatusCode.UNAUTHENTICATED,
                "UNAUTHENTICATED",
            ), name
    for name in ("Generate", "GetServerInfo", "GetPoolStatus"):
        context = FakeContext(authorization=f"Bearer {token}".encode())
        await calls[name](context)
        assert context.code is None, name
    context = FakeContext()
    health = await ingress_check(generator_of(FakeGenerator()), HealthCheckRequest(), context)
    assert (health.status, context.code) == (HealthCheckResponse.SERVING, None)


async def test_without_tokens_only_callers_of_this_machine_are_answered() -> None:
    """An ingress listens on every interface, whatever it is told."""
    door = Door(generator_of(FakeGenerator()), LoopbackGate())
    far, near = FakeContext(), FakeContext(peer="ipv4:127.0.0.1:40000")
    await ingress_get_server_info(door, far)
    await ingress_get_server_info(door, near)
    assert (far.code, near.code) == (grpc.StatusCode.UNAUTHENTICATED, None)
