"""Prompt lookup: propose what followed the last few tokens when they occurred before (Saxena 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from drafter_service.method import DraftView, DraftWork, Outcome, Progress
from drafter_service.registry import BuiltMethod, info_without_model
from paceline.errors import StartupFailed
from paceline.lookup.ngram import NgramIndex
from paceline.sampling import DraftedToken
from paceline.settings import DrafterSettings

_ANY_CONTEXT = 2**31 - 1


class NgramMethod:
    """Needs no model: the state is an index of the committed tokens."""

    max_context = _ANY_CONTEXT
    memory = None
    preemptions = 0

    def __init__(self, *, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        self._min, self._max = prompt_lookup_min, prompt_lookup_max

    def open(self, session: DraftView) -> NgramIndex:
        return NgramIndex(prompt_lookup_min=self._min, prompt_lookup_max=self._max)

    def draft(self, batch: Sequence[DraftWork[NgramIndex]]) -> Sequence[Outcome]:
        return [Progress(drafted=self._propose(work)) for work in batch]

    def can_step(self) -> bool:
        return True

    def rewind(self, state: NgramIndex, length: int) -> None:
        """The index holds committed tokens alone, and those are never taken back."""

    def pending_tokens(self, state: NgramIndex, session: DraftView) -> int:
        return 0

    def close(self, state: NgramIndex) -> None:
        """Nothing is held beyond the state itself."""

    @staticmethod
    def _propose(work: DraftWork[NgramIndex]) -> Sequence[DraftedToken]:
        state, session = work.state, work.session
        state.extend(session.committed_ids[len(state) :])
        return [DraftedToken(token_id) for token_id in state.propose(session.drafted_ids, work.max_tokens)]


def build(settings: DrafterSettings) -> BuiltMethod:
    """Raises `StartupFailed` where the settings contradict each other."""
    if settings.prompt_lookup_min > settings.prompt_lookup_max:
        raise StartupFailed("--prompt-lookup-min is larger than --prompt-lookup-max; raise the latter.")
    method = NgramMethod(prompt_lookup_min=settings.prompt_lookup_min, prompt_lookup_max=settings.prompt_lookup_max)
    return BuiltMethod(method, info_without_model("ngram", max_context=method.max_context))
