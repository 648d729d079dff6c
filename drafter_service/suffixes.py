"""The suffixes of one session as drafting methods use them: those of its committed tokens, kept up with.

Knows nothing of which method asks, or of what else it drafts from.
"""

from __future__ import annotations

from collections.abc import Sequence

from drafter_service.method import DraftView
from paceline.lookup.suffix import SuffixCache
from paceline.lookup.suffix_tree import SuffixProposal, prepare
from paceline.settings import DrafterSettings


def suffix_cache(settings: DrafterSettings) -> SuffixCache:
    """What the settings say; what is compiled is compiled, or read from the disk, before the first session."""
    prepare()
    return SuffixCache(
        max_tree_depth=settings.suffix_decoding_max_tree_depth,
        max_spec_factor=settings.suffix_decoding_max_spec_factor,
        min_token_prob=settings.suffix_decoding_min_token_prob,
        max_cached_requests=settings.suffix_decoding_max_cached_requests,
        max_cached_bytes=settings.suffix_decoding_max_cached_mib * 2**20,
    )


class SessionSuffixes:
    """Invariant: drafted tokens never enter; committed ones are never taken back, so nothing has to be undone."""

    def __init__(self, cache: SuffixCache, session: DraftView) -> None:
        spec = session.spec
        self._session = session
        # What a session is opened with is not its own doing: the prompt, or an answer that began at another drafter.
        self._lookup = cache.session(spec.tenant, prompt_length=len(session.committed_ids), vocab_size=spec.vocab_size)

    def __len__(self) -> int:
        """Committed tokens that were taken in."""
        return len(self._lookup)

    def propose(self, tail: Sequence[int], max_tokens: int) -> SuffixProposal:
        """What most often followed the committed tokens and `tail`, up to `max_tokens` tokens."""
        self.catch_up()
        return self._lookup.propose(tail, max_tokens)

    def catch_up(self) -> None:
        """Take in what was committed since; a later proposal then costs less."""
        self._lookup.extend(self._session.committed_ids[len(self._lookup) :])

    def close(self) -> None:
        """The output, to its last committed token, is there for the tenant's later sessions."""
        self.catch_up()
        self._lookup.close()
