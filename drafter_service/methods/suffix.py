"""Suffix decoding: propose what most often followed where the last tokens occurred before (Oliaro et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence

from drafter_service.method import DraftView, DraftWork, Outcome, Progress
from drafter_service.registry import BuiltMethod, info_without_model
from drafter_service.suffixes import SessionSuffixes, suffix_cache
from paceline.lookup.suffix import SuffixCache
from paceline.sampling import DraftedToken
from paceline.settings import DrafterSettings

_ANY_CONTEXT = 2**31 - 1


class SuffixMethod:
    """Needs no model: the state is a tree of the committed tokens; all sessions of a tenant share one of their outputs.

    A draft is what is found behind the committed tokens. Tokens drafted already are not looked up in turn: each would
    make the match longer, and with it the draft, although nothing new is known.
    """

    max_context = _ANY_CONTEXT
    memory = None
    preemptions = 0

    def __init__(self, cache: SuffixCache) -> None:
        self._cache = cache

    def open(self, session: DraftView) -> SessionSuffixes:
        return SessionSuffixes(self._cache, session)

    def draft(self, batch: Sequence[DraftWork[SessionSuffixes]]) -> Sequence[Outcome]:
        return [Progress(drafted=self._propose(work)) for work in batch]

    def can_step(self) -> bool:
        return True

    def rewind(self, state: SessionSuffixes, length: int) -> None:
        """The tree holds committed tokens alone, and those are never taken back."""

    def pending_tokens(self, state: SessionSuffixes, session: DraftView) -> int:
        return 0

    def close(self, state: SessionSuffixes) -> None:
        state.close()

    @staticmethod
    def _propose(work: DraftWork[SessionSuffixes]) -> Sequence[DraftedToken]:
        if not work.max_tokens:
            work.state.catch_up()
            return ()
        drafted = tuple(work.session.drafted_ids)
        ids = work.state.propose((), len(drafted) + work.max_tokens).ids
        if ids[: len(drafted)] != drafted:
            return ()  # other tokens follow, by now, than were drafted when less was known
        return [DraftedToken(token_id) for token_id in ids[len(drafted) :]]


def build(settings: DrafterSettings) -> BuiltMethod:
    """Needs nothing but the settings."""
    method = SuffixMethod(suffix_cache(settings))
    return BuiltMethod(method, info_without_model("suffix", max_context=method.max_context))
