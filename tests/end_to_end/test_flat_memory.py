"""Resident memory over thousands of sessions of random length: what is taken at the start is all that is taken."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.session_churn import BUDGET_TOKENS

SESSIONS = 2000
GROWTH_LIMIT = 4 * 2**20  # bytes, from the second reading on; the tokens of 2,000 sessions that leaked would be 50 MB


def test_resident_memory_stays_flat_and_the_pool_within_its_budget() -> None:
    """Eight readings on the way; the first is not compared, since buffers of the libraries fill until then."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.session_churn", str(SESSIONS)], capture_output=True, text=True, check=True
    )
    readings = json.loads(done.stdout)
    assert readings[-1][0] >= SESSIONS
    resident = [reading[1] for reading in readings[1:]]
    assert max(resident) - resident[0] < GROWTH_LIMIT, readings
    assert BUDGET_TOKENS // 2 < max(reading[2] for reading in readings) <= BUDGET_TOKENS
