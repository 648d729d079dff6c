"""Who is answered now, who waits for a place, and who is refused: bounded, fair between shares, and quick to say no.

A place is one answer that runs; a request needs one for each of its choices, all of them or none. Requests wait in a
bounded line. When places come free, the request of the *share* (a caller, a tenant) that holds the fewest places goes
next, first come first served within a share. Knows nothing of requests but their share, size and deadline.

What this is built on:

* A line that grows only makes everybody late, so it is short, and a request that would wait in vain is refused at once:
  one whose expected wait is longer than its caller's time or than the longest wait allowed. The expectation is
  measured: places ahead of it in the fair order, over the rate at which places have been coming free.
* A share may take up as much of the line as it leaves free: alone at most half of it, two together two thirds.
  So a flood by some leaves room for others, however many they are.
* Places are kept free for a large request whose turn it is. Else small ones would pass it for ever.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from paceline.errors import DeadlineExceeded, InvalidRequest, QueueFull

_REMEMBERED = 64  # givings back that the rate is measured by
_FIRST_RETRY_S, _SHORTEST_RETRY_S, _LONGEST_RETRY_S = 1.0, 0.1, 60.0


@dataclass(slots=True, eq=False)
class Claim:
    """A request's claim to its places: it waits, then holds them, then is gone."""

    share: str
    places: int
    number: int  # in the order of arrival
    turn: asyncio.Future[None] | None = None  # None: it never had to wait
    holds: bool = False


@dataclass(slots=True)
class _Share:
    held: int = 0  # places
    waiting: deque[Claim] = field(default_factory=deque)


class Admission:
    """The places of one orchestrator and the line in front of them, on one event loop.

    Invariant: places held + places free = `max_places`, and at most `max_waiting` requests wait; a share is known while
    it holds or awaits something. The request whose turn it is waits only while fewer places are free than it needs.
    """

    def __init__(
        self,
        *,
        max_places: int,
        max_waiting: int,
        longest_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_places, self._max_waiting, self._longest_wait_s = max_places, max_waiting, longest_wait_s
        self._clock = clock
        self._shares: dict[str, _Share] = {}
        self._free = max_places
        self._arrivals = 0
        self._waiting = 0
        self._turnover = _Turnover(clock())

    @property
    def running(self) -> int:
        """Places held."""
        return self._max_places - self._free

    @property
    def waiting(self) -> int:
        """Requests in the line."""
        return self._waiting

    @asynccontextmanager
    async def places(self, count: int, *, share: str, deadline_s: float | None) -> AsyncIterator[None]:
        """Hold `count` places while the block runs; waits for them in the line. `deadline_s` is of this clock.

        Raises `QueueFull`, mostly at once, where a place is not to be had in time, `InvalidRequest` where there are not
        so many at all, and `DeadlineExceeded` if the caller's time is over before the block begins. Cancelling leaves
        the line at once.
        """
        claim = self.ask(count, share=share, deadline_s=deadline_s)
        try:
            if claim.turn is not None:
                await self._wait_for_turn(claim.turn, deadline_s)
            self._refuse_late(deadline_s)
            yield
        finally:
            self.leave(claim)

    def ask(self, count: int, *, share: str, deadline_s: float | None = None) -> Claim:
        """A claim that holds its places already, or has a turn to wait for; to be given to `leave` in the end.

        Raises what `places` raises, without having waited.
        """
        if count > self._max_places:
            raise InvalidRequest(
                f"n is {count}, but at most {self._max_places} answers run at once here; ask for fewer.", parameter="n"
            )
        self._refuse_late(deadline_s)
        claim = Claim(share, count, self._arrivals)
        lacking = self._places_ahead(share) + count - self._free
        if lacking > 0:
            self._refuse_or_queue(claim, lacking, deadline_s)
        else:
            self._hand(claim)
        self._arrivals += 1
        return claim

    def leave(self, claim: Claim) -> None:
        """The request has ended, or waits no longer."""
        known = self._shares[claim.share]
        if claim.holds:
            claim.holds = False
            self._turnover.note(self._clock(), held=self.running, given_back=claim.places)
            self._free += claim.places
            known.held -= claim.places
        else:
            known.waiting.remove(claim)
            self._waiting -= 1
        self._forget_if_idle(claim.share)
        self._hand_out()

    # ---- whose turn it is

    def _hand_out(self) -> None:
        """Let in whoever's turn it is, as long as there is room."""
        while self._waiting:
            share = min(
                (share for share in self._shares.values() if share.waiting),
                key=lambda share: (share.held, share.waiting[0].number),
            )
            if share.waiting[0].places > self._free:
                return
            claim = share.waiting.popleft()
            self._waiting -= 1
            self._hand(claim)

    def _hand(self, claim: Claim) -> None:
        self._turnover.note(self._clock(), held=self.running)
        claim.holds = True
        self._free -= claim.places
        self._shares.setdefault(claim.share, _Share()).held += claim.places
        # A caller that has just left no longer waits, and gives the places back in a moment.
        if claim.turn is not None and not claim.turn.done():
            claim.turn.set_result(None)

    def _places_ahead(self, name: str) -> int:
        """Places that go to others before a request that this share adds to the line now, if no answer ends."""
        own = self._shares.get(name, _Share())
        own_ahead = sum(claim.places for claim in own.waiting)
        level = own.held + own_ahead
        others = (share for share in self._shares.values() if share.waiting and share is not own)
        return own_ahead + sum(_places_until(level, share.held, share.waiting) for share in others)

    def _forget_if_idle(self, name: str) -> None:
        share = self._shares[name]
        if not share.held and not share.waiting:
            del self._shares[name]

    # ---- the line

    def _refuse_or_queue(self, claim: Claim, lacking: int, deadline_s: float | None) -> None:
        wait_s = self._expected_wait_s(lacking)
        own = len(self._shares[claim.share].waiting) if claim.share in self._shares else 0
        room = self._max_waiting - self._waiting
        if own >= room:
            raise self._refusal(wait_s, "this caller's part of the line is full" if room else "the line is full")
        if wait_s is not None and wait_s > self._patience_s(deadline_s):
            raise self._refusal(wait_s, f"the next would wait for about {wait_s:.3g} s")
        claim.turn = asyncio.get_running_loop().create_future()
        self._shares.setdefault(claim.share, _Share()).waiting.append(claim)
        self._waiting += 1

    async def _wait_for_turn(self, turn: asyncio.Future[None], deadline_s: float | None) -> None:
        try:
            async with asyncio.timeout(self._patience_s(deadline_s)):
                await turn
        except TimeoutError:
            self._refuse_late(deadline_s)
            raise self._refusal(
                self._expected_wait_s(1), f"none of their places came free within {self._longest_wait_s:g} s"
            ) from None

    def _expected_wait_s(self, places: int) -> float | None:
        """Until so many have come free; None while nobody knows."""
        each_s = self._turnover.seconds_held(self._clock(), held=self.running)
        return None if each_s is None else places * each_s / self._max_places

    def _patience_s(self, deadline_s: float | None) -> float:
        """The longest that a request may wait from now on."""
        if deadline_s is None:
            return self._longest_wait_s
        return min(self._longest_wait_s, deadline_s - self._clock())

    def _refuse_late(self, deadline_s: float | None) -> None:
        if deadline_s is not None and self._clock() >= deadline_s:
            raise DeadlineExceeded("The time allowed for this answer was used up before it could begin; allow more.")

    def _refusal(self, wait_s: float | None, why: str) -> QueueFull:
        retry_s = _FIRST_RETRY_S if wait_s is None else min(max(wait_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S)
        return QueueFull(
            f"{self.running} answers are running, at most {self._max_places} may, and {why}; try again in "
            f"{retry_s:.1f} s.",
            retry_after_s=retry_s,
        )


def _places_until(level: int, held: int, waiting: Iterable[Claim]) -> int:
    """Places that a share is handed while it holds no more than `level`."""
    ahead = 0
    for claim in waiting:
        if held + ahead > level:
            break
        ahead += claim.places
    return ahead


class _Turnover:
    """How long a place is held by one answer, measured over the last givings back.

    By the seconds of all held places for each giving back: that is right too where most places stood empty till now,
    and grows while none comes back.
    """

    def __init__(self, now_s: float) -> None:
        self._noted_s, self._place_seconds, self._given_back = now_s, 0.0, 0
        self._history: deque[tuple[float, int]] = deque([(0.0, 0)], maxlen=_REMEMBERED)

    def note(self, now_s: float, *, held: int, given_back: int = 0) -> None:
        """So many places were held until now, and so many of them are given back."""
        self._place_seconds += held * (now_s - self._noted_s)
        self._noted_s = now_s
        if given_back:
            self._given_back += given_back
            self._history.append((self._place_seconds, self._given_back))

    def seconds_held(self, now_s: float, *, held: int) -> float | None:
        """By one answer; None before the first has ended."""
        self.note(now_s, held=held)
        place_seconds, given_back = self._history[0]
        if given_back == self._given_back:
            return None
        return (self._place_seconds - place_seconds) / (self._given_back - given_back)
