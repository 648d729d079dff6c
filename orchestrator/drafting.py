"""Where a session's drafts come from when the drafter is there, late, gone, or was never configured.

The order is: the drafter service, then prompt lookup in the orchestrator itself, then no draft. Every step down costs
speed alone.
"""

from __future__ import annotations

from typing import Protocol

from orchestrator.loop import OfferedDraft
from paceline.lookup.ngram import NgramIndex
from paceline.prefix import TokenPrefix
from paceline.types import Draft


class NoDrafts:
    """Plain decoding (`loop.DraftSource`)."""

    def commit(self, prefix: TokenPrefix, *, draft_length: int, credit: int) -> None:
        """Nobody has to know."""

    async def draft(self, prefix: TokenPrefix, max_length: int) -> OfferedDraft:
        return OfferedDraft()

    def continues(self, digest: int) -> bool:
        return False


class Remote(Protocol):
    """The session at the drafter service (`clients.RemoteDrafts`)."""

    def commit(self, prefix: TokenPrefix, *, draft_length: int, credit: int) -> None: ...

    async def draft(self, prefix: TokenPrefix, max_length: int) -> Draft | None:
        """None: the drafter is gone or late; an empty draft: it has nothing to offer."""

    def continues(self, digest: int) -> bool: ...


class DraftsWithFallback:
    """The drafter service, with prompt lookup for the rounds in which it does not answer (`loop.DraftSource`)."""

    def __init__(self, remote: Remote, lookup: NgramIndex | None) -> None:
        self._remote, self._lookup = remote, lookup

    def commit(self, prefix: TokenPrefix, *, draft_length: int, credit: int) -> None:
        self._remote.commit(prefix, draft_length=draft_length, credit=credit)

    async def draft(self, prefix: TokenPrefix, max_length: int) -> OfferedDraft:
        draft = await self._remote.draft(prefix, max_length)
        if draft is not None:
            return OfferedDraft(draft)
        if self._lookup is None:
            return OfferedDraft()
        # Built when first needed, then kept up: a healthy drafter costs the orchestrator no index.
        self._lookup.extend(prefix.ids[len(self._lookup) :])
        found = Draft(self._lookup.propose((), max_length))
        return OfferedDraft(found, is_fallback=bool(found.ids))

    def continues(self, digest: int) -> bool:
        return self._remote.continues(digest)
