"""What goes into the next step of a model: a token budget, shared prefixes, and room in memory.

Prompts are fed in chunks of what the budget leaves, so that no session waits longer than one budgeted step for another
one's prompt. Where memory is short the sessions opened last give theirs up and are computed again later; the one opened
first can always go on. Knows nothing of drafts, verdicts or streams.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from paceline.engine.interface import Cache, CacheT, Extension, Model

SHORT_LENGTH = 80  # tokens; a session that needs no more is in mid-answer, or as good as
_PROMPT_SHARE = 4  # a quarter of the budget is kept for prompts, where some wait
_ALIKE_LENGTH = 16  # tokens; prompts that go on alike for so long are computed one after the other


@dataclass(frozen=True, slots=True)
class StepReport:
    """How much one step took on, and how long that was."""

    sessions: int
    tokens: int  # fed
    seconds: float


CacheT_co = TypeVar("CacheT_co", bound=Cache, covariant=True)


class Feeder(Protocol[CacheT_co]):
    """A session, as far as its memory goes. Invariant: the cache holds the first of its tokens."""

    @property
    def cache(self) -> CacheT_co: ...

    @property
    def opened(self) -> int:
        """Rank by age: sessions opened later have higher ones."""

    @property
    def is_silent(self) -> bool:
        """Whether it has asked for nothing for so long that it may give way to a session opened later."""

    @property
    def committed_ids(self) -> Sequence[int]:
        """The tokens that nobody will take back, which may be shared with other sessions."""


class Wish(NamedTuple, Generic[CacheT]):
    """What a session wants of the next steps: that the first `length` of its tokens are cached, and the logits of the
    last `rows` of them.

    Its tokens are the committed ones and `ids` behind them. The rows are never split over two steps.
    """

    feeder: Feeder[CacheT]
    ids: Sequence[int]
    length: int
    rows: int

    @property
    def remaining(self) -> int:
        """Tokens to be fed."""
        return self.length - self.feeder.cache.length


# Not frozen, which takes twice as long to make: each line of each step of a drafter takes one.
@dataclass(slots=True)
class Part(Generic[CacheT]):
    """What of a wish goes into the step: its next `count` tokens, with its rows if those are the last ones."""

    wish: Wish[CacheT]
    count: int

    def extension(self) -> Extension[CacheT]:
        """The part as the model takes it; to be asked for once, before the step."""
        wish, count = self.wish, self.count
        cache, committed = wish.feeder.cache, wish.feeder.committed_ids
        start, behind = cache.length, cache.length - len(committed)
        if behind >= 0:
            fed = wish.ids[behind : behind + count]
        else:
            fed = [*committed[start : start + count], *wish.ids[: max(0, behind + count)]]
        return Extension(cache, fed, wish.rows if start + count == wish.length else 0)


@dataclass(slots=True)
class _Plan(Generic[CacheT]):
    """One step in the making; sessions go by their ages."""

    wanting: set[int]  # all that want something now
    parts: dict[int, Part[CacheT]] = field(default_factory=dict)
    being_computed: set[tuple[int, ...]] = field(default_factory=set)  # what `_next_tokens` says of the parts
    newest_allowed: float = math.inf  # the oldest session that found no room: what newer ones took it would take back

    @property
    def tokens(self) -> int:
        return sum(part.count for part in self.parts.values())


class StepPlanner(Generic[CacheT]):
    """Plans one step after another for one model.

    `holders` gives all sessions that may hold memory. `preemptions` counts how often one lost it.
    """

    def __init__(
        self, model: Model[CacheT], *, holders: Callable[[], Iterable[Feeder[CacheT]]], max_batch_tokens: int
    ) -> None:
        self._model, self._holders, self.max_batch_tokens = model, holders, max_batch_tokens
        self.preemptions = 0
        self._waited_at: dict[int, int] = {}  # by age: cached tokens of sessions that waited for another one's

    def plan(self, wishes: Sequence[Wish[CacheT]]) -> list[Part[CacheT]]:
        """As much of the wishes, given in the order of their urgency, as fits: each at most once.

        Afterwards there is room in memory for all parts. Empty only while older sessions hold the memory, want nothing
        now and are not silent either; no session waits for one opened later.
        """
        prompts: list[Wish[CacheT]] = []
        others: list[Wish[CacheT]] = []
        for wish in wishes:
            if wish.remaining > _ALIKE_LENGTH:
                self._reuse_prefix(wish)
            (prompts if wish.remaining > SHORT_LENGTH else others).append(wish)
        plan = _Plan[CacheT]({wish.feeder.opened for wish in wishes})
        self._fill(plan, others, self.max_batch_tokens - self._kept_for_prompts(prompts, others))
        self._fill(plan, prompts, self.max_batch_tokens - plan.tokens)
        if self._waited_at:
            self._waited_at = {opened: length for opened, length in self._waited_at.items() if opened in plan.wanting}
        return list(plan.parts.values())

    def share_prefixes(self, parts: Iterable[Part[CacheT]]) -> None:
        """To be called when a step is over: lets others reuse the committed tokens that it has computed."""
        for part in parts:
            self._model.share_prefix(part.wish.feeder.cache, part.wish.feeder.committed_ids)

    def _reuse_prefix(self, wish: Wish[CacheT]) -> None:
        feeder = wish.feeder
        committed, cache = feeder.committed_ids, feeder.cache
        # The tokens whose rows are wanted are computed, even if others have.
        if self._model.reuse_prefix(cache, committed) > wish.length - wish.rows:
            self._model.truncate(cache, wish.length - wish.rows)

    def _kept_for_prompts(self, prompts: Sequence[Wish[CacheT]], others: Sequence[Wish[CacheT]]) -> int:
        if not prompts or not others:
            return 0
        # Never so much that the rows of the most urgent wish do not fit: it would wait as long as prompts keep coming.
        return max(0, min(self.max_batch_tokens // _PROMPT_SHARE, self.max_batch_tokens - others[0].rows))

    def _fill(self, plan: _Plan[CacheT], wishes: Iterable[Wish[CacheT]], budget: int) -> None:
        """Add parts until the budget is used up."""
        for wish in wishes:
            remaining, opened = wish.remaining, wish.feeder.opened
            # All, or a chunk that leaves its rows together.
            count = remaining if remaining <= budget else min(budget, remaining - wish.rows)
            if count <= 0 or opened > plan.newest_allowed:
                continue
            next_tokens = _next_tokens(wish) if remaining > _ALIKE_LENGTH else None
            if next_tokens in plan.being_computed and self._may_wait(wish):
                continue
            if self._make_room(plan, wish, count):
                plan.parts[opened] = Part(wish, count)
                budget -= count
                if next_tokens is not None:
                    plan.being_computed.add(next_tokens)
            else:
                plan.newest_allowed = min(plan.newest_allowed, opened)

    def _may_wait(self, wish: Wish[CacheT]) -> bool:
        """Whether the session may wait for another one's tokens: one step, and again if it then could reuse some."""
        opened, length = wish.feeder.opened, wish.feeder.cache.length
        if self._waited_at.pop(opened, None) == length:
            return False
        self._waited_at[opened] = length
        return True

    def _make_room(self, plan: _Plan[CacheT], wish: Wish[CacheT], count: int) -> bool:
        cache = wish.feeder.cache
        while not self._model.reserve(cache, cache.length + count):
            victim = self._victim(plan, wish.feeder)
            if victim is None:
                return False
            plan.parts.pop(victim.opened, None)
            self._model.release(victim.cache)
            self.preemptions += 1
        return True

    def _victim(self, plan: _Plan[CacheT], feeder: Feeder[CacheT]) -> Feeder[CacheT] | None:
        """Who gives up its memory: the session opened last, if later than this one; else a silent one."""
        others = [
            holder
            for holder in self._holders()
            # Room was made for those in the plan, even if nothing is cached yet.
            if holder is not feeder and (holder.cache.length > 0 or holder.opened in plan.parts)
        ]
        newer = [holder for holder in others if holder.opened > feeder.opened]
        # One that has waited long for its own turn is not silent: the two would take each other's memory in turn.
        silent = [holder for holder in others if holder.is_silent and holder.opened not in plan.wanting]
        return max(newer or silent, key=lambda holder: holder.opened, default=None)


def _next_tokens(wish: Wish[CacheT]) -> tuple[int, ...]:
    """What sessions have in common that go on alike, and with committed tokens.

    Where one of them computes, the others had better wait and reuse. Sessions whose tokens before are others have this
    in common as well, which costs them one step's delay.
    """
    # From a border on: chunks end anywhere, but only whole blocks are reused.
    start = wish.feeder.cache.length // _ALIKE_LENGTH * _ALIKE_LENGTH
    return (start, *wish.feeder.committed_ids[start : start + _ALIKE_LENGTH])
