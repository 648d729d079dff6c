"""Where a session's drafts come from when the drafter is there, late, gone, or was never configured.

The order is: the drafter service, then prompt lookup in the orchestrator itself, then no draft. Every step down costs
speed alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from orchestrator.loop import DraftOrder, OfferedDraft, RoundPlan
from orchestrator.proposals import Arrival
from orchestrator.stall import StallMeter
from paceline.prefix import TokenPrefix
from paceline.types import Draft, DraftOrigin


class NoDrafts:
    """Plain decoding (`loop.DraftSource`)."""

    def commit(self, prefix: TokenPrefix, order: DraftOrder) -> None:
        """Nobody has to know."""

    def available(self, prefix: TokenPrefix, max_length: int) -> int:
        return 0

    def is_ready(self, prefix: TokenPrefix, plan: RoundPlan) -> bool:
        return True

    async def draft(self, prefix: TokenPrefix, plan: RoundPlan) -> OfferedDraft:
        return OfferedDraft()

    def continues(self, digest: int) -> bool:
        return False

    def distrust(self) -> None:
        """There is nobody to distrust."""


class Remote(Protocol):
    """The session at the drafter service (`remote_drafts.RemoteDrafts`)."""

    def commit(self, prefix: TokenPrefix, order: DraftOrder) -> None: ...

    def available(self, prefix: TokenPrefix, max_length: int) -> int: ...

    def is_ready(self, prefix: TokenPrefix, plan: RoundPlan) -> bool:
        """Whether `draft` would wait for nothing now."""

    async def draft(self, prefix: TokenPrefix, plan: RoundPlan) -> Draft | None:
        """None: the drafter is gone or late, or not waited for; an empty draft: it has nothing to offer."""

    def continues(self, digest: int) -> bool: ...

    def distrust(self) -> None: ...

    def arrival(self, prefix: TokenPrefix) -> Arrival | None:
        """Of the drafted tokens that are there for the committed ones."""

    @property
    def is_served(self) -> bool:
        """Whether a drafter holds the session now."""

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

    def commit(self, prefix: TokenPrefix, order: DraftOrder) -> None:
        self._remote.commit(prefix, order)
        if self._clock is not None:
            self._clock.begin_round()
            # Whatever the planner makes of it: a pool without drafters must not look idle.
            if self._remote.wants_drafts and not self._remote.is_served:
                self._clock.note_draft(has_come=False)

    def available(self, prefix: TokenPrefix, max_length: int) -> int:
        return self._remote.available(prefix, max_length)

    def is_ready(self, prefix: TokenPrefix, plan: RoundPlan) -> bool:
        return self._remote.is_ready(prefix, plan)

    async def draft(self, prefix: TokenPrefix, plan: RoundPlan) -> OfferedDraft:
        if self._clock is not None:
            self._clock.begin_wait()
        draft = await self._remote.draft(prefix, plan)
        # A plan that does not wait for the drafter misses none: more drafters would not have been faster.
        if self._clock is not None and self._remote.wants_drafts and (draft is not None or plan.enough_length):
            self._clock.note_draft(has_come=draft is not None)
        if draft is not None and draft.ids:
            return OfferedDraft(draft, DraftOrigin.AHEAD, self._remote.arrival(prefix))
        if draft is not None:
            return OfferedDraft()
        if self._lookup is None:
            return OfferedDraft()
        # Built when first needed, then kept up: a healthy drafter costs the orchestrator no index.
        self._lookup.extend(prefix.ids[len(self._lookup) :])
        found = Draft(self._lookup.propose((), plan.draft_length))
        return OfferedDraft(found, DraftOrigin.FALLBACK if found.ids else DraftOrigin.NONE)

    def continues(self, digest: int) -> bool:
        return self._remote.continues(digest)

    def distrust(self) -> None:
        self._remote.distrust()


class _RoundClock:
    """Tells the meter of one session's rounds: each lasts from one commit to the next; the last one does not count."""

    def __init__(self, meter: StallMeter) -> None:
        self._meter = meter
        self._began_s = self._asked_s = 0.0
        self._stalled_s: float | None = None  # None: this round wanted no draft

    def begin_round(self) -> None:
        now_s = self._meter.clock()
        if self._stalled_s is not None:
            self._meter.record(stalled_s=self._stalled_s, round_s=now_s - self._began_s)
        self._began_s, self._stalled_s = now_s, None

    def begin_wait(self) -> None:
        """A draft is wanted from now on: till now the client may have had its turn."""
        self._asked_s = self._meter.clock()

    def note_draft(self, *, has_come: bool) -> None:
        """A draft was wanted, and this is how it went."""
        self._stalled_s = self._meter.clock() - self._asked_s if has_come else math.inf
