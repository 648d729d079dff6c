"""Prompt lookup: propose what followed the last few tokens when they occurred before (Saxena 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from drafter_service.drafter import DraftedToken, DraftView
from paceline.lookup.ngram import NgramIndex

_ANY_CONTEXT = 2**31 - 1


class NgramMethod:
    """Needs no model: the state is an index of the committed tokens."""

    max_context = _ANY_CONTEXT

    def __init__(self, *, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        self._min, self._max = prompt_lookup_min, prompt_lookup_max

    def open(self, session: DraftView) -> NgramIndex:
        return NgramIndex(prompt_lookup_min=self._min, prompt_lookup_max=self._max)

    def ingest(self, state: NgramIndex, session: DraftView) -> None:
        state.extend(session.ids[len(state) : session.committed_length])

    def draft(self, state: NgramIndex, session: DraftView, max_tokens: int) -> Sequence[DraftedToken]:
        self.ingest(state, session)
        tail = session.ids[session.committed_length :]
        return [DraftedToken(token_id) for token_id in state.propose(tail, max_tokens)]

    def rewind(self, state: NgramIndex, length: int) -> None:
        """The index holds committed tokens alone, and those are never taken back."""

    def kv_tokens(self, state: NgramIndex, session: DraftView) -> int:
        return 0
