"""Where drafts come from: the drafter, else prompt lookup, else nowhere; every step down costs speed alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from orchestrator.clients import RemoteDrafts
from orchestrator.drafting import DraftsWithFallback, NoDrafts
from orchestrator.loop import OfferedDraft
from paceline.errors import LengthMismatch, PacelineError, PayloadInvalid, QueueFull
from paceline.lookup.ngram import NgramIndex
from paceline.prefix import TokenPrefix
from paceline.types import Draft
from paceline.v1 import drafter_service_pb2 as drafter_pb
from paceline.wire import failure_to_proto
from tests.fakes import FakeModel, fake_info, hashed_logits, spec_of

PERIODIC = TokenPrefix((7, 8, 9, 7, 8))
NEW = TokenPrefix((1, 2, 3, 4))


@dataclass
class FakeRemote:
    """A drafter service that answers as it is told; notes what it hears (`drafting.Remote`)."""

    answer: Draft | None = None
    heard: list[tuple[str, int, int, int]] = field(default_factory=list)

    def commit(self, prefix: TokenPrefix, *, draft_length: int, credit: int) -> None:
        self.heard.append(("commit", len(prefix), draft_length, credit))

    async def draft(self, prefix: TokenPrefix, max_length: int) -> Draft | None:
        self.heard.append(("draft", len(prefix), max_length, 0))
        return self.answer

    def continues(self, digest: int) -> bool:
        return digest == 4


def lookup() -> NgramIndex:
    return NgramIndex(prompt_lookup_min=1, prompt_lookup_max=3)


async def test_without_a_drafter_there_are_no_drafts() -> None:
    """Plain decoding: an empty draft, never one that stands in for a drafter, and nothing ever waits behind it."""
    drafts = NoDrafts()
    drafts.commit(PERIODIC, draft_length=4, credit=8)
    assert await drafts.draft(PERIODIC, 4) == OfferedDraft(Draft(), is_fallback=False)
    assert not drafts.continues(PERIODIC.digest())


@pytest.mark.parametrize("answer", [Draft((1, 2)), Draft((1,), (b"row",)), Draft()])
async def test_what_the_drafter_says_holds(answer: Draft) -> None:
    """Also that it has nothing to offer: lookup does not step in for a drafter that answers."""
    drafts = DraftsWithFallback(FakeRemote(answer), lookup())
    assert await drafts.draft(PERIODIC, 4) == OfferedDraft(answer, is_fallback=False)


async def test_lookup_stands_in_for_a_drafter_that_does_not_answer() -> None:
    """Its drafts are deterministic, marked as a stand-in, and no longer than asked for."""
    drafts = DraftsWithFallback(FakeRemote(None), lookup())
    assert await drafts.draft(PERIODIC, 4) == OfferedDraft(Draft((9, 7, 8, 9)), is_fallback=True)
    assert await drafts.draft(PERIODIC, 1) == OfferedDraft(Draft((9,)), is_fallback=True)


@pytest.mark.parametrize("has_lookup", [True, False])
async def test_without_a_match_or_a_lookup_there_is_no_draft(has_lookup: bool) -> None:
    """And a round without a draft is not counted as one of the stand-in."""
    drafts = DraftsWithFallback(FakeRemote(None), lookup() if has_lookup else None)
    assert await drafts.draft(NEW, 4) == OfferedDraft()


async def test_lookup_catches_up_on_the_rounds_that_the_drafter_served() -> None:
    """It is built when first needed and then kept up, as if it had been there all along."""
    remote, index = FakeRemote(Draft((1,))), lookup()
    drafts, prefix = DraftsWithFallback(remote, index), TokenPrefix(NEW.ids)
    await drafts.draft(prefix, 4)
    assert len(index) == 0
    for answer, committed in ((None, (1, 2)), (Draft((5,)), (9, 1)), (None, (2,)), (Draft(), (4, 4)), (None, (9, 1))):
        prefix.extend(committed)
        remote.answer = answer
        offered = await drafts.draft(prefix, 3)
        if answer is None:
            fresh = lookup()
            fresh.extend(prefix.ids)
            assert offered == OfferedDraft(Draft(fresh.propose((), 3)), is_fallback=True)


async def test_the_drafter_hears_of_every_commit_and_answers_for_what_is_there() -> None:
    """Only what the drafter pushed can stand in for a bonus token: a lookup is no draft that is there."""
    remote = FakeRemote()
    drafts = DraftsWithFallback(remote, lookup())
    drafts.commit(PERIODIC, draft_length=4, credit=8)
    await drafts.draft(PERIODIC, 3)
    assert remote.heard == [("commit", 5, 4, 8), ("draft", 5, 3, 0)]
    assert drafts.continues(4)
    assert not drafts.continues(PERIODIC.digest())


# ---- the session at the drafter service -----------------------------------------------------------------------------


@dataclass
class FakeClient:
    """A connection to a drafter; notes what is sent on it, or takes no more."""

    is_full: bool = False
    sent: list[drafter_pb.DrafterCommand] = field(default_factory=list)
    connection: int = 1
    is_connected: bool = True
    stale_items: int = 0
    info = fake_info(FakeModel(hashed_logits(10), vocab_size=10))

    def send(self, command: drafter_pb.DrafterCommand) -> None:
        if self.is_full:
            raise QueueFull("The peer does not read its stream.")
        self.sent.append(command)

    @property
    def kinds(self) -> list[tuple[str | None, int]]:
        return [(command.WhichOneof("command"), command.epoch) for command in self.sent]


def remote_drafts(client: Any) -> RemoteDrafts:
    return RemoteDrafts(client, spec_of(prompt_length=4, vocab_size=10), draft_deadline_s=0.01)


def failed(error: PacelineError, *, epoch: int = 1) -> drafter_pb.DrafterEvent:
    return drafter_pb.DrafterEvent(session_id="session", epoch=epoch, failed=failure_to_proto(error))


def proposed(*ids: int, epoch: int = 1) -> drafter_pb.DrafterEvent:
    proposal = drafter_pb.Proposal(base_length=len(NEW), prefix_digest=NEW.digest(), draft_ids=ids)
    return drafter_pb.DrafterEvent(session_id="session", epoch=epoch, proposal=proposal)


async def test_a_draft_that_is_there_is_given_at_once() -> None:
    """And what continues it is known to be there; one of an older epoch is dropped and counted."""
    client = FakeClient()
    drafts = remote_drafts(client)
    drafts.commit(NEW, draft_length=2, credit=4)
    drafts.on_event(proposed(9, epoch=0))
    drafts.on_event(proposed(5, 6, 7))
    assert await drafts.draft(NEW, 2) == Draft((5, 6))
    assert drafts.continues(TokenPrefix((*NEW.ids, 5, 6)).digest())
    assert client.stale_items == 1
    assert client.kinds == [("open", 1), ("commit", 1)]


async def test_a_session_that_the_drafter_lost_is_opened_again_from_its_tokens() -> None:
    """Under a higher epoch, with the next commit; until then nobody waits for it. After several times it is left."""
    client, prefix = FakeClient(), TokenPrefix(NEW.ids)
    drafts = remote_drafts(client)
    for epoch in (1, 2, 3, 4):
        drafts.commit(prefix, draft_length=2, credit=4)
        assert client.kinds[-2:] == [("open", epoch), ("commit", epoch)]
        assert list(client.sent[-2].open.committed_ids) == list(prefix.ids)
        drafts.on_event(failed(LengthMismatch("Open it again."), epoch=epoch))
        assert await drafts.draft(prefix, 2) is None
        prefix.extend([epoch])
    sent = len(client.sent)
    drafts.commit(prefix, draft_length=2, credit=4)
    assert [kind for kind, _ in client.kinds[sent:]] in ([], ["close"])


@pytest.mark.parametrize("event", [proposed(10), failed(PayloadInvalid("The committed tokens hold the id 10."))])
async def test_a_session_that_is_given_up_is_closed_at_the_drafter(event: drafter_pb.DrafterEvent) -> None:
    """It would hold its memory there, and go on drafting, until it has idled too long."""
    client = FakeClient()
    drafts = remote_drafts(client)
    drafts.commit(NEW, draft_length=2, credit=4)
    drafts.on_event(event)
    assert await drafts.draft(NEW, 2) is None
    drafts.close()
    assert client.kinds == [("open", 1), ("commit", 1), ("close", 1)]


async def test_a_drafter_that_does_not_read_never_fails_a_session() -> None:
    """The queue to it is full: that costs drafts, not the answer."""
    client = FakeClient(is_full=True)
    drafts = remote_drafts(client)
    drafts.commit(NEW, draft_length=2, credit=4)
    assert await drafts.draft(NEW, 2) is None
    drafts.close()
