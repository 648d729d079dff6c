"""Suffix decoding: drafts from what the session itself said before, and from what others of its tenant were served.

Oliaro et al. 2024, "SuffixDecoding" (arXiv 2411.04975). A session's own tree holds its prompt and output; a tenant's
tree the outputs of its sessions that have ended, of all tenants the latest. Nothing but committed tokens ever enters a
tree, and no session reads another tenant's. Deterministic, model-free and pure; knows nothing of rounds or text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import InvalidRequest
from paceline.lookup.suffix_tree import SuffixProposal, SuffixTree


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose sessions share a tree: one tenant's, and of one vocabulary, for the same id means the same there alone."""

    tenant: str
    vocab_size: int


class SuffixCache:
    """What the ended sessions of one drafter were served, a tree a scope.

    Invariant: `_order` names the scope of each output held, the oldest first, and every tree holds at least one. When
    there are too many, or they take too much memory, the oldest go, whoever they belong to, and with them all that
    their tokens added to the counts. The names of the limits but for the last are vLLM's.
    """

    def __init__(
        self,
        *,
        max_tree_depth: int = 24,  # most tokens of a match and the draft behind it together
        max_spec_factor: float = 1.0,  # most tokens of a draft for each that matched
        min_token_prob: float = 0.1,  # of a drafted token and all before it
        max_cached_requests: int = 10_000,  # outputs that are held, of all tenants; 0: none
        max_cached_bytes: int = 256 * 2**20,  # that they take in memory; at most twice as much is allocated
    ) -> None:
        if max_tree_depth < 2:
            raise InvalidRequest(
                f"max_tree_depth must be at least 2, for a match and a token behind it, not {max_tree_depth}.",
                parameter="max_tree_depth",
            )
        self.max_tree_depth = max_tree_depth
        self._max_spec_factor, self._min_token_prob = max_spec_factor, min_token_prob
        self._max_requests, self._max_bytes = max_cached_requests, max_cached_bytes
        self.evicted_requests = 0
        self.cached_tokens = 0
        self.held_bytes = 0
        self._trees: dict[Scope, SuffixTree] = {}
        self._order: deque[Scope] = deque()

    @property
    def cached_requests(self) -> int:
        return len(self._order)

    def session(self, tenant: str, *, prompt_length: int, vocab_size: int = 0) -> SuffixSession:
        """A session that holds no token yet; the first `prompt_length` are never shown to others."""
        return SuffixSession(self, Scope(tenant, vocab_size), prompt_length=prompt_length)

    def propose(self, own: SuffixTree, scope: Scope, context: Sequence[int], max_tokens: int) -> SuffixProposal:
        """The draft with the higher score of the session's own tree and the scope's; of equals, its own."""
        proposal = self._propose(own, context, max_tokens)
        shared = self._trees.get(scope)
        if shared is None:
            return proposal
        others = self._propose(shared, context, max_tokens)
        return others if others.score > proposal.score else proposal

    def add(self, scope: Scope, output_ids: Sequence[int]) -> None:
        """Keep the output of a session that has ended, and forget as many old ones as are too many then."""
        if not output_ids or not self._max_requests:
            return
        tree = self._trees.get(scope)
        if tree is None:
            tree = self._trees[scope] = SuffixTree(max_depth=self.max_tree_depth)
            self.held_bytes += tree.held_bytes
        before = tree.held_bytes
        tree.extend(output_ids)
        tree.close_sequence()
        self.held_bytes += tree.held_bytes - before
        self.cached_tokens += len(output_ids)
        self._order.append(scope)
        while len(self._order) > self._max_requests or self.held_bytes > self._max_bytes:
            self._evict_oldest()

    def _propose(self, tree: SuffixTree, context: Sequence[int], max_tokens: int) -> SuffixProposal:
        return tree.propose(
            context, max_tokens, max_spec_factor=self._max_spec_factor, min_token_prob=self._min_token_prob
        )

    def _evict_oldest(self) -> None:
        scope = self._order.popleft()
        tree = self._trees[scope]
        before = tree.held_bytes
        self.cached_tokens -= tree.evict_oldest()
        self.evicted_requests += 1
        if tree.is_empty:
            del self._trees[scope]  # with the memory that it had grown to
            self.held_bytes -= before
        else:
            self.held_bytes -= before - tree.held_bytes


class SuffixSession:
    """The committed tokens of one session, and where its drafts come from."""

    def __init__(self, cache: SuffixCache, scope: Scope, *, prompt_length: int) -> None:
        self._cache, self._scope, self._prompt_length = cache, scope, prompt_length
        self._own = SuffixTree(max_depth=cache.max_tree_depth)
        self._recent: list[int] = []  # as many of the last tokens as are ever looked up
        self._length = 0
        self._is_closed = False

    def __len__(self) -> int:
        return self._length

    @property
    def held_bytes(self) -> int:
        return self._own.held_bytes

    def extend(self, ids: Sequence[int]) -> None:
        """Append committed tokens."""
        self._own.extend(ids)
        self._length += len(ids)
        self._recent = [*self._recent, *ids][-self._cache.max_tree_depth :]

    def propose(self, tail: Sequence[int], max_tokens: int) -> SuffixProposal:
        """Up to `max_tokens` tokens to follow the committed ones and `tail`, tokens already drafted behind them.

        The tail is looked up but never counted. Leaves all as it was.
        """
        return self._cache.propose(self._own, self._scope, [*self._recent, *tail], max_tokens)

    def close(self) -> None:
        """Keep the output for the tenant's later sessions; once."""
        if not self._is_closed:
            self._is_closed = True
            self._cache.add(self._scope, self._own.tokens_from(self._prompt_length))


class SuffixIndex:
    """One session's own tokens, and drafts from them alone; has the methods of `ngram.NgramIndex` but for truncating."""

    def __init__(self) -> None:
        self._session = SuffixCache(max_cached_requests=0).session("", prompt_length=0)

    def __len__(self) -> int:
        return len(self._session)

    def extend(self, ids: Sequence[int]) -> None:
        self._session.extend(ids)

    def propose(self, tail: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        return self._session.propose(tail, max_tokens).ids
