"""How many drafted tokens are accepted, and how often a draft is there in time."""

from __future__ import annotations

from random import Random

import pytest

from orchestrator.acceptance import Acceptance, Share


def draft(acceptance: Acceptance, rate: float, rounds: int, *, draft_length: int = 4, seed: int = 1) -> None:
    random = Random(seed)
    for _ in range(rounds):
        kept = 0
        while kept < draft_length and random.random() < rate:
            kept += 1
        acceptance.record(draft_length=draft_length, kept_length=kept)


def test_the_rate_is_accepted_over_judged() -> None:
    """One draft of four tokens of which three are kept judges four; eight tokens of the prior count beside them."""
    acceptance = Acceptance(0.5)
    acceptance.record(draft_length=4, kept_length=3)
    assert acceptance.rate == pytest.approx((3 + 4) / (4 + 8))
    assert acceptance.judged == 4


def test_tokens_behind_a_rejection_are_not_judged() -> None:
    """Long drafts do not lower the rate: it is the same for lengths 2 and 16, within 0.1.

    Sample: 400 rounds each, about 90 of which count; the standard error is below 0.03, so a false alarm is below 1e-3,
    and the seed is fixed.
    """
    short, long = Acceptance(0.6), Acceptance(0.6)
    draft(short, 0.7, 400, draft_length=2)
    draft(long, 0.7, 400, draft_length=16)
    assert short.rate == pytest.approx(0.7, abs=0.1)
    assert long.rate == pytest.approx(0.7, abs=0.1)


def test_a_session_begins_with_what_others_saw_and_goes_by_its_own_text() -> None:
    """The second session of a drafter expects the first one's acceptance, and soon its own."""
    deployment = Acceptance(0.5)
    draft(Acceptance(deployment), 0.95, 100)
    session = Acceptance(deployment)
    assert session.rate > 0.85
    draft(session, 0.1, 40)
    assert session.rate < 0.3


def test_how_acceptance_falls_with_the_position_is_the_drafters() -> None:
    """Where the third token is never right, drafts of three do not survive, for new sessions either."""
    deployment = Acceptance(0.5)
    first = Acceptance(deployment)
    for _ in range(200):
        first.record(draft_length=3, kept_length=2)
    survival = Acceptance(deployment).survival()
    assert survival[2] > 0.5
    assert survival[3] < 0.25 * survival[2]


def test_survival_ends_where_no_draft_is_of_use() -> None:
    """It begins at 1, never rises, and stops once a longer draft would never be kept."""
    acceptance = Acceptance(0.5)
    survival = acceptance.survival()
    assert survival[0] == 1.0
    assert survival == sorted(survival, reverse=True)
    assert len(survival) < 12


def test_doubt_lets_new_evidence_count() -> None:
    """Behind a pause a few rounds move the rate further than before."""
    certain, doubtful = Acceptance(0.5), Acceptance(0.5)
    for acceptance in (certain, doubtful):
        draft(acceptance, 0.05, 60)
    doubtful.doubt(0.25)
    for acceptance in (certain, doubtful):
        for _ in range(4):
            acceptance.record(draft_length=2, kept_length=2)
    assert doubtful.rate > certain.rate + 0.1


def test_a_share_follows_what_happens() -> None:
    """From its prior to what is counted; the deployment learns with it."""
    deployment = Share(0.3)
    session = Share(deployment)
    assert session.value == pytest.approx(0.3)
    for _ in range(100):
        session.add(True)
    assert session.value > 0.9
    assert deployment.value > 0.85
