"""Thousands of sessions of random length through one engine, as a program: prints what the process held on the way.

`python -m tests.session_churn SESSIONS` prints a JSON list of [sessions ended, resident bytes, held tokens at most].
"""

from __future__ import annotations

import gc
import json
import random
import sys
import tempfile
from pathlib import Path

import psutil
import torch

from paceline.engine.block_pool import BlockTable
from paceline.engine.memory import MemoryLimits
from paceline.engine.model import CausalModel
from paceline.sessions import Address, Close, Open, SessionTable
from paceline.types import SamplingParams, SessionSpec, VerdictRows, VerificationRule
from target_service.scheduler import Judge, Scheduler
from target_service.verifier import DraftToJudge, TargetSession
from tests.checkpoints import TINY_VOCAB_SIZE, save_tiny_checkpoint

AT_ONCE = 16
BUDGET_TOKENS = 2048
READINGS = 8


class Churn:
    """Keeps `AT_ONCE` sessions running, each of a random prompt and a random number of drafts of random tokens."""

    def __init__(self, folder: Path) -> None:
        model = CausalModel.load(
            str(folder), dtype="float32", device="cpu", limits=MemoryLimits(kv_budget_tokens=BUDGET_TOKENS)
        )
        self.memory = model.memory
        table = SessionTable[TargetSession[BlockTable]](max_sessions=AT_ONCE, idle_ttl_s=1000.0)
        self._scheduler = Scheduler(model, table, max_batch_tokens=256)
        self._rng = random.Random(5)
        self._remaining: dict[Address, int] = {}
        self._opened = 0
        self.ended = 0

    def run(self, sessions: int) -> int:
        """Until so many sessions have ended in all; returns the most tokens that were held between two steps."""
        most = 0
        while self.ended < sessions:
            while len(self._remaining) < AT_ONCE:
                self._open()
            for event in self._scheduler.step():
                assert isinstance(event.outcome, VerdictRows), event
                self._go_on(event.address, event.outcome)
            most = max(most, self.memory.held_tokens)
        return most

    def _open(self) -> None:
        self._opened += 1
        address = Address(0, str(self._opened), 1)
        ids = self._ids(self._rng.randint(1, 200))
        spec = SessionSpec(
            session_id=address.session_id,
            prompt_length=len(ids),
            sampling=SamplingParams(),
            seed=self._opened,
            rule=VerificationRule.COUPLED,
            vocab_size=TINY_VOCAB_SIZE,
        )
        self._remaining[address] = self._rng.randint(1, 6)
        self._scheduler.accept(Open(address, spec, ids))
        self._judge(address, len(ids), ())

    def _judge(self, address: Address, base_length: int, committed_ids: tuple[int, ...]) -> None:
        draft = DraftToJudge(
            base_length=base_length,
            committed_ids=committed_ids,
            draft_ids=self._ids(self._rng.randint(0, 4)),
            distributions=None,
        )
        self._scheduler.accept(Judge(address=address, draft=draft, arrived_s=0.0, deadline_s=None))

    def _go_on(self, address: Address, verdict: VerdictRows) -> None:
        self._remaining[address] -= 1
        if self._remaining[address] == 0:
            del self._remaining[address]
            self._scheduler.accept(Close(address))
            self.ended += 1
        else:
            new = tuple(row.token_id for row in verdict.rows)
            self._judge(address, verdict.base_length + len(new), new)

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(TINY_VOCAB_SIZE) for _ in range(count))


def main(sessions: int) -> None:
    torch.set_num_threads(1)
    readings = []
    with tempfile.TemporaryDirectory() as folder:
        churn = Churn(save_tiny_checkpoint(Path(folder) / "model", seed=1))
        for reading in range(1, READINGS + 1):
            most = churn.run(sessions * reading // READINGS)
            gc.collect()
            readings.append([churn.ended, psutil.Process().memory_info().rss, most])
    print(json.dumps(readings))


if __name__ == "__main__":
    main(int(sys.argv[1]))
