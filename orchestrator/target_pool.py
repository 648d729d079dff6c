"""The targets that one orchestrator uses: all mean the same tokens by the same ids."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

from orchestrator.board import PoolBoard, Replica
from orchestrator.directory import Directory
from orchestrator.pool import Pool
from orchestrator.remote_target import FailoverLimits, RemoteTarget
from orchestrator.replica_client import TargetClient
from paceline.errors import ModelMismatch
from paceline.telemetry import PoolMetrics
from paceline.types import ModelInfo, SessionSpec


class NewTargetClient(Protocol):
    """Makes the connection to a target; `TargetClient` itself, where that is reached over gRPC."""

    def __call__(
        self,
        replica: Replica,
        board: PoolBoard,
        *,
        admit: Callable[[Replica, ModelInfo], None],
        silence_limit_s: float,
    ) -> TargetClient: ...


class TargetPool(Pool[TargetClient]):
    """The pool of targets. Invariant: a target is used only if it agrees with the first that was."""

    name = "target"

    def __init__(
        self,
        directory: Directory,
        *,
        limits: FailoverLimits,
        silence_limit_s: float,
        metrics: PoolMetrics,
        new_client: NewTargetClient = TargetClient,
    ) -> None:
        super().__init__(directory, silence_limit_s=silence_limit_s, metrics=metrics)
        self._limits, self._make_client = limits, new_client
        self.info: ModelInfo | None = None  # of the first target that was used; None: none yet

    @contextlib.contextmanager
    def session(
        self, spec: SessionSpec, *, verify_deadline_s: float, deadline_s: float | None
    ) -> Iterator[RemoteTarget]:
        """A session at the targets; closed there, and its seat given back, when the block ends, however it ends.

        `deadline_s` (time.monotonic) is when the caller's time is used up: a target begins no work behind it.
        """
        session = RemoteTarget(self, spec, self._limits, verify_deadline_s=verify_deadline_s, deadline_s=deadline_s)
        try:
            yield session
        finally:
            session.close()

    def note_late(self, replica: Replica) -> None:
        """It gave no verdict in time, though it may well say every second that it lives."""
        self.board.suspect(replica.replica_id)

    def note_verdict(self, replica: Replica) -> None:
        self.board.trust(replica.replica_id)

    def _new_client(self, replica: Replica) -> TargetClient:
        return self._make_client(replica, self.board, admit=self._admit, silence_limit_s=self._silence_limit_s)

    def _admit(self, replica: Replica, info: ModelInfo) -> None:
        """The first target says what all must be: an answer may go on at any of them."""
        if self.info is None:
            self.info = info
        check_alike(replica, info, self.info)


def check_alike(replica: Replica, info: ModelInfo, first: ModelInfo) -> None:
    """Raises `ModelMismatch` unless an answer that was begun at the first target can go on at this replica."""
    if info.tokenizer_sha256 != first.tokenizer_sha256:
        what = f"tokenizer {info.tokenizer_sha256[:16] or 'unknown'}, not {first.tokenizer_sha256[:16] or 'unknown'}"
    elif info.vocab_size != first.vocab_size:
        what = f"a vocabulary of {info.vocab_size} tokens, not {first.vocab_size}"
    elif info.max_context != first.max_context:
        what = f"a context of {info.max_context} tokens, not {first.max_context}"
    else:
        return
    raise ModelMismatch(
        f"The target at {replica.address} ({info.model_id!r}) has {what} as the first one ({first.model_id!r}); start it "
        "with the same model, or start the orchestrator again to change all."
    )
