"""Where drafts come from: the drafter, else prompt lookup, else nowhere; every step down costs speed alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from orchestrator.drafting import DraftsWithFallback, NoDrafts
from orchestrator.loop import OfferedDraft
from paceline.lookup.ngram import NgramIndex
from paceline.prefix import TokenPrefix
from paceline.types import Draft

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
