"""One session at the drafter: how far it may draft, what it wants of the next step, and what is pushed when.

Knows nothing of other sessions, of methods, or of how states are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice
from typing import Generic

from drafter_service.likelihood import LEAST_LIKELIHOOD, Sharpness, static_likelihoods
from drafter_service.lines import Bud, Committed, Line, LineTree, Run
from drafter_service.method import DraftView, StateT
from paceline.errors import LengthMismatch
from paceline.sampling import DraftedToken
from paceline.sessions import Address
from paceline.types import SessionSpec, VerificationRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """What is committed, and how far to draft."""

    address: Address
    base_length: int
    committed_ids: tuple[int, ...]  # the last of the base_length tokens
    draft_length: int
    credit: int  # tokens beyond base_length that may be drafted
    branches: int = 0  # most lines besides the likeliest one
    fan_out: int = 0  # most guesses at one position
    acceptance: float = 0.0  # expected, per token; what is likely under `rejection`
    is_resend: bool = False  # what was sent for what lies behind them has not arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """What is ready to be pushed: a draft that continues the prefix of `base_length` tokens with that digest, branches, or
    both."""

    base_length: int
    prefix_digest: int
    tokens: tuple[DraftedToken, ...]
    vocab_size: int  # of the target
    draft_time_s: float  # of all steps that the session took part in since the last push
    draft_steps: int  # how many those were
    branches: tuple[Run, ...] = ()


class Urgency(Enum):
    """Which sessions are served first."""

    WAITING = auto()  # too little of the next draft is out: an orchestrator may be waiting
    AHEAD = auto()  # drafting past the draft in flight
    INGEST = auto()  # no credit, but committed tokens that the method has not seen
    BRANCH = auto()  # for outcomes that may never come; committed tokens will be needed for certain


class DraftSession(Generic[StateT]):
    """One session: its lines, and how far they may go.

    What is pushed when depends on how many tokens were drafted where, never on which: under `rejection` the law of the
    output rests on that (design 3.3). A drawn token is kept with a probability that is right for a token of that
    distribution; if whether it is there in time hung on its own value, or on another value drawn with the same number,
    those that are there would be drawn from another one. So there likelihoods are set by depth and rank, each position has
    as many guesses as any other, and which lines live after a commit depends on committed tokens alone.
    """

    def __init__(
        self,
        spec: SessionSpec,
        committed_ids: Sequence[int],
        open_state: Callable[[DraftView], StateT],
        sharpness: Mapping[VerificationRule, Sharpness],
    ) -> None:
        self.tree = LineTree(spec, committed_ids, open_state)
        self.spec = spec
        self.draft_length, self.credit = 1, 0
        self.branches = self.fan_out = 0
        self.needs_ingest = True
        self._most_drafted = 0  # a line with so many tokens behind the committed ones grows no further
        self._acceptance = 0.0
        self._sharpness = sharpness[spec.effective_rule]
        self._is_static = spec.effective_rule is VerificationRule.REJECTION
        self._has_untold_end = False  # the method had no continuation of the trunk, and nobody has heard of it
        self._draft_time_s, self._draft_steps = 0.0, 0

    @property
    def trunk(self) -> Line[StateT]:
        return self.tree.trunk

    @property
    def committed_length(self) -> int:
        return self.tree.committed_length

    # ---- what it is told

    def commit(self, command: Commit, max_context: int, *, can_branch: bool) -> Committed[StateT]:
        """Take over committed tokens and credit.

        Raises `LengthMismatch` if the tokens do not join on; the session is then as it was.
        """
        ids = self._new_ids(command)
        committed = self.tree.commit(ids)
        if not self._is_static:
            self._learn(committed)
        self.needs_ingest |= bool(ids)
        self.draft_length, self.credit = max(1, command.draft_length), command.credit
        self._most_drafted = min(command.credit, max_context - command.base_length)
        is_branching = can_branch and command.branches > 0 and command.fan_out > 0
        self.branches, self.fan_out = (command.branches, command.fan_out) if is_branching else (0, 0)
        self._acceptance = command.acceptance
        for line in self.tree.lines:
            line.has_nothing = False
            if command.is_resend:
                line.unsend()
        self._has_untold_end = False
        return committed

    def _new_ids(self, command: Commit) -> Sequence[int]:
        """The ids behind those that are committed already."""
        base_length, ids, known_length = command.base_length, command.committed_ids, self.committed_length
        start = base_length - len(ids)
        if not 0 <= start <= known_length:
            raise LengthMismatch(
                f"{len(ids)} tokens up to length {base_length} do not continue the {known_length} committed "
                "ones; open the session again from its tokens."
            )
        known = self.tree.prefix.ids[start:known_length]
        if tuple(known) != ids[: len(known)]:
            raise LengthMismatch(
                f"The tokens up to length {base_length} contradict those committed before; open the session again."
            )
        return ids[len(known) :]

    def _learn(self, committed: Committed[StateT]) -> None:
        for token, token_id in committed.decided:
            if token.guess_ids:
                named = (token.token_id, *token.guess_ids)
                place = named.index(token_id) if token_id in named else len(named)
                self._sharpness.observe(token.estimates, place)

    # ---- what it wants

    def room_of(self, line: Line[StateT]) -> int:
        """How many tokens the line may grow by now."""
        return 0 if line.has_nothing else max(0, self._most_drafted - len(line.nodes))

    @property
    def urgency(self) -> Urgency | None:
        """What the session waits for, if anything."""
        if self.room_of(self.trunk):
            return Urgency.WAITING if self._is_waited_for else Urgency.AHEAD
        if self.needs_ingest:
            return Urgency.INGEST
        return Urgency.BRANCH if any(True for _ in self.branch_wishes()) else None

    def branch_wishes(self) -> Iterator[Line[StateT] | Bud[StateT]]:
        """The branches that are worth another token, and guesses to open branches behind."""
        if not self.branches:
            return
        for line in self.tree.branches:
            if line.likelihood >= LEAST_LIKELIHOOD and self.room_of(line) > 0:
                yield line
        yield from self._openable_buds()

    def _openable_buds(self) -> Iterator[Bud[StateT]]:
        """The likeliest guesses: as many as there is a place for, or one with a better claim to a place than the least
        likely branch."""
        # Behind the guess there must be room for a token.
        most_before = self._most_drafted - 1
        buds = (bud for bud in self.tree.buds if bud.depth < most_before)
        free = self.branches - len(self.tree.branches)
        if free > 0:
            return islice(buds, free)
        least_likely = self.tree.least_likely()
        to_exceed = least_likely.entry_likelihood
        return islice((bud for bud in buds if bud.likelihood > to_exceed and bud.line is not least_likely), 1)

    # ---- what came of it

    def note_step(self, seconds: float) -> None:
        """The session took part in a step, to draft."""
        self._draft_time_s += seconds
        self._draft_steps += 1

    def extend(self, line: Line[StateT], tokens: Sequence[DraftedToken]) -> None:
        for token in tokens:
            self.tree.extend(line, token, self._likelihoods(token))
        line.has_nothing = not tokens
        if line is self.trunk:
            self._has_untold_end = line.has_nothing

    def take_drafted(self) -> list[Drafted]:
        """What is to be pushed now.

        A whole draft, or what there is when drafting cannot go on; branches once they are as many tokens as a draft, or
        nothing is left to do. With branches and credit beyond one draft whatever there is: which of it the verdict will ask
        for is not known, and what has not arrived by then was drafted for nothing.
        """
        taken = []
        unsent = [line for line in self.tree.branches if line.sent < len(line.nodes)]
        is_trunk_due = self._is_trunk_due()
        while is_trunk_due or self._are_branches_due(unsent):
            base_length, digest = self._trunk_end()
            draft = self.tree.take_unsent(self.trunk) if is_trunk_due else None
            if is_trunk_due and draft is None:
                # With branches beside it, an empty draft would not say that there is nothing to offer.
                self._has_untold_end = False
                taken.append(self._drafted(base_length, digest, None, []))
            else:
                taken.append(self._drafted(base_length, digest, draft, unsent))
                unsent = []
            is_trunk_due = self._has_untold_end and self._is_trunk_due()
        return taken

    def _drafted(self, base_length: int, digest: int, draft: Run | None, branches: Sequence[Line[StateT]]) -> Drafted:
        runs = [self.tree.take_unsent(line) for line in branches]
        seconds, steps = self._draft_time_s, self._draft_steps
        self._draft_time_s, self._draft_steps = 0.0, 0
        return Drafted(
            base_length=base_length,
            prefix_digest=digest,
            tokens=draft.tokens if draft is not None else (),
            vocab_size=self.spec.vocab_size,
            draft_time_s=seconds,
            draft_steps=steps,
            branches=tuple([run for run in runs if run is not None]),
        )

    @property
    def _is_streaming(self) -> bool:
        return self.branches > 0 and self.credit > self.draft_length

    @property
    def _is_waited_for(self) -> bool:
        return self.trunk.sent < (self.draft_length if self._is_streaming else 1)

    def _is_trunk_due(self) -> bool:
        unsent = len(self.trunk.nodes) - self.trunk.sent
        is_last = not self.room_of(self.trunk) and (unsent > 0 or self._has_untold_end)
        return is_last or (unsent > 0 if self._is_streaming else self.trunk.sent == 0 and unsent >= self.draft_length)

    def _are_branches_due(self, unsent: Sequence[Line[StateT]]) -> bool:
        if not unsent or self._is_streaming:
            return bool(unsent)
        is_enough = sum(len(line.nodes) - line.sent for line in unsent) >= self.draft_length
        return is_enough or self.urgency in (None, Urgency.INGEST)

    def _trunk_end(self) -> tuple[int, int]:
        """Length and digest of the tokens up to the last of the trunk that is out."""
        sent = self.trunk.sent
        digest = self.trunk.nodes[sent - 1].digest if sent else self.tree.prefix.digest()
        return self.committed_length + sent, digest

    def _likelihoods(self, token: DraftedToken) -> Sequence[float]:
        if self._is_static:
            return static_likelihoods(self._acceptance, len(token.guess_ids))
        return self._sharpness.likelihoods(token.estimates) if token.guess_ids else token.estimates
