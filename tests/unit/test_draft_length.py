"""How long a draft pays, and how long to wait for one."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.draft_length import RoundCosts, choose, expected_tokens


def survival(acceptance: float, longest: int = 64) -> list[float]:
    return [acceptance**length for length in range(longest + 1)]


def costs(acceptance: float = 0.7, **changes: Any) -> RoundCosts:
    """A target of 30 ms, a drafter of 1.5 ms, nobody else, and never a miss."""
    ideal = RoundCosts(
        survival=survival(acceptance),
        longest=64,
        plain_s=0.03,
        verify_s=0.03,
        verify_token_s=0.0,
        draft_token_s=0.0015,
        redraft_s=0.0015,
        hit_after_full=1.0,
        hit_after_rejection=1.0,
        hit_after_plain=1.0,
    )
    return replace(ideal, **changes)


def test_expected_tokens_are_those_of_the_papers() -> None:
    """E = (1 - a^(g+1)) / (1 - a)."""
    assert expected_tokens(survival(0.8), 4) == pytest.approx((1 - 0.8**5) / 0.2)


@pytest.mark.parametrize(
    ("acceptance", "verify_token_s", "draft_token_s"),
    list(itertools.product((0.3, 0.6, 0.9), (0.0001, 0.002, 0.02), (0.0005, 0.004, 0.03))),
)
def test_without_misses_the_choice_is_the_limit(acceptance: float, verify_token_s: float, draft_token_s: float) -> None:
    """The best of E over the longer of verifying and drafting, found by trying all."""
    limit = max(
        expected_tokens(survival(acceptance), length)
        / max(0.03 + length * verify_token_s, (length + 1) * draft_token_s)
        for length in range(1, 65)
    )
    choice = choose(costs(acceptance, verify_token_s=verify_token_s, draft_token_s=draft_token_s))
    assert choice.rate == pytest.approx(limit, rel=1e-6)
    assert choice.gain == pytest.approx(limit * 0.03, rel=1e-6)


def test_a_drafter_as_slow_as_the_target_does_not_pay() -> None:
    """With every miss waited for, half as many tokens come as the acceptance gives."""
    assert choose(costs(0.5, draft_token_s=0.03, redraft_s=0.03, hit_after_rejection=0.0)).gain < 1.0


def test_hits_are_worth_what_they_save() -> None:
    """More of them are never slower, and without any each rejection costs a new draft or a plain round."""
    rates = [choose(costs(0.6, redraft_s=0.03, hit_after_rejection=hit)).rate for hit in (0.0, 0.3, 0.6, 1.0)]
    assert rates == sorted(rates)
    assert rates[0] < 0.8 * rates[-1]


def test_a_token_costs_what_others_lose_by_it() -> None:
    """Drafts get shorter with the price of a token, and beyond the acceptance itself none pays."""
    lengths = [choose(costs(0.8, token_price=price)).draft_length for price in (0.0, 0.2, 0.5, 0.75)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1] == 1
    assert choose(costs(0.8, token_price=0.85)).gain < 1.0


def test_a_drafted_bonus_is_no_token_of_its_own() -> None:
    """Where the next draft takes the bonus token's place, a draft of one token that is kept brings one token."""
    without_bonus = replace(costs(1.0), survival=[1.0, 1.0], bonus_is_drafted=True)
    assert choose(without_bonus).gain == pytest.approx(1.0)
    assert choose(replace(without_bonus, bonus_is_drafted=False)).gain == pytest.approx(2.0)


def test_what_is_there_is_verified_at_once() -> None:
    """Of tokens that have come, all are used up to twice the best length, and nothing is waited for."""
    choice = choose(costs())
    wait = choice.wait(60)
    assert wait.enough_length == 2 * choice.draft_length
    assert wait.wait_s == 0.0


def test_a_round_waits_only_for_what_comes_soon() -> None:
    """Behind a miss: a drafter around the corner is worth a wait, one that is two target steps away is not."""
    near = choose(costs(0.9, hit_after_rejection=0.3, redraft_s=0.003)).wait(0)
    far = choose(costs(0.3, hit_after_rejection=0.3, hit_after_plain=0.3, redraft_s=0.06)).wait(0)
    assert near.enough_length > 1
    assert near.wait_s == pytest.approx(0.003 + (near.enough_length - 1) * 0.0015)
    assert (far.enough_length, far.wait_s) == (0, 0.0)


def test_tokens_on_their_way_are_waited_for_one_by_one() -> None:
    """When some are there, the next ones take a drafter's step each, and no round trip."""
    wait = choose(costs(0.95, hit_after_rejection=0.3, redraft_s=0.06)).wait(1)
    assert wait.enough_length > 1
    assert wait.wait_s == pytest.approx((wait.enough_length - 1) * 0.0015)


def test_where_others_keep_the_target_busy_a_wait_costs_a_step() -> None:
    """Who misses the step that begins now waits for the next one, and so rather goes without a draft."""
    alone = choose(costs(0.4, hit_after_rejection=0.3, redraft_s=0.003))
    in_company = choose(costs(0.4, hit_after_rejection=0.3, redraft_s=0.003, least_wait_s=0.03))
    assert alone.wait(0).enough_length > 0
    assert in_company.wait(0).enough_length == 0


def test_a_guess_changes_how_the_choice_is_found_and_not_the_choice() -> None:
    """Policy iteration ends at the same length from any start."""
    given = costs(0.8, verify_token_s=0.001, hit_after_rejection=0.4, redraft_s=0.02)
    lengths = {choose(given, guess=guess).draft_length for guess in (0.0, 20.0, 90.0, 400.0)}
    assert max(lengths) - min(lengths) <= 1
    rates = [choose(given, guess=guess).rate for guess in (0.0, 20.0, 90.0, 400.0)]
    assert max(rates) <= 1.01 * min(rates)


def test_nothing_divides_by_zero() -> None:
    """Fakes answer in no time at all."""
    choice = choose(costs(0.5, plain_s=0.0, verify_s=0.0, draft_token_s=0.0, redraft_s=0.0))
    assert choice.draft_length >= 1
    assert choice.rate > 0.0
