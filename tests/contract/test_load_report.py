"""What model services report of themselves: room, tokens held, drafts kept, and that they are about to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drafter_service.methods.draft_model import DraftModelMethod
from drafter_service.service import serve_drafter
from paceline.generation import GenerationRequest, Schedule
from paceline.process import Serve
from paceline.settings import DrafterSettings, ModelServiceSettings, TargetSettings
from paceline.types import Origin, VerificationRule
from paceline.v1 import drafter_service_pb2 as drafter_pb
from paceline.v1 import session_pb2 as session_pb
from paceline.v1 import target_service_pb2 as target_pb
from target_service.service import serve_target
from tests.checkpoints import save_markov_checkpoint
from tests.contract.stream_peer import (
    LIMIT_S,
    MAX_CONTEXT,
    VOCAB,
    StreamPeer,
    drafter_peer,
    open_session,
    target_peer,
)
from tests.fakes import FakeModel, Logits, counting_logits, fake_info
from tests.harness import (
    complete_all,
    model_drafter_of,
    ngram_drafter,
    request,
    running,
    start,
    system,
    target_of,
)

PROMPT = (0, 1, 2)
Peer = StreamPeer[Any, Any]


@dataclass(frozen=True)
class Kind:
    """One kind of model service, and how to speak with it."""

    serve: Callable[..., Serve]  # settings
    peer: Callable[[str], AbstractAsyncContextManager[Peer]]
    command: type[Any]
    asked: dict[str, Any]  # a draft of two tokens, to be judged or to be made
    tokens_after: int  # held when that is answered


def counting_model(settings: ModelServiceSettings) -> FakeModel:
    """Its memory counts single tokens: as many as the settings say, else as many whole contexts as sessions."""
    tokens = settings.kv_budget_tokens or settings.max_sessions * MAX_CONTEXT
    return FakeModel(counting_logits(VOCAB), vocab_size=VOCAB, max_context=MAX_CONTEXT, num_blocks=tokens, block_size=1)


def counting_target(**settings: Any) -> Serve:
    options = TargetSettings(**({"heartbeat_s": 0.02, "drain_s": 60} | settings))
    model: Any = counting_model(options)
    return lambda lifetime: serve_target(lifetime, options, model, fake_info(model))


def counting_drafter(**settings: Any) -> Serve:
    options = DrafterSettings(**({"heartbeat_s": 0.02, "drain_s": 60} | settings))
    model: Any = counting_model(options)
    method = DraftModelMethod(model, distribution_entries=4)
    return lambda lifetime: serve_drafter(lifetime, options, method, fake_info(model, method="draft_model"))


TARGET = Kind(
    counting_target,
    target_peer,
    target_pb.TargetCommand,
    {"verify": target_pb.VerifyDraft(base_length=3, draft_ids=(3, 4))},
    tokens_after=5,
)
DRAFTER = Kind(
    counting_drafter,
    drafter_peer,
    drafter_pb.DrafterCommand,
    {"commit": drafter_pb.Commit(base_length=3, draft_length=2, credit=2)},
    tokens_after=4,  # the last token of a draft is fed with the next one
)
both_kinds = pytest.mark.parametrize("kind", [TARGET, DRAFTER], ids=["target", "drafter"])


def opened(kind: Kind, session_id: str, *, epoch: int = 1, ids: Sequence[int] = PROMPT) -> Any:
    return kind.command(session_id=session_id, epoch=epoch, open=open_session(ids))


def asked(kind: Kind, session_id: str, *, epoch: int = 1) -> Any:
    return kind.command(session_id=session_id, epoch=epoch, **kind.asked)


def closed(kind: Kind, session_id: str, *, epoch: int = 1) -> Any:
    return kind.command(session_id=session_id, epoch=epoch, close=session_pb.CloseSession())


async def assert_served(peer: Peer, kind: Kind, session_id: str) -> None:
    await peer.send(asked(kind, session_id))
    event = await peer.event(session_id)
    assert event.WhichOneof("event") in {"verdict", "proposal"}, event


# ---------------------------------------------------------------------------------------------------------------------
# Room


@both_kinds
async def test_service_says_how_much_it_can_hold(kind: Kind) -> None:
    """Sessions, and tokens of its memory."""
    async with running(kind.serve(max_sessions=3, drain_s=0)) as service, kind.peer(service.address) as peer:
        load = await peer.load()
        assert (load.max_sessions, load.kv_capacity_tokens) == (3, 3 * MAX_CONTEXT)
    async with (
        running(kind.serve(kv_budget_tokens=10, drain_s=0)) as service,
        kind.peer(service.address) as peer,
    ):
        assert (await peer.load()).kv_capacity_tokens == 10


@both_kinds
async def test_tokens_held_are_reported_until_their_sessions_end(kind: Kind) -> None:
    """Whether a session is closed or taken over by a newer opening."""
    async with running(kind.serve(drain_s=0)) as service, kind.peer(service.address) as peer:
        await peer.send(opened(kind, "a"))
        await assert_served(peer, kind, "a")
        await peer.load(lambda load: load.kv_used_tokens == kind.tokens_after)
        await peer.send(opened(kind, "b"), opened(kind, "b", epoch=2, ids=(0, 1, 2, 3)), closed(kind, "a"))
        await peer.load(lambda load: load.kv_used_tokens == 4)
        await peer.send(closed(kind, "b", epoch=2))
        await peer.load(lambda load: (load.sessions, load.kv_used_tokens) == (0, 0))


@both_kinds
async def test_tokens_of_a_session_that_nobody_uses_are_given_back(kind: Kind) -> None:
    """With the session, after its idle time."""
    async with (
        running(kind.serve(session_idle_ttl_s=0.05, drain_s=0)) as service,
        kind.peer(service.address) as peer,
    ):
        await peer.send(opened(kind, "a"))
        await assert_served(peer, kind, "a")
        await peer.load(lambda load: (load.sessions, load.kv_used_tokens) == (0, 0))


async def test_drafter_without_a_model_holds_no_tokens() -> None:
    """Its sessions cost no memory worth counting, so it names no bound, whatever budget it was given."""
    async with (
        running(ngram_drafter(heartbeat_s=0.02, kv_budget_tokens=1)) as service,
        drafter_peer(service.address) as peer,
    ):
        await peer.send(opened(DRAFTER, "a"))
        load = await peer.load(lambda load: load.sessions == 1)
        assert (load.kv_used_tokens, load.kv_capacity_tokens) == (0, 0)


@both_kinds
async def test_session_beyond_the_budget_is_refused_until_there_is_room(kind: Kind) -> None:
    """QUEUE_FULL with the numbers; the sessions that run are served on, and grow."""
    async with (
        running(kind.serve(kv_budget_tokens=10, drain_s=0)) as service,
        kind.peer(service.address) as peer,
    ):
        await peer.send(opened(kind, "a"), opened(kind, "b"), opened(kind, "c", ids=(0, 1, 2, 3, 4)))
        failure = await peer.failure("c")
        assert failure.reason == "QUEUE_FULL"
        assert "5 tokens do not fit into the 4 that are free of this replica's 10" in failure.message
        await assert_served(peer, kind, "a")
        await assert_served(peer, kind, "b")
        assert (await peer.load(lambda load: load.kv_used_tokens == 2 * kind.tokens_after)).sessions == 2
        await peer.send(closed(kind, "a"), opened(kind, "c", epoch=2, ids=(0,)))
        await peer.load(lambda load: load.sessions == 2)
        assert peer.waiting("c") == []


@both_kinds
async def test_opening_that_comes_again_after_its_close_opens_nothing(kind: Kind) -> None:
    """A duplicate that was late: nobody would ever close that session."""
    async with running(kind.serve(drain_s=0)) as service, kind.peer(service.address) as peer:
        await peer.send(opened(kind, "a"), closed(kind, "a"), opened(kind, "a"), asked(kind, "a"))
        assert (await peer.failure("a")).reason == "SESSION_NOT_FOUND"
        load = await peer.load()
        assert (load.sessions, load.stale_items) == (0, 1)
        await peer.send(opened(kind, "a", epoch=2), asked(kind, "a", epoch=2))
        assert (await peer.event("a")).epoch == 2


# ---------------------------------------------------------------------------------------------------------------------
# Draining


@both_kinds
async def test_drain_is_announced_to_all_peers_at_once_and_ends_with_the_last_session(kind: Kind) -> None:
    """Not with the next heartbeat, which is a minute away; what is held is closed by those who hold it."""
    service = await start(kind.serve(heartbeat_s=60))
    async with AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(kind.peer(service.address)) for _ in range(3)]
        for peer, session_id in zip(peers, "abc", strict=True):
            await peer.send(opened(kind, session_id))
            await assert_served(peer, kind, session_id)
        announcements = [asyncio.ensure_future(peer.load(lambda load: load.draining)) for peer in peers]
        await asyncio.sleep(0)
        service.lifetime.stop()
        assert [load.sessions for load in await asyncio.gather(*announcements)] == [3, 3, 3]
        first, second, third = peers
        await third.send(closed(kind, "c"), opened(kind, "d"))
        assert (await third.failure("d")).reason == "DRAINING"
        await first.send(closed(kind, "a"))
        await asyncio.wait({service.task}, timeout=0.1)
        assert not service.task.done()
        await second.send(closed(kind, "b"))
        async with asyncio.timeout(LIMIT_S):
            await service.task


@both_kinds
async def test_drain_ends_when_its_time_is_up(kind: Kind) -> None:
    """Though a session is still held."""
    service = await start(kind.serve(drain_s=0.05))
    async with kind.peer(service.address) as peer:
        await peer.send(opened(kind, "a"))
        await assert_served(peer, kind, "a")
        service.lifetime.stop()
        async with asyncio.timeout(LIMIT_S):
            await service.task


# ---------------------------------------------------------------------------------------------------------------------
# Drafts kept, in whole systems


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One word a token: t0, t1, ..."""
    uniform = [[1 / VOCAB] * VOCAB] * VOCAB
    folder: Path = save_markov_checkpoint(tmp_path_factory.mktemp("models") / "words", uniform)
    return str(folder)


def often_counting() -> Logits:
    """Counts, but behind 5 comes 0: one draft token in eight or so is refused."""
    right = counting_logits(VOCAB)
    return lambda ids: right([VOCAB - 1] if ids[-1] == 5 else ids)


REQUESTS: list[GenerationRequest] = [
    request(
        PROMPT,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=max_tokens,
        rule=rule,
        schedule=schedule,
        draft_length=1,
    )
    for max_tokens in (1, 2, 15, 16, 17, 18, 31, 32)
    for schedule in (Schedule.SEQUENTIAL, Schedule.PIPELINED)
    for temperature, rule in ((0.0, None), (1.0, VerificationRule.COUPLED))
]


async def test_target_knows_as_the_orchestrator_does_what_was_kept(tokenizer: str) -> None:
    """Sums over 32 answers, equal up to the last round of each: with drafts of one token that round has either no draft
    or one that was kept, and then it ends with a bonus token."""
    target = target_of(FakeModel(counting_logits(VOCAB), vocab_size=VOCAB))
    drafter = model_drafter_of(FakeModel(often_counting(), vocab_size=VOCAB))
    async with system(target, drafter, tokenizer, fallback="none") as services:
        answers = await complete_all(services.client, REQUESTS)
        load, drafter_load = await services.loads()
    last_drafts = sum(answer.origins[-1] is Origin.BONUS for answer in answers)
    drafted = sum(answer.speculation.num_draft_tokens for answer in answers)
    accepted = sum(answer.speculation.num_accepted_tokens for answer in answers)
    assert (load.num_draft_tokens, load.num_accepted_tokens) == (drafted - last_drafts, accepted - last_drafts)
    assert 0 < load.num_accepted_tokens < load.num_draft_tokens
    assert last_drafts > 0
    assert (drafter_load.num_draft_tokens, drafter_load.num_accepted_tokens) == (0, 0)
    assert (load.kv_used_tokens, drafter_load.kv_used_tokens) == (0, 0)
