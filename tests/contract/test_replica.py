"""A model service inside somebody else's process: start, leases, health, figures, and an end in every case."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

import drafter_service.service
import target_service.service
from drafter_service.methods.draft_model import DraftModelMethod
from paceline.errors import Draining, PacelineError, StartupFailed
from paceline.model_service import ModelService
from paceline.process import Lifetime
from paceline.replica import ModelReplica
from paceline.settings import DrafterSettings, TargetSettings
from paceline.types import ModelInfo
from paceline.v1 import drafter_service_pb2 as drafter_pb
from paceline.v1 import session_pb2 as session_pb
from paceline.v1 import target_service_pb2 as target_pb
from tests.checkpoints import save_tiny_checkpoint
from tests.contract.stream_peer import (
    LIMIT_S,
    VOCAB,
    TargetPeer,
    assert_is_sentence,
    drafter_peer,
    health_of,
    open_session,
    target_peer,
)
from tests.fakes import FakeModel, Logits, counting_logits, fake_info
from tests.metrics import FakeMetrics

PROMPT = (0, 1, 2)


def counting_target(logits: Logits | None = None, **settings: Any) -> ModelService[Any, Any]:
    options = TargetSettings(**({"heartbeat_s": 0.02, "drain_s": 0} | settings))
    tokens = options.kv_budget_tokens or 1024
    model = FakeModel(
        logits or counting_logits(VOCAB), vocab_size=VOCAB, max_context=64, num_blocks=tokens, block_size=1
    )
    return target_service.service.assemble(options, model, fake_info(model))


@asynccontextmanager
async def replica_of(service: Any, **options: Any) -> AsyncIterator[ModelReplica]:
    replica = await ModelReplica.start(service, pool="target", **options)
    try:
        yield replica
    finally:
        await replica.stop()


def opened(session_id: str) -> target_pb.TargetCommand:
    return target_pb.TargetCommand(session_id=session_id, epoch=1, open=open_session(PROMPT))


def closed(session_id: str) -> target_pb.TargetCommand:
    return target_pb.TargetCommand(session_id=session_id, epoch=1, close=session_pb.CloseSession())


def verify(session_id: str, *draft_ids: int) -> target_pb.TargetCommand:
    return target_pb.TargetCommand(
        session_id=session_id, epoch=1, verify=target_pb.VerifyDraft(base_length=3, draft_ids=draft_ids)
    )


async def assert_served(peer: TargetPeer, session_id: str) -> None:
    await peer.send(verify(session_id))
    assert list((await peer.event(session_id)).verdict.token_ids) == [3]


async def until(is_reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not is_reached():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


# ---------------------------------------------------------------------------------------------------------------------
# What and where it is


async def test_replica_serves_where_it_says() -> None:
    """Everything that a control plane publishes is text, and the address answers."""
    async with replica_of(counting_target()) as replica:
        metadata = replica.metadata()
        assert metadata == {
            "grpc_address": replica.address,
            "pool": "target",
            "zone": "",
            "model_id": "fake",
            "tokenizer_sha256": "",
            "incarnation": "1",
            "method": "",
            "protocol": "paceline.v1",
        }
        async with target_peer(metadata["grpc_address"]) as peer:
            await peer.send(opened("a"))
            await assert_served(peer, "a")


@pytest.mark.parametrize(("host", "shown"), [("10.0.0.7", "10.0.0.7"), ("node-1", "node-1"), ("fd00::7", "[fd00::7]")])
async def test_advertised_host_stands_before_the_port_that_is_listened_on(host: str, shown: str) -> None:
    """For a service that listens on all interfaces."""
    async with replica_of(counting_target(host="0.0.0.0", trust_network=True), advertised_host=host) as replica:
        assert replica.address.startswith(f"{shown}:")
        port = replica.address.rpartition(":")[2]
        assert await health_of(f"127.0.0.1:{port}", "") == "SERVING"


HELD_MS = 30.0
PER_TOKEN_MS = 0.5


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Preparing a service sets the number of threads of the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def prepared(folder: Path) -> list[ModelService[Any, Any]]:
    """Target and drafter as they load from a checkpoint, with steps held."""
    options: dict[str, Any] = {
        "model": str(save_tiny_checkpoint(folder, seed=1)),
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "emulated_step_ms": HELD_MS,
        "emulated_step_ms_per_token": PER_TOKEN_MS,
        "drain_s": 0,
    }
    return [
        target_service.service.prepare(TargetSettings(**options)),
        drafter_service.service.prepare(DrafterSettings(**options)),
    ]


async def test_emulated_service_says_so(tmp_path: Path) -> None:
    """The model's description, a warning in the log, and the ready line, which names the times that are set."""
    for service in prepared(tmp_path / "model"):
        assert service.info.emulated
        with capture_logs() as logs:
            fields = await ready_fields(service)
        assert emulation(fields) == {"emulated_step_ms": HELD_MS, "emulated_step_ms_per_token": PER_TOKEN_MS}
        assert [line for line in logs if line["log_level"] == "warning" and "emulated" in line["event"]]


async def test_emulated_service_takes_its_time(tmp_path: Path) -> None:
    """No verdict, and no token of a draft, is there before the steps it took have lasted as long as set."""
    target, drafter = prepared(tmp_path / "model")
    session = open_session(PROMPT, vocab_size=target.info.vocab_size)
    async with replica_of(target) as replica, target_peer(replica.address) as peer:
        await peer.send(target_pb.TargetCommand(session_id="a", epoch=1, open=session), verify("a", 1, 2))
        assert (await peer.event("a")).verdict.step_time_us >= 1000 * HELD_MS
    async with replica_of(drafter) as replica, drafter_peer(replica.address) as drafts:
        commit = drafter_pb.Commit(base_length=3, draft_length=2, credit=2)
        await drafts.send(
            drafter_pb.DrafterCommand(session_id="a", epoch=1, open=session),
            drafter_pb.DrafterCommand(session_id="a", epoch=1, commit=commit),
        )
        assert (await drafts.event("a")).proposal.draft_time_us >= 2 * 1000 * HELD_MS


def test_steps_cannot_be_held_where_there_is_no_model() -> None:
    """Prompt lookup takes none: a sentence says what to drop."""
    options: dict[str, Any] = {"method": "ngram", "emulated_step_ms": 1}
    with pytest.raises(StartupFailed, match="--emulated-step-ms") as failure:
        drafter_service.service.prepare(DrafterSettings(**options))
    assert_is_sentence(failure.value.message)


class NotingLifetime(Lifetime):
    """Keeps what the ready line would say."""

    def ready(self, service: str, address: str, **fields: object) -> None:
        self.fields = fields
        super().ready(service, address, **fields)
        self.stop()


async def ready_fields(service: ModelService[Any, Any]) -> dict[str, object]:
    """Start the service and stop it at once; gives what its ready line says besides the address."""
    lifetime = NotingLifetime()
    async with asyncio.timeout(LIMIT_S):
        await service(lifetime)
    return lifetime.fields


def emulation(fields: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if name.startswith("emulated")}


async def test_service_that_is_not_emulated_does_not_speak_of_it() -> None:
    """Neither in its description nor in the ready line."""
    service = counting_target()
    assert emulation(await ready_fields(service)) == {}
    assert not service.info.emulated


# ---------------------------------------------------------------------------------------------------------------------
# Starts that fail


class Scripted:
    """A service that does as told: `run` is its whole life."""

    seconds_in_step = 0.0
    drain_s = 0.0
    registry = CollectorRegistry()

    def __init__(self, run: Callable[[Lifetime], Any]) -> None:
        self._run = run
        self.info: ModelInfo = fake_info(FakeModel(counting_logits(VOCAB), vocab_size=VOCAB))
        self.was_cancelled = False

    async def __call__(self, lifetime: Lifetime) -> None:
        try:
            await self._run(lifetime)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise

    def load(self) -> session_pb.LoadReport:
        return session_pb.LoadReport(kv_capacity_tokens=0)

    def holds(self, session_id: str) -> bool:
        return False


async def test_start_says_why_the_service_ended() -> None:
    """The sentence of our own error; of any other that the log knows, where it is."""

    async def refuse(lifetime: Lifetime) -> None:
        raise StartupFailed("Port 7 cannot be opened; choose another.")

    async def break_down(lifetime: Lifetime) -> None:
        raise RuntimeError("the secret of the service")

    with pytest.raises(StartupFailed, match="Port 7 cannot be opened"):
        await ModelReplica.start(Scripted(refuse), pool="target")
    with capture_logs() as logs, pytest.raises(StartupFailed) as failure:
        await ModelReplica.start(Scripted(break_down), pool="target")
    assert "secret" not in failure.value.message
    assert_is_sentence(failure.value.message)
    assert [line["event"] for line in logs] == ["the service failed"]


async def test_start_of_a_real_service_whose_port_is_taken_fails() -> None:
    """Through all layers."""
    async with replica_of(counting_target()) as replica:
        port = int(replica.address.rpartition(":")[2])
        with pytest.raises(StartupFailed, match=str(port)):
            await ModelReplica.start(counting_target(port=port), pool="target")


async def test_start_has_a_limit_and_leaves_nothing_running() -> None:
    """Whether the time is up or the caller gives up: the service is ended."""

    async def dawdle(lifetime: Lifetime) -> None:
        await asyncio.Event().wait()

    late = Scripted(dawdle)
    with pytest.raises(StartupFailed, match=r"not ready within 0\.01 s"):
        await ModelReplica.start(late, pool="target", start_limit_s=0.01)
    given_up = Scripted(dawdle)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await ModelReplica.start(given_up, pool="target")
    await until(lambda: late.was_cancelled and given_up.was_cancelled)


# ---------------------------------------------------------------------------------------------------------------------
# Leases


async def test_lease_says_one_thing_and_then_nothing() -> None:
    """It is open, and counted, until its holder closes it."""
    async with replica_of(counting_target()) as replica:
        async with aclosing(replica.lease("a")) as lease, aclosing(replica.lease("b")) as other:
            assert (await anext(lease))["session_id"] == "a"
            await anext(other)
            assert replica.leases == 2
            following = asyncio.ensure_future(anext(lease))
            await asyncio.wait({following}, timeout=0.05)
            assert not following.done()
            following.cancel()
            await asyncio.wait({following})
            assert replica.leases == 1
        assert replica.leases == 0


async def test_lease_ends_a_while_after_its_session_whoever_holds_it() -> None:
    """A holder that was killed cancels nothing: its place is free once its session has gone; a session that stays keeps it."""
    async with (
        replica_of(counting_target(orphan_grace_s=0), unused_lease_s=0.2) as replica,
        target_peer(replica.address) as stays,
        aclosing(replica.lease("stays")) as kept,
        aclosing(replica.lease("dies")) as left,
        aclosing(replica.lease("never opened")) as unused,
    ):
        await stays.send(opened("stays"))
        async with target_peer(replica.address) as dies:
            await dies.send(opened("dies"))
            await stays.load(lambda load: load.sessions == 2)
            for lease in (kept, left, unused):
                await anext(lease)
        async with asyncio.timeout(LIMIT_S):
            for lease in (left, unused):
                assert [item async for item in lease] == []
        assert replica.leases == 1


async def test_stop_ends_all_leases_and_grants_no_more() -> None:
    """Whoever holds one hears at once that the session must go elsewhere, though the service still drains."""
    async with (
        replica_of(counting_target(drain_s=60)) as replica,
        target_peer(replica.address) as peer,
    ):
        lease = replica.lease("a")
        await anext(lease)
        await peer.send(opened("a"))
        await assert_served(peer, "a")
        stopping = asyncio.ensure_future(replica.stop())
        async with asyncio.timeout(LIMIT_S):
            assert [item async for item in lease] == []
        assert replica.leases == 0
        await peer.load(lambda load: load.draining)
        assert not stopping.done()
        with pytest.raises(Draining):
            await anext(replica.lease("b"))
        await peer.send(closed("a"))
        async with asyncio.timeout(LIMIT_S):
            await stopping


async def test_leases_end_with_a_service_that_fails() -> None:
    """Nobody waits for a replica that is gone."""
    may_fail = asyncio.Event()

    async def fail_later(lifetime: Lifetime) -> None:
        lifetime.ready("target", "127.0.0.1:1")
        await may_fail.wait()
        raise PacelineError("The model thread broke; start again.")

    replica = await ModelReplica.start(Scripted(fail_later), pool="target")
    replica.check_health()
    lease = replica.lease("a")
    await anext(lease)
    may_fail.set()
    with capture_logs():
        async with asyncio.timeout(LIMIT_S):
            assert [item async for item in lease] == []
    with pytest.raises(PacelineError, match="The model thread broke"):
        replica.check_health()
    await replica.stop()


# ---------------------------------------------------------------------------------------------------------------------
# Health and figures


class Gate:
    """Logits that come only when the gate is open."""

    def __init__(self) -> None:
        self.is_open, self.is_reached = threading.Event(), threading.Event()

    def __call__(self, ids: Sequence[int]) -> Sequence[float]:
        self.is_reached.set()
        assert self.is_open.wait(2 * LIMIT_S)
        return counting_logits(VOCAB)(ids)


@pytest.fixture
def gate() -> Gate:
    return Gate()


async def test_model_that_hangs_in_a_step_is_unhealthy(gate: Gate) -> None:
    """Once the step is longer than the limit; when it ends after all, the replica is well again."""
    async with (
        replica_of(counting_target(gate), step_limit_s=0.05) as replica,
        target_peer(replica.address) as peer,
    ):
        replica.check_health()
        await peer.send(opened("a"), verify("a"))
        assert await asyncio.to_thread(gate.is_reached.wait, LIMIT_S)
        await asyncio.sleep(0.06)
        with pytest.raises(PacelineError, match="start the replica again") as failure:
            replica.check_health()
        assert_is_sentence(failure.value.message)
        gate.is_open.set()
        await peer.event("a")
        await until(lambda: replica.stats()["queued"] == 0)
        replica.check_health()


async def test_stop_gives_up_a_model_that_hangs(gate: Gate) -> None:
    """Within its limit, and says so in the log."""
    replica = await ModelReplica.start(counting_target(gate), pool="target", stop_margin_s=0.05)
    async with target_peer(replica.address) as peer:
        await peer.send(opened("a"), verify("a"))
        assert await asyncio.to_thread(gate.is_reached.wait, LIMIT_S)
        with capture_logs() as logs:
            async with asyncio.timeout(LIMIT_S):
                await replica.stop()
        assert "cut off" in str(logs)
        with pytest.raises(PacelineError):
            replica.check_health()
    gate.is_open.set()


async def test_figures_follow_what_is_held() -> None:
    """Share of the tokens there is room for, sessions, and what waits."""
    async with (
        replica_of(counting_target(kv_budget_tokens=20)) as replica,
        target_peer(replica.address) as peer,
    ):
        assert replica.stats() == {
            "kv_used_fraction": 0.0,
            "queued": 0.0,
            "sessions": 0.0,
            "leases": 0.0,
            "step_busy_share": 0.0,
        }
        await peer.send(opened("a"), opened("b"), verify("a", 3, 4))
        await peer.event("a")
        assert replica.stats()["kv_used_fraction"] == (5 + 3) / 20
        assert replica.stats()["sessions"] == 2
        await peer.send(closed("a"), closed("b"))
        await until(lambda: replica.stats()["kv_used_fraction"] == 0.0)


async def test_figures_of_a_service_that_caches_nothing() -> None:
    """No room is no reason to fail."""

    async def serve(lifetime: Lifetime) -> None:
        lifetime.ready("drafter", "127.0.0.1:1")
        await lifetime.until_stopped()

    async with replica_of(Scripted(serve)) as replica:
        assert replica.stats()["kv_used_fraction"] == 0.0


async def test_metrics_are_exported_while_the_service_runs() -> None:
    """Under the pool's name; the last figures are those of the service's end."""
    metrics = FakeMetrics()
    async with replica_of(counting_target(), metrics=metrics) as replica, target_peer(replica.address) as peer:
        assert metrics.value("paceline_sessions", service="target") == 0
        await peer.send(opened("a"), verify("a"))
        await peer.event("a")
    assert metrics.value("paceline_step_seconds_count", service="target", sessions="1", tokens="4") == 1
    assert metrics.value("paceline_draining", service="target") == 1


# ---------------------------------------------------------------------------------------------------------------------
# The end


async def test_stop_may_be_called_any_number_of_times() -> None:
    """Also at the same time; afterwards nothing listens."""
    replica = await ModelReplica.start(counting_target(), pool="target")
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(replica.stop(), replica.stop())
        await replica.stop()
    assert await health_of(replica.address, "") == "UNAVAILABLE"
    with pytest.raises(PacelineError, match="has ended"):
        replica.check_health()


async def test_drafters_are_replicas_too() -> None:
    """Their method is part of what is published."""
    model = FakeModel(counting_logits(VOCAB), vocab_size=VOCAB, max_context=64)
    method = DraftModelMethod(model, distribution_entries=4)
    options: dict[str, Any] = {"drain_s": 0}
    service = drafter_service.service.assemble(
        DrafterSettings(**options), method, fake_info(model, method="draft_model")
    )
    async with replica_of(service) as replica:
        assert replica.metadata()["method"] == "draft_model"
        assert await health_of(replica.address, "paceline.v1.DrafterService") == "SERVING"
