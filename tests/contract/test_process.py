"""The life of the services: start, signs of life, health, drain, end, and what goes wrong on the way.

First within this process, target and drafter alike; then as processes of their own, as `python -m` starts them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest
import structlog
import torch

import drafter_service.service
import orchestrator.service
import target_service.service
from drafter_service.methods.draft_model import DraftModelMethod
from drafter_service.service import serve_drafter
from paceline.client import complete
from paceline.generation import Completion
from paceline.process import Serve
from paceline.rpc import open_channel
from paceline.settings import DrafterSettings, TargetSettings
from paceline.v1 import drafter_service_pb2 as drafter_pb
from paceline.v1 import session_pb2 as session_pb
from paceline.v1 import target_service_pb2 as target_pb
from paceline.v1.drafter_service_pb2_grpc import DrafterServiceStub
from paceline.v1.target_service_pb2_grpc import TargetServiceStub
from target_service.service import serve_target
from tests.checkpoints import save_tiny_checkpoint
from tests.contract.stream_peer import (
    LIMIT_S,
    MAX_CONTEXT,
    VOCAB,
    StreamPeer,
    assert_is_sentence,
    drafter_peer,
    health_of,
    open_session,
    target_peer,
)
from tests.fakes import FakeModel, counting_logits, fake_info
from tests.harness import Running, request, start

PROMPT = (0, 1, 2)
SESSION = open_session(PROMPT)
CLOSE = session_pb.CloseSession()
VERIFY = target_pb.VerifyDraft(base_length=3)
COMMIT = drafter_pb.Commit(base_length=3, draft_length=1, credit=1)


# ---------------------------------------------------------------------------------------------------------------------
# Target and drafter, which live the same life


@dataclass(frozen=True)
class Kind:
    """One kind of model service, and items for its stream: `asked` is answered by an event that is no failure."""

    name: str
    serve: Callable[..., Serve]  # settings
    peer: Callable[[str], AbstractAsyncContextManager[StreamPeer[Any, Any]]]
    info: Callable[[grpc.aio.Channel], Any]
    opened: Callable[[str], Any]  # session id
    asked: Callable[[str], Any]
    closed: Callable[[str], Any]


def counting_model() -> FakeModel:
    return FakeModel(counting_logits(VOCAB), vocab_size=VOCAB, max_context=MAX_CONTEXT)


def counting_target(**settings: Any) -> Serve:
    model = counting_model()
    info = fake_info(counting_model())
    options = TargetSettings(**({"heartbeat_s": 0.02, "drain_s": 0} | settings))
    return lambda lifetime: serve_target(lifetime, options, model, info)


def counting_drafter(**settings: Any) -> Serve:
    model = counting_model()
    options = DrafterSettings(**({"heartbeat_s": 0.02, "drain_s": 0} | settings))
    method = DraftModelMethod(model, distribution_entries=4)
    return lambda lifetime: serve_drafter(lifetime, options, method, fake_info(model, method="draft_model"))


TARGET = Kind(
    name="paceline.v1.TargetService",
    serve=counting_target,
    peer=target_peer,
    info=lambda channel: TargetServiceStub(channel).GetTargetInfo(target_pb.GetTargetInfoRequest(), timeout=LIMIT_S),
    opened=lambda session_id: target_pb.TargetCommand(session_id=session_id, epoch=1, open=SESSION),
    asked=lambda session_id: target_pb.TargetCommand(session_id=session_id, epoch=1, verify=VERIFY),
    closed=lambda session_id: target_pb.TargetCommand(session_id=session_id, epoch=1, close=CLOSE),
)
DRAFTER = Kind(
    name="paceline.v1.DrafterService",
    serve=counting_drafter,
    peer=drafter_peer,
    info=lambda channel: DrafterServiceStub(channel).GetDrafterInfo(
        drafter_pb.GetDrafterInfoRequest(), timeout=LIMIT_S
    ),
    opened=lambda session_id: drafter_pb.DrafterCommand(session_id=session_id, epoch=1, open=SESSION),
    asked=lambda session_id: drafter_pb.DrafterCommand(session_id=session_id, epoch=1, commit=COMMIT),
    closed=lambda session_id: drafter_pb.DrafterCommand(session_id=session_id, epoch=1, close=CLOSE),
)
both_kinds = pytest.mark.parametrize("kind", [TARGET, DRAFTER], ids=["target", "drafter"])


@asynccontextmanager
async def alive(kind: Kind, **settings: Any) -> AsyncIterator[Running]:
    """A service of its own; ended without ceremony unless the test has stopped it."""
    service = await start(kind.serve(**settings))
    try:
        yield service
    finally:
        if not service.task.done():
            service.lifetime.stop()
            async with asyncio.timeout(LIMIT_S):
                await service.kill()


async def assert_served(peer: StreamPeer[Any, Any], kind: Kind, session_id: str) -> None:
    await peer.send(kind.asked(session_id))
    event = await peer.event(session_id)
    assert event.WhichOneof("event") in {"verdict", "proposal"}, event


@both_kinds
async def test_info_says_who_the_service_is(kind: Kind) -> None:
    """Sizes of the model, and an incarnation."""
    async with alive(kind) as service, open_channel(service.address) as channel:
        info = (await kind.info(channel)).info
    assert (info.model_id, info.vocab_size, info.max_context) == ("fake", VOCAB, MAX_CONTEXT)
    assert info.incarnation


@both_kinds
async def test_load_is_reported_on_every_stream(kind: Kind) -> None:
    """Each stream hears signs of life again and again, with the number of sessions held."""
    async with alive(kind) as service, kind.peer(service.address) as first, kind.peer(service.address) as second:
        assert (await first.load()).sessions == 0
        await first.send(kind.opened("a"), kind.opened("b"))
        for peer in (first, second):
            await peer.load(lambda load: load.sessions == 2)
            assert not (await peer.load()).draining


@both_kinds
async def test_unused_session_is_forgotten(kind: Kind) -> None:
    """After its idle time a session is gone; its next item hears SESSION_NOT_FOUND."""
    async with alive(kind, session_idle_ttl_s=0.05) as service, kind.peer(service.address) as peer:
        await peer.send(kind.opened("a"))
        await assert_served(peer, kind, "a")
        await peer.load(lambda load: load.sessions == 0)
        await peer.send(kind.asked("a"))
        assert (await peer.failure("a")).reason == "SESSION_NOT_FOUND"


@both_kinds
async def test_sessions_of_a_vanished_peer_are_forgotten(kind: Kind) -> None:
    """A peer that hangs up leaves no session behind for longer than the idle time."""
    async with alive(kind, session_idle_ttl_s=0.05) as service, kind.peer(service.address) as witness:
        async with kind.peer(service.address) as peer:
            await peer.send(kind.opened("a"))
            await assert_served(peer, kind, "a")
        await witness.load(lambda load: load.sessions == 0)


@both_kinds
async def test_half_closed_stream_ends_regularly(kind: Kind) -> None:
    """A peer that has said all it wanted, and has its answers, sees the stream end with OK."""
    async with alive(kind) as service, kind.peer(service.address) as peer:
        await peer.send(kind.opened("a"))
        await assert_served(peer, kind, "a")
        await peer.half_close()
        assert await peer.ending() is grpc.StatusCode.OK


@both_kinds
async def test_health_says_serving_then_not_serving(kind: Kind) -> None:
    """The service and the server as a whole are healthy from start to drain; other names are unknown."""
    async with alive(kind, drain_s=60) as service, kind.peer(service.address) as peer:
        for name in ("", kind.name):
            assert await health_of(service.address, name) == "SERVING"
        assert await health_of(service.address, "paceline.v1.Other") == "NOT_FOUND"
        await peer.send(kind.opened("a"))
        await assert_served(peer, kind, "a")
        service.lifetime.stop()
        await peer.load(lambda load: load.draining)
        for name in ("", kind.name):
            assert await health_of(service.address, name) == "NOT_SERVING"


@both_kinds
async def test_draining_service_serves_its_sessions_and_ends_with_the_last(kind: Kind) -> None:
    """Asked to stop, it says so on the stream, and goes on with what it holds."""
    async with alive(kind, drain_s=60) as service, kind.peer(service.address) as peer:
        await peer.send(kind.opened("a"), kind.opened("b"))
        await assert_served(peer, kind, "a")
        service.lifetime.stop()
        await peer.load(lambda load: load.draining)
        await assert_served(peer, kind, "b")
        await peer.send(kind.closed("a"), kind.closed("b"))
        async with asyncio.timeout(LIMIT_S):
            await service.task


@both_kinds
async def test_draining_service_takes_no_new_sessions(kind: Kind) -> None:
    """An opening in the drain is refused by DRAINING; those held are not disturbed."""
    async with alive(kind, drain_s=60) as service, kind.peer(service.address) as peer:
        await peer.send(kind.opened("a"))
        await assert_served(peer, kind, "a")
        service.lifetime.stop()
        await peer.load(lambda load: load.draining)
        await peer.send(kind.opened("b"))
        assert (await peer.failure("b")).reason == "DRAINING"


@both_kinds
async def test_service_stops_soon_though_streams_and_sessions_are_open(kind: Kind) -> None:
    """Without time to drain, a peer that does not let go is cut off, and hears so."""
    async with alive(kind) as service, kind.peer(service.address) as peer:
        await peer.send(kind.opened("a"))
        await assert_served(peer, kind, "a")
        async with asyncio.timeout(LIMIT_S / 2):
            await service.stop()
        assert await peer.ending() in {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}


# ---------------------------------------------------------------------------------------------------------------------
# Start-up errors: `main` itself, in this process, because a process for each would take seconds

Main = Callable[[], NoReturn]
MAINS: dict[str, Main] = {
    "target": target_service.service.main,
    "drafter": drafter_service.service.main,
    "orchestrator": orchestrator.service.main,
}
OTHERWISE_FINE = {
    "target": (),
    "drafter": (),
    "orchestrator": ("--target", "127.0.0.1:1"),
}
every_service = pytest.mark.parametrize("service", MAINS)


@dataclass(frozen=True)
class Exit:
    """How a command ended."""

    status: int
    stdout: str
    stderr: str

    def assert_fails(self, status: int, *, saying: str) -> None:
        """With one sentence for a person, and nothing on standard output."""
        assert (self.status, self.stdout) == (status, ""), self
        (sentence,) = self.stderr.splitlines()
        assert saying in sentence, sentence
        assert_is_sentence(sentence)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Exit]]:
    """Runs the command line of a service as far as the error that ends it."""
    threads = torch.get_num_threads()

    def run(service: str, *arguments: str) -> Exit:
        monkeypatch.setattr(sys, "argv", [service, "--log-level", "error", *arguments])
        with pytest.raises(SystemExit) as ended:
            MAINS[service]()
        captured = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return Exit(ended.value.code, captured.out, captured.err)

    yield run
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    torch.set_num_threads(threads)


@every_service
def test_unknown_option_is_refused(command: Callable[..., Exit], service: str) -> None:
    """Status 2, and the option is named."""
    ended = command(service, *OTHERWISE_FINE[service], "--no-such-option", "1")
    assert (ended.status, ended.stdout) == (2, "")
    assert "--no-such-option" in ended.stderr
    assert "Traceback" not in ended.stderr


@every_service
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--port", "70000"),
        ("--port", "http"),
        ("--heartbeat-s", "0"),
        ("--max-sessions", "-1"),
        ("--log-level", "loud"),
    ],
)
def test_option_out_of_range_is_refused_by_name(
    command: Callable[..., Exit], service: str, option: str, value: str
) -> None:
    """Status 2, one line that names the option."""
    ended = command(service, *OTHERWISE_FINE[service], option, value)
    assert (ended.status, ended.stdout) == (2, "")
    (sentence,) = ended.stderr.splitlines()
    assert sentence.startswith(f"{option}: ")


@pytest.mark.parametrize(
    ("service", "variable", "value", "option"),
    [
        ("target", "PACELINE_TARGET_PORT", "-1", "--port"),
        ("target", "PACELINE_TARGET_DTYPE", "int3", "--dtype"),
        ("drafter", "PACELINE_DRAFTER_LOGIT_NOISE", "loud", "--logit-noise"),
        ("orchestrator", "PACELINE_ORCHESTRATOR_DRAFT_LENGTH", "65", "--draft-length"),
        ("orchestrator", "PACELINE_ORCHESTRATOR_RULE", "greedy", "--rule"),
    ],
)
def test_environment_value_out_of_range_is_refused_by_name(
    command: Callable[..., Exit],
    monkeypatch: pytest.MonkeyPatch,
    service: str,
    variable: str,
    value: str,
    option: str,
) -> None:
    """Status 2, one line that names the setting; a variable is held to the same limits as the option."""
    monkeypatch.setenv(variable, value)
    ended = command(service, *OTHERWISE_FINE[service])
    assert (ended.status, ended.stdout) == (2, "")
    (sentence,) = ended.stderr.splitlines()
    assert option in sentence


def test_orchestrator_without_a_target_is_told_to_name_one(command: Callable[..., Exit]) -> None:
    """Status 2, and the option is named."""
    ended = command("orchestrator")
    assert (ended.status, ended.stdout) == (2, "")
    assert "--target" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_unknown_drafting_method_is_refused_by_name(
    command: Callable[..., Exit], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 1, and a sentence that names it and those that are known."""
    monkeypatch.setenv("PACELINE_DRAFTER_METHOD", "guess")
    ended = command("drafter")
    ended.assert_fails(1, saying="'guess'")
    assert "draft_model, hybrid, ngram, suffix" in ended.stderr


@pytest.mark.parametrize("service", ["target", "drafter"])
def test_unknown_model_is_refused_by_name(command: Callable[..., Exit], service: str, tmp_path: Path) -> None:
    """Status 1, and a sentence that names the model."""
    missing = tmp_path / "no-such-model"
    command(service, "--model", str(missing)).assert_fails(1, saying=str(missing))


def test_device_that_is_not_there_is_refused_by_name(command: Callable[..., Exit], tiny_target: Path) -> None:
    """Status 1, and a sentence that names the device."""
    command("target", "--model", str(tiny_target), "--device", "abacus").assert_fails(1, saying="abacus")


def test_settings_that_contradict_each_other_are_refused(command: Callable[..., Exit]) -> None:
    """Status 1, and a sentence that names both options."""
    ended = command("drafter", "--method", "ngram", "--prompt-lookup-min", "5", "--prompt-lookup-max", "4")
    ended.assert_fails(1, saying="--prompt-lookup-min")


def test_orchestrator_says_that_no_target_answers(command: Callable[..., Exit]) -> None:
    """Status 1 after the time to connect, and a sentence that names the address and what to start."""
    ended = command("orchestrator", "--target", "127.0.0.1:1", "--connect-timeout-s", "0.2")
    ended.assert_fails(1, saying="127.0.0.1:1")
    assert "target_service" in ended.stderr


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("option", ["--port", "--metrics-port"])
def test_taken_port_is_named(command: Callable[..., Exit], option: str) -> None:
    """Status 1, and a sentence that names the port, be it for gRPC or for metrics."""
    with taken_port() as port:
        ended = command("drafter", "--method", "ngram", option, str(port))
    ended.assert_fails(1, saying=f"{port}")
    assert option in ended.stderr


def test_host_of_another_machine_is_named(command: Callable[..., Exit]) -> None:
    """Status 1, and a sentence that names the address that cannot be listened on."""
    ended = command("drafter", "--method", "ngram", "--host", "192.0.2.1", "--port", "50999")
    ended.assert_fails(1, saying="192.0.2.1")


# ---------------------------------------------------------------------------------------------------------------------
# Real processes, few of them: each takes seconds to import what it needs


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("models") / "target", seed=1)


@dataclass(frozen=True)
class Story:
    """What three processes did: a target, an orchestrator, and a second target whose port was taken."""

    ready: dict[str, dict[str, Any]]
    answer: Completion
    ended: dict[str, Exit]


@pytest.fixture(scope="module")
def story(tiny_target: Path) -> Iterator[Story]:
    model = ("--model", str(tiny_target), "--dtype", "float32")
    with taken_port() as port, ExitStack() as processes:
        target = processes.enter_context(launched("target_service", *model, "--stop-with-parent"))
        refused = processes.enter_context(launched("target_service", *model, "--port", str(port)))
        ready = {"target": ready_line(target)}
        orchestrator = processes.enter_context(launched("orchestrator", "--target", ready["target"]["address"]))
        ready["orchestrator"] = ready_line(orchestrator)
        answer = complete(ready["orchestrator"]["address"], request((1, 2, 3), max_tokens=5), timeout_s=60)
        orchestrator.send_signal(signal.SIGTERM)
        ended = {"orchestrator": end_of(orchestrator), "refused": end_of(refused), "target": end_of(target)}
        yield Story(ready, answer, ended)


@contextmanager
def launched(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", module, "--threads", "1", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "services")])},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ready_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line: dict[str, Any] = json.loads(process.stdout.readline())
    return line


def end_of(process: subprocess.Popen[str]) -> Exit:
    """Close the standard input, then wait for the end; gives what was not read yet."""
    stdout, stderr = process.communicate(timeout=60)
    return Exit(process.returncode, stdout, stderr)


@pytest.mark.parametrize("service", ["target", "orchestrator"])
def test_process_prints_one_line_when_it_is_ready(story: Story, service: str) -> None:
    """The ready line names the service and its address, and nothing else is ever written on standard output."""
    line = story.ready[service]
    assert (line["event"], line["service"]) == ("ready", service)
    host, _, port = line["address"].rpartition(":")
    assert (host, int(port) > 0) == ("127.0.0.1", True)
    assert story.ended[service].stdout == ""


def test_processes_answer_together(story: Story) -> None:
    """An answer comes through both."""
    assert story.answer.usage.completion_tokens == 5


def test_process_ends_with_its_parent(story: Story) -> None:
    """With --stop-with-parent the end of standard input ends the process (the target): status 0, no traceback."""
    assert story.ended["target"].status == 0
    assert "Traceback" not in story.ended["target"].stderr


def test_process_ends_when_it_is_told_to(story: Story) -> None:
    """SIGTERM ends the process (the orchestrator): status 0, no traceback."""
    assert story.ended["orchestrator"].status == 0
    assert "Traceback" not in story.ended["orchestrator"].stderr


def test_process_whose_port_is_taken_says_so_in_one_sentence(story: Story) -> None:
    """Status 1, one line on standard error, and nothing on standard output."""
    story.ended["refused"].assert_fails(1, saying="--port")
