"""Drafting with a small language model: one forward pass a step, one token for each session that has caught up."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Generic

import structlog
import torch
from torch import Tensor

from drafter_service.drafter import DraftedToken, DraftView, DraftWork, Outcome, Progress
from drafter_service.registry import BuiltMethod
from paceline.engine.emulation import emulated
from paceline.engine.interface import CacheT, Memory, Model
from paceline.engine.memory import step_tokens
from paceline.engine.step_plan import Part, StepPlanner, Wish
from paceline.engine.vocabulary_bridge import intersected
from paceline.errors import PacelineError, internal_error
from paceline.model_service import load_model
from paceline.sampling import TokenHistory, draw_draft_token
from paceline.settings import DrafterSettings
from paceline.types import ModelInfo

logger = structlog.get_logger(__name__)

_SILENT_S = 2.0  # without work; a round takes less, unless a target or an orchestrator has a fault


class DraftState(Generic[CacheT]):
    """What the draft model keeps for a session (`step_plan.Feeder`).

    Invariant: the cache holds the first `cache.length` of the session's ids, always fewer than all of them; `history` is
    that of `committed_ids`, which lag behind the session between its steps.
    """

    def __init__(self, session: DraftView, cache: CacheT, *, opened: int, clock: Callable[[], float]) -> None:
        prompt_length = session.spec.prompt_length
        self.cache, self.opened = cache, opened
        self.committed_ids = list(session.ids)
        self.history = TokenHistory(self.committed_ids[:prompt_length], self.committed_ids[prompt_length:])
        self._clock = clock
        self._asked_s = clock()

    @property
    def is_silent(self) -> bool:
        return self._clock() - self._asked_s > _SILENT_S

    def follow(self, session: DraftView) -> None:
        """The session has work: take over what was committed since."""
        new = session.ids[len(self.committed_ids) : session.committed_length]
        self.committed_ids += new
        self.history.extend(new)
        self._asked_s = self._clock()


class DraftModelMethod(Generic[CacheT]):
    """Draws each token from the draft model's own distribution, shaped by the same parameters as the target's.

    A step feeds at most `max_batch_tokens`, as `step_plan` shares them out.
    """

    def __init__(
        self,
        model: Model[CacheT],
        *,
        distribution_entries: int,
        max_batch_tokens: int = 512,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._entries, self._clock = model, distribution_entries, clock
        self._opened = count()
        self._holders: dict[int, DraftState[CacheT]] = {}  # by age: those that may hold memory
        self._planner = StepPlanner(model, holders=self._holders.values, max_batch_tokens=max_batch_tokens)

    @property
    def max_context(self) -> int:
        return self._model.max_context

    @property
    def memory(self) -> Memory:
        return self._model.memory

    @property
    def preemptions(self) -> int:
        return self._planner.preemptions

    def open(self, session: DraftView) -> DraftState[CacheT]:
        return DraftState(session, self._model.new_cache(), opened=next(self._opened), clock=self._clock)

    def draft(self, batch: Sequence[DraftWork[DraftState[CacheT]]]) -> Sequence[Outcome]:
        """One token for each session whose turn comes and whose tokens are all fed with it.

        After a draft that was kept whole, its last token and the bonus are fed in the same pass.
        """
        wishes = [self._wish(work) for work in batch]
        parts = self._planner.plan(wishes)
        rows = self._model.step([part.extension() for part in parts]) if parts else []
        self._planner.share_prefixes(parts)
        fed = {part.wish.feeder.opened: (part, row) for part, row in zip(parts, rows, strict=True)}
        return [self._outcome(work, wish, fed) for work, wish in zip(batch, wishes, strict=True)]

    def rewind(self, state: DraftState[CacheT], length: int) -> None:
        self._model.truncate(state.cache, min(state.cache.length, length))

    def pending_tokens(self, state: DraftState[CacheT], session: DraftView) -> int:
        return max(0, session.committed_length - state.cache.length)

    def close(self, state: DraftState[CacheT]) -> None:
        self._holders.pop(state.opened, None)
        self._model.release(state.cache)

    def _wish(self, work: DraftWork[DraftState[CacheT]]) -> Wish[CacheT]:
        """To draft takes all ids; to catch up, all committed ones but the last, which is fed with the next draft."""
        state, session = work.state, work.session
        state.follow(session)
        self._holders[state.opened] = state
        drafted = session.ids[session.committed_length :]
        if work.max_tokens:
            return Wish(state, drafted, len(session.ids), 1)
        return Wish(state, drafted, session.committed_length - 1, 0)

    def _outcome(
        self,
        work: DraftWork[DraftState[CacheT]],
        wish: Wish[CacheT],
        fed: dict[int, tuple[Part[CacheT], Tensor]],  # rows [rows, draft_vocab_size]
    ) -> Outcome:
        part, rows = fed.get(work.state.opened, (None, None))
        fed_tokens = part.count if part else 0
        if wish.remaining > 0:
            return Progress(fed_tokens)
        if not work.max_tokens:
            return Progress(fed_tokens, drafted=())
        assert rows is not None, "to draft, at least one token is fed"
        try:
            return Progress(fed_tokens, drafted=[self._draw(work, rows[0])])
        except PacelineError as error:
            return error
        except Exception:
            # A fault of ours, met in one session's row: the others have their tokens.
            logger.exception("a draft token could not be drawn", session_id=work.session.spec.session_id)
            return internal_error()

    def _draw(
        self,
        work: DraftWork[DraftState[CacheT]],
        logits: Tensor,  # [draft_vocab_size]
    ) -> DraftedToken:
        session, ids = work.session, work.session.ids
        token_id, distribution = draw_draft_token(
            fit_vocabulary(logits, session.spec.vocab_size),
            params=session.spec.sampling,
            rule=session.spec.effective_rule,
            history=work.state.history,
            drafted=ids[session.committed_length :],
            seed=session.spec.seed,
            position=len(ids),
            max_entries=self._entries,
        )
        return DraftedToken(token_id, distribution)


def fit_vocabulary(
    logits: Tensor,  # [draft_vocab_size]
    vocab_size: int,
) -> Tensor:  # [vocab_size]
    """Cut or pad a row to the target's vocabulary: models of one tokenizer differ in unused rows at the end."""
    if len(logits) >= vocab_size:
        return logits[:vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - len(logits)), value=float("-inf"))


def build(settings: DrafterSettings) -> BuiltMethod:
    """The model that the settings name, loaded; raises `ModelUnavailable` and `StartupFailed`."""
    loaded = load_model(settings, logit_noise=settings.logit_noise, verifier=settings.verifier)
    model: Model[Any] = emulated(loaded, step_ms=settings.emulated_step_ms)
    tokenizer_sha256 = loaded.tokenizer_sha256
    if settings.target_tokenizer:
        model = shared = intersected(
            model, drafter=settings.model, target=settings.target_tokenizer, cache_dir=settings.cache_dir
        )
        tokenizer_sha256 = shared.tokenizer_sha256
    info = ModelInfo(
        model_id=loaded.model_id,
        vocab_size=model.vocab_size,
        max_context=model.max_context,
        tokenizer_sha256=tokenizer_sha256,
        incarnation=uuid.uuid4().hex,
        method="draft_model",
        dtype=str(loaded.dtype).removeprefix("torch."),
        emulated=settings.emulated_step_ms > 0,
        expected_acceptance=loaded.expected_acceptance,
    )
    method = DraftModelMethod(
        model,
        distribution_entries=settings.distribution_entries,
        max_batch_tokens=step_tokens(settings.max_num_batched_tokens, loaded.allocation.device),
    )
    return BuiltMethod(method, info, loaded.allocation)
