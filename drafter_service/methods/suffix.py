"""Suffix decoding: propose what most often followed where the last tokens occurred before (Oliaro et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drafter_service.drafter import DraftedToken, DraftView, DraftWork, Outcome, Progress
from drafter_service.registry import BuiltMethod, info_without_model
from paceline.lookup.suffix import SuffixCache, SuffixSession
from paceline.lookup.suffix_tree import prepare
from paceline.settings import DrafterSettings

_ANY_CONTEXT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SuffixState:
    """The tokens of a session that have been looked at, and where all are."""

    lookup: SuffixSession
    session: DraftView

    def catch_up(self) -> None:
        self.lookup.extend(self.session.ids[len(self.lookup) : self.session.committed_length])


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

    def open(self, session: DraftView) -> SuffixState:
        spec = session.spec
        # What a session is opened with is not its own doing: the prompt, or an answer that began at another drafter.
        lookup = self._cache.session(spec.tenant, prompt_length=session.committed_length, vocab_size=spec.vocab_size)
        return SuffixState(lookup, session)

    def draft(self, batch: Sequence[DraftWork[SuffixState]]) -> Sequence[Outcome]:
        return [Progress(drafted=self._propose(work)) for work in batch]

    def rewind(self, state: SuffixState, length: int) -> None:
        """The tree holds committed tokens alone, and those are never taken back."""

    def pending_tokens(self, state: SuffixState, session: DraftView) -> int:
        return 0

    def close(self, state: SuffixState) -> None:
        """The output, to its last committed token, is there for the tenant's later sessions."""
        state.catch_up()
        state.lookup.close()

    @staticmethod
    def _propose(work: DraftWork[SuffixState]) -> Sequence[DraftedToken]:
        work.state.catch_up()
        if not work.max_tokens:
            return ()
        drafted = tuple(work.session.ids[work.session.committed_length :])
        ids = work.state.lookup.propose((), len(drafted) + work.max_tokens).ids
        if ids[: len(drafted)] != drafted:
            return ()  # other tokens follow, by now, than were drafted when less was known
        return [DraftedToken(token_id) for token_id in ids[len(drafted) :]]


def build(settings: DrafterSettings) -> BuiltMethod:
    """Ready at once: what is compiled is compiled, or read from the disk, before the first session."""
    prepare()
    cache = SuffixCache(
        max_tree_depth=settings.suffix_decoding_max_tree_depth,
        max_spec_factor=settings.suffix_decoding_max_spec_factor,
        min_token_prob=settings.suffix_decoding_min_token_prob,
        max_cached_requests=settings.suffix_decoding_max_cached_requests,
        max_cached_bytes=settings.suffix_decoding_max_cached_mib * 2**20,
    )
    method = SuffixMethod(cache)
    return BuiltMethod(method, info_without_model("suffix", max_context=method.max_context))
