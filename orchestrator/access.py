"""Who may call, and how much: gates for the door (`door.Gate`), with limits for each caller.

Limits count within one orchestrator: of several, each grants them. Knows nothing of gRPC or HTTP; `paceline.tokens` says
what a token is.
"""

from __future__ import annotations

import datetime as dt
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

from orchestrator.door import Caller, Gate, OpenGate, UseTokens
from paceline.errors import InvalidRequest, RateLimited, StartupFailed, Unauthenticated
from paceline.exposure import is_loopback
from paceline.settings import OrchestratorSettings
from paceline.tokens import TokenEntry, TokenFile, find_entry, read_tokens
from paceline.watched import Watched

_LONGEST_TOKEN = 256  # characters; a longer one is none of ours
_PLACE_RETRY_S = 1.0  # nobody knows when a caller's own answers end
_SECONDS_A_MINUTE = 60.0
_ROUNDING_S = 1e-6  # who waits for as long as was said must not find a rounding error in the way


# ---------------------------------------------------------------------------------------------------------------------
# What a caller may use


class Budget:
    """So much a minute, refilled steadily, up to `capacity` at once. May be overdrawn, and is empty until that is paid."""

    def __init__(self, a_minute: float, *, capacity: float, clock: Callable[[], float]) -> None:
        self._a_second, self._capacity, self._clock = a_minute / _SECONDS_A_MINUTE, capacity, clock
        self._level, self._counted_s = capacity, clock()

    def wait_s(self, amount: float) -> float:
        """Until so much is there; 0: it is."""
        self._refill()
        wait_s = (amount - self._level) / self._a_second
        return wait_s if wait_s > _ROUNDING_S else 0.0

    def spend(self, amount: float) -> None:
        self._refill()
        self._level -= amount

    def _refill(self) -> None:
        now_s = self._clock()
        self._level = min(self._capacity, self._level + (now_s - self._counted_s) * self._a_second)
        self._counted_s = now_s


class Account:
    """What one caller has used, by the limits of its entry."""

    def __init__(self, entry: TokenEntry, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.answering = 0  # answers that run now
        self._begin(entry)

    def follow(self, entry: TokenEntry) -> None:
        """Limits that have changed hold from now on, with nothing used of them but by the answers that run."""
        if entry != self._entry:
            self._begin(entry)

    def _begin(self, entry: TokenEntry) -> None:
        self._entry = entry
        self._requests: Budget | None = None
        self._tokens: Budget | None = None
        if entry.requests_per_minute is not None:
            at_once = entry.burst or max(1, math.ceil(entry.requests_per_minute))
            self._requests = Budget(entry.requests_per_minute, capacity=at_once, clock=self._clock)
        if entry.tokens_per_minute is not None:
            self._tokens = Budget(entry.tokens_per_minute, capacity=entry.tokens_per_minute, clock=self._clock)

    @contextmanager
    def answers(self, count: int) -> Iterator[UseTokens]:
        """Room for one request with so many answers while the block runs; what is given takes the tokens they used.

        Raises `RateLimited` with the time after which the same request is taken, and `InvalidRequest` if it never is.
        """
        self._refuse_unless_granted(count)
        if self._requests is not None:
            self._requests.spend(1)
        self.answering += count
        try:
            yield self._use_tokens
        finally:
            self.answering -= count

    def _refuse_unless_granted(self, count: int) -> None:
        limit = self._entry.concurrent_answers
        if limit is not None and count > limit:
            raise InvalidRequest(
                f"This asks for {count} answers, but at most {limit} of {self._entry.name} run at once; ask for fewer.",
                parameter="n",
            )
        if limit is not None and self.answering + count > limit:
            raise RateLimited(
                f"{self.answering} answers of {self._entry.name} are running, and at most {limit} may with the {count} of "
                "this request; let one end first.",
                retry_after_s=_PLACE_RETRY_S,
            )
        for budget, least, what in ((self._requests, 1.0, "requests"), (self._tokens, 0.0, "tokens")):
            wait_s = budget.wait_s(least) if budget is not None else 0.0
            if wait_s > 0:
                raise RateLimited(
                    f"{self._entry.name} has used up the {what} that it may use in a minute; try again in {wait_s:.1f} s.",
                    retry_after_s=wait_s,
                )

    def _use_tokens(self, count: int) -> None:
        if self._tokens is not None:
            self._tokens.spend(count)


# ---------------------------------------------------------------------------------------------------------------------
# Gates


class TokenGate:
    """Lets in whoever brings a token of the file, which is read again when it changes (`door.Gate`)."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC),
    ) -> None:
        """Reads the file; raises `StartupFailed`."""
        self._clock, self._now = clock, now
        self._watched = Watched([path], lambda: read_tokens(path), clock=clock)
        self._accounts: dict[str, Account] = {}

    def caller(self, authorization: str | None, *, peer: str = "") -> Caller:
        scheme, _, token = (authorization or "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("A token is needed here; send it as `authorization: Bearer TOKEN`.")
        entry = find_entry(self._file().tokens, token) if len(token) <= _LONGEST_TOKEN else None
        if entry is None or entry.disabled:
            raise Unauthenticated("This token is not known here; ask whoever runs this deployment for one.")
        if entry.has_expired(self._now()):
            raise Unauthenticated("This token has expired; ask whoever runs this deployment for a new one.")
        return Caller(entry.name)

    @contextmanager
    def answers(self, caller: Caller, *, count: int) -> Iterator[UseTokens]:
        entry = next((entry for entry in self._file().tokens if entry.name == caller.name), None)
        if entry is None:
            raise Unauthenticated("This token is not known here any more.")
        account = self._accounts.get(caller.name)
        if account is None:
            account = self._accounts[caller.name] = Account(entry, self._clock)
        account.follow(entry)
        with account.answers(count) as use_tokens:
            yield use_tokens

    def _file(self) -> TokenFile:
        """What the file says now; callers whom it no longer names, and who have no answers, are forgotten."""
        file = self._watched.value()
        names = {entry.name for entry in file.tokens}
        if not self._accounts.keys() <= names:
            self._accounts = {
                name: account for name, account in self._accounts.items() if name in names or account.answering
            }
        return file


class LoopbackGate(OpenGate):
    """Lets in whoever calls from this machine, where a server listens further than it should (`door.Gate`)."""

    def caller(self, authorization: str | None, *, peer: str = "") -> Caller:
        if not is_loopback(_host_of(peer)):
            raise Unauthenticated(
                "Only callers on the same machine are let in, for this deployment has no tokens; whoever runs it can set "
                "tokens_file, or trust_network where strangers cannot reach the network."
            )
        return Caller()


def _host_of(peer: str) -> str:
    """The host of a peer as gRPC names it (ipv4:127.0.0.1:5, ipv6:%5B::1%5D:5), or of a bare address."""
    for scheme in ("ipv4:", "ipv6:"):
        if peer.startswith(scheme):
            return unquote(peer.removeprefix(scheme)).rpartition(":")[0]
    return peer


def gate_of(settings: OrchestratorSettings) -> Gate:
    """For a port of our own, which listens where it may: tokens if there is a file of them; raises `StartupFailed`."""
    return TokenGate(settings.tokens_file) if settings.tokens_file is not None else OpenGate()


def ingress_gate_of(settings: OrchestratorSettings, *, hides_peers: bool = False) -> Gate:
    """Behind an ingress, which listens wherever it likes: without tokens only this machine is let in, unless the network is
    trusted. Raises `StartupFailed`, also where an ingress that `hides_peers` leaves nothing to tell callers by.
    """
    if settings.tokens_file is not None or settings.trust_network:
        return gate_of(settings)
    if hides_peers:
        raise StartupFailed(
            "What stands before this orchestrator hides who calls, and nothing else here tells it; give it a tokens_file, or "
            "set its trust_network if strangers cannot reach the network."
        )
    return LoopbackGate()
