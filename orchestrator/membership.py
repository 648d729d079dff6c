"""What Serve's request router of a pool shares with the rest of its process: the board it ranks by, and who is there.

Serve pickles a router class by value, together with its module, so both must live in a module of their own: this one.
It is the one place with state at module level. Knows nothing of Ray.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from orchestrator.board import PoolBoard, Replica

Members = Mapping[str, Replica]


class Membership:
    """The members last published, and who wants to hear of the next ones. Safe from any thread."""

    def __init__(self) -> None:
        self.board: PoolBoard | None = None  # None in a process that routes without being an orchestrator
        self._lock = threading.Lock()
        self._members: Members = {}
        self._followers: list[Callable[[Members], None]] = []

    def publish(self, members: Members) -> None:
        """Called on the router's thread; so are the followers."""
        with self._lock:
            self._members = dict(members)
            followers = list(self._followers)
        for follower in followers:
            follower(members)

    def follow(self, follower: Callable[[Members], None]) -> Members:
        """Tell `follower` of every later change, on the publisher's thread; returns the members now."""
        with self._lock:
            self._followers.append(follower)
            return self._members

    def unfollow(self, follower: Callable[[Members], None]) -> None:
        with self._lock:
            self._followers.remove(follower)


_memberships: dict[str, Membership] = {}
_lock = threading.Lock()


def membership_of(pool: str) -> Membership:
    with _lock:
        return _memberships.setdefault(pool, Membership())
