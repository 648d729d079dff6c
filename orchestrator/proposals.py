"""Drafts that the drafter pushed ahead, found again by the prefix they continue. Pure.

A proposal is stored under the digest of its prefix and of every longer prefix that it covers. So a draft ahead of the
verdict, the rest of a draft behind an emitted bonus token, and a branch for another outcome are all one look-up: what
continues exactly the tokens committed now.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from paceline.prefix import extend_digest
from paceline.types import Draft, Proposal


@dataclass(frozen=True, slots=True)
class _Continuation:
    proposal: Proposal
    offset: int  # tokens of the proposal's draft that the prefix holds already
    end_digest: int  # of the prefix plus the whole draft


class ProposalStore:
    """Invariant: every continuation belongs to one of the last `max_proposals` proposals."""

    def __init__(self, *, max_proposals: int = 256) -> None:
        self._by_prefix: dict[int, _Continuation] = {}
        self._order: deque[tuple[Proposal, list[int]]] = deque()
        self._max_proposals = max_proposals
        self._committed_length = 0

    def __len__(self) -> int:
        return len(self._order)

    def add(self, proposal: Proposal) -> None:
        """Store a proposal. The first to arrive for a prefix is kept, whatever its tokens are.

        "Nothing to offer" counts for the committed tokens alone: ahead of a verdict the drafter knew less than it will.
        """
        if not proposal.draft.ids and proposal.base_length != self._committed_length:
            return
        digests = [proposal.prefix_digest]
        for token_id in proposal.draft.ids:
            digests.append(extend_digest(digests[-1], token_id))
        end = digests[-1]
        for offset, digest in enumerate(digests[:-1] or digests):
            self._by_prefix.setdefault(digest, _Continuation(proposal, offset, end))
        self._order.append((proposal, digests))
        while len(self._order) > self._max_proposals:
            self._drop_oldest()

    def find(self, digest: int, max_length: int) -> Draft | None:
        """The draft that continues the prefix with that digest, of at most `max_length` tokens.

        Joins proposals that continue one another. None: nothing has arrived for this prefix; an empty draft: the
        drafter has nothing to offer for it.
        """
        found = self._by_prefix.get(digest)
        if found is None:
            return None
        draft = found.proposal.draft[found.offset :]
        while len(draft) < max_length:
            found = self._by_prefix.get(found.end_digest)
            if found is None or not found.proposal.draft.ids or not draft.joins(found.proposal.draft):
                break
            draft += found.proposal.draft[found.offset :]
        return draft[:max_length]

    def continues(self, digest: int) -> bool:
        """Whether at least one token is there for the prefix with that digest."""
        found = self._by_prefix.get(digest)
        return found is not None and bool(found.proposal.draft.ids)

    def prune(self, committed_length: int) -> None:
        """Drop proposals that end before the committed length; those that reach beyond still serve by their rest."""
        self._committed_length = committed_length
        while self._order and _end_length(self._order[0][0]) < committed_length:
            self._drop_oldest()

    def clear(self) -> None:
        self._by_prefix.clear()
        self._order.clear()

    def _drop_oldest(self) -> None:
        proposal, digests = self._order.popleft()
        for digest in digests:
            found = self._by_prefix.get(digest)
            if found is not None and found.proposal is proposal:
                del self._by_prefix[digest]


def _end_length(proposal: Proposal) -> int:
    return proposal.base_length + len(proposal.draft)
