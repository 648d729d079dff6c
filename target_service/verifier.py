"""Verification of drafts: one forward pass, then results row by row.

Knows nothing of streams, protobuf or threads; whoever calls it owns the model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from paceline.engine.model import Extension
from paceline.errors import ContextTooLong, LengthMismatch
from paceline.rejection import judge_draft
from paceline.sampling import SparseDistribution, TokenHistory
from paceline.types import SessionSpec, SpeculationStats, VerdictRows


class Cache(Protocol):
    @property
    def length(self) -> int: ...


CacheT = TypeVar("CacheT", bound=Cache)


class Model(Protocol[CacheT]):
    """The narrow interface to a causal model (`engine.model.CausalModel`)."""

    vocab_size: int
    max_context: int

    def new_cache(self) -> CacheT: ...
    def truncate(self, cache: CacheT, length: int) -> None: ...
    def step(self, batch: Sequence[Extension[CacheT]]) -> list[Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftToJudge:
    """One draft as it came from an orchestrator, its ids and distributions checked."""

    base_length: int
    committed_ids: tuple[int, ...]  # the last of the base_length tokens
    draft_ids: tuple[int, ...]
    distributions: tuple[SparseDistribution, ...] | None  # None: deterministic


@dataclass(frozen=True, slots=True)
class JudgedDraft:
    """A draft that was fed and answered, and of which only the session's next draft tells what was kept."""

    base_length: int
    draft_length: int


class TargetSession(Generic[CacheT]):
    """One generation at the target: its committed tokens, and a cache that may lag behind or run ahead of them.

    Invariant: `fed` are the tokens whose keys and values the cache holds, so `len(fed) == cache.length`; the first
    `agreed_length` of them are known to be committed.
    """

    def __init__(self, spec: SessionSpec, committed_ids: Sequence[int], cache: CacheT, fed: list[int]) -> None:
        self.spec = spec
        self.committed = list(committed_ids)
        self.cache, self.fed = cache, fed
        self.agreed_length = 0
        self.unsettled: JudgedDraft | None = None
        self.history = TokenHistory(committed_ids[: spec.prompt_length], committed_ids[spec.prompt_length :])

    @property
    def kv_tokens(self) -> int:
        """Tokens in the cache, or that will be once the next step has fed the committed ones."""
        return max(self.cache.length, len(self.committed))

    def is_stale(self, base_length: int) -> bool:
        """Whether a draft stands on fewer tokens than are committed already."""
        return base_length < len(self.committed)

    def commit(self, base_length: int, ids: Sequence[int]) -> None:
        """Make the first `base_length` tokens the committed ones; `ids` are the last of them.

        Raises `LengthMismatch` if `ids` do not join on to what is committed, or contradict it.
        """
        start = base_length - len(ids)
        known = self.committed[start:]
        if not 0 <= start <= len(self.committed) or list(ids[: len(known)]) != known:
            raise LengthMismatch(
                f"{len(ids)} tokens up to length {base_length} do not continue the {len(self.committed)} committed "
                "ones; open the session again from its tokens."
            )
        new = ids[len(known) :]
        self.committed += new
        self.history.extend(new)


class Verifier(Generic[CacheT]):
    """Opens sessions and judges drafts, with one model.

    `outcomes` counts the drafts of all sessions once it is known what was kept of them, so all but a session's last.
    """

    def __init__(self, model: Model[CacheT]) -> None:
        self._model = model
        self.outcomes = SpeculationStats()

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    def open(
        self, spec: SessionSpec, committed_ids: Sequence[int], previous: TargetSession[CacheT] | None = None
    ) -> TargetSession[CacheT]:
        """A session on these tokens; the cache of `previous` is reused as far as the tokens agree."""
        if len(committed_ids) > self._model.max_context:
            raise ContextTooLong(
                f"{len(committed_ids)} tokens do not fit into the model's context of {self._model.max_context}."
            )
        if previous is None:
            return TargetSession(spec, committed_ids, self._model.new_cache(), [])
        session = TargetSession(spec, committed_ids, previous.cache, previous.fed)
        session.unsettled = previous.unsettled
        return session

    def judge(self, session: TargetSession[CacheT], draft: DraftToJudge) -> VerdictRows:
        """Run one verify step; afterwards the cache holds `base_length + draft_length` tokens.

        Raises `LengthMismatch` or `ContextTooLong`; the session is then as it was before.
        """
        total_length = draft.base_length + len(draft.draft_ids)
        if total_length > self._model.max_context:
            raise ContextTooLong(
                f"{total_length} tokens do not fit into the model's context of {self._model.max_context}; draft fewer."
            )
        session.commit(draft.base_length, draft.committed_ids)
        started_s = time.perf_counter()
        logits = self._forward(session, draft)
        spec = session.spec
        rows = judge_draft(
            logits,
            rule=spec.effective_rule,
            params=spec.sampling,
            history=session.history,
            draft_ids=draft.draft_ids,
            draft_distributions=draft.distributions,
            seed=spec.seed,
            base_length=draft.base_length,
        )
        session.unsettled = JudgedDraft(draft.base_length, len(draft.draft_ids))
        return VerdictRows(base_length=draft.base_length, rows=rows, step_time_s=time.perf_counter() - started_s)

    def _forward(self, session: TargetSession[CacheT], draft: DraftToJudge) -> Tensor:
        """Logits of the last committed token and of each draft token: [draft_length + 1, vocab_size]."""
        self._roll_back(session)
        unfed = session.committed[session.cache.length :]
        # Once a session runs, `unfed` is the last committed token alone: the cache holds base_length - 1 tokens.
        ids = [*unfed, *draft.draft_ids]
        (logits,) = self._model.step([Extension(session.cache, ids, len(draft.draft_ids) + 1)])
        session.fed += ids
        session.agreed_length = draft.base_length
        return logits

    def _roll_back(self, session: TargetSession[CacheT]) -> None:
        """Truncate the cache to the tokens that are committed, and by one more so that the last is fed again."""
        agreed = common_prefix_length(session.fed, session.committed, start=session.agreed_length)
        self._settle(session, agreed)
        length = min(agreed, len(session.committed) - 1)
        self._model.truncate(session.cache, length)
        del session.fed[length:]

    def _settle(self, session: TargetSession[CacheT], agreed_length: int) -> None:
        """Count what was kept of the last draft, if the committed tokens go far enough to tell.

        Under every rule they agree with the draft exactly as far as it was kept: a correction is never the token that
        was refused.
        """
        judged, session.unsettled = session.unsettled, None
        if judged is None or judged.draft_length == 0:
            return
        kept_length = agreed_length - judged.base_length
        if kept_length >= 0 and (kept_length == judged.draft_length or agreed_length < len(session.committed)):
            self.outcomes.record_round(judged.draft_length, kept_length)


def common_prefix_length(first: Sequence[int], second: Sequence[int], *, start: int) -> int:
    """How many leading tokens agree, given that the first `start` do; costs the tokens behind those alone."""
    length = start
    for one, other in zip(islice(first, start, None), islice(second, start, None), strict=False):
        if one != other:
            break
        length += 1
    return length
