"""Verification of drafts: what a session at the target holds, and what the model's rows say of a draft.

Knows nothing of steps, streams, protobuf or threads; whoever calls it owns the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic

from torch import Tensor

from paceline.engine.interface import CacheT, Model
from paceline.engine.step_plan import Wish
from paceline.errors import ContextTooLong, LengthMismatch
from paceline.rejection import judge_draft
from paceline.sampling import SparseDistribution, TokenHistory
from paceline.types import Row, SessionSpec, SpeculationStats

SILENT_S = 2.0  # without a draft; a round takes less, unless a drafter or an orchestrator has a fault


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftToJudge:
    """One draft as it came from an orchestrator, its ids and distributions checked."""

    base_length: int
    committed_ids: tuple[int, ...]  # the last of the base_length tokens
    draft_ids: tuple[int, ...]
    distributions: tuple[SparseDistribution, ...] | None  # None: deterministic

    @property
    def total_length(self) -> int:
        return self.base_length + len(self.draft_ids)


class TargetSession(Generic[CacheT]):
    """One generation at the target: its committed tokens, and a cache that may lag behind or run ahead of them.

    Invariant: the cache holds the first committed tokens; behind `unsettled.base_length` of them, if a draft was judged
    since the last commit, the tokens of that draft. `opened` ranks sessions by age.
    """

    def __init__(
        self, spec: SessionSpec, committed_ids: Sequence[int], cache: CacheT, *, opened: int, clock: Callable[[], float]
    ) -> None:
        self.spec, self.cache, self.opened = spec, cache, opened
        self.committed_ids = list(committed_ids)
        self.history = TokenHistory(committed_ids[: spec.prompt_length], committed_ids[spec.prompt_length :])
        self.unsettled: DraftToJudge | None = None
        self._clock, self._heard_s = clock, clock()

    @property
    def pending_tokens(self) -> int:
        """Committed tokens that are not cached."""
        return max(0, len(self.committed_ids) - self.cache.length)

    @property
    def is_silent(self) -> bool:
        """Whether no draft has come for so long that the memory had better serve others."""
        return self._clock() - self._heard_s > SILENT_S

    def is_stale(self, base_length: int) -> bool:
        """Whether a draft stands on fewer tokens than are committed already."""
        return base_length < len(self.committed_ids)

    def commit(self, base_length: int, ids: Sequence[int]) -> None:
        """Make the first `base_length` tokens the committed ones; `ids` are the last of them.

        Raises `LengthMismatch` if `ids` do not join on to what is committed, or contradict it.
        """
        start = base_length - len(ids)
        known = self.committed_ids[start:]
        if not 0 <= start <= len(self.committed_ids) or list(ids[: len(known)]) != known:
            raise LengthMismatch(
                f"{len(ids)} tokens up to length {base_length} do not continue the {len(self.committed_ids)} committed "
                "ones; open the session again from its tokens."
            )
        new = ids[len(known) :]
        self.committed_ids += new
        self.history.extend(new)
        self._heard_s = self._clock()

    def cached_ids(self) -> list[int]:
        """The tokens in the cache."""
        draft = self.unsettled
        ids = self.committed_ids if draft is None else [*self.committed_ids[: draft.base_length], *draft.draft_ids]
        return ids[: self.cache.length]


class Verifier(Generic[CacheT]):
    """Opens sessions, and judges drafts by a model's rows.

    `outcomes` counts the drafts of all sessions once it is known what was kept of them, so all but a session's last.
    """

    def __init__(self, model: Model[CacheT], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._model, self._clock = model, clock
        self._opened = 0
        self.outcomes = SpeculationStats()

    def open(
        self, spec: SessionSpec, committed_ids: Sequence[int], previous: TargetSession[CacheT] | None = None
    ) -> TargetSession[CacheT]:
        """A session on these tokens; the cache of `previous` is reused as far as the tokens agree."""
        self._require_context(len(committed_ids))
        if previous is None:
            self._opened += 1
            return TargetSession(spec, committed_ids, self._model.new_cache(), opened=self._opened, clock=self._clock)
        kept = common_prefix_length(previous.cached_ids(), committed_ids)
        if list(committed_ids[: len(previous.committed_ids)]) == previous.committed_ids:
            self._settle(previous, committed_ids)  # otherwise they are silent about what the draft stood on
        self._model.truncate(previous.cache, kept)
        return TargetSession(spec, committed_ids, previous.cache, opened=previous.opened, clock=self._clock)

    def close(self, session: TargetSession[CacheT]) -> None:
        self._model.release(session.cache)

    def begin(self, session: TargetSession[CacheT], draft: DraftToJudge) -> Wish[CacheT]:
        """Commit the tokens that the draft stands on and roll the cache back to them; what is then to be fed.

        The last committed token is fed (again) together with the draft, for the row behind it. Raises `LengthMismatch`
        or `ContextTooLong`; the session is then as it was before.
        """
        self._require_context(draft.total_length)
        session.commit(draft.base_length, draft.committed_ids)
        agreed = self._settle(session, session.committed_ids)
        self._model.truncate(session.cache, min(session.cache.length, agreed, draft.base_length - 1))
        return Wish(session, draft.draft_ids, length=draft.total_length, rows=len(draft.draft_ids) + 1)

    def judge(
        self,
        session: TargetSession[CacheT],
        draft: DraftToJudge,
        logits: Tensor,  # [draft_length + 1, vocab_size]
    ) -> tuple[Row, ...]:
        """What the rows say of the draft, which the cache now holds."""
        session.unsettled = draft
        spec = session.spec
        return judge_draft(
            logits,
            rule=spec.effective_rule,
            params=spec.sampling,
            history=session.history,
            draft_ids=draft.draft_ids,
            draft_distributions=draft.distributions,
            seed=spec.seed,
            base_length=draft.base_length,
            logprobs=spec.logprobs,
        )

    def _require_context(self, length: int) -> None:
        if length > self._model.max_context:
            raise ContextTooLong(
                f"{length} tokens do not fit into this target's context of {self._model.max_context}; draft fewer, or ask for less."
            )

    def _settle(self, session: TargetSession[CacheT], committed_ids: Sequence[int]) -> int:
        """Count what was kept of the last draft, if the committed tokens go far enough to tell; returns up to where the
        cache may agree with them.

        Under every rule they agree with the draft exactly as far as it was kept: a correction is never the token that
        was refused.
        """
        draft, session.unsettled = session.unsettled, None
        if draft is None:
            return len(committed_ids)
        kept = common_prefix_length(draft.draft_ids, committed_ids[draft.base_length :])
        agreed = draft.base_length + kept
        if draft.draft_ids and (kept == len(draft.draft_ids) or agreed < len(committed_ids)):
            self.outcomes.record_round(len(draft.draft_ids), kept)
        return agreed


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading tokens agree."""
    length = 0
    for one, other in zip(first, islice(second, len(first)), strict=False):
        if one != other:
            break
        length += 1
    return length
