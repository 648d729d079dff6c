"""The drafters that one orchestrator uses, and the sessions that wait for a seat at one of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.board import Replica
from orchestrator.directory import Directory
from orchestrator.pool import Pool
from orchestrator.remote_drafts import DraftCostMeter, RemoteDrafts, SeatTaker
from orchestrator.replica_client import DrafterClient
from orchestrator.stall import StallMeter
from paceline.errors import ModelMismatch, PacelineError
from paceline.telemetry import PoolMetrics
from paceline.tls import ClientTls
from paceline.types import ModelInfo, SessionSpec

_FULL_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class _Asker:
    taker: SeatTaker
    tokens: int


class DrafterPool(Pool[DrafterClient]):
    """The pool of drafters; refuses those whose token ids mean something else than the target's.

    Invariant: at most one lease is asked for at a time. Sessions wait in a queue here, which they may leave, while a
    control plane may keep the place of somebody who has gone.
    """

    name = "drafter"

    def __init__(
        self,
        directory: Directory,
        *,
        target_info: ModelInfo,
        silence_limit_s: float,
        metrics: PoolMetrics,
        tls: ClientTls | None = None,
    ) -> None:
        super().__init__(directory, silence_limit_s=silence_limit_s, metrics=metrics)
        self._target_info, self._tls = target_info, tls
        self._queue: dict[str, _Asker] = {}  # by session id, in the order of asking
        self._asked = asyncio.Event()
        self.stall = StallMeter()
        self._sessions: set[RemoteDrafts] = set()

    @property
    def info(self) -> ModelInfo | None:
        """Of a drafter that is connected now, if there is one."""
        return next((client.info for client in self._connected()), None)

    @property
    def connected(self) -> tuple[ModelInfo, ...]:
        """Of all drafters that are connected now."""
        return tuple(client.info for client in self._connected() if client.info is not None)

    @property
    def speculating_sessions(self) -> int:
        """How many sessions want drafts, whether or not they have a seat."""
        return sum(session.wants_drafts for session in self._sessions)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(super().run())
            group.create_task(self._seat_in_turn())

    @contextlib.contextmanager
    def session(self, spec: SessionSpec, *, meter: DraftCostMeter | None = None) -> Iterator[RemoteDrafts]:
        """A session's drafts; its seat is asked for now, and given back when the block ends, however it ends."""
        session = RemoteDrafts(self, spec, meter=meter)
        self._sessions.add(session)
        session.ask()
        try:
            yield session
        finally:
            self._sessions.discard(session)
            session.close()

    def ask(self, session_id: str, taker: SeatTaker, *, tokens: int) -> None:
        """Call `taker.on_seat` when its turn has come; asking twice is asking once."""
        self._queue.setdefault(session_id, _Asker(taker, tokens))
        self._asked.set()

    def withdraw(self, session_id: str) -> None:
        """Leave the queue, if in it."""
        self._queue.pop(session_id, None)

    async def _seat_in_turn(self) -> None:
        while True:
            await self._asked.wait()
            if not self._queue:
                self._asked.clear()
                continue
            session_id, asker = next(iter(self._queue.items()))
            try:
                seat = await self.seat(session_id, asker.taker, tokens=asker.tokens)
            except PacelineError:
                # Whatever the control plane has to complain of: a session does without.
                await asyncio.sleep(_FULL_PAUSE_S)
                continue
            if self._queue.get(session_id) is asker:
                del self._queue[session_id]
                asker.taker.on_seat(seat)
            else:
                # The session ended while its lease was on the way.
                seat.release()

    def _new_client(self, replica: Replica) -> DrafterClient:
        return DrafterClient(
            replica, self.board, admit=self._admit, silence_limit_s=self._silence_limit_s, tls=self._tls
        )

    def _admit(self, replica: Replica, info: ModelInfo) -> None:
        check_pairing(info, self._target_info)


def check_pairing(drafter: ModelInfo, target: ModelInfo) -> None:
    """Raises `ModelMismatch` unless the two mean the same tokens by the same ids.

    Padding of the output layer behind the tokenizer's last id may differ. A side without a tokenizer, such as prompt
    lookup, works on any ids.
    """
    ours, theirs = drafter.tokenizer_sha256, target.tokenizer_sha256
    if ours and theirs and ours != theirs:
        raise ModelMismatch(
            f"The drafter {drafter.model_id!r} (tokenizer {ours[:16]}) and the target {target.model_id!r} (tokenizer "
            f"{theirs[:16]}) number their tokens differently; choose a drafter with the target's tokenizer, or start the "
            "drafter with --use-heterogeneous-vocab --target-tokenizer NAME."
        )
