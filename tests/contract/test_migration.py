"""Answers that go on at another replica: targets and drafters are killed, drained, full, held up, and come and go.

Under `coupled` a text depends on target, prompt, parameters and seed alone, so every answer here has one right text, and
it is compared token for token: a lost or a repeated token shows. The model's next token depends on every token before
it. Nothing is judged by chance; faults strike by count of tokens, not by the clock.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from orchestrator.board import Link, PoolBoard, Replica
from orchestrator.directory import StaticDirectory, StaticLease
from orchestrator.text import Tokenizer
from paceline.errors import (
    DeadlineExceeded,
    InvalidRequest,
    PacelineError,
    QueueFull,
    StartupFailed,
    TargetUnavailable,
)
from paceline.generation import Completion, CompletionBuilder, Delta, GenerationRequest, Schedule
from paceline.types import VerificationRule
from tests.checkpoints import save_markov_checkpoint
from tests.contract.stream_peer import LIMIT_S, VOCAB
from tests.contract.test_orchestrator import killed, silent_port
from tests.fakes import FakeModel, fake_info, hashed_logits, spec_of, target_alone
from tests.faults import HoldingTarget, holding_target
from tests.harness import (
    Fleet,
    Running,
    fleet,
    model_drafter_of,
    ngram_drafter,
    request,
    running,
    target_of,
)

SESSIONS = 8
MAX_TOKENS = 48
SCHEDULES = [Schedule.SEQUENTIAL, Schedule.PIPELINED]
PIPELINED_FIRST = [Schedule.PIPELINED, pytest.param(Schedule.SEQUENTIAL, marks=pytest.mark.slow)]

_target_logits = hashed_logits(VOCAB)
_other_logits = hashed_logits(VOCAB, salt=1)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One word a token: t0, t1, ..."""
    uniform = [[1 / VOCAB] * VOCAB] * VOCAB
    return str(save_markov_checkpoint(tmp_path_factory.mktemp("models") / "words", uniform))


def model(*, pause_s: float = 0.001, max_context: int = 4096) -> FakeModel:
    """The target's model; `pause_s` is how long it takes for each row."""

    def logits(ids: Sequence[int]) -> Sequence[float]:
        time.sleep(pause_s)
        return _target_logits(ids)

    return FakeModel(logits, vocab_size=VOCAB, max_context=max_context)


def target(*, pause_s: float = 0.001, **settings: Any) -> Any:
    return target_of(model(pause_s=pause_s), **{"heartbeat_s": 0.05, **settings})


def drafter(**settings: Any) -> Any:
    """A drafter that is right about two tokens in three."""

    def logits(ids: Sequence[int]) -> Sequence[float]:
        return _target_logits(ids) if sum(ids) % 3 else _other_logits(ids)

    return model_drafter_of(FakeModel(logits, vocab_size=VOCAB), **{"heartbeat_s": 0.05, **settings})


def asked_of(seed: int, *, schedule: Schedule = Schedule.PIPELINED, max_tokens: int = MAX_TOKENS) -> GenerationRequest:
    prompt = tuple((seed + offset) % VOCAB for offset in range(3))
    return request(
        prompt, seed=seed, max_tokens=max_tokens, schedule=schedule, rule=VerificationRule.COUPLED, draft_length=4
    )


def right_text(asked: GenerationRequest) -> tuple[int, ...]:
    """What the target says by itself, each token from scratch."""
    assert asked.token_ids is not None
    assert asked.seed is not None
    assert asked.stopping.max_tokens is not None
    spec = spec_of(prompt_length=len(asked.token_ids), vocab_size=VOCAB, seed=asked.seed)
    return tuple(target_alone(_target_logits, spec, asked.token_ids, asked.stopping.max_tokens))


@dataclass
class Answers:
    """Answers under way at once, and how far they have come."""

    fleet: Fleet
    asked: Sequence[GenerationRequest]
    tokens: int = 0
    _tasks: list[asyncio.Task[Completion]] = field(default_factory=list)
    _progress: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self) -> None:
        self._tasks = [asyncio.ensure_future(self._one(asked)) for asked in self.asked]

    async def reached(self, tokens: int) -> None:
        """All answers together have so many tokens, or are complete."""
        async with asyncio.timeout(LIMIT_S):
            while self.tokens < tokens and not all(task.done() for task in self._tasks):
                self._progress.clear()
                await self._progress.wait()

    async def completed(self) -> list[Completion]:
        async with asyncio.timeout(60):
            return await asyncio.gather(*self._tasks)

    async def outcomes(self) -> list[Completion | BaseException]:
        async with asyncio.timeout(60):
            return await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _one(self, asked: GenerationRequest) -> Completion:
        builder = CompletionBuilder()
        async with aclosing(self.fleet.generator.generate(asked, timeout_s=60)) as events:
            async for event in events:
                builder.add(event)
                self.tokens += len(event.token_ids) if isinstance(event, Delta) else 0
                self._progress.set()
        self._progress.set()
        return builder.build()


def answers_of(
    services: Fleet, schedule: Schedule = Schedule.PIPELINED, *, count: int = SESSIONS, max_tokens: int = MAX_TOKENS
) -> Answers:
    """So many answers, begun."""
    answers = Answers(services, [asked_of(seed, schedule=schedule, max_tokens=max_tokens) for seed in range(count)])
    answers.start()
    return answers


async def assert_right(answers: Answers) -> list[Completion]:
    """Every answer has its right text, its exact count of tokens, and its place has been given back."""
    completions = await answers.completed()
    for asked, completion in zip(answers.asked, completions, strict=True):
        assert completion.token_ids == right_text(asked)
        assert completion.usage.completion_tokens == asked.stopping.max_tokens
    await assert_no_leases(answers.fleet)
    return completions


async def assert_no_leases(services: Fleet) -> None:
    """A drafter's seat may still be on its way to a session that has ended, which gives it back."""
    async with asyncio.timeout(LIMIT_S):
        while services.leases:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)


async def in_turn(services: Sequence[Running], strike: Callable[[Running], Awaitable[object]]) -> None:
    for service in services:
        await strike(service)


# ---------------------------------------------------------------------------------------------------------------------
# Targets


@pytest.mark.parametrize("schedule", PIPELINED_FIRST)
async def test_killed_targets_change_nothing(tokenizer: str, schedule: Schedule) -> None:
    """Two of three targets are killed under eight answers: every text is whole and right, and sessions have moved."""
    # Slow enough that no answer is complete when the second target has been killed.
    targets = [target(pause_s=0.004) for _ in range(3)]
    async with fleet(targets, [drafter()], tokenizer) as services:
        answers = answers_of(services, schedule)
        await answers.reached(60)
        await services.targets[0].kill()
        await answers.reached(160)
        await services.targets[1].kill()
        completions = await assert_right(answers)
        assert services.moves("target", "lost") >= 3
        assert services.registry.get_sample_value("paceline_connected_replicas", {"pool": "target"}) == 1
        assert sum(completion.speculation.num_accepted_tokens for completion in completions) > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_drained_target_is_left_by_its_sessions(tokenizer: str, schedule: Schedule) -> None:
    """It would wait a minute for them; instead they go on elsewhere at once, and no text changes."""
    async with fleet([target(drain_s=60), target(drain_s=60)], [drafter()], tokenizer) as services:
        answers = answers_of(services, schedule)
        await answers.reached(100)
        leaving = await busy_target(services)
        leaving.lifetime.stop()
        async with asyncio.timeout(LIMIT_S):
            await leaving.task
        await assert_right(answers)
        assert services.moves("target", "draining") >= 2
        assert services.moves("target", "lost") == 0


async def busy_target(services: Fleet) -> Running:
    """A target that holds at least two sessions, by its own report; which one that is depends on when reports came."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            targets = next(pool for pool in services.generator.status().pools if pool.name == "target")
            for replica in targets.replicas:
                if replica.sessions >= 2:
                    return next(each for each in services.targets if each.address == replica.address)
            await asyncio.sleep(0.005)


async def test_draining_target_does_not_wait_for_a_client_that_reads_slowly(tokenizer: str) -> None:
    """A session that awaits no verdict gives its place back at once; when it is read on, it goes on elsewhere."""
    asked = asked_of(3)
    async with fleet([target(drain_s=60)], [], tokenizer, failover_timeout_s=LIMIT_S) as services:
        builder = CompletionBuilder()
        async with aclosing(services.generator.generate(asked, timeout_s=60)) as events:
            received = 0
            while received < 10:
                event = await anext(events)
                builder.add(event)
                received += isinstance(event, Delta)
            services.targets[0].lifetime.stop()
            async with asyncio.timeout(LIMIT_S):
                await services.targets[0].task
            assert services.leases == 0
            async with running(target(port=services.targets[0].port)):
                async for event in events:
                    builder.add(event)
        assert builder.build().token_ids == right_text(asked)


async def test_rolling_restart_of_every_target_changes_nothing(tokenizer: str) -> None:
    """Each of three targets is killed and started again on its address, one after another, under eight answers."""
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(
            fleet([target() for _ in range(3)], [drafter()], tokenizer, failover_timeout_s=LIMIT_S)
        )
        answers = answers_of(services, max_tokens=120)

        async def restart(service: Running) -> None:
            await answers.reached(answers.tokens + 80)
            port = await killed(service)
            await stack.enter_async_context(running(target(port=port)))
            await services.until_connected(service.address)

        await in_turn(services.targets, restart)
        await assert_right(answers)
        assert services.moves("target", "lost") >= SESSIONS


async def test_losing_every_target_is_a_typed_error_within_the_limit(tokenizer: str) -> None:
    """TARGET_UNAVAILABLE with a sentence, and every place is given back."""
    async with fleet([target(), target()], [drafter()], tokenizer, failover_timeout_s=0.3) as services:
        answers = answers_of(services)
        await answers.reached(60)
        struck_s = time.monotonic()
        await in_turn(services.targets, Running.kill)
        outcomes = await answers.outcomes()
        assert time.monotonic() - struck_s < 5.0
        assert {type(outcome) for outcome in outcomes} == {TargetUnavailable}
        assert all("again" in str(outcome) for outcome in outcomes)
        await assert_no_leases(services)


async def test_answer_goes_on_at_a_target_that_comes_late(tokenizer: str) -> None:
    """The only target is killed; another appears at an address nobody answered at, and all answers go on there."""
    with silent_port() as port:
        reserved = f"127.0.0.1:{port}"
    async with (
        AsyncExitStack() as stack,
        fleet([target()], [drafter()], tokenizer, more_targets=[reserved], failover_timeout_s=LIMIT_S) as services,
    ):
        answers = answers_of(services)
        await answers.reached(60)
        await services.targets[0].kill()
        async with asyncio.timeout(LIMIT_S):
            while services.target_directory.leases:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.01)
        await stack.enter_async_context(running(target(port=port)))
        await assert_right(answers)


async def test_new_answers_wait_for_a_target_as_running_ones_do(tokenizer: str) -> None:
    """In the moment between two targets nobody is refused."""
    async with fleet([target()], [], tokenizer, failover_timeout_s=LIMIT_S) as services:
        port = await killed(services.targets[0])
        answers = answers_of(services, count=2)
        await asyncio.sleep(0.05)
        async with running(target(port=port)):
            await assert_right(answers)


async def test_full_targets_refuse_new_answers_at_once_but_not_those_in_their_middle(tokenizer: str) -> None:
    """QUEUE_FULL where nothing is lost yet; an answer that has lost its target waits until another has room."""
    small = {"max_sessions": 1}
    async with fleet(
        [target(pause_s=0.003, **small), target(pause_s=0.003, **small)], [], tokenizer, failover_timeout_s=LIMIT_S
    ) as services:
        answers = answers_of(services, Schedule.PLAIN, count=2)
        await answers.reached(20)
        assert services.leases == 2
        with pytest.raises(QueueFull):
            await services.complete(asked_of(9))
        await services.targets[0].kill()
        await assert_right(answers)
        assert services.moves("target", "lost") == 1


async def test_answer_that_loses_target_after_target_gives_up(tokenizer: str) -> None:
    """Four targets in a row take the session and are lost before a verdict: with three migrations allowed, it fails."""
    async with AsyncExitStack() as stack:
        hidden: dict[str, Running] = {}
        for _ in range(4):
            service = await stack.enter_async_context(running(target()))
            address, proxy = await stack.enter_async_context(holding_target(service.address))
            proxy.is_holding, hidden[address] = True, service
        services = await stack.enter_async_context(
            fleet(
                [],
                [],
                tokenizer,
                more_targets=list(hidden),
                directory_type=ControlPlane,
                max_migrations=3,
                failover_timeout_s=LIMIT_S,
            )
        )
        plane = services.target_directory
        assert isinstance(plane, ControlPlane)
        answering = asyncio.ensure_future(services.complete(asked_of(1)))
        for lost in range(4):
            async with asyncio.timeout(LIMIT_S):
                while len(plane.granted) <= lost:  # noqa: ASYNC110 - there is no event to wait for
                    await asyncio.sleep(0.01)
            lease, _ = plane.granted[lost]
            await hidden[lease.replica.address].kill()
        with pytest.raises(TargetUnavailable, match="4 targets in a row"):
            await answering
        await assert_no_leases(services)


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_verdicts_that_come_after_the_session_has_moved_are_never_applied(
    tokenizer: str, schedule: Schedule
) -> None:
    """A target lives but holds its verdicts; the session moves, and moves back when the other holds too. Then the old ones arrive."""
    asked = asked_of(5, schedule=schedule, max_tokens=60)
    async with AsyncExitStack() as stack:
        proxies: dict[str, HoldingTarget] = {}
        for _ in range(2):
            hidden = await stack.enter_async_context(running(target()))
            address, proxy = await stack.enter_async_context(holding_target(hidden.address))
            proxies[address] = proxy
        services = await stack.enter_async_context(
            fleet([], [drafter()], tokenizer, more_targets=list(proxies), verify_deadline_s=0.5)
        )
        answers = Answers(services, [asked])
        answers.start()
        await answers.reached(10)
        first = max(proxies.values(), key=lambda proxy: proxy.verdicts)
        (second,) = (proxy for proxy in proxies.values() if proxy is not first)
        first.is_holding = True
        await answers.reached(30)
        assert second.verdicts > 0
        assert first.held
        second.is_holding, first.is_holding = True, False
        await assert_right(answers)
        assert first.late_verdicts > 0
        assert services.moves("target", "late") == 2
        assert services.generator.info().target is not None
        assert stale_items(services) >= first.late_verdicts


def stale_items(services: Fleet) -> int:
    return int(services.registry.get_sample_value("paceline_stale_items") or 0)


async def test_target_that_gives_no_verdict_fails_the_answer_if_there_is_no_other(tokenizer: str) -> None:
    """Asking it again would take as long again."""
    async with AsyncExitStack() as stack:
        hidden = await stack.enter_async_context(running(target()))
        address, proxy = await stack.enter_async_context(holding_target(hidden.address))
        services = await stack.enter_async_context(
            fleet([], [], tokenizer, more_targets=[address], verify_deadline_s=0.2)
        )
        proxy.is_holding = True
        with pytest.raises(TargetUnavailable, match="no verdict"):
            await services.complete(asked_of(1))
        await assert_no_leases(services)


async def test_silent_target_is_left(tokenizer: str) -> None:
    """It hangs as a whole, signs of life included: after the limit it counts as gone."""
    async with AsyncExitStack() as stack:
        gate = Gate()
        hidden = await stack.enter_async_context(running(target()))
        address = await stack.enter_async_context(gate.before(hidden.address))
        services = await stack.enter_async_context(
            fleet([target()], [], tokenizer, more_targets=[address], silence_limit_s=0.4)
        )
        await services.until_connected(address)
        answers = answers_of(services)
        await answers.reached(60)
        gate.is_shut = True
        await assert_right(answers)
        assert services.moves("target", "lost") >= 2


class Gate:
    """A TCP link that passes nothing on while it is shut; what comes meanwhile waits."""

    def __init__(self) -> None:
        self.is_shut = False

    @asynccontextmanager
    async def before(self, address: str) -> AsyncIterator[str]:
        host, _, port = address.rpartition(":")
        tasks: set[asyncio.Task[None]] = set()

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while chunk := await reader.read(65536):
                while self.is_shut:  # noqa: ASYNC110 - a handful of looks a test
                    await asyncio.sleep(0.01)
                writer.write(chunk)
            writer.close()

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there_reader, there_writer = await asyncio.open_connection(host, int(port))
            tasks.update(
                asyncio.ensure_future(pump(*ends)) for ends in ((reader, there_writer), (there_reader, writer))
            )

        server = await asyncio.start_server(connect, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


# ---------------------------------------------------------------------------------------------------------------------
# A control plane


class ControlPlane(StaticDirectory):
    """A directory whose members come and go, and whose leases end, as the test says."""

    def __init__(self, addresses: Sequence[str], board: PoolBoard) -> None:
        super().__init__(addresses, board)
        self._on_members: Callable[[Mapping[str, Replica]], None] = lambda _: None
        self.granted: list[tuple[StaticLease, Callable[[], None]]] = []

    async def run(self, on_members: Callable[[Mapping[str, Replica]], None]) -> None:
        self._on_members = on_members
        await super().run(on_members)

    async def lease(self, session_id: str, *, tokens: int, on_lost: Callable[[], None]) -> StaticLease:
        lease = await super().lease(session_id, tokens=tokens, on_lost=on_lost)
        self.granted.append((lease, on_lost))
        return lease

    def remove(self, address: str) -> None:
        self._members = {known: replica for known, replica in self._members.items() if known != address}
        self._on_members(self._members)

    def add(self, address: str) -> None:
        self._members = {**self._members, address: Replica(replica_id=address, address=address)}
        self._on_members(self._members)


async def test_sessions_leave_a_target_that_is_no_member_any_more(tokenizer: str) -> None:
    """The control plane takes it out before it stops it: they move between two verdicts, and its client goes last."""
    async with fleet([target(), target()], [drafter()], tokenizer, directory_type=ControlPlane) as services:
        plane = services.target_directory
        assert isinstance(plane, ControlPlane)
        answers = answers_of(services)
        await answers.reached(60)
        plane.remove(services.targets[0].address)
        await answers.reached(120)
        await assert_right(answers)
        assert services.moves("target", "draining") >= 2
        (targets, _) = services.generator.status().pools
        assert [known.address for known in targets.replicas] == [services.targets[1].address]
        plane.add(services.targets[0].address)
        plane.remove(services.targets[1].address)
        await assert_right(answers_of(services, count=2))


async def test_sessions_whose_leases_end_leave_a_target_that_hangs(tokenizer: str) -> None:
    """The control plane knows before the silence is long enough; a session gives its verdict a moment and goes."""
    async with AsyncExitStack() as stack:
        hidden = await stack.enter_async_context(running(target()))
        address, proxy = await stack.enter_async_context(holding_target(hidden.address))
        services = await stack.enter_async_context(
            fleet([target()], [], tokenizer, more_targets=[address], directory_type=ControlPlane)
        )
        plane = services.target_directory
        assert isinstance(plane, ControlPlane)
        await services.until_connected(address)
        answers = answers_of(services, count=4)
        await answers.reached(20)
        proxy.is_holding = True
        plane.remove(address)
        for lease, on_lost in plane.granted:
            if lease.replica.address == address:
                on_lost()
        await assert_right(answers)


# ---------------------------------------------------------------------------------------------------------------------
# Drafters


@pytest.mark.parametrize("schedule", PIPELINED_FIRST)
async def test_killed_and_drained_drafters_change_nothing(tokenizer: str, schedule: Schedule) -> None:
    """One of three is killed, another drains: the sessions go on without a break and draft on with the third."""
    async with fleet([target()], [drafter(), drafter(drain_s=60), drafter()], tokenizer, fallback="none") as services:
        answers = answers_of(services, schedule, max_tokens=80)
        await answers.reached(60)
        await services.drafters[0].kill()
        await answers.reached(200)
        services.drafters[1].lifetime.stop()
        async with asyncio.timeout(LIMIT_S):
            await services.drafters[1].task
        before = await asyncio.gather(*[services.complete(asked_of(50 + number)) for number in range(2)])
        assert all(completion.speculation.num_accepted_tokens > 0 for completion in before)
        completions = await assert_right(answers)
        assert services.moves("drafter", "lost") >= 1
        assert services.moves("drafter", "draining") >= 1
        assert all(completion.speculation.num_accepted_tokens > 0 for completion in completions)
        assert services.moves("target") == 0


async def test_answer_takes_up_a_drafter_in_its_middle(tokenizer: str) -> None:
    """There is none at first, and nobody waits for one; the one that comes drafts for the answers under way."""
    with silent_port() as port:
        reserved = f"127.0.0.1:{port}"
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(
            fleet(
                [target(pause_s=0.002)],
                [],
                tokenizer,
                more_drafters=[reserved],
                drafter_timeout_s=0.1,
                fallback="none",
            )
        )
        answers = answers_of(services, count=4, max_tokens=140)
        await answers.reached(40)
        stalled = services.generator.status().orchestrator.stall_fraction
        assert stalled == pytest.approx(1.0), "sessions that want drafts and have no drafter are stalled"
        await stack.enter_async_context(running(drafter(port=port)))
        completions = await assert_right(answers)
        assert all(completion.speculation.num_accepted_tokens > 0 for completion in completions)
        assert services.generator.status().orchestrator.stall_fraction != stalled


async def test_drafter_that_does_not_fit_is_left_out_and_the_other_serves(tokenizer: str) -> None:
    """One drafter numbers its tokens differently: it is never used, and costs nothing."""
    info = replace(fake_info(model(), method="draft_model"), tokenizer_sha256=Tokenizer.load(tokenizer).fingerprint)
    stranger = model_drafter_of(model(), replace(info, tokenizer_sha256="d" * 64))
    async with (
        running(stranger) as refused,
        fleet([target_of(model(), info)], [ngram_drafter()], tokenizer, more_drafters=[refused.address]) as services,
    ):
        assert services.drafter_directory is not None
        await until_refused(services.drafter_directory, refused.address)
        await assert_right(answers_of(services, count=2))


async def until_refused(directory: StaticDirectory, address: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while directory.board.standing(address).link is not Link.REFUSED:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)


# ---------------------------------------------------------------------------------------------------------------------
# Who may be in the pool


async def test_target_that_is_not_like_the_first_is_not_used(tokenizer: str) -> None:
    """It is refused, and the other serves; without that one there is no target."""
    async with AsyncExitStack() as stack:
        stranger = await stack.enter_async_context(running(target_of(model(max_context=64))))
        gate = Gate()
        gate.is_shut = True  # so that the other is the first
        far = await stack.enter_async_context(gate.before(stranger.address))
        services = await stack.enter_async_context(fleet([target()], [], tokenizer, more_targets=[far]))
        gate.is_shut = False
        await until_refused(services.target_directory, far)
        await assert_right(answers_of(services, count=4))
        await services.targets[0].kill()
        with pytest.raises(TargetUnavailable):
            await services.complete(asked_of(1))


async def test_no_target_in_time_fails_the_start(tokenizer: str) -> None:
    """And names every address that was tried."""
    with silent_port() as one, silent_port() as other:
        addresses = [f"127.0.0.1:{one}", f"127.0.0.1:{other}"]
        with pytest.raises(StartupFailed) as failure:
            async with fleet([], [], tokenizer, more_targets=addresses, connect_timeout_s=0.3):
                pass
    assert all(address in failure.value.message for address in addresses)


# ---------------------------------------------------------------------------------------------------------------------
# Everything at once


async def test_no_lease_is_left_behind_however_answers_end(tokenizer: str) -> None:
    """200 answers that finish, are cancelled, fail or run out of time, with targets and drafters lost meanwhile: none holds a place."""
    generator = random.Random(11)
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(
            fleet(
                [target(pause_s=0.0) for _ in range(2)],
                [drafter() for _ in range(2)],
                tokenizer,
                failover_timeout_s=0.2,
            )
        )
        endings: dict[str, int] = {}

        async def one(number: int) -> None:
            kind = generator.choice(["finish", "cancel", "invalid", "late"])
            try:
                await end_as(services, kind, number, generator)
            except PacelineError as error:
                kind = error.reason
            endings[kind] = endings.get(kind, 0) + 1

        async def strike(service: Running, serve: Callable[[int], Any]) -> None:
            port = await killed(service)
            await stack.enter_async_context(running(serve(port)))

        for first in range(0, 200, 40):
            batch = [asyncio.ensure_future(one(number)) for number in range(first, first + 40)]
            if first == 40:
                await strike(services.drafters[0], lambda port: drafter(port=port))
            if first == 80:
                await strike(services.targets[0], lambda port: target(pause_s=0.0, port=port))
            if first == 120:
                await in_turn(services.targets[1:], Running.kill)
            async with asyncio.timeout(60):
                await asyncio.gather(*batch)
        assert sum(endings.values()) == 200
        assert {"finish", "cancel", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED"} <= set(endings), endings
        await assert_no_leases(services)
        assert services.generator.running == 0


async def end_as(services: Fleet, kind: str, number: int, generator: random.Random) -> None:
    """One answer that ends in this way."""
    asked = asked_of(number, schedule=generator.choice(list(Schedule)), max_tokens=16)
    match kind:
        case "finish":
            assert (await services.complete(asked)).token_ids == right_text(asked)
        case "cancel":
            answering = asyncio.ensure_future(services.complete(asked))
            await asyncio.sleep(generator.uniform(0, 0.05))
            answering.cancel()
            await asyncio.wait({answering})
        case "invalid":
            with pytest.raises(InvalidRequest):
                await services.complete(replace(asked, token_ids=(VOCAB,)))
            raise InvalidRequest("As expected.", parameter="token_ids")
        case "late":
            with pytest.raises((DeadlineExceeded, TargetUnavailable)):
                await services.complete(
                    replace(asked, stopping=replace(asked.stopping, max_tokens=3000)),
                    timeout_s=generator.uniform(0.001, 0.1),
                )
            raise DeadlineExceeded("As expected.")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
async def test_random_faults_change_nothing(tokenizer: str, seed: int) -> None:
    """Eight answers under a random schedule of kills, drains and restarts of both pools: every text is the right one."""
    generator = random.Random(seed)
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(
            fleet(
                [target(drain_s=60) for _ in range(3)],
                [drafter() for _ in range(2)],
                tokenizer,
                failover_timeout_s=LIMIT_S,
                max_migrations=20,
            )
        )
        answers = answers_of(services, generator.choice(SCHEDULES), max_tokens=60)
        alive = {"target": list(services.targets), "drafter": list(services.drafters)}
        for _ in range(5):
            await answers.reached(answers.tokens + generator.randrange(20, 70))
            pool = generator.choice(["target", "drafter"])
            victim = alive[pool].pop(generator.randrange(len(alive[pool])))
            if generator.random() < 0.5:
                await victim.stop()
            await victim.kill()
            serve = target(drain_s=60, port=victim.port) if pool == "target" else drafter(port=victim.port)
            alive[pool].append(await stack.enter_async_context(running(serve)))
        await assert_right(answers)
