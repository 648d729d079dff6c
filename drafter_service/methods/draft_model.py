"""Drafting with a small language model: one forward pass a step, one token for each session that has caught up."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, NamedTuple

import structlog
import torch
from torch import Tensor

from drafter_service.method import DraftedToken, DraftView, DraftWork, Guess, Outcome, Progress
from drafter_service.registry import BuiltMethod
from paceline.engine.emulation import emulated
from paceline.engine.interface import CacheT, Memory, Model
from paceline.engine.memory import step_tokens
from paceline.engine.step_plan import StepPlanner, Wish
from paceline.engine.vocabulary_bridge import intersected
from paceline.errors import PacelineError, internal_error
from paceline.model_service import load_model
from paceline.sampling import DraftChoice, DraftRow, TokenHistory, choose_draft_tokens
from paceline.settings import DrafterSettings
from paceline.types import ModelInfo, SamplingParams, VerificationRule

logger = structlog.get_logger(__name__)

_BRANCH_AGE = 2**40  # beyond all numbers of sessions
_SILENT_S = 2.0  # without work; a round takes less, unless a target or an orchestrator has a fault


class SharedTokens(Generic[CacheT]):
    """What all states of one session have in common: its committed tokens, their history, and its age.

    `states` are those that are open, in the order of opening: the first is the session's own, all others are branches'.
    """

    def __init__(self, session: DraftView, *, opened: int, clock: Callable[[], float]) -> None:
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

    def follow(self) -> None:
        """The session has work: take over what was committed since."""
        if len(self.committed_ids) > self._known_length:
            self.history.extend(self.committed_ids[self._known_length :])
            self._known_length = len(self.committed_ids)
        self._asked_s = self._clock()


class DraftState(Generic[CacheT]):
    """What the draft model keeps for a line of tokens of a session (`step_plan.Feeder`).

    Invariant: the cache holds the first `cache.length` of the line's ids, always fewer than all of them.
    """

    def __init__(self, shared: SharedTokens[CacheT], cache: CacheT, *, number: int) -> None:
        self.shared, self.cache, self.number = shared, cache, number
        shared.states.append(self)

    @property
    def opened(self) -> int:
        """Branches give up their memory before any session does; one that stays alone is the session."""
        return self.shared.opened if self.shared.states[0] is self else _BRANCH_AGE + self.number

    @property
    def committed_ids(self) -> Sequence[int]:
        return self.shared.committed_ids

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
        shared = SharedTokens[CacheT](session, opened=number, clock=self._clock)
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
        wishes = [self._wish(work) for work in batch]
        parts = self._planner.plan(wishes)
        rows = self._model.step([part.extension() for part in parts]) if parts else []
        self._planner.share_prefixes(parts)
        fed = {part.wish.feeder.opened: (part, row) for part, row in zip(parts, rows, strict=True)}
        outcomes: list[Outcome] = []
        places: list[_Place[CacheT]] = []
        for work, wish in zip(batch, wishes, strict=True):
            part, logits = fed.get(work.state.opened, (None, None))
            fed_tokens = part.count if part else 0
            if work.max_tokens and wish.remaining <= 0:
                assert logits is not None, "to draft, at least one token is fed"
                places.append(_Place(len(outcomes), fed_tokens, work, _row(work, logits[0])))
            outcomes.append(Progress(fed_tokens, None if wish.remaining > 0 else ()))
        for place, drafted in zip(places, self._draw(places), strict=True):
            outcomes[place.index] = (
                drafted if isinstance(drafted, PacelineError) else Progress(place.fed_tokens, (drafted,))
            )
        return outcomes

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
            self._model.adopt(open_states[0].cache)
        self._model.release(state.cache)

    def _wish(self, work: DraftWork[DraftState[CacheT]]) -> Wish[CacheT]:
        """To draft takes all ids; to catch up, all committed ones but the last, which is fed with the next draft."""
        state, session = work.state, work.session
        state.shared.follow()
        self._holders[state.number] = state
        drafted, committed_length = session.drafted_ids, len(session.committed_ids)
        if work.max_tokens:
            return Wish(state, drafted, committed_length + len(drafted), 1)
        return Wish(state, drafted, committed_length - 1, 0)

    def _draw(self, places: Sequence[_Place[CacheT]]) -> list[DraftedToken | PacelineError]:
        """A token for each place: those of one law are drawn together, as long as none of them fails."""
        drafted: dict[int, DraftedToken | PacelineError] = {}
        by_law: dict[_Law, list[_Place[CacheT]]] = {}
        for place in places:
            by_law.setdefault(_law(place.work), []).append(place)
        for law, alike in by_law.items():
            for place, token in zip(alike, self._draw_alike(law, alike), strict=True):
                drafted[place.index] = token
        return [drafted[place.index] for place in places]

    def _draw_alike(self, law: _Law, places: Sequence[_Place[CacheT]]) -> list[DraftedToken | PacelineError]:
        try:
            choices = choose_draft_tokens(
                [place.row for place in places],
                params=law.params,
                rule=law.rule,
                max_entries=self._entries,
                guesses=law.guesses,
            )
        except Exception as error:
            if len(places) > 1:
                return [drafted for place in places for drafted in self._draw_alike(law, [place])]
            if isinstance(error, PacelineError):
                return [error]
            # A fault of ours, met in one session's row: the others have their tokens.
            session_id = places[0].work.session.spec.session_id
            logger.exception("a draft token could not be drawn", session_id=session_id)
            return [internal_error()]
        return [_drafted(choice) for choice in choices]


@dataclass(frozen=True, slots=True)
class _Place(Generic[CacheT]):
    """Where a step came to draw a token: for the `index`-th work of the batch."""

    index: int
    fed_tokens: int
    work: DraftWork[DraftState[CacheT]]
    row: DraftRow


class _Law(NamedTuple):
    """What places must have in common for their tokens to be drawn together."""

    params: SamplingParams
    rule: VerificationRule
    vocab_size: int
    guesses: int


def _law(work: DraftWork[DraftState[CacheT]]) -> _Law:
    spec = work.session.spec
    return _Law(spec.sampling, spec.effective_rule, spec.vocab_size, work.fan_out)


def _row(
    work: DraftWork[DraftState[CacheT]],
    logits: Tensor,  # [draft_vocab_size]
) -> DraftRow:
    session, drafted = work.session, work.session.drafted_ids
    return DraftRow(
        fit_vocabulary(logits, session.spec.vocab_size),
        work.state.shared.history,
        drafted,
        session.spec.seed,
        len(session.committed_ids) + len(drafted),
    )


def _drafted(choice: DraftChoice) -> DraftedToken:
    guesses = tuple([Guess(token_id, likelihood) for token_id, likelihood in choice.guesses])
    return DraftedToken(choice.token_id, choice.distribution, choice.likelihood, guesses)


def fit_vocabulary(
    logits: Tensor,  # [draft_vocab_size]
    vocab_size: int,
) -> Tensor:  # [vocab_size]
    """Cut or pad a row to the target's vocabulary: models of one tokenizer differ in unused rows at the end."""
    missing = vocab_size - logits.shape[0]
    if missing == 0:
        return logits
    if missing < 0:
        return logits[:vocab_size]
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
