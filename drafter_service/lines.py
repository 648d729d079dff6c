"""The lines of drafted tokens behind a session's committed ones: a tree whose leaves all hold a state to draft on from.

At each drafted position the method named other tokens as well. Behind the likeliest of them new lines are opened, which
share the tokens before. A commit closes the lines that it contradicts and leaves the others as they are, state included:
that is how a branch which came true is grafted.

Knows nothing of methods, credit, or of when anything is pushed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, NamedTuple

from drafter_service.likelihood import LEAST_LIKELIHOOD
from drafter_service.method import DraftView, StateT
from paceline.prefix import TokenPrefix, extend_digest
from paceline.sampling import DraftedToken
from paceline.types import SessionSpec


class Node:
    """One token behind the committed ones: the drafted one, or a guess in its place."""

    __slots__ = ("digest", "drafted", "likelihood", "likelihoods", "opened", "place")

    def __init__(self, drafted: DraftedToken, place: int, digest: int, likelihoods: Sequence[float]) -> None:
        self.drafted, self.place = drafted, place  # 0: the drafted token; from 1 on: its guesses
        self.digest = digest  # of all tokens up to this one
        self.likelihoods = likelihoods  # of the drafted token and its guesses, if all tokens before are right
        self.likelihood = likelihoods[place]
        self.opened = 0  # the guesses that lines were opened behind, one bit a place

    @property
    def is_guess(self) -> bool:
        return self.place > 0


class Line(Generic[StateT]):
    """Tokens behind the committed ones and the method's state of exactly these (`method.DraftView`).

    The first `start` of its nodes are its parent's; the rest are its own, beginning with the guess it was opened behind.
    The first `sent` nodes are out, or are guesses or the parent's to send: `start <= sent <= len(nodes)`.
    """

    __slots__ = (
        "committed_ids",
        "drafted_ids",
        "entry_likelihood",
        "has_nothing",
        "is_open",
        "likelihood",
        "nodes",
        "sent",
        "spec",
        "start",
        "state",
    )

    def __init__(self, spec: SessionSpec, committed_ids: Sequence[int], nodes: list[Node], *, start: int) -> None:
        self.spec, self.committed_ids, self.nodes, self.start = spec, committed_ids, nodes, start
        self.drafted_ids = [_token_id(node) for node in nodes]
        self.sent = len(nodes)
        self.likelihood = self.entry_likelihood = 1.0  # that all its tokens are right; that the answer goes into it
        self._weigh()
        self.has_nothing = False  # the method had no continuation of exactly these tokens
        self.is_open = True  # until its tree closes it
        self.state: StateT

    @property
    def guesses(self) -> int:
        """How many of its tokens are guesses."""
        return sum(node.is_guess for node in self.nodes)

    def append(self, node: Node) -> None:
        self.nodes.append(node)
        self.drafted_ids.append(_token_id(node))
        self.likelihood *= node.likelihood

    def agreement(self, ids: Sequence[int]) -> int:
        """How many of the ids are its first ones."""
        for number, (drafted_id, token_id) in enumerate(zip(self.drafted_ids, ids, strict=False)):
            if drafted_id != token_id:
                return number
        return min(len(self.drafted_ids), len(ids))

    def unsend(self) -> None:
        """Its own tokens are to be sent again."""
        is_behind_guess = self.start < len(self.nodes) and self.nodes[self.start].is_guess
        self.sent = self.start + is_behind_guess

    def truncate(self, count: int) -> None:
        """Keep the first `count` tokens alone."""
        del self.nodes[count:], self.drafted_ids[count:]
        self._shift(0)

    def shed(self, count: int) -> None:
        """The first `count` tokens are committed now."""
        del self.nodes[:count], self.drafted_ids[:count]
        self._shift(count)

    def _shift(self, count: int) -> None:
        self.start = max(0, self.start - count)
        self.sent = min(len(self.nodes), max(0, self.sent - count))
        self._weigh()

    def _weigh(self) -> None:
        likelihoods = [node.likelihood for node in self.nodes]
        self.likelihood = math.prod(likelihoods)
        self.entry_likelihood = math.prod(likelihoods[: self.start + 1])


def _token_id(node: Node) -> int:
    return node.drafted.guess_ids[node.place - 1] if node.place else node.drafted.token_id


# Tuples rather than dataclasses, which take twice as long to make: each line of each step takes some of these.
class Bud(NamedTuple, Generic[StateT]):
    """A guess behind which no line was opened yet: in the place of the line's token at `depth`."""

    line: Line[StateT]
    depth: int
    place: int
    likelihood: float  # that the answer goes there


class Run(NamedTuple):
    """Drafted tokens to be sent, behind the `base_length` tokens with that digest."""

    base_length: int
    prefix_digest: int
    tokens: tuple[DraftedToken, ...]


@dataclass(frozen=True, slots=True)
class Committed(Generic[StateT]):
    """What a commit did to the lines."""

    closed: Sequence[StateT]
    rewound_to: int | None  # the length that is left of the only line's ids; None: all lines are as they were
    decided: Sequence[tuple[DraftedToken, int]]  # what was drafted at each decided position, and the right token there


class LineTree(Generic[StateT]):
    """All lines of one session, the likeliest one, its trunk, first.

    Invariant: any two lines differ in a token that both have; each node is one line's own, and the others that share it
    grow out of that line.
    """

    def __init__(
        self, spec: SessionSpec, committed_ids: Sequence[int], open_state: Callable[[DraftView], StateT]
    ) -> None:
        self.spec, self.prefix = spec, TokenPrefix(committed_ids)
        self.lines = [self._new_line([], start=0)]
        self.lines[0].state = open_state(self.lines[0])
        self._buds: list[Bud[StateT]] = []
        self._are_buds_ranked = True

    @property
    def trunk(self) -> Line[StateT]:
        return self.lines[0]

    @property
    def branches(self) -> Sequence[Line[StateT]]:
        return self.lines[1:]

    @property
    def committed_length(self) -> int:
        return len(self.prefix)

    @property
    def buds(self) -> Sequence[Bud[StateT]]:
        """The unopened guesses that are likely enough, the likeliest first; of equals the older one."""
        if not self._are_buds_ranked:
            # Once for all tokens of a step: it is nearly in order already.
            self._buds.sort(key=_likelihood, reverse=True)
            self._are_buds_ranked = True
        return self._buds

    def extend(self, line: Line[StateT], token: DraftedToken, likelihoods: Sequence[float]) -> None:
        """Append a token; `likelihoods` are its own, then those of its guesses."""
        nodes, before = line.nodes, line.likelihood
        digest = nodes[-1].digest if nodes else self.prefix.digest()
        line.append(Node(token, 0, extend_digest(digest, token.token_id), likelihoods))
        self._grow_buds(line, len(nodes) - 1, before)

    def fork(self, bud: Bud[StateT], fork_state: Callable[[StateT, DraftView, int], StateT]) -> Line[StateT]:
        """Open a line behind a guess."""
        self._buds.remove(bud)
        parent, index = bud.line, bud.depth
        node = parent.nodes[index]
        node.opened |= 1 << bud.place
        digest = parent.nodes[index - 1].digest if index else self.prefix.digest()
        token_id = node.drafted.guess_ids[bud.place - 1]
        guess = Node(node.drafted, bud.place, extend_digest(digest, token_id), node.likelihoods)
        line = self._new_line([*parent.nodes[:index], guess], start=index)
        line.state = fork_state(parent.state, line, self.committed_length + index)
        self.lines.append(line)
        return line

    def close(self, line: Line[StateT]) -> list[StateT]:
        """Close a branch and all that grow out of it; returns their states."""
        assert line is not self.trunk, "the last line is never closed"
        own = line.nodes[line.start]
        gone = [each for each in self.branches if each is line or own in each.nodes[line.start : line.start + 1]]
        for each in gone:
            each.is_open = False
        self.lines = [each for each in self.lines if each.is_open]
        self._buds = [bud for bud in self._buds if bud.line.is_open]
        return [each.state for each in gone]

    def least_likely(self) -> Line[StateT]:
        """The branch that the answer goes into least likely: nothing grows out of it. There must be one."""
        # Of equals the last: those that grow out of a line come behind it, and are no likelier.
        return min(reversed(self.branches), key=lambda line: line.entry_likelihood)

    def commit(self, ids: Sequence[int]) -> Committed[StateT]:
        """Take over newly committed ids.

        Costs time in the lines and their tokens, never in what was committed before.
        """
        ids = list(ids)
        agreements = [line.agreement(ids) for line in self.lines]
        longest = max(agreements)
        survivors: list[Line[StateT]] = []
        closed: list[Line[StateT]] = []
        for line, agreement in zip(self.lines, agreements, strict=True):
            (survivors if agreement == longest else closed).append(line)
        decided = _decided(survivors[0], ids)
        rewound_to = None
        if longest < len(ids):
            closed += survivors[1:]  # others that end there, or differ there, have nothing that the first has not
            del survivors[1:]
            if len(survivors[0].nodes) > longest:
                rewound_to = self.committed_length + longest
            survivors[0].truncate(longest)
        for line in closed:
            line.is_open = False
        for line in survivors:
            line.shed(min(longest, len(ids)))
        self.prefix.extend(ids)
        # The one without guesses is what all others grow out of.
        self.lines = sorted(survivors, key=lambda line: line.guesses)
        self._regrow_buds()
        return Committed([line.state for line in closed], rewound_to, decided)

    def take_unsent(self, line: Line[StateT]) -> Run | None:
        """What of a line is yet to be sent, if anything, and is then taken for sent. Guesses themselves never are."""
        start, line.sent = line.sent, len(line.nodes)
        if start == line.sent:
            return None
        digest = line.nodes[start - 1].digest if start else self.prefix.digest()
        return Run(self.committed_length + start, digest, tuple([node.drafted for node in line.nodes[start:]]))

    def _new_line(self, nodes: list[Node], *, start: int) -> Line[StateT]:
        return Line(self.spec, self.prefix.ids, nodes, start=start)

    def _regrow_buds(self) -> None:
        self._buds = []
        for line in self.lines:
            before = 1.0
            for index, node in enumerate(line.nodes):
                if before < LEAST_LIKELIHOOD:
                    break
                if index >= line.start and not node.is_guess:
                    self._grow_buds(line, index, before)
                before *= node.likelihood

    def _grow_buds(self, line: Line[StateT], index: int, before: float) -> None:
        """Add those in the place of one token of the line; `before`: that all tokens before are right."""
        node = line.nodes[index]
        for place in range(1, len(node.likelihoods)):
            likelihood = before * node.likelihoods[place]
            if likelihood < LEAST_LIKELIHOOD:
                break
            if not node.opened >> place & 1:
                self._buds.append(Bud(line, index, place, likelihood))
                self._are_buds_ranked = False


_likelihood: Callable[[Bud[Any]], float] = attrgetter("likelihood")


def _decided(line: Line[StateT], ids: Sequence[int]) -> list[tuple[DraftedToken, int]]:
    """The drafted positions up to the first one where the line differs from the ids."""
    decided = []
    for node, drafted_id, token_id in zip(line.nodes, line.drafted_ids, ids, strict=False):
        decided.append((node.drafted, token_id))
        if drafted_id != token_id:
            break
    return decided
