"""Who is let in, over real gRPC: certificates between the services, tokens and certificates before them.

What is not right is refused with a typed error on our side, and disturbs nobody else. Certificates are made here; waits
are for what happens, not for a time.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio
import pytest
import structlog
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha import reflection_pb2
from structlog.testing import capture_logs

from orchestrator.api import SERVICE_NAME
from paceline.client import ClientTls, GenerationClient, ServerUnavailable
from paceline.errors import PacelineError, PeerRefused, RateLimited, StartupFailed, Unauthenticated
from paceline.generation import Delta, GenerationRequest
from paceline.logs import configure_logging
from paceline.process import run_service
from paceline.rpc import open_channel
from paceline.settings import TargetSettings
from paceline.tokens import TokenEntry, TokenFile, hash_token, new_token, write_tokens
from paceline.v1 import generation_service_pb2 as generation_pb
from paceline.v1.drafter_service_pb2 import GetDrafterInfoRequest
from paceline.v1.drafter_service_pb2_grpc import DrafterServiceStub
from paceline.v1.target_service_pb2 import GetTargetInfoRequest
from paceline.v1.target_service_pb2_grpc import (
    TargetServiceServicer,
    TargetServiceStub,
    add_TargetServiceServicer_to_server,
)
from tests.certificates import DRAFTER, ORCHESTRATOR, TARGET, Authority, Identity
from tests.checkpoints import save_markov_checkpoint
from tests.contract.stream_peer import VOCAB
from tests.contract.test_migration import asked_of, drafter, model, right_text
from tests.harness import (
    LIMIT_S,
    System,
    fleet,
    ngram_drafter,
    orchestrator_of,
    running,
    start,
    system,
    target_of,
)

A_DAY_S = 86_400.0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One word a token: t0, t1, ..."""
    uniform = [[1 / VOCAB] * VOCAB] * VOCAB
    return str(save_markov_checkpoint(tmp_path_factory.mktemp("models") / "words", uniform))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    """Another authority, which nobody here believes."""
    return Authority(tmp_path / "stranger")


def target(identity: Identity, **settings: Any) -> Any:
    return target_of(model(pause_s=0), **{"heartbeat_s": 0.05, **identity.settings, **settings})


# ---------------------------------------------------------------------------------------------------------------------
# Between our own services


async def test_services_with_certificates_answer(authority: Authority, tokenizer: str) -> None:
    """All three over mutual TLS: the answer is the target's own, and drafts were part of it."""
    asked = asked_of(1)
    async with system(
        target(authority.issue(TARGET)),
        drafter(**authority.issue(DRAFTER).settings),
        tokenizer,
        **authority.issue(ORCHESTRATOR).settings,
    ) as services:
        answer = await services.client.complete(asked)
    assert answer.token_ids == right_text(asked)
    assert answer.speculation.num_accepted_tokens > 0


async def test_answers_move_between_targets_with_certificates(authority: Authority, tokenizer: str) -> None:
    """One target is killed in the midst of eight answers: each goes on at the other, and no token is lost or repeated."""
    identity = authority.issue(TARGET)
    asked = [asked_of(seed) for seed in range(8)]
    async with fleet(
        [target(identity), target(identity)],
        [drafter(**authority.issue(DRAFTER).settings)],
        tokenizer,
        **authority.issue(ORCHESTRATOR).settings,
    ) as services:
        tokens = 0
        is_under_way = asyncio.Event()

        async def answer(request: GenerationRequest) -> tuple[int, ...]:
            nonlocal tokens
            ids: tuple[int, ...] = ()
            async with aclosing(services.generator.generate(request, timeout_s=LIMIT_S)) as events:
                async for event in events:
                    if isinstance(event, Delta):
                        ids += event.token_ids
                        tokens += len(event.token_ids)
                        if tokens > 80:
                            is_under_way.set()
            return ids

        answers = [asyncio.ensure_future(answer(request)) for request in asked]
        await is_under_way.wait()
        await services.targets[0].kill()
        assert await asyncio.gather(*answers) == [right_text(request) for request in asked]
        assert services.moves("target") > 0


async def info_of_target(address: str, credentials: grpc.ChannelCredentials | None) -> str:
    """What a client of gRPC's own, with such credentials, is told."""
    options = [("grpc.ssl_target_name_override", TARGET)]
    channel = (
        grpc.aio.secure_channel(address, credentials, options)
        if credentials is not None
        else grpc.aio.insecure_channel(address)
    )
    async with channel:
        stub = TargetServiceStub(channel)
        reply = await stub.GetTargetInfo(GetTargetInfoRequest(), timeout=LIMIT_S)
        return str(reply.info.model_id)


def credentials_of(identity: Identity) -> grpc.ChannelCredentials:
    """Whatever the files hold, also what we would refuse to show."""
    return grpc.ssl_channel_credentials(identity.ca.read_bytes(), identity.key.read_bytes(), identity.cert.read_bytes())


async def test_a_model_service_refuses_callers_without_a_right_certificate(
    authority: Authority, stranger: Authority
) -> None:
    """In the handshake: in plaintext, without one, with another authority's, with one that has expired. The next that is
    right is answered.
    """
    refused = {
        "plaintext": None,
        "no certificate": grpc.ssl_channel_credentials(authority.ca.read_bytes()),
        "other authority": credentials_of(stranger.issue(ORCHESTRATOR, believes=authority.ca)),
        "expired": credentials_of(authority.issue(ORCHESTRATOR, expires_in_s=-A_DAY_S)),
    }
    async with running(target(authority.issue(TARGET))) as service:
        for what, credentials in refused.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await info_of_target(service.address, credentials)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, what
        assert await info_of_target(service.address, credentials_of(authority.issue(ORCHESTRATOR)))


async def test_a_model_service_refuses_a_name_that_is_not_an_orchestrators(authority: Authority) -> None:
    """The authority has signed it, but for somebody else: PERMISSION_DENIED for calls, streams and health alike."""
    async with AsyncExitStack() as stack:
        target_service = await stack.enter_async_context(running(target(authority.issue(TARGET))))
        drafter_service = await stack.enter_async_context(running(drafter(**authority.issue(DRAFTER).settings)))
        other = authority.issue("somebody.paceline")
        tls = {
            name: ClientTls(ca=other.ca, cert=other.cert, key=other.key, server_name=name) for name in (TARGET, DRAFTER)
        }
        targets = await stack.enter_async_context(open_channel(target_service.address, tls[TARGET]))
        drafters = await stack.enter_async_context(open_channel(drafter_service.address, tls[DRAFTER]))
        calls: list[Callable[[], Any]] = [
            lambda: TargetServiceStub(targets).GetTargetInfo(GetTargetInfoRequest()),
            lambda: TargetServiceStub(targets).Verify().read(),
            lambda: HealthStub(targets).Check(HealthCheckRequest()),
            lambda: DrafterServiceStub(drafters).GetDrafterInfo(GetDrafterInfoRequest()),
            lambda: DrafterServiceStub(drafters).Draft().read(),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call()
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert "somebody.paceline" in str(caught.value.details())


async def test_names_that_are_let_in_are_configured(authority: Authority) -> None:
    """Any of several, or with none named whoever the authority has signed."""
    other = credentials_of(authority.issue("somebody.paceline"))
    for names in ("orchestrator.paceline, somebody.paceline", ""):
        async with running(target(authority.issue(TARGET), tls_clients=names)) as service:
            assert await info_of_target(service.address, other)


async def started_orchestrator(target_address: str, tokenizer: str, **settings: Any) -> PacelineError:
    """Why it could not start."""
    with pytest.raises(PacelineError) as caught:
        await start(orchestrator_of(target_address, None, tokenizer, **{"connect_timeout_s": 2, **settings}))
    return caught.value


async def test_an_orchestrator_uses_no_target_of_another_name_or_authority(
    authority: Authority, stranger: Authority, tokenizer: str
) -> None:
    """A drafter's certificate is none of a target's: whoever answers at the address must be who was asked for."""
    ours = authority.issue(ORCHESTRATOR)
    for identity in (authority.issue(DRAFTER), stranger.issue(TARGET, believes=authority.ca)):
        async with running(target(identity)) as service:
            refusal = await started_orchestrator(service.address, tokenizer, **ours.settings)
        assert isinstance(refusal, PeerRefused)
        assert TARGET in refusal.message
        assert service.address in refusal.message


class _KnowsNothing(TargetServiceServicer):
    """A target that is there, for its certificate."""


async def test_an_orchestrator_uses_no_target_whose_certificate_has_expired(
    authority: Authority, tokenizer: str
) -> None:
    """A target of ours would not start with it; one that runs when it expires meets no new orchestrator."""
    expired = authority.issue(TARGET, expires_in_s=-A_DAY_S)
    server = grpc.aio.server()
    add_TargetServiceServicer_to_server(_KnowsNothing(), server)
    pair = (expired.key.read_bytes(), expired.cert.read_bytes())
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([pair], expired.ca.read_bytes(), require_client_auth=True)
    )
    await server.start()
    try:
        ours = authority.issue(ORCHESTRATOR)
        refusal = await started_orchestrator(f"127.0.0.1:{port}", tokenizer, **ours.settings)
    finally:
        await server.stop(None)
    assert isinstance(refusal, PeerRefused)
    assert "expired" in refusal.message


async def test_an_orchestrator_that_is_refused_says_so(
    authority: Authority, stranger: Authority, tokenizer: str
) -> None:
    """By name it is told in words; where the handshake fails, or it comes in plaintext, it says where to look."""
    other_name = authority.issue("somebody.paceline").settings
    other_authority = stranger.issue(ORCHESTRATOR, believes=authority.ca).settings
    async with running(target(authority.issue(TARGET))) as service:
        refusal = await started_orchestrator(service.address, tokenizer, **other_name)
        assert isinstance(refusal, PeerRefused)
        assert "somebody.paceline" in refusal.message
        refusal = await started_orchestrator(service.address, tokenizer, **other_authority)
        assert isinstance(refusal, StartupFailed)
        assert "--tls-cert" in refusal.message
        assert isinstance(await started_orchestrator(service.address, tokenizer), StartupFailed)


async def test_a_drafter_that_is_not_believed_costs_speed_alone(
    authority: Authority, stranger: Authority, tokenizer: str
) -> None:
    """It is refused in the log, and answers are the target's own, drafted by lookup."""
    async with AsyncExitStack() as stack:
        target_service = await stack.enter_async_context(running(target(authority.issue(TARGET))))
        false = stranger.issue(DRAFTER, believes=authority.ca)
        drafter_service = await stack.enter_async_context(running(drafter(**false.settings)))
        ours = authority.issue(ORCHESTRATOR)
        with capture_logs() as logs, pytest.raises(PeerRefused, match=DRAFTER):
            await start(orchestrator_of(target_service.address, drafter_service.address, tokenizer, **ours.settings))
    assert any(entry["event"] == "drafter refused" for entry in logs)


async def until(condition: Callable[[], Any]) -> None:
    """Wait until it holds, as long as a test may."""
    async with asyncio.timeout(LIMIT_S):
        while not await condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.05)


async def test_certificates_are_renewed_while_a_stream_runs(authority: Authority, tokenizer: str) -> None:
    """A target's new certificate is shown to whoever connects next; the stream from before goes on, and so do answers."""
    identity, ours = authority.issue(TARGET), authority.issue(ORCHESTRATOR)
    async with system(target(identity), None, tokenizer, **ours.settings) as services:
        assert (await services.client.complete(asked_of(1))).token_ids == right_text(asked_of(1))
        authority.reissue(identity, "renewed.paceline")
        renewed = ClientTls(ca=ours.ca, cert=ours.cert, key=ours.key, server_name="renewed.paceline")

        async def is_shown() -> bool:
            async with open_channel(services.target.address, renewed) as channel:
                try:
                    await TargetServiceStub(channel).GetTargetInfo(GetTargetInfoRequest(), timeout=LIMIT_S)
                except grpc.aio.AioRpcError:
                    return False
                return True

        await until(is_shown)
        assert (await services.client.complete(asked_of(2))).token_ids == right_text(asked_of(2))


async def test_an_orchestrators_new_certificate_is_shown_at_the_next_connection(
    authority: Authority, tokenizer: str
) -> None:
    """Renewed badly it is refused by the target that comes back, and used again once it is right."""
    ours, theirs = authority.issue(ORCHESTRATOR), authority.issue(TARGET)
    async with fleet([target(theirs)], [], tokenizer, **ours.settings) as services:
        asked = asked_of(3)
        address, port = services.targets[0].address, services.targets[0].port
        authority.reissue(ours, "somebody.paceline")
        await services.targets[0].kill()
        with capture_logs() as logs:
            async with running(target(theirs, port=port)):

                async def is_refused() -> bool:
                    return any(entry["event"] == "target refused" for entry in logs)

                await until(is_refused)
                assert not services.generator.is_ready
                authority.reissue(ours, ORCHESTRATOR)
                await services.until_connected(address)
                assert (await services.complete(asked)).token_ids == right_text(asked)


async def test_a_renewed_certificate_that_cannot_be_used_is_survived(authority: Authority, tokenizer: str) -> None:
    """It breaks no connection that is there; a replica that comes later is refused until the files are right again."""
    ours, theirs = authority.issue(ORCHESTRATOR), authority.issue(TARGET)
    async with fleet([target(theirs)], [], tokenizer, **ours.settings) as services:
        address, port = services.targets[0].address, services.targets[0].port
        right = ours.cert.read_bytes()
        ours.cert.write_text("no certificate")
        asked = asked_of(4)
        assert (await services.complete(asked)).token_ids == right_text(asked)
        await services.targets[0].kill()
        async with running(target(theirs, port=port)):
            with capture_logs() as logs:

                async def is_refused() -> bool:
                    return any(entry["event"] == "target refused" for entry in logs)

                await until(is_refused)
            ours.cert.write_bytes(right)
            await services.until_connected(address)
            assert (await services.complete(asked)).token_ids == right_text(asked)


@pytest.mark.parametrize("spoilt", ["tls_cert", "tls_key", "tls_ca"])
async def test_a_service_does_not_start_with_files_that_cannot_be_used(
    authority: Authority, tokenizer: str, spoilt: str
) -> None:
    """A model service and the orchestrator: the sentence names the file."""
    async with running(target_of(model(pause_s=0))) as service:
        settings = authority.issue(TARGET).settings
        settings[spoilt].write_text("nothing")
        for serve in (target_of(model(), **settings), orchestrator_of(service.address, None, tokenizer, **settings)):
            with pytest.raises(StartupFailed, match=str(settings[spoilt])):
                await start(serve)


# ---------------------------------------------------------------------------------------------------------------------
# Where they listen


async def test_no_service_listens_for_others_without_protection(tokenizer: str) -> None:
    """Beyond loopback each refuses to start; the three ways out are in the sentence."""
    async with running(target_of(model(pause_s=0))) as service:
        for serve in (
            target_of(model(), host="0.0.0.0"),
            ngram_drafter(host="0.0.0.0"),
            orchestrator_of(service.address, None, tokenizer, host="0.0.0.0"),
        ):
            with pytest.raises(StartupFailed, match=r"--host.*--t.*--trust-network"):
                await start(serve)


async def test_services_listen_for_others_with_protection(authority: Authority, tokenizer: str, tmp_path: Path) -> None:
    """With certificates, tokens, or the word that strangers cannot reach the network."""
    tokens = tmp_path / "tokens.yaml"
    write_tokens(tokens, TokenFile())
    async with running(target(authority.issue(TARGET), host="0.0.0.0")) as service:
        address = f"127.0.0.1:{service.port}"
        ours = authority.issue(ORCHESTRATOR)
        for protection in (
            {"tokens_file": tokens},
            authority.issue("api.example.com").public_settings,
            {"trust_network": True},
        ):
            async with running(
                orchestrator_of(address, None, tokenizer, host="0.0.0.0", **ours.settings, **protection)
            ):
                pass


def test_a_process_refuses_before_it_loads_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which may take minutes."""

    def prepare(settings: TargetSettings) -> NoReturn:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(sys, "argv", ["target_service", "--host", "0.0.0.0"])
    try:
        with pytest.raises(SystemExit) as caught:
            run_service("target", TargetSettings, prepare)
    finally:
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
    assert caught.value.code == 1
    assert "--trust-network" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Before them: tokens


def entry(name: str, token: str, **fields: Any) -> TokenEntry:
    return TokenEntry(name=name, sha256=hash_token(token), **fields)


@asynccontextmanager
async def guarded(tokenizer: str, path: Path, *entries: TokenEntry, **settings: Any) -> AsyncIterator[System]:
    """A system whose callers need tokens."""
    write_tokens(path, TokenFile(tokens=entries))
    async with system(target_of(model(pause_s=0)), None, tokenizer, tokens_file=path, **settings) as services:
        yield services


async def complete(services: System, asked: GenerationRequest, token: str | None) -> tuple[int, ...]:
    async with GenerationClient(services.orchestrator.address, token=token, max_resumptions=0) as client:
        return (await client.complete(asked)).token_ids


async def test_a_right_token_is_answered_and_no_other(tokenizer: str, tmp_path: Path) -> None:
    """None, a wrong one, one that has expired and a disabled one are all UNAUTHENTICATED."""
    right, expired, disabled = new_token(), new_token(), new_token()
    asked = asked_of(1)
    async with guarded(
        tokenizer,
        tmp_path / "tokens.yaml",
        entry("a", right),
        entry("b", expired, expires=dt.date(2020, 1, 1)),
        entry("c", disabled, disabled=True),
    ) as services:
        for token in (None, new_token(), right[:-1], right.upper(), expired, disabled):
            with pytest.raises(Unauthenticated):
                await complete(services, asked, token)
        assert await complete(services, asked, right) == right_text(asked)


async def test_every_method_needs_the_token_but_health_does_not(tokenizer: str, tmp_path: Path) -> None:
    """All there are by the contract, now and later, and reflection; with the token each is let through."""
    token = new_token()
    methods = [
        f"/{SERVICE_NAME}/{method.name}"
        for method in generation_pb.DESCRIPTOR.services_by_name["GenerationService"].methods
    ]
    assert len(methods) >= 4
    reflective = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    listing = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    async with (
        guarded(tokenizer, tmp_path / "tokens.yaml", entry("a", token), reflection=True) as services,
        open_channel(services.orchestrator.address) as channel,
    ):

        async def one(message: Any) -> AsyncIterator[Any]:
            yield message

        async def code_of(method: str, message: bytes, metadata: tuple[tuple[str, str], ...]) -> grpc.StatusCode:
            call: Any = channel.stream_stream(method)(one(message), metadata=metadata, timeout=LIMIT_S)
            try:
                await call.read()
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        for method in (*methods, reflective):
            message = listing if method == reflective else b""
            for wrong in ((), (("authorization", "Bearer wrong"),), (("authorization", token),)):
                assert await code_of(method, message, wrong) is grpc.StatusCode.UNAUTHENTICATED, method
            let_in = await code_of(method, message, (("authorization", f"Bearer {token}"),))
            assert let_in in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT), method
        health = await HealthStub(channel).Check(HealthCheckRequest())
        assert health.status == HealthCheckResponse.SERVING


async def test_tokens_are_rotated_while_a_stream_runs(tokenizer: str, tmp_path: Path) -> None:
    """The new one is taken and the old one refused, without a restart; the answer that the old one began is whole."""
    path, old, new = tmp_path / "tokens.yaml", new_token(), new_token()
    asked = asked_of(1)
    async with guarded(tokenizer, path, entry("a-1", old)) as services:
        async with GenerationClient(services.orchestrator.address, token=old) as client:
            ids: tuple[int, ...] = ()
            async with aclosing(client.generate(asked)) as events:
                async for event in events:
                    if not isinstance(event, Delta):
                        continue
                    if not ids:
                        write_tokens(path, TokenFile(tokens=(entry("a-2", new),)))

                        async def is_refused() -> bool:
                            try:
                                await client.server_info()
                            except Unauthenticated:
                                return True
                            return False

                        await until(is_refused)
                    ids += event.token_ids
        assert ids == right_text(asked)
        assert await complete(services, asked, new) == right_text(asked)


async def test_a_caller_beyond_its_limits_is_told_when_to_come_again(tokenizer: str, tmp_path: Path) -> None:
    """RESOURCE_EXHAUSTED with the time to wait; another caller is answered meanwhile."""
    often, seldom = new_token(), new_token()
    async with guarded(
        tokenizer,
        tmp_path / "tokens.yaml",
        entry("often", often),
        entry("seldom", seldom, requests_per_minute=0.001, burst=1),
    ) as services:
        asked = asked_of(1)
        assert await complete(services, asked, seldom) == right_text(asked)
        with pytest.raises(RateLimited) as caught:
            await complete(services, asked, seldom)
        assert caught.value.retry_after_s is not None
        assert 0.99 * 60_000 < caught.value.retry_after_s <= 60_000
        assert await complete(services, asked, often) == right_text(asked)


async def test_no_token_reaches_the_log(
    tokenizer: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole run at the most talkative level, with calls that are answered, refused, and fail with the token in hand."""
    right, wrong = new_token(), new_token()
    configure_logging("debug", service="test")
    async with AsyncExitStack() as stack:
        stack.callback(structlog.contextvars.clear_contextvars)
        stack.callback(structlog.reset_defaults)
        services = await stack.enter_async_context(guarded(tokenizer, tmp_path / "tokens.yaml", entry("a", right)))
        await complete(services, asked_of(1), right)
        with pytest.raises(Unauthenticated):
            await complete(services, asked_of(1), wrong)

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError(f"authorization: Bearer {right}")

        monkeypatch.setattr("orchestrator.api.request_from_proto", fail)
        with pytest.raises(PacelineError):
            await complete(services, asked_of(1), right)
    logged = "".join(capfd.readouterr())
    assert "authorization" in logged, "the failure was logged"
    for token in (right, wrong):
        assert token not in logged
        assert token.removeprefix("paceline_") not in logged
        assert hash_token(token) not in logged


# ---------------------------------------------------------------------------------------------------------------------
# Before them: certificates


async def test_callers_see_the_public_certificate(authority: Authority, tokenizer: str) -> None:
    """TLS without client certificates: whoever believes the authority, and asks for the right name, is answered."""
    public = authority.issue("api.example.com")
    asked = asked_of(1)
    async with system(
        target_of(model(pause_s=0)), None, tokenizer, public_tls_cert=public.cert, public_tls_key=public.key
    ) as services:
        tls = ClientTls(ca=authority.ca, server_name="api.example.com")
        async with GenerationClient(services.orchestrator.address, tls=tls) as client:
            assert (await client.complete(asked)).token_ids == right_text(asked)
        for refused in (ClientTls(ca=authority.ca, server_name="other.example.com"), None):
            async with GenerationClient(services.orchestrator.address, tls=refused, max_resumptions=0) as client:
                with pytest.raises(ServerUnavailable):
                    await client.complete(asked)


async def test_callers_may_be_let_in_by_certificate(authority: Authority, stranger: Authority, tokenizer: str) -> None:
    """With the authority's name set, the handshake refuses whoever it has not signed."""
    public, caller = authority.issue("api.example.com"), authority.issue("caller.example.com")
    false = stranger.issue("caller.example.com", believes=authority.ca)
    asked = asked_of(1)
    async with system(target_of(model(pause_s=0)), None, tokenizer, **public.public_settings) as services:

        async def ids_with(identity: Identity | None) -> tuple[int, ...]:
            tls = ClientTls(
                ca=authority.ca,
                cert=identity.cert if identity else None,
                key=identity.key if identity else None,
                server_name="api.example.com",
            )
            async with GenerationClient(services.orchestrator.address, tls=tls, max_resumptions=0) as client:
                return (await client.complete(asked)).token_ids

        for refused in (None, false):
            with pytest.raises(ServerUnavailable):
                await ids_with(refused)
        assert await ids_with(caller) == right_text(asked)
