"""Drafting by repetition where the text repeats itself, and by another method where it does not.

Suffix decoding costs no model step and proposes many tokens at once, but only where the text has occurred before; its
score says how many of them to expect accepted (Oliaro et al. 2024, arXiv 2411.04975, "hybrid" decoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic

from drafter_service.method import DraftMethod, DraftView, DraftWork, Outcome, Progress, StateT
from drafter_service.methods import draft_model
from drafter_service.registry import BuiltMethod
from drafter_service.suffixes import SessionSuffixes, suffix_cache
from paceline.engine.interface import Memory
from paceline.lookup.suffix import SuffixCache
from paceline.sampling import DraftedToken
from paceline.settings import DrafterSettings
from paceline.types import MAX_CREDIT, VerificationRule

_SCORED_TOKENS = 16  # a repetition is judged by so many of its tokens, even if fewer may be drafted now


@dataclass(slots=True)
class HybridState(Generic[StateT]):
    """What both ways of drafting keep for a session."""

    suffixes: SessionSuffixes
    other: StateT
    is_repeating: bool = False  # what is drafted behind the committed tokens, if anything, was found by its suffix


class HybridMethod(Generic[StateT]):
    """Drafts the repetition of a suffix whose score is at least `min_score`, else what the other method drafts.

    The other method drafts at most `most_others` tokens beyond the committed ones: each costs a step, and the further ahead the
    less likely it is kept, while a repetition may be as long as the draft.

    The choice looks at the tokens before alone, never at what one is drawn from. Under `rejection` a draft is drawn as a
    whole or not at all, and when it is pushed must not depend on its tokens: there the choice is made when nothing is
    drafted behind the committed tokens, and holds until that is so again.

    A cache of the other method lags behind while repetitions serve; it catches up as after any other commit.
    """

    def __init__(
        self,
        other: DraftMethod[StateT],
        suffixes: SuffixCache,
        *,
        min_score: float,
        most_others: int = MAX_CREDIT,
    ) -> None:
        self._other, self._suffixes, self._min_score, self._most_others = other, suffixes, min_score, most_others

    @property
    def max_context(self) -> int:
        return self._other.max_context

    @property
    def memory(self) -> Memory | None:
        return self._other.memory

    @property
    def preemptions(self) -> int:
        return self._other.preemptions

    def open(self, session: DraftView) -> HybridState[StateT]:
        return HybridState(SessionSuffixes(self._suffixes, session), self._other.open(session))

    def draft(self, batch: Sequence[DraftWork[HybridState[StateT]]]) -> Sequence[Outcome]:
        """A repetition that is served first is not held up by a model step: the other sessions get theirs right after."""
        found = [self._repetition(work) for work in batch]
        if found and found[0] is not None:
            return [Progress(drafted=tokens) for tokens in found]
        wanting = [
            DraftWork(work.state.other, work.session, work.max_tokens)
            for work, tokens in zip(batch, found, strict=True)
            if tokens is None
        ]
        others = iter(self._other.draft(wanting))
        return [next(others) if tokens is None else Progress(drafted=tokens) for tokens in found]

    def can_step(self) -> bool:
        return self._other.can_step()

    def rewind(self, state: HybridState[StateT], length: int) -> None:
        """The suffixes are those of committed tokens, which are never taken back."""
        self._other.rewind(state.other, length)

    def pending_tokens(self, state: HybridState[StateT], session: DraftView) -> int:
        return self._other.pending_tokens(state.other, session)

    def close(self, state: HybridState[StateT]) -> None:
        state.suffixes.close()
        self._other.close(state.other)

    def _repetition(self, work: DraftWork[HybridState[StateT]]) -> Sequence[DraftedToken] | None:
        """The tokens of a repetition, none where the draft ends with it; None: the other method's turn."""
        state, session = work.state, work.session
        drafted = session.drafted_ids
        is_bound = bool(drafted) and session.spec.effective_rule is VerificationRule.REJECTION
        if not work.max_tokens:
            state.suffixes.catch_up()
            return None
        if is_bound and not state.is_repeating:
            return self._others_turn(drafted)
        proposal = state.suffixes.propose(drafted, max(work.max_tokens, _SCORED_TOKENS))
        if proposal.ids and proposal.score >= self._min_score:
            state.is_repeating = True
            return [DraftedToken(token_id) for token_id in proposal.ids[: work.max_tokens]]
        if is_bound:
            return ()
        state.is_repeating = False
        return self._others_turn(drafted)

    def _others_turn(self, drafted: Sequence[int]) -> Sequence[DraftedToken] | None:
        """None; no tokens, where it has drafted as many as it may and the draft ends."""
        return None if len(drafted) < self._most_others else ()


def build(settings: DrafterSettings) -> BuiltMethod:
    """The hybrid of suffix decoding and the model that the settings name."""
    built = draft_model.build(settings)
    method = HybridMethod(
        built.method,
        suffix_cache(settings),
        min_score=settings.hybrid_suffix_min_score,
        most_others=settings.hybrid_model_draft_length,
    )
    # What the model's evaluation recorded holds where it drafts alone: here it drafts what does not repeat itself.
    return replace(built, method=method, info=replace(built.info, expected_acceptance=()))
