"""What a drafting method is: the tokens it proposes, what it sees of a session, and what it is asked for.

Knows nothing of which sessions there are, of lines of tokens beside one another, or of when a draft is pushed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from paceline.engine.interface import Memory
from paceline.errors import PacelineError
from paceline.sampling import DraftedToken
from paceline.types import SessionSpec

StateT = TypeVar("StateT")


class DraftView(Protocol):
    """What a method may see of a session."""

    @property
    def spec(self) -> SessionSpec: ...

    @property
    def committed_ids(self) -> Sequence[int]:
        """The same sequence for the life of the session: it only ever grows."""

    @property
    def drafted_ids(self) -> Sequence[int]:
        """The tokens behind the committed ones that the next token continues: those drafted, and guesses among them."""


# Tuples rather than dataclasses, which take twice as long to make: each line of each step takes some of these.
class DraftWork(NamedTuple, Generic[StateT]):
    """What one session wants: up to `max_tokens` tokens that continue its ids; 0: to catch up with the committed ones,
    so that the next draft starts at once. With each token, up to `fan_out` guesses.

    Under `rejection` a method that can branch names as many guesses as it can, whatever it draws: how many they are
    must not depend on a drawn token.
    """

    state: StateT
    session: DraftView
    max_tokens: int
    fan_out: int = 0


class Progress(NamedTuple):
    """What a step did for one session.

    `drafted` is what it asked for: up to `max_tokens` tokens, and none also where there is nothing to offer. None: it
    has not got there yet and wants another step. With nothing fed either, it was left out.
    """

    fed_tokens: int = 0
    drafted: Sequence[DraftedToken] | None = None

    @property
    def is_left_out(self) -> bool:
        return self.fed_tokens == 0 and self.drafted is None


Outcome = Progress | PacelineError


class DraftMethod(Protocol[StateT]):
    """A way of drafting. `StateT` is what it keeps for a session, from `open` until `close`."""

    @property
    def max_context(self) -> int: ...

    @property
    def memory(self) -> Memory | None:
        """That of its model; None without one."""

    @property
    def preemptions(self) -> int:
        """How often a session gave up its memory for others, to be computed again; 0 without a model."""

    def open(self, session: DraftView) -> StateT:
        """State for a new session; does no model work and holds no memory."""

    def draft(self, batch: Sequence[DraftWork[StateT]]) -> Sequence[Outcome]:
        """One step for as many of these sessions as it can take, the first ones first; what came of each of them.

        At most one model step. The outcome of a session that cannot go on is its error; an error raised is nobody's in
        particular, and every state is then still good to be tried again.
        """

    def can_step(self) -> bool:
        """Whether its model still computes, asked when a step has failed; True without one."""

    def rewind(self, state: StateT, length: int) -> None:
        """Only the first `length` of the session's ids are still what they were."""

    def pending_tokens(self, state: StateT, session: DraftView) -> int:
        """Committed tokens that are yet to be fed; 0 without a model."""

    def close(self, state: StateT) -> None:
        """The session has ended, in whatever way: give back all it holds."""


@runtime_checkable
class BranchingMethod(DraftMethod[StateT], Protocol[StateT]):
    """A method that can draft behind its guesses as well: several states of one session live beside one another, each
    for its own tokens behind the committed ones."""

    def fork(self, state: StateT, session: DraftView, length: int) -> StateT:
        """A state for `session`, whose first `length` tokens are those of `state`; neither sees what the other is fed.

        Does no model work. The two are states of one session, and are closed one by one, in any order.
        """
