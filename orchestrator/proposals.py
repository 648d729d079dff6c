"""Drafted tokens that the drafter pushed, found again by the prefix they continue. Pure.

Each run of tokens, a draft or a branch, is stored under the digest of its prefix and of every longer prefix that it covers.
So a draft ahead of the verdict, the rest of a draft behind an emitted bonus token, a branch for another outcome and a branch
of a branch are all one look-up: what continues exactly the tokens committed now.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from paceline.prefix import extend_digest
from paceline.types import Branch, Draft, Proposal


@dataclass(frozen=True, slots=True)
class Arrival:
    """When drafted tokens came, and what the drafter spent on the proposal that they came with."""

    arrived_s: float  # by whatever clock the store is told
    draft_time_s: float
    draft_steps: int


@dataclass(slots=True, eq=False)
class _Run:
    """Tokens that continue one another, never changed. `digests[i]` is that of the prefix with the first i of them."""

    draft: Draft
    base_length: int
    digests: list[int]  # one more than tokens
    is_branch: bool
    arrived_s: float
    proposal: Proposal  # that it came with

    def is_alive(self, committed_length: int, committed_digest: int) -> bool:
        """Whether it may still continue what is committed: it leads through it, or begins behind it."""
        index = committed_length - self.base_length
        return index < 0 or (index < len(self.digests) and self.digests[index] == committed_digest)


class ProposalStore:
    """Invariant: it holds at most `max_runs` runs of at most `max_tokens` tokens in all, and leads to no others.

    Beyond that branches make room, those that begin farthest ahead first: a hole in the likeliest tokens would cost most.
    """

    def __init__(self, *, max_runs: int = 4096, max_tokens: int = 4096) -> None:
        self._by_prefix: dict[int, tuple[_Run, int]] = {}  # by digest: the run, and how many of its tokens that holds
        self._runs: list[_Run] = []
        self._max_runs, self._max_tokens = max_runs, max_tokens
        self._ends: set[int] = set()  # prefixes that the drafter had nothing to offer for, as far as it knew by then
        self._tokens = 0
        self._committed_length = 0

    def __len__(self) -> int:
        """Runs held."""
        return len(self._runs)

    @property
    def tokens(self) -> int:
        """Drafted tokens held, whatever they continue."""
        return self._tokens

    def add(self, proposal: Proposal, *, now_s: float = 0.0) -> None:
        """Store a proposal. What arrives first for a prefix is kept, whatever its tokens are.

        "Nothing to offer" is an empty draft for the committed tokens alone: behind drafted ones it says that no more is to
        come, until the next commit, for then the drafter knows more.
        """
        has_nothing = not proposal.draft.ids and not proposal.branches
        if proposal.draft.ids or (has_nothing and proposal.base_length == self._committed_length):
            self._add_run(proposal, proposal, now_s, is_branch=False)
        elif has_nothing:
            self._ends.add(proposal.prefix_digest)
        for branch in proposal.branches:
            if branch.draft.ids and branch.base_length + len(branch.draft) > self._committed_length:
                self._add_run(branch, proposal, now_s, is_branch=True)
        while len(self._runs) > self._max_runs or self._tokens > self._max_tokens:
            self._make_room()

    def find(self, digest: int, max_length: int) -> Draft | None:
        """The draft that continues the prefix with that digest, of at most `max_length` tokens.

        Joins runs that continue one another. None: nothing has arrived for this prefix; an empty draft: the drafter has
        nothing to offer for it.
        """
        found = self._by_prefix.get(digest)
        if found is None:
            return None
        run, offset = found
        draft = run.draft[offset:]
        while len(draft) < max_length:
            found = self._by_prefix.get(run.digests[-1])
            if found is None or not found[0].draft.ids or not draft.joins(found[0].draft):
                break
            run, offset = found
            draft += run.draft[offset:]
        return draft[:max_length]

    def available(self, digest: int, max_length: int) -> int:
        """How many tokens `find` would give."""
        available, following = 0, self._by_prefix.get(digest)
        joins = True
        while following is not None and joins and available < max_length:
            run, offset = following
            available += len(run.draft) - offset
            following = self._by_prefix.get(run.digests[-1])
            joins = following is not None and bool(following[0].draft.ids) and run.draft.joins(following[0].draft)
        return min(available, max_length)

    def arrival(self, digest: int) -> Arrival | None:
        """Of the first tokens that `find` gives."""
        found = self._by_prefix.get(digest)
        if found is None:
            return None
        run, _ = found
        return Arrival(run.arrived_s, run.proposal.draft_time_s, run.proposal.draft_steps)

    def has_heard(self, digest: int) -> bool:
        """Whether anything has arrived for the prefix with that digest, if only that there is nothing to offer."""
        return digest in self._by_prefix

    def is_complete(self, digest: int) -> bool:
        """Whether the drafter has said that nothing is to come behind what `find` gives."""
        while (found := self._by_prefix.get(digest)) is not None and found[0].draft.ids:
            digest = found[0].digests[-1]
        return found is not None or digest in self._ends

    def continues(self, digest: int) -> bool:
        """Whether at least one token is there for the prefix with that digest."""
        found = self._by_prefix.get(digest)
        return found is not None and bool(found[0].draft.ids)

    def prune(self, committed_length: int, committed_digest: int) -> None:
        """Drop what the committed tokens contradict, or have used up; what reaches beyond them serves by its rest.

        Costs time in the runs held.
        """
        self._committed_length = committed_length
        self._ends.clear()
        runs, self._runs = self._runs, []
        for run in runs:
            if run.is_alive(committed_length, committed_digest):
                self._runs.append(run)
            else:
                self._forget(run)

    def clear(self) -> None:
        self._by_prefix.clear()
        self._runs.clear()
        self._ends.clear()
        self._tokens = 0

    def _add_run(self, drafted: Proposal | Branch, proposal: Proposal, now_s: float, *, is_branch: bool) -> None:
        digests = list(accumulate(drafted.draft.ids, extend_digest, initial=drafted.prefix_digest))
        run = _Run(drafted.draft, drafted.base_length, digests, is_branch, now_s, proposal)
        leads_on = False
        for offset, digest in enumerate(digests[:-1] or digests):
            leads_on |= self._by_prefix.setdefault(digest, (run, offset))[0] is run
        # What was sent again may all be here: it would take up room, and not be found even when the older run is gone.
        if leads_on:
            self._runs.append(run)
            self._tokens += len(drafted.draft.ids)

    def _make_room(self) -> None:
        branches = [run for run in self._runs if run.is_branch] or self._runs
        farthest = max(branches, key=lambda run: run.base_length)
        self._runs.remove(farthest)
        self._forget(farthest)

    def _forget(self, run: _Run) -> None:
        self._tokens -= len(run.draft)
        for digest in run.digests:
            found = self._by_prefix.get(digest)
            if found is not None and found[0] is run:
                del self._by_prefix[digest]
