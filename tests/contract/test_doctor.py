"""`paceline.doctor` against real services in this process: each planted fault is found by its check, which says what to
do, and where nothing is wrong nothing is found.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest

from orchestrator.text import Tokenizer
from paceline.bench.delay_link import Relay
from paceline.cli.serving import free_port
from paceline.client import ClientTls, DeploymentStatus, GenerationClient
from paceline.doctor.examination import Deployment, Examination
from paceline.doctor.findings import Finding, Outcome
from paceline.rpc import Server
from paceline.tls import ServerTls
from paceline.tokens import TokenEntry, TokenFile, hash_token, new_token, write_tokens
from paceline.types import ModelInfo
from paceline.version import installed_version
from tests.certificates import DRAFTER, ORCHESTRATOR, TARGET, Authority
from tests.checkpoints import save_markov_checkpoint
from tests.contract.stream_peer import VOCAB
from tests.contract.test_migration import drafter, model
from tests.fake_generation import FakeGenerationService, serving
from tests.fakes import FakeModel, counting_logits, fake_info
from tests.harness import (
    LIMIT_S,
    Running,
    model_drafter_of,
    orchestrator_of,
    request,
    running,
    system,
    target_of,
)

A_DAY_S = 86_400.0
LONG_S = 90 * A_DAY_S
PUBLIC = "api.example"
ROW_S = 0.004  # of the target's model: its steps are long beside the loopback, also on a busy machine


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One word a token: t0, t1, ..."""
    uniform = [[1 / VOCAB] * VOCAB] * VOCAB
    return str(save_markov_checkpoint(tmp_path_factory.mktemp("models") / "words", uniform))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


def target(*, info: Callable[[FakeModel], ModelInfo] = fake_info, **settings: Any) -> Any:
    fake = model(pause_s=ROW_S)
    return target_of(fake, info(fake), **{"heartbeat_s": 0.05, **settings})


async def examine(
    endpoint: str,
    *,
    asks_for_answers: bool = False,
    version: str | None = None,
    clock: Callable[[], float] = time.time,
    addresses: Sequence[str] = (),
    **deployment: Any,
) -> list[Finding]:
    """Of a machine that nobody else reaches, unless it is given addresses."""
    examination = Examination(
        Deployment(endpoint=endpoint, **deployment),
        timeout_s=LIMIT_S / 6,
        asks_for_answers=asks_for_answers,
        version=version,
        clock=clock,
        addresses=lambda: addresses,
    )
    return await examination.run()


def faults(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.outcome in (Outcome.WARNING, Outcome.FAILED)]


def only_fault(findings: Sequence[Finding]) -> Finding:
    """The one planted; nothing else is complained of."""
    (fault,) = faults(findings)
    return fault


async def status_of(client: GenerationClient, is_there: Callable[[DeploymentStatus], bool]) -> None:
    """Wait until the pools look like that."""
    async with asyncio.timeout(LIMIT_S):
        while not is_there(await client.pool_status()):  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.02)


# ---------------------------------------------------------------------------------------------------------------------
# Nothing is wrong


async def test_nothing_is_found_where_nothing_is_wrong(tokenizer: str) -> None:
    """Every check that applies is made and comes out well, the two answers and HTTP among them."""
    port = free_port()
    async with system(target(), drafter(), tokenizer, http_port=port) as services:
        findings = await examine(
            services.orchestrator.address,
            asks_for_answers=True,
            http_url=f"http://127.0.0.1:{port}",
            targets=(services.target.address,),
        )
    assert faults(findings) == []
    assert {finding.name for finding in findings if finding.outcome is Outcome.OK} == {
        "port", "tls", "server", "health", "token", "exposure", "version", "clock", "round trip", "targets", "drafters",
        "model", "answer", "drafter distance", "memory", "model service", "http", "acceptance",
    }  # fmt: skip


async def test_nothing_is_found_behind_certificates_and_tokens(
    authority: Authority, tokenizer: str, tmp_path: Path
) -> None:
    """Everything over TLS with checked names; without a drafter there is nothing to be said of one."""
    orchestrator = authority.issue(ORCHESTRATOR, expires_in_s=LONG_S)
    public = authority.issue(PUBLIC, expires_in_s=LONG_S)
    secret, path = new_token(), tmp_path / "tokens.yaml"
    write_tokens(path, TokenFile(tokens=(TokenEntry(name="alice", sha256=hash_token(secret)),)))
    port = free_port()
    async with system(
        target(**authority.issue(TARGET, expires_in_s=LONG_S).settings),
        drafter(**authority.issue(DRAFTER, expires_in_s=LONG_S).settings),
        tokenizer,
        **orchestrator.settings,
        public_tls_cert=public.cert,
        public_tls_key=public.key,
        tokens_file=path,
        http_port=port,
    ) as services:
        assert services.drafter is not None
        findings = await examine(
            services.orchestrator.address,
            asks_for_answers=True,
            token=secret,
            tokens_file=path,
            tls=ClientTls(ca=authority.ca, server_name=PUBLIC),
            services_tls=ClientTls(ca=orchestrator.ca, cert=orchestrator.cert, key=orchestrator.key),
            targets=(services.target.address,),
            drafters=(services.drafter.address,),
            http_url=f"https://127.0.0.1:{port}",
        )
    assert faults(findings) == []
    assert secret not in repr(findings)


# ---------------------------------------------------------------------------------------------------------------------
# Who is there


async def test_a_port_where_nothing_listens() -> None:
    """It is said before anything else, and nothing else is tried."""
    fault = only_fault(await examine(f"127.0.0.1:{free_port()}"))
    assert (fault.name, fault.outcome) == ("port", Outcome.FAILED)
    assert "Nothing listens" in fault.sentence
    assert "paceline up" in fault.remedy
    assert "--endpoint" in fault.remedy


@pytest.mark.parametrize("host", ["a" * 64, "no-such-host.invalid"])
async def test_a_host_that_does_not_exist(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its name is too long for one, or nobody has it."""

    async def resolve(self: asyncio.AbstractEventLoop, host: str, port: int, **_: Any) -> NoReturn:
        host.encode("idna")
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
    fault = only_fault(await examine(f"{host}:9000"))
    assert (fault.name, fault.outcome) == ("port", Outcome.FAILED)
    assert "no host" in fault.sentence
    assert "Correct --endpoint" in fault.remedy


@asynccontextmanager
async def greeting(words: bytes) -> AsyncIterator[str]:
    """Another program that says the same to everybody, at HOST:PORT."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(words)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("words", "sentence", "remedy"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "Something else than Paceline", "--endpoint"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "HTTP/1", "--http"),
        (b"", "says nothing", "--endpoint"),
        (b"+\n", "Something else than Paceline", "--endpoint"),
    ],
)
async def test_something_else_listens_there(words: bytes, sentence: str, remedy: str) -> None:
    """It is told by its first words from Paceline, and an HTTP port from others."""
    async with greeting(words) as address:
        fault = only_fault(await examine(address))
    assert (fault.name, fault.outcome) == ("port", Outcome.FAILED)
    assert sentence in fault.sentence
    assert remedy in fault.remedy


async def test_another_grpc_server_is_no_orchestrator(tokenizer: str) -> None:
    """Nor is a target service, which is called by its name."""
    other = Server(host="127.0.0.1", port=0)
    await other.start("other.Service")
    try:
        unknown = only_fault(await examine(other.address))
    finally:
        await other.stop(0)
    async with running(target()) as service:
        known = only_fault(await examine(service.address))
    assert (unknown.name, known.name) == ("server", "server")
    assert "no Paceline orchestrator" in unknown.sentence
    assert "target service" in known.sentence
    assert "--endpoint" in unknown.remedy
    assert "--endpoint" in known.remedy


async def test_versions_that_differ(tokenizer: str) -> None:
    """Ours from the server's by more than a patch is a failure; one of the services' is a warning that names it."""
    old = "0.0.1"
    async with system(target(info=lambda fake: replace(fake_info(fake), version=old)), None, tokenizer) as services:
        theirs = only_fault(await examine(services.orchestrator.address))
        ours = only_fault(await examine(services.orchestrator.address, version="9.0.0"))
    assert (theirs.name, theirs.outcome) == ("version", Outcome.WARNING)
    assert f"{old}: the target at {services.target.address}" in theirs.sentence
    assert f"paceline=={installed_version()}" in theirs.remedy
    assert (ours.name, ours.outcome) == ("version", Outcome.FAILED)
    assert "9.0.0" in ours.sentence
    assert "Install one version" in ours.remedy


@pytest.mark.parametrize(("shift_s", "words"), [(300.0, "behind"), (-300.0, "ahead of")])
async def test_a_clock_that_is_off_by_minutes(tokenizer: str, shift_s: float, words: str) -> None:
    """Of the orchestrator it is a failure, of a model service a warning; both are to follow a time server."""
    async with system(target(), None, tokenizer) as services:
        findings = faults(await examine(services.orchestrator.address, clock=lambda: time.time() + shift_s))
    assert [(finding.name, finding.outcome) for finding in findings] == [
        ("clock", Outcome.FAILED),
        ("clock", Outcome.WARNING),
    ]
    assert f"300 s {words} this machine's" in findings[0].sentence
    assert all("NTP" in finding.remedy for finding in findings)


# ---------------------------------------------------------------------------------------------------------------------
# Certificates and tokens


async def test_an_expired_certificate(authority: Authority) -> None:
    """Its end is said, and where the new one goes."""
    identity = authority.issue("localhost", expires_in_s=-A_DAY_S)
    credentials = grpc.ssl_server_credentials([(identity.key.read_bytes(), identity.cert.read_bytes())])
    with serving(FakeGenerationService(), credentials=credentials) as address:
        fault = only_fault(await examine(address, tls=ClientTls(ca=authority.ca, server_name="localhost")))
    assert (fault.name, fault.outcome) == ("tls", Outcome.FAILED)
    assert "has expired on 20" in fault.sentence
    assert "Renew it" in fault.remedy
    assert "--public-tls-cert" in fault.remedy


@asynccontextmanager
async def behind_certificate(tokenizer: str, authority: Authority, **settings: Any) -> AsyncIterator[Running]:
    """An orchestrator whose public certificate is that of `PUBLIC`."""
    public = authority.issue(PUBLIC, expires_in_s=LONG_S)
    settings = {"public_tls_cert": public.cert, "public_tls_key": public.key, **settings}
    async with (
        running(target()) as service,
        running(orchestrator_of(service.address, None, tokenizer, **settings)) as orchestrator,
    ):
        yield orchestrator


async def test_a_certificate_of_another_name(authority: Authority, tokenizer: str) -> None:
    """The name that it has is said; asked for by that one, the server is well."""
    async with behind_certificate(tokenizer, authority) as server:
        fault = only_fault(await examine(server.address, tls=ClientTls(ca=authority.ca)))
        right = await examine(server.address, tls=ClientTls(ca=authority.ca, server_name=PUBLIC))
    assert (fault.name, fault.outcome) == ("tls", Outcome.FAILED)
    assert PUBLIC in fault.sentence
    assert "--tls-name" in fault.remedy
    assert faults(right) == []


async def test_other_ways_in_which_tls_goes_wrong(authority: Authority, tokenizer: str, tmp_path: Path) -> None:
    """An authority that nobody named, plaintext to TLS and the other way round, and a caller without a certificate."""
    stranger = Authority(tmp_path / "stranger")
    over_tls = ClientTls(ca=authority.ca, server_name=PUBLIC)
    async with behind_certificate(tokenizer, authority) as server:
        unknown = only_fault(await examine(server.address, tls=replace(over_tls, ca=stranger.ca)))
        plain = only_fault(await examine(server.address))
    async with behind_certificate(tokenizer, authority, public_tls_ca=authority.ca) as server:
        bare = only_fault(await examine(server.address, tls=over_tls))
    async with system(target(), None, tokenizer) as services:
        needless = only_fault(await examine(services.orchestrator.address, tls=over_tls))
    found = {"--tls-ca": unknown, "--tls,": plain, "--tls-cert": bare, "leave out --tls": needless}
    assert {fault.name for fault in found.values()} == {"tls"}
    assert {fault.outcome for fault in found.values()} == {Outcome.FAILED}
    for remedy, fault in found.items():
        assert remedy in fault.remedy


async def test_certificates_that_expire_soon(authority: Authority) -> None:
    """The server's and our own, a fortnight before."""
    theirs, ours = authority.issue("localhost", expires_in_s=5 * A_DAY_S), authority.issue("me", expires_in_s=A_DAY_S)
    server = Server(host="127.0.0.1", port=0, tls=ServerTls(cert=theirs.cert, key=theirs.key))
    await server.start("other.Service")
    try:
        tls = ClientTls(ca=authority.ca, cert=ours.cert, key=ours.key, server_name="localhost")
        found = [finding for finding in faults(await examine(server.address, tls=tls)) if finding.name == "tls"]
    finally:
        await server.stop(0)
    assert [finding.outcome for finding in found] == [Outcome.WARNING, Outcome.WARNING]
    assert "sign a new one" in found[0].remedy
    assert "--public-tls-cert" in found[1].remedy


async def test_tokens_that_are_not_taken(tokenizer: str, tmp_path: Path) -> None:
    """None, a wrong one, and one that has expired, which the file on this machine tells; no token is ever shown."""
    good, old, wrong = new_token(), new_token(), new_token()
    path = tmp_path / "tokens.yaml"
    entries = (
        TokenEntry(name="alice", sha256=hash_token(good)),
        TokenEntry.model_validate({"name": "bob", "sha256": hash_token(old), "expires": "2020-01-01"}),
    )
    write_tokens(path, TokenFile(tokens=entries))
    async with system(target(), None, tokenizer, tokens_file=path) as services:
        endpoint = services.orchestrator.address
        missing = only_fault(await examine(endpoint))
        refused = only_fault(await examine(endpoint, token=wrong))
        expired = faults(await examine(endpoint, token=old, tokens_file=path))
        taken = await examine(endpoint, token=good, tokens_file=path)
        path.chmod(0o644)
        readable = only_fault(await examine(endpoint, token=good, tokens_file=path))
    assert (missing.name, missing.outcome) == (refused.name, refused.outcome) == ("token", Outcome.FAILED)
    assert "--token" in missing.remedy
    assert "paceline token list" in refused.remedy
    assert [finding.name for finding in expired] == ["token", "token"]
    assert "bob" in expired[0].sentence
    assert "paceline token new bob --replace" in expired[0].remedy
    assert faults(taken) == []
    assert (readable.name, readable.outcome) == ("tokens file", Outcome.WARNING)
    assert "chmod 600" in readable.remedy
    assert not any(token in repr((missing, refused, expired, taken)) for token in (good, old, wrong))


async def test_a_server_that_is_open_to_everybody(tokenizer: str) -> None:
    """On all interfaces without tokens; unless whoever asks says that the network may be trusted."""
    elsewhere = ("127.0.0.2",)  # stands for another address of this machine: loopback alone does not listen there
    async with (
        running(target()) as service,
        running(orchestrator_of(service.address, None, tokenizer, host="0.0.0.0", trust_network=True)) as orchestrator,
    ):
        endpoint = f"127.0.0.1:{orchestrator.port}"
        fault = only_fault(await examine(endpoint, addresses=elsewhere))
        trusted = await examine(endpoint, addresses=elsewhere, trust_network=True)
    assert (fault.name, fault.outcome) == ("exposure", Outcome.WARNING)
    assert "--tokens-file" in fault.remedy
    assert "--trust-network" in fault.remedy
    assert faults(trusted) == []


# ---------------------------------------------------------------------------------------------------------------------
# Pools


async def test_no_target_is_connected(tokenizer: str) -> None:
    """After the only one has gone; no answer is asked for then."""
    async with system(target(), None, tokenizer) as services:
        await services.target.stop()
        await status_of(services.client, lambda status: not status.pools[0].replicas[0].is_connected)
        fault = only_fault(await examine(services.orchestrator.address, asks_for_answers=True))
    assert (fault.name, fault.outcome) == ("targets", Outcome.FAILED)
    assert services.target.address in fault.sentence
    assert "python -m target_service" in fault.remedy


async def test_no_drafter_is_connected(tokenizer: str) -> None:
    """A warning, for answers go on without."""
    address = f"127.0.0.1:{free_port()}"
    async with (
        running(target()) as service,
        running(orchestrator_of(service.address, address, tokenizer, drafter_timeout_s=0.05)) as orchestrator,
    ):
        fault = only_fault(await examine(orchestrator.address, asks_for_answers=True))
    assert (fault.name, fault.outcome) == ("drafters", Outcome.WARNING)
    assert address in fault.sentence
    assert "python -m drafter_service" in fault.remedy


async def test_a_drafter_of_another_tokenizer(tokenizer: str) -> None:
    """The orchestrator says which two it compared; so do the services themselves, with no orchestrator at all."""
    ours, other = Tokenizer.load(tokenizer).fingerprint, "b" * 64

    def target_info(fake: FakeModel) -> ModelInfo:
        return replace(fake_info(fake), tokenizer_sha256=ours)

    fake, port = FakeModel(counting_logits(VOCAB), vocab_size=VOCAB), free_port()
    stranger = replace(fake_info(fake, model_id="stranger", method="draft_model"), tokenizer_sha256=other)
    async with (
        running(target(info=target_info)) as service,
        running(
            orchestrator_of(service.address, f"127.0.0.1:{port}", tokenizer, drafter_timeout_s=0.05)
        ) as orchestrator,
        running(model_drafter_of(fake, stranger, port=port)) as refused,
        GenerationClient(orchestrator.address) as client,
    ):
        await status_of(client, lambda status: bool(status.pools[1].replicas[0].refusal))
        found = faults(await examine(orchestrator.address))
        alone = faults(
            await examine(f"127.0.0.1:{free_port()}", targets=(service.address,), drafters=(refused.address,))
        )
    assert [(finding.name, finding.outcome) for finding in found] == [
        ("drafters", Outcome.FAILED),
        ("tokenizers", Outcome.FAILED),
    ]
    assert [finding.name for finding in alone] == ["port", "tokenizers"]
    for finding in (*found, alone[1]):
        assert ours[:16] in finding.sentence
        assert other[:16] in finding.sentence
        assert "tokenizer" in finding.remedy
    assert "--use-heterogeneous-vocab" in alone[1].remedy


async def test_a_drafter_that_is_far_away(tokenizer: str) -> None:
    """Its drafts take longer than all the steps they could save."""
    async with running(drafter()) as near:
        relay = Relay(("127.0.0.1", near.port))
        far = f"127.0.0.1:{await relay.listen()}"
        async with (
            running(target()) as service,
            running(orchestrator_of(service.address, far, tokenizer)) as orchestrator,
            GenerationClient(orchestrator.address) as client,
        ):
            await status_of(client, lambda status: status.pools[1].replicas[0].is_connected)
            relay.delay_s = 0.15
            fault = only_fault(await examine(orchestrator.address, asks_for_answers=True))
    assert (fault.name, fault.outcome) == ("drafter distance", Outcome.WARNING)
    assert "Start a drafter nearer" in fault.remedy


class Held:
    """A target's model that holds its first row back, and with it all tokens fed so far, until it is let go."""

    def __init__(self) -> None:
        self.is_let_go = threading.Event()
        rows = counting_logits(VOCAB)

        def logits(ids: Sequence[int]) -> Sequence[float]:
            self.is_let_go.wait(LIMIT_S)
            return rows(ids)

        self.model = FakeModel(logits, vocab_size=VOCAB, num_blocks=8, block_size=16)


async def test_memory_for_keys_and_values_is_full(tokenizer: str) -> None:
    """One long prompt fills it; what helps is named, and no answer is in its way."""
    held = Held()
    async with system(target_of(held.model, heartbeat_s=0.05), None, tokenizer) as services:
        answer = asyncio.ensure_future(services.client.complete(request((1, 2) * 60, max_tokens=2)))
        try:
            await status_of(services.client, lambda status: status.pools[0].replicas[0].kv_used_tokens > 116)
            fault = only_fault(await examine(services.orchestrator.address))
        finally:
            held.is_let_go.set()
            await answer
    assert (fault.name, fault.outcome) == ("memory", Outcome.WARNING)
    assert services.target.address in fault.sentence
    assert "--kv-budget-tokens" in fault.remedy


async def test_a_model_that_is_not_served(tokenizer: str) -> None:
    """Those that are served are named."""
    async with system(target(), None, tokenizer) as services:
        fault = only_fault(await examine(services.orchestrator.address, model="other"))
    assert (fault.name, fault.outcome) == ("model", Outcome.FAILED)
    assert "'fake'" in fault.remedy


# ---------------------------------------------------------------------------------------------------------------------
# HTTP


async def test_the_token_is_shown_to_no_http_url_that_others_can_read(
    tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond this machine in plaintext: nothing is asked there, and it says what to do."""

    async def never(*_: object, **__: object) -> NoReturn:
        raise AssertionError("it was asked")

    monkeypatch.setattr("paceline.doctor.examination.look_at_url", never)
    async with system(target(), None, tokenizer) as services:
        fault = only_fault(
            await examine(services.orchestrator.address, http_url="http://gateway.example:8000", token=new_token())
        )
    assert fault.name == "token"
    assert "gateway.example" in fault.sentence
    assert "https" in fault.remedy


async def test_http_urls_that_lead_elsewhere(tokenizer: str) -> None:
    """Nobody there, something else, https where plaintext is spoken, and a token that is missing."""
    port = free_port()
    async with system(target(), None, tokenizer, http_port=port) as services:
        endpoint = services.orchestrator.address
        nobody = only_fault(await examine(endpoint, http_url=f"http://127.0.0.1:{free_port()}"))
        async with greeting(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nhi") as other:
            another = only_fault(await examine(endpoint, http_url=f"http://{other}"))
        scheme = only_fault(await examine(endpoint, http_url=f"https://127.0.0.1:{port}"))
    assert {nobody.name, another.name, scheme.name} == {"http"}
    assert "--http-port" in nobody.remedy
    assert "not Paceline's HTTP API" in another.sentence
    assert "http or https" in scheme.remedy
