"""Where a session's drafts come from when the drafter is there, late, gone, or was never configured.

The order is: the drafter service, then prompt lookup in the orchestrator itself, then no draft. Every step down costs
speed alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from orchestrator.loop import OfferedDraft
from orchestrator.stall import StallMeter
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
    """The session at the drafter service (`remote_drafts.RemoteDrafts`)."""

    def commit(self, prefix: TokenPrefix, *, draft_length: int, credit: int) -> None: ...

    async def draft(self, prefix: TokenPrefix, max_length: int) -> Draft | None:
        """None: the drafter is gone or late; an empty draft: it has nothing to offer."""

    def continues(self, digest: int) -> bool: ...

    @property
    def wants_drafts(self) -> bool:
        """False: no drafter could serve this session, so that none is missing."""


class Lookup(Protocol):
    """Drafts by lookup in one session's committed tokens (`ngram.NgramIndex`, `suffix.SuffixIndex`)."""

    def __len__(self) -> int: ...

    def extend(self, ids: Sequence[int], /) -> None: ...

    def propose(self, tail: Sequence[int], max_tokens: int, /) -> tuple[int, ...]: ...


class DraftsWithFallback:
    """The drafter service, with prompt lookup for the rounds in which it does not answer (`loop.DraftSource`)."""

    def __init__(self, remote: Remote, lookup: Lookup | None, *, stall: StallMeter | None = None) -> None:
        self._remote, self._lookup = remote, lookup
        self._clock = _RoundClock(stall) if stall is not None else None

    def commit(self, prefix: TokenPrefix, *, draft_length: int, credit: int) -> None:
        if self._clock is not None:
            self._clock.begin_round()
        self._remote.commit(prefix, draft_length=draft_length, credit=credit)

    async def draft(self, prefix: TokenPrefix, max_length: int) -> OfferedDraft:
        draft = await self._remote.draft(prefix, max_length)
        if self._clock is not None and self._remote.wants_drafts:
            self._clock.note_draft(has_come=draft is not None)
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


class _RoundClock:
    """Tells the meter of one session's rounds: each lasts from one commit to the next; the last one does not count."""

    def __init__(self, meter: StallMeter) -> None:
        self._meter = meter
        self._began_s = 0.0
        self._stalled_s: float | None = None  # None: this round wanted no draft

    def begin_round(self) -> None:
        now_s = self._meter.clock()
        if self._stalled_s is not None:
            self._meter.record(stalled_s=self._stalled_s, round_s=now_s - self._began_s)
        self._began_s, self._stalled_s = now_s, None

    def note_draft(self, *, has_come: bool) -> None:
        """A draft was wanted, and this is how it went; a round begins with waiting for it."""
        self._stalled_s = self._meter.clock() - self._began_s if has_come else math.inf
