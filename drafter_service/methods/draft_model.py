"""Drafting with a small language model: one forward pass a step, one token for each session that has caught up."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, NamedTuple
from weakref import WeakValueDictionary

import structlog
import torch
from torch import Tensor

from drafter_service.method import DraftView, DraftWork, Outcome, Progress
from drafter_service.registry import BuiltMethod
from paceline.engine.emulation import emulated
from paceline.engine.interface import CacheT, Memory, Model
from paceline.engine.memory import step_tokens
from paceline.engine.pulse import can_step
from paceline.engine.step_plan import StepPlanner, Wish
from paceline.engine.vocabulary_bridge import intersected
from paceline.errors import PacelineError, internal_error
from paceline.model_service import load_model
from paceline.sampling import DraftedToken, DraftRow, TokenHistory, choose_draft_tokens
from paceline.settings import DrafterSettings
from paceline.types import ModelInfo, SamplingParams, SessionSpec, VerificationRule

logger = structlog.get_logger(__name__)

_BRANCH_AGE = 2**40  # beyond all numbers of sessions
_SILENT_S = 2.0  # without work; a round takes less, unless a target or an orchestrator has a fault


class SharedTokens(Generic[CacheT]):
    """What all states of one session have in common: its committed tokens, their history, and its age.

    `states` are those that are open, in the order of opening: the first is the session's own, all others are branches'.
    """

    def __init__(self, session: DraftView, law: _Law, *, opened: int, clock: Callable[[], float]) -> None:
        self.spec, self.law = session.spec, law
        prompt_length = session.spec.prompt_length
        self.committed_ids, self.opened = session.committed_ids, opened
        self.states: list[DraftState[CacheT]] = []
        self.history = TokenHistory(self.committed_ids[:prompt_length], self.committed_ids[prompt_length:])
        self._known_length = len(self.committed_ids)
        self._clock = clock
        self._asked_s = clock()

    @property
    def is_silent(self) -> bool:
        return self._clock() - self._asked_s > _SILENT_S

    def follow(self, now_s: float) -> None:
        """The session has work: take over what was committed since."""
        if len(self.committed_ids) > self._known_length:
            self.history.extend(self.committed_ids[self._known_length :])
            self._known_length = len(self.committed_ids)
        self._asked_s = now_s


class DraftState(Generic[CacheT]):
    """What the draft model keeps for a line of tokens of a session (`step_plan.Feeder`).

    Branches give up their memory before any session does; one that stays alone is the session: `opened` says so.

    Invariant: the cache holds the first `cache.length` of the line's ids, always fewer than all of them.
    """

    def __init__(self, shared: SharedTokens[CacheT], cache: CacheT, *, number: int) -> None:
        self.shared, self.cache, self.number = shared, cache, number
        self.committed_ids = shared.committed_ids
        self.opened = _BRANCH_AGE + number if shared.states else shared.opened
        shared.states.append(self)

    @property
    def is_silent(self) -> bool:
        return self.shared.is_silent


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
        self._numbers = count()
        self._holders: dict[int, DraftState[CacheT]] = {}  # by number: those that may hold memory
        self._laws: WeakValueDictionary[tuple[SamplingParams, VerificationRule, int], _Law] = WeakValueDictionary()
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
        number = next(self._numbers)
        shared = SharedTokens[CacheT](session, self._law(session.spec), opened=number, clock=self._clock)
        return DraftState(shared, self._model.new_cache(), number=number)

    def fork(self, state: DraftState[CacheT], session: DraftView, length: int) -> DraftState[CacheT]:
        """The cache is shared until one of the two is fed. What the other one has given up is computed again."""
        cache = self._model.fork(state.cache, min(length, state.cache.length))
        fork = DraftState(state.shared, cache, number=next(self._numbers))
        self._holders[fork.number] = fork
        return fork

    def draft(self, batch: Sequence[DraftWork[DraftState[CacheT]]]) -> Sequence[Outcome]:
        """One token for each session whose turn comes and whose tokens are all fed with it.

        After a draft that was kept whole, its last token and the bonus are fed in the same pass.
        """
        now_s = self._clock()
        wishes = [self._wish(work, now_s) for work in batch]
        parts = self._planner.plan(wishes)
        rows = self._model.step([part.extension() for part in parts]) if parts else []
        self._planner.share_prefixes(parts)
        fed = {part.wish.feeder.opened: (part.count, logits) for part, logits in zip(parts, rows, strict=True)}
        outcomes: list[Outcome] = []
        places: dict[tuple[_Law, int], list[_Place]] = {}  # those whose tokens can be drawn together
        for number, (work, wish) in enumerate(zip(batch, wishes, strict=True)):
            shared = work.state.shared
            count, logits = fed.get(work.state.opened, _NOTHING_FED)
            is_fed = wish.remaining <= 0
            if is_fed and work.max_tokens:
                assert logits is not None, "to draft, at least one token is fed"
                row = DraftRow(logits, shared.history, wish.ids, shared.spec.seed, wish.length)
                places.setdefault((shared.law, work.fan_out), []).append(_Place(number, count, shared.spec, row))
            outcomes.append(Progress(count, () if is_fed else None))
        for (law, guesses), alike in places.items():
            for place, drafted in zip(alike, self._draw(alike, law, guesses), strict=True):
                outcomes[place.number] = (
                    drafted if isinstance(drafted, PacelineError) else Progress(place.fed_tokens, (drafted,))
                )
        return outcomes

    def can_step(self) -> bool:
        return can_step(self._model)

    def rewind(self, state: DraftState[CacheT], length: int) -> None:
        self._model.truncate(state.cache, min(state.cache.length, length))

    def pending_tokens(self, state: DraftState[CacheT], session: DraftView) -> int:
        return max(0, len(session.committed_ids) - state.cache.length)

    def close(self, state: DraftState[CacheT]) -> None:
        self._holders.pop(state.number, None)
        open_states = state.shared.states
        open_states.remove(state)
        if open_states:
            # A branch may have become the session's own line; before the release, so that one of them always counts.
            open_states[0].opened = state.shared.opened
            self._model.adopt(open_states[0].cache)
        self._model.release(state.cache)

    def _law(self, spec: SessionSpec) -> _Law:
        """The one of all open sessions that are alike."""
        law = _Law(spec.sampling, spec.effective_rule, spec.vocab_size)
        return self._laws.setdefault((law.params, law.rule, law.vocab_size), law)

    def _wish(self, work: DraftWork[DraftState[CacheT]], now_s: float) -> Wish[CacheT]:
        """To draft takes all ids; to catch up, all committed ones but the last, which is fed with the next draft."""
        state, session = work.state, work.session
        state.shared.follow(now_s)
        self._holders[state.number] = state
        drafted, committed_length = session.drafted_ids, len(session.committed_ids)
        if work.max_tokens:
            return Wish(state, drafted, committed_length + len(drafted), 1)
        return Wish(state, drafted, committed_length - 1, 0)

    def _draw(self, places: Sequence[_Place], law: _Law, guesses: int) -> Sequence[DraftedToken | PacelineError]:
        """A token for each place, drawn together as long as none of them fails."""
        rows = [place.row for place in places]
        if law.vocab_size != self._model.vocab_size:
            rows = [row._replace(logits=fit_vocabulary(row.logits, law.vocab_size)) for row in rows]
        try:
            return choose_draft_tokens(
                rows, params=law.params, rule=law.rule, max_entries=self._entries, guesses=guesses
            )
        except Exception as error:
            if len(places) > 1:
                return [drafted for place in places for drafted in self._draw([place], law, guesses)]
            if isinstance(error, PacelineError):
                return [error]
            # A fault of ours, met in one session's row: the others have their tokens.
            logger.exception("a draft token could not be drawn", session_id=places[0].spec.session_id)
            return [internal_error()]


_NOTHING_FED: tuple[int, Tensor | None] = (0, None)


class _Place(NamedTuple):
    """Where a step came to draw a token, with the number of the work that it is for in the batch."""

    number: int
    fed_tokens: int
    spec: SessionSpec
    row: DraftRow


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _Law:
    """What sessions must have in common for their tokens to be drawn together; those that have it hold the same object,
    so that nothing is compared in a step."""

    params: SamplingParams
    rule: VerificationRule
    vocab_size: int


def fit_vocabulary(
    logits: Tensor,  # [..., draft_vocab_size]
    vocab_size: int,
) -> Tensor:  # [..., vocab_size]
    """Cut or pad rows to the target's vocabulary: models of one tokenizer differ in unused rows at the end."""
    missing = vocab_size - logits.shape[-1]
    if missing == 0:
        return logits
    if missing < 0:
        return logits[..., :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))


def build(settings: DrafterSettings) -> BuiltMethod:
    """The model that the settings name, loaded; raises `ModelUnavailable` and `StartupFailed`."""
    loaded = load_model(settings, logit_noise=settings.logit_noise, verifier=settings.verifier)
    model: Model[Any] = emulated(
        loaded,
        step_ms=settings.emulated_step_ms,
        per_session_ms=settings.emulated_step_ms_per_session,
        per_token_ms=settings.emulated_step_ms_per_token,
    )
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
        emulated=settings.is_emulated,
        expected_acceptance=loaded.expected_acceptance,
    )
    method = DraftModelMethod(
        model,
        distribution_entries=settings.distribution_entries,
        max_batch_tokens=step_tokens(settings.max_num_batched_tokens, loaded.allocation.device),
    )
    return BuiltMethod(method, info, loaded.allocation)
