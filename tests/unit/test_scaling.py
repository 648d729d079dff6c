"""The pools follow the load closely, cheaply and calmly, whatever starts slowly; and nothing Serve may say upsets them.

The simulated loads are random with stated seeds, so every run sees the same day: no false alarms. What "the fewest
replicas that meet the load" means is computed by the simulation, from its own model of drafters, never by the policy:
for a load that stays the same, the smallest count that carries it; for one that fluctuates, the largest such count
within the last ten minutes, as a pool that may turn once in ten minutes cannot have fewer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.scaling import (
    DRAFTER,
    ORCHESTRATOR,
    TARGET,
    Decision,
    Need,
    PoolMemory,
    PoolPolicy,
    PoolView,
    RatioMemory,
    ScalingMemory,
    ScalingRules,
    ScalingView,
    decide,
    memory_from_states,
    scale_pools,
    states_from_memory,
)
from tests.load_simulation import (
    HOUR,
    Context,
    DeploymentId,
    Load,
    PoolSetting,
    Setting,
    Trace,
    a_day,
    always,
    coupled,
    direction_changes,
    simulate,
    stall_fraction,
)

RULES = ScalingRules()
MINUTE = 60.0
TEN_MINUTES = 120  # steps of five seconds


def pool(count: int = 1, **fields: Any) -> PoolView:
    """A pool in which all that was ordered runs."""
    return PoolView(
        **{"running": count, "desired": count, "minimum": 1, "maximum": 16, "sessions_per_replica": 16, **fields}
    )


def drafters(count: int = 1, **fields: Any) -> PoolView:
    return pool(count, **{"sessions_per_replica": 64, **fields})


def view(now_s: float = 0.0, **fields: Any) -> ScalingView:
    return ScalingView(now_s=now_s, **{"target": pool(), "drafter": drafters(), **fields})


def settled(seen: ScalingView, after: Decision | None = None) -> Decision:
    """The decision after an hour of that view, taken every ten seconds; `after` an hour of another."""
    decision = after or decide(seen, ScalingMemory(), RULES)
    start_s = 3600.0 if after else 0.0
    for step in range(1, 361):
        decision = decide(replace(seen, now_s=start_s + step * 10.0), decision.memory, RULES)
    return decision


def in_closed_loop(
    rules: ScalingRules = RULES, *, step_s: float = 5.0, duration_s: float = HOUR, **fields: Any
) -> Iterator[Decision]:
    """Decisions about pools that have at once what was decided; `stall` may be a function of the drafters."""
    memory, target, drafter = ScalingMemory(), fields.pop("target", pool()), fields.pop("drafter", drafters())
    stall = fields.pop("stall", None)
    for step in range(round(duration_s / step_s)):
        now = stall(drafter.running) if callable(stall) else stall
        seen = ScalingView(now_s=step * step_s, target=target, drafter=drafter, stall=now, **fields)
        decision = decide(seen, memory, rules)
        memory = decision.memory
        target = replace(target, running=decision.target, desired=decision.target)
        drafter = replace(drafter, running=decision.drafter, desired=decision.drafter)
        yield decision


# ---------------------------------------------------------------------------------------------------------------------
# Each rule by itself


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"target": pool(sessions=16.0)}, 1),
        ({"target": pool(sessions=16.1)}, 2),
        ({"target": pool(sessions=16.0), "kv_used": 2.3}, 4),
        ({"target": pool(sessions=16.0, queued=49.0)}, 4),
        ({"target": pool(sessions=1000.0)}, 16),
        ({"target": pool(sessions=0.0, minimum=0)}, 0),
        ({"target": pool(sessions=0.01, minimum=0)}, 1),
    ],
)
def test_targets_follow_what_they_have_least_of(fields: dict[str, Any], count: int) -> None:
    """Places, KV memory or time for steps; within the pool's bounds, and none only for nobody."""
    assert settled(view(**fields)).target == count


def test_drafters_are_ordered_in_the_same_moment_as_the_targets_they_will_draft_for() -> None:
    """Not when those targets have come: that would add one start to the other."""
    busy = [view(now_s, target=pool(1, sessions=64.0)) for now_s in (0.0, 10.0)]
    waiting = decide(busy[0], ScalingMemory(), RULES)
    ordered = decide(busy[1], waiting.memory, RULES)
    assert (waiting.target, waiting.drafter) == (1, 1)
    assert (ordered.target, ordered.drafter) == (4, 4)


def test_there_are_no_drafters_for_sessions_that_no_target_will_take() -> None:
    """Sessions beyond the largest target pool wait, and draft nothing meanwhile."""
    target = pool(2, maximum=2, sessions=160.0)
    assert settled(view(target=target)).drafter == 2


def test_more_is_ordered_only_after_it_was_needed_for_a_while() -> None:
    """A peak shorter than the delay orders nothing, and the delay begins anew."""
    memory, counts = ScalingMemory(), []
    for now_s, sessions in ((0.0, 40.0), (9.0, 40.0), (9.5, 10.0), (10.5, 40.0), (20.0, 40.0), (20.5, 40.0)):
        decision = decide(view(now_s, target=pool(sessions=sessions)), memory, RULES)
        memory = decision.memory
        counts.append(decision.target)
    assert counts == [1, 1, 1, 1, 1, 3]


def test_an_empty_pool_is_filled_at_once() -> None:
    """Somebody waits, and nothing there could bridge the delay."""
    first = decide(view(target=pool(0, minimum=0, sessions=20.0)), ScalingMemory(), RULES)
    assert first.target == 2


def test_a_count_is_kept_until_it_was_not_needed_for_the_whole_hold() -> None:
    """And then lowered to the most that was needed since, not to what happens to be needed now."""
    memory, counts = ScalingMemory(), {}
    for now_s, sessions in (
        (0.0, 80.0),
        (10.0, 80.0),
        (300.0, 40.0),
        (609.9, 5.0),
        (610.0, 5.0),
        (899.9, 5.0),
        (900.0, 5.0),
    ):
        decision = decide(view(now_s, target=pool(5, sessions=sessions)), memory, RULES)
        memory, counts[now_s] = decision.memory, decision.target
    assert counts == {0.0: 5, 10.0: 5, 300.0: 5, 609.9: 5, 610.0: 3, 899.9: 3, 900.0: 1}


def test_a_held_count_orders_nothing() -> None:
    """Where somebody else lowered the pool, the hold does not raise it again."""
    high = decide(view(0.0, target=pool(5, sessions=80.0)), ScalingMemory(), RULES)
    assert decide(view(5.0, target=pool(2, sessions=20.0)), high.memory, RULES).target == 2


def test_a_policy_without_memory_takes_what_is_ordered_for_needed() -> None:
    """So a Serve controller that starts again changes nothing at first, and keeps the ratio that worked."""
    seen = view(target=pool(4, sessions=60.0), drafter=drafters(11, sessions=60.0), stall=0.04)
    first = decide(seen, ScalingMemory(), RULES)
    later = settled(seen)
    assert (first.target, first.drafter) == (later.target, later.drafter) == (4, 11)


def test_orchestrators_follow_the_sessions_they_serve() -> None:
    """They have no other signal."""
    decisions = settled(view(orchestrator=pool(sessions=100.0, sessions_per_replica=32)))
    assert decisions.orchestrator == 4


def test_drafters_stay_at_the_minimum_while_no_session_wants_drafts() -> None:
    """Speculation does not pay; but none goes to zero while its place there is held, for Serve would start it again."""
    busy = pool(3, sessions=48.0)
    for held, count in ((0.0, 0), (48.0, 1)):
        seen = view(target=busy, drafter=drafters(4, minimum=0, sessions=held), drafting_sessions=0.0)
        assert settled(seen).drafter == count


def test_the_stall_is_judged_once_an_interval_however_often_serve_asks() -> None:
    """Ten calls a second for forty seconds make no more raises than the settling allows: one."""
    rules = replace(RULES, raise_delay_s=0.0)
    last = list(in_closed_loop(rules, step_s=0.1, duration_s=40.0, target=pool(sessions=16.0), stall=0.3))[-1]
    assert last.drafter == 2


def test_drafters_on_order_are_waited_for() -> None:
    """Whatever the stall says until then, and however long they take."""
    coming = drafters(2, running=1)
    assert settled(view(target=pool(sessions=16.0), drafter=coming, stall=0.6)).drafter == 2


def test_a_raise_that_does_not_help_is_taken_back_and_tried_again_an_hour_later() -> None:
    """Drafts that take longer than a step stall with any number of drafters; the pool does not climb to its maximum."""
    decisions = in_closed_loop(target=pool(sessions=16.0), stall=0.4, duration_s=2 * HOUR)
    counts = [each.drafter or 0 for each in decisions]
    raised = [step * 5 for step in range(1, len(counts)) if counts[step] > counts[step - 1]]
    assert set(counts) == {1, 2}
    assert len(raised) == 2
    assert 3600 < raised[1] - raised[0] < 3700
    assert counts.count(2) * 5 == 2 * (600 + 45)  # the hold, which begins when the second drafter has been judged


def test_a_policy_may_be_told_to_keep_what_does_not_help() -> None:
    """Then the pool climbs as far as it may."""
    rules = replace(RULES, least_gain=0.0)
    counts = [each.drafter or 0 for each in in_closed_loop(rules, target=pool(sessions=16.0), stall=0.4)]
    assert counts == sorted(counts)
    assert counts[-1] == RULES.max_ratio


def test_drafters_that_do_nothing_about_the_stall_go_one_by_one() -> None:
    """Eight of them for eight targets: after the raise that did not help, fewer are found to do as well."""
    target = pool(8, sessions=128.0)
    counts = [each.drafter or 0 for each in in_closed_loop(target=target, stall=0.4, duration_s=1.5 * HOUR)]
    assert counts[100] == 10  # a quarter more
    assert counts[700] == 4


@pytest.mark.parametrize(("stall_target", "between", "count"), [(0.05, 0.6, 5), (0.4, 0.1, 3)])
def test_a_stall_that_was_accepted_is_no_longer_once_it_has_gone_by_itself(
    stall_target: float, between: float, count: int
) -> None:
    """As when drafters took minutes to warm up: an hour of too few drafters would be the price."""
    calls = itertools.count()

    def stall(drafters: int) -> float:
        time_s = next(calls) * 5
        return 1.0 if time_s < 300 else between if time_s < 400 else max(0.0, 1 - drafters / 5)

    rules = replace(RULES, stall_target=stall_target)
    counts = [each.drafter or 0 for each in in_closed_loop(rules, target=pool(sessions=16.0), stall=stall)]
    assert max(counts[:60]) == 2
    assert counts[-1] == count


@pytest.mark.parametrize(
    ("failed", "running", "sessions", "stall", "count"),
    [
        (1, 2, 16.0, 0.3, 2),  # it did not help, and is taken back when the hold is over
        (1, 2, 40.0, 0.3, 4),  # many more sessions than before
        (1, 2, 16.0, 0.45, 3),  # worse than before: drafters do not do that
        (8, 10, 160.0, 0.31, 13),  # a quarter more drafters, and a quarter more sessions
    ],
)
def test_a_raise_is_not_blamed_for_what_changed_meanwhile(
    failed: int, running: int, sessions: float, stall: float, count: int
) -> None:
    """After one drafter for each 16 sessions had stalled by 0.3."""
    learned = RatioMemory(
        ratio=1.0,
        kept_ratio=1.0,
        judge_at_s=0.0,
        judged_count=running,
        failed_count=failed,
        failed_load=float(failed),
        raised_from_stall=0.3,
    )
    rules = replace(RULES, raise_delay_s=0.0)
    seen = view(target=pool(10, sessions=sessions), drafter=drafters(running), stall=stall)
    memory = decide(seen, ScalingMemory(ratio=learned), rules).memory
    assert decide(replace(seen, now_s=10.0), memory, rules).drafter == count


def test_a_raise_is_not_judged_while_the_stall_is_falling() -> None:
    """It is an average over the time before, too; four readings on its way from a half to a tenth."""
    learned = RatioMemory(
        ratio=2.0,
        kept_ratio=2.0,
        judge_at_s=0.0,
        judged_count=2,
        failed_count=1,
        failed_load=1.0,
        raised_from_stall=0.5,
    )
    memory = ScalingMemory(ratio=learned)
    for step, stall in enumerate((0.49, 0.47, 0.42, 0.1)):
        seen = view(10.0 * step, target=pool(sessions=16.0), drafter=drafters(2), stall=stall)
        memory = decide(seen, memory, RULES).memory
        assert memory.ratio is not None
        assert memory.ratio.accepted_stall == 0.0
        assert (memory.ratio.ratio > 2.0) == (step == 3)


def test_a_raise_that_paid_is_not_judged_again() -> None:
    """A stall that comes back later has another cause, and calls for more drafters."""
    learned = RatioMemory(
        ratio=2.0,
        kept_ratio=2.0,
        judge_at_s=0.0,
        judged_count=2,
        failed_count=1,
        failed_load=1.0,
        raised_from_stall=0.3,
    )
    rules = replace(RULES, raise_delay_s=0.0)
    well = view(target=pool(sessions=16.0), drafter=drafters(2), stall=0.0)
    memory = decide(well, ScalingMemory(ratio=learned), rules).memory
    assert decide(replace(well, now_s=10.0, stall=0.3), memory, rules).drafter == 3


def test_a_raise_that_helps_is_followed_by_another() -> None:
    """As long as the stall falls and is too long, and the drafters for a full target are no more than allowed."""
    for enough, count in ((6, 6), (40, 8)):
        decisions = in_closed_loop(target=pool(sessions=16.0), stall=lambda n, enough=enough: max(0.0, 1 - n / enough))
        assert [each.drafter for each in decisions][-1] == count


def test_an_idle_night_says_nothing_about_the_day() -> None:
    """One drafter with next to nothing to do is not taken for a drafter that could do it all."""
    night = settled(view(target=pool(sessions=2.0), stall=0.0))
    assert settled(view(target=pool(5, sessions=80.0), drafter=drafters(5), stall=0.04), after=night).drafter == 5


def test_no_drafter_is_meant_to_carry_more_sessions_than_it_may() -> None:
    """Though none stalls."""
    assert settled(view(target=pool(13, sessions=200.0), drafter=drafters(1), stall=0.0)).drafter == 13
    rules = replace(RULES, initial_ratio=0.1)
    fed = in_closed_loop(rules, target=pool(13, sessions=200.0), stall=0.0)
    assert [each.drafter for each in fed][-1] == 4


def test_a_count_that_stalled_is_not_tried_again_for_an_hour() -> None:
    """And once it was, not for another hour."""
    decisions = in_closed_loop(
        target=pool(sessions=16.0), duration_s=3 * HOUR, stall=lambda count: max(0.0, 1 - count / 3), step_s=10.0
    )
    counts = [each.drafter for each in decisions]
    tries = [step * 10 for step in range(1, len(counts)) if (counts[step - 1], counts[step]) == (3, 2)]
    assert tries
    assert min(after - before for before, after in zip([0, *tries], tries, strict=False)) > 3600
    assert counts.count(2) * 10 < 150 * (len(tries) + 1)


@pytest.mark.parametrize(("sessions", "count"), [(20.0, 3), (16.0, 3), (15.0, 3), (14.0, 2), (8.0, 2)])
def test_a_count_that_stalled_is_judged_by_its_load(sessions: float, count: int) -> None:
    """Two drafters were too few for sixteen sessions: so they are for more, but for a tenth less they are tried."""
    learned = RatioMemory(ratio=3.0, kept_ratio=3.0, judge_at_s=0.0, judged_count=3, failed_count=2, failed_load=1.0)
    memory = ScalingMemory(drafter=PoolMemory((Need(1, -1000.0),)), ratio=learned)
    idle = view(target=pool(sessions=sessions), drafter=drafters(3), stall=0.0)
    assert decide(idle, memory, RULES).drafter == count


# ---------------------------------------------------------------------------------------------------------------------
# Under simulated load


def wide(**fields: Any) -> Setting:
    """Pools whose bounds do not matter."""
    return Setting(
        target=PoolSetting(minimum=1, maximum=64, sessions_per_replica=16, start_s=(150, 210)),
        drafter=PoolSetting(
            **{"minimum": 1, "maximum": 64, "sessions_per_replica": 64, "start_s": (60, 120), **fields}
        ),
    )


def test_the_model_of_drafters_is_right_where_it_is_known() -> None:
    """One session never waits; two at one drafter are solved by hand; a saturated pool loses what it cannot make."""
    assert stall_fraction(1, 1, 0.5) == 0.0
    odds = 0.2 / 0.8
    assert stall_fraction(2, 1, 0.2) == pytest.approx(odds**2 / (1 + 2 * odds + 2 * odds**2))
    assert stall_fraction(400, 3, 0.1) == pytest.approx(1 - 3 / (400 * 0.1), abs=1e-6)


@pytest.mark.parametrize("work", [0.05, 0.15])
@pytest.mark.parametrize("sessions", [1, 5, 16, 17, 40, 80])
def test_a_load_that_stays_the_same_gets_the_fewest_replicas_that_meet_it(sessions: int, work: float) -> None:
    """After an hour: targets exactly, drafters within a tenth or one, below it for a try an hour at most."""
    load = Load(duration_s=2.5 * HOUR, sessions=always(sessions), work=always(work))
    trace = simulate(load, coupled(RULES), replace(wide(), step_s=10.0, look_back_s=20.0, stall_look_back_s=30.0))
    rest = slice(trace.at(HOUR), None)
    assert set(trace.targets[rest]) == {trace.fewest_targets[-1]}
    fewest = trace.fewest_drafters[-1]
    assert max(abs(count - fewest) for count in trace.drafters[rest]) <= max(1, 0.1 * fewest)
    assert fmean(trace.drafters[rest]) == pytest.approx(fewest, rel=0.1)
    assert fmean(stall > 0.05 for stall in trace.stall[rest]) < 0.06
    assert direction_changes(trace.drafters[rest], window=trace.at(600)) <= 1


@pytest.mark.parametrize(("arrivals_per_s", "seed"), [(0.1, 1), (0.4, 2), (0.8, 3), (1.2, 4)])
def test_a_load_that_only_fluctuates_is_met_within_a_tenth_and_without_flapping(
    arrivals_per_s: float, seed: int
) -> None:
    """Three hours of Poisson arrivals, 6 to 72 sessions on average."""
    load = Load(duration_s=3 * HOUR, arrivals_per_s=always(arrivals_per_s), seed=seed)
    trace = simulate(load, coupled(RULES), wide())
    rest = slice(trace.at(HOUR), None)
    for counts, fewest in ((trace.targets, trace.fewest_targets), (trace.drafters, trace.fewest_drafters)):
        assert fmean(counts[rest]) == pytest.approx(fmean(trace.held(fewest)[rest]), rel=0.1)
        assert direction_changes(counts[rest], window=TEN_MINUTES) <= 1
    assert trace.mean_stall() < 0.03
    assert trace.stalled_share() < 0.2


@pytest.fixture(scope="module")
def day() -> Trace:
    return simulate(a_day(), coupled(RULES), Setting(step_s=10.0, look_back_s=20.0, stall_look_back_s=30.0))


def test_a_day_costs_little_more_than_foresight(day: Trace) -> None:
    """Replica-hours, against the fewest at every moment, as if replicas came and went at once: 1.3 and 1.45 times.

    Against the fewest that a pool can have which turns once in ten minutes: 1.05 and 1.2 times.
    """
    for counts, fewest, most, most_held in (
        (day.targets, day.fewest_targets, 1.3, 1.05),
        (day.drafters, day.fewest_drafters, 1.45, 1.2),
    ):
        assert day.hours(counts) < most * day.hours(fewest)
        assert day.hours(counts) < most_held * day.hours(day.held(fewest))


def test_a_day_is_served(day: Trace) -> None:
    """Of the sessions' time, less than 9 % is stalled beyond the target; nobody waits longer than a target's start."""
    assert day.stalled_share() < 0.09
    assert day.mean_stall() < 0.02
    assert max(day.waits_s) <= 210 + RULES.raise_delay_s + 20
    assert fmean(day.waits_s) < 1.0


@pytest.mark.parametrize("burst_h", [10.0, 20.5])
def test_a_burst_is_over_soon_after_the_replicas_have_come(day: Trace, burst_h: float) -> None:
    """Twice and 2.5 times the load from one step to the next: five minutes later nobody waits, and nothing stalls."""
    later = slice(day.at(burst_h * HOUR + 5 * MINUTE), day.at(burst_h * HOUR + 15 * MINUTE))
    assert max(day.waiting[later]) == 0
    assert fmean(day.stall[later]) < 0.05


@pytest.mark.parametrize("stop_h", [3.0, 17.0])
def test_a_drop_to_zero_empties_the_pools_within_the_hold(day: Trace, stop_h: float) -> None:
    """Counted from the end of the last session, with the look-back and a step to notice it."""
    start = day.at(stop_h * HOUR)
    idle = start + day.open[start:].index(0)
    bound = idle + day.at(600 + 20 + 10)
    assert (day.targets[bound], day.drafters[bound]) == (1, 1)


def test_nothing_turns_twice_within_ten_minutes_all_day(day: Trace) -> None:
    """Not only in steady load: bursts, drops and the hour of long documents included."""
    assert direction_changes(day.targets, window=day.at(600)) <= 1
    assert direction_changes(day.drafters, window=day.at(600)) <= 1


def test_drafters_come_from_zero_and_go_back_to_zero_once() -> None:
    """Half an hour of load between two of silence: no start before, none after (ray #33416)."""
    load = Load(duration_s=2 * HOUR, arrivals_per_s=lambda time_s: 0.5 if 0.5 * HOUR <= time_s < HOUR else 0.0)
    trace = simulate(load, coupled(RULES), wide(minimum=0))
    first = trace.drafters.index(1)
    last = len(trace.drafters) - trace.drafters[::-1].index(1)
    assert trace.time_s[first] - 0.5 * HOUR <= 15
    assert 0 not in trace.drafters[first:last]
    assert trace.time_s[last] - HOUR <= 600 + 7 * MINUTE  # the last of the sessions takes some minutes
    assert max(trace.drafters) <= 6


@pytest.mark.parametrize("ends_by", ["fewer sessions", "faster drafts"])
def test_a_stall_brings_three_drafters_within_a_minute_and_its_end_takes_two_away(ends_by: str) -> None:
    """One target all the while. Drafters start in five to ten seconds, as on a machine that has their model at hand."""
    rules = replace(RULES, drafter_hold_s=60.0, settle_s=25.0, raise_delay_s=0.0, forget_after_s=300.0)
    after = (2, 0.13) if ends_by == "fewer sessions" else (14, 0.02)

    def at(time_s: float) -> tuple[int, float]:
        """Sessions, and the work of one draft."""
        return (4, 0.02) if time_s < 300 else (14, 0.13) if time_s < 600 else after

    load = Load(duration_s=1200.0, sessions=lambda time_s: at(time_s)[0], work=lambda time_s: at(time_s)[1])
    trace = simulate(load, coupled(rules), wide(start_s=(5, 10)))
    assert set(trace.targets) == {1}
    assert trace.drafters[trace.at(295)] == 1
    assert 3 in trace.drafters_running[: trace.at(300 + 90)]
    assert set(trace.drafters[trace.at(300 + 90) : trace.at(600)]) == {3}
    assert trace.drafters[trace.at(600 + (90 if ends_by == "fewer sessions" else 360))] == 1
    assert direction_changes(trace.drafters, window=trace.at(60)) <= 1


@pytest.mark.parametrize("settle_s", [4.0, 22.0])
@pytest.mark.parametrize("work", [0.75, 0.9])
def test_figures_that_lag_behind_do_not_make_a_raise_look_useless(settle_s: float, work: float) -> None:
    """A load and drafters that come at once, a stall averaged over twenty seconds, and hardly time for it to settle."""
    rules = ScalingRules(
        stall_target=0.3, judge_interval_s=3.0, settle_s=settle_s, raise_delay_s=1.0, drafter_hold_s=8.0, max_raise=1.0
    )
    load = Load(duration_s=240.0, sessions=lambda time_s: 4 if 30 <= time_s < 150 else 0, work=always(work))
    setting = replace(wide(start_s=(4, 6), maximum=3), step_s=1.0, look_back_s=11.0, stall_look_back_s=21.0)
    small = replace(setting.target, sessions_per_replica=6)
    trace = simulate(load, coupled(rules), replace(setting, target=small))
    assert 3 in trace.drafters[: trace.at(90)]
    assert set(trace.drafters[trace.at(90) : trace.at(150)]) == {3}
    assert trace.drafters[-1] == 1


def test_slow_drafters_are_not_ordered_in_advance_of_what_the_first_ones_do() -> None:
    """Drafters that take five minutes to come: the pool passes the fewest that meet the load by one at most."""
    load = Load(duration_s=2 * HOUR, sessions=always(16), work=always(0.2))
    trace = simulate(load, coupled(RULES), wide(start_s=(300, 300)))
    assert trace.fewest_drafters[-1] == 4
    assert trace.drafters[-1] == 4
    assert max(trace.drafters) <= 5
    assert max(count - running for count, running in zip(trace.drafters, trace.drafters_running, strict=True)) == 1


def test_a_load_that_jumps_is_met_without_a_detour() -> None:
    """Forty times the sessions from one minute to the next: what is judged on the way says little, and does no harm."""
    load = Load(duration_s=2 * HOUR, sessions=lambda time_s: 2 if time_s < HOUR else 80)
    trace = simulate(load, coupled(RULES), wide())
    assert trace.fewest_drafters[-1] == 8
    assert min(trace.drafters[trace.at(HOUR + 5 * MINUTE) :]) >= 5
    assert trace.drafters[-1] == 8


def test_no_drafts_wanted_takes_the_drafters_away_and_wanting_them_brings_them_back() -> None:
    """As when the operator turns speculation off for an hour; the targets do not notice."""
    load = Load(duration_s=3 * HOUR, sessions=always(60), wants_drafts=lambda time_s: not HOUR <= time_s < 2 * HOUR)
    trace = simulate(load, coupled(RULES), wide(minimum=0))
    before, off, again = (trace.drafters[trace.at(hour * HOUR)] for hour in (0.99, 1.9, 2.9))
    assert (before, off, again) == (trace.fewest_drafters[0], 0, trace.fewest_drafters[0])
    assert set(trace.targets[trace.at(HOUR) :]) == {4}


def test_serves_own_delays_on_top_slow_the_policy_down_and_no_more() -> None:
    """Whoever leaves them in the configuration gets no flapping for it."""
    setting = wide(upscale_delay_s=30.0, downscale_delay_s=300.0)
    trace = simulate(Load(duration_s=3 * HOUR, sessions=always(40)), coupled(RULES), setting)
    assert abs(trace.drafters[-1] - trace.fewest_drafters[-1]) <= 1
    assert direction_changes(trace.drafters, window=TEN_MINUTES) <= 1
    assert max(trace.drafters) <= trace.fewest_drafters[-1] + 1


# ---------------------------------------------------------------------------------------------------------------------
# Whatever is seen

counts = st.integers(0, 40)
amounts = st.floats(0, 500)
shares = st.none() | st.floats(0, 1)
times = st.floats(0, 1e10)


@st.composite
def pools(draw: st.DrawFn) -> PoolView:
    minimum = draw(st.integers(0, 5))
    return PoolView(
        running=draw(counts),
        desired=draw(counts),
        minimum=minimum,
        maximum=minimum + draw(st.integers(1, 30)),
        sessions_per_replica=draw(st.floats(0.5, 100)),
        sessions=draw(amounts),
        queued=draw(amounts),
    )


@st.composite
def memories(draw: st.DrawFn) -> ScalingMemory:
    def pool_memory() -> PoolMemory:
        needed = sorted(draw(st.sets(counts, max_size=5)), reverse=True)
        return PoolMemory(tuple(Need(count, draw(times)) for count in needed), draw(st.none() | times))

    ratio = None
    if draw(st.booleans()):
        low, high = sorted((draw(st.floats(0.01, 8)), draw(st.floats(0.01, 8))))
        ratio = RatioMemory(
            ratio=high,
            kept_ratio=low,
            judge_at_s=draw(times),
            judged_count=draw(counts),
            raised_from_stall=draw(st.none() | st.floats(0, 1)),
            unpaid_stall=draw(st.none() | st.floats(0, 1)),
            steady_load=draw(st.floats(0, 30)),
            steady_since_s=draw(times),
            failed_count=draw(counts),
            failed_load=draw(st.floats(0, 30)),
            failed_at_s=draw(times),
            accepted_stall=draw(st.floats(0, 1)),
            accepted_at_s=draw(times),
        )
    return ScalingMemory(target=pool_memory(), drafter=pool_memory(), orchestrator=pool_memory(), ratio=ratio)


views = st.builds(
    ScalingView,
    now_s=times,
    target=pools(),
    drafter=st.none() | pools(),
    orchestrator=st.none() | pools(),
    kv_used=amounts,
    drafting_sessions=st.none() | amounts,
    stall=shares,
)


@given(views, memories())
@settings(max_examples=150, deadline=None)
def test_counts_keep_within_the_bounds_whatever_is_seen_or_remembered(seen: ScalingView, memory: ScalingMemory) -> None:
    """And a pool that is not there gets no count."""
    decision = decide(seen, memory, RULES)
    for count, each in (
        (decision.target, seen.target),
        (decision.drafter, seen.drafter),
        (decision.orchestrator, seen.orchestrator),
    ):
        assert (count is None) == (each is None)
        if each is not None and count is not None:
            assert each.minimum <= count <= each.maximum


@given(views, memories(), st.floats(0, 100))
@settings(max_examples=150, deadline=None)
def test_more_sessions_never_mean_fewer_replicas(seen: ScalingView, memory: ScalingMemory, more: float) -> None:
    """All else being equal. Left out: the judgement whether a raise paid, which must weigh the stall with the load."""
    if memory.ratio is not None:
        memory = replace(memory, ratio=replace(memory.ratio, raised_from_stall=None))
    fuller = replace(seen, target=replace(seen.target, sessions=seen.target.sessions + more))
    before, after = decide(seen, memory, RULES), decide(fuller, memory, RULES)
    assert after.target >= before.target
    assert (after.drafter or 0) >= (before.drafter or 0)


@given(memories())
@settings(max_examples=150, deadline=None)
def test_a_memory_survives_as_plain_numbers(memory: ScalingMemory) -> None:
    """Serve keeps it so, with keys of its own among them."""
    states = states_from_memory(memory)
    assert all(type(value) is float for state in states.values() for value in state.values())
    for state in states.values():
        state |= {"__decision_counters": 3, "__decision_timestamp": None}
    assert memory_from_states(states) == memory


@given(
    st.floats(0, 200), st.floats(0, 10), st.none() | st.floats(0, 0.9), st.integers(0, 1), st.sampled_from((10.0, 60.0))
)
@settings(max_examples=25, deadline=None)
def test_what_stays_the_same_never_makes_a_pool_oscillate(
    sessions: float, kv_used: float, stall: float | None, minimum: int, step_s: float
) -> None:
    """For two hours, called more or less often; a stall that does not react is the worst case."""
    decisions = list(
        in_closed_loop(
            step_s=step_s,
            duration_s=2 * HOUR,
            target=pool(sessions=sessions),
            drafter=drafters(minimum, minimum=minimum, sessions=sessions),
            kv_used=kv_used,
            stall=stall,
        )
    )
    for each in ([one.target for one in decisions], [one.drafter or 0 for one in decisions]):
        assert direction_changes(each, window=round(600 / step_s)) <= 1
        # Up to what the load needs, down to what helps; and that once more when the hour is over.
        assert direction_changes(each, window=len(each)) <= 4


# ---------------------------------------------------------------------------------------------------------------------
# Behind Ray Serve


def context(**fields: Any) -> Context:
    """A deployment with two running replicas."""
    return Context(**{"current_num_replicas": 2, "target_num_replicas": 2, **fields})


def asked(
    policy: PoolPolicy, named: Mapping[str, Context], *, times_s: Sequence[float] = (0.0, 20.0)
) -> dict[str, int]:
    """The counts by name after some calls, with the state handed on as Serve does."""
    states: dict[DeploymentId, dict[str, Any]] = {}
    counts: dict[DeploymentId, int] = {}
    for time_s in times_s:
        contexts = {
            DeploymentId(name): replace(
                each, current_time=1e9 + time_s, policy_state=states.get(DeploymentId(name), {})
            )
            for name, each in named.items()
        }
        counts, states = policy(contexts)
    return {deployment_id.name: count for deployment_id, count in counts.items()}


def test_every_deployment_of_ours_gets_a_count_and_no_other() -> None:
    """A fourth deployment in the application is somebody else's."""
    named = {TARGET: context(total_num_requests=50.0), DRAFTER: context(), ORCHESTRATOR: context(), "Other": context()}
    assert asked(PoolPolicy(), named) == {TARGET: 4, DRAFTER: 4, ORCHESTRATOR: 2}


def test_an_application_without_drafters_scales_its_targets() -> None:
    """Drafters are optional."""
    assert asked(PoolPolicy(), {TARGET: context(total_num_requests=50.0)}) == {TARGET: 4}


def test_nothing_is_decided_and_nothing_forgotten_while_the_target_is_not_listed() -> None:
    """As when the application is being deployed."""
    state = {"needed_at_s.3": 5.0, "__decision_counters": 1}
    assert scale_pools({DeploymentId(DRAFTER): context(policy_state=state)}, RULES) == (
        {},
        {DeploymentId(DRAFTER): state},
    )


def test_the_figures_of_the_replicas_are_used() -> None:
    """KV and queue of all targets together; the stall by the sessions of each orchestrator; who wants drafts."""
    memory_bound = context(aggregated_metrics={"kv_used_fraction": {"a": 0.9, "b": 0.8, "c": 0.9}})
    assert asked(PoolPolicy(), {TARGET: memory_bound})[TARGET] == 4
    step_bound = context(total_queued_requests=10.0, aggregated_metrics={"queued": {"a": 20.0, "b": 22.0}})
    assert asked(PoolPolicy(), {TARGET: step_bound})[TARGET] == 4
    # One session of a hundred stalls all the time: that is a stall of 1 %, and calls for nobody.
    figures = {"stall_fraction": {"a": 1.0, "b": 0.0}, "speculating_sessions": {"a": 0.3, "b": 29.7}}
    named = {
        TARGET: context(total_num_requests=30.0),
        DRAFTER: context(),
        ORCHESTRATOR: context(aggregated_metrics=figures),
    }
    calls = tuple(float(time_s) for time_s in range(0, 100, 5))
    assert asked(PoolPolicy(), named, times_s=calls)[DRAFTER] == 2
    figures["speculating_sessions"] = {"a": 29.7, "b": 0.3}
    assert asked(PoolPolicy(), named, times_s=calls)[DRAFTER] == 3


@pytest.mark.parametrize(
    "metrics",
    [
        None,
        {},
        {"stall_fraction": {}},
        {"stall_fraction": {"a": float("nan")}, "speculating_sessions": {"a": float("inf")}},
        {"stall_fraction": {"a": None, "b": "0.5"}, "speculating_sessions": {"a": [], "b": "many"}},
        {"stall_fraction": {"a": 0.0}, "speculating_sessions": {"a": -3.0}},
        {"kv_used_fraction": {"a": None}, "queued": {"a": float("nan")}},
    ],
)
def test_figures_that_are_missing_or_make_no_sense_are_passed_over(metrics: Mapping[str, Any] | None) -> None:
    """An exception here would stop Serve from reconciling the whole application."""
    strange = context(aggregated_metrics=metrics, total_num_requests=40.0, total_queued_requests=None)
    found = asked(PoolPolicy(), {TARGET: strange, DRAFTER: context(), ORCHESTRATOR: strange})
    assert found[TARGET] == found[ORCHESTRATOR] == 3
    assert found[DRAFTER] in {2, 3}


def test_rules_come_as_keywords_and_are_checked() -> None:
    """A mistake shows where the policy is made, with the name of the field."""
    full = context(aggregated_metrics={"kv_used_fraction": {"a": 0.9, "b": 0.9}})
    assert asked(PoolPolicy(kv_target=0.5), {TARGET: full})[TARGET] == 4
    for name, value in (
        ("kv_target", 0.0),
        ("target_hold_s", -1.0),
        ("stall_target", 1.0),
        ("max_ratio", float("inf")),
    ):
        with pytest.raises(ValueError, match=name):
            PoolPolicy(**{name: value})
    with pytest.raises(TypeError, match="hold"):
        PoolPolicy(hold=3)
    assert ScalingRules(**asdict(RULES)) == RULES


def test_ray_serve_can_carry_and_call_the_policy() -> None:
    """Its own classes: the policy by name with keywords, and the context with lazy figures."""
    config = pytest.importorskip("ray.serve.config")
    policy = config.AutoscalingPolicy(
        policy_function="orchestrator.scaling:PoolPolicy", policy_kwargs={"raise_delay_s": 0.0}
    )
    carried = policy.get_policy()(**policy.policy_kwargs)
    of_serve = config.AutoscalingContext(
        deployment_id=DeploymentId(TARGET),
        deployment_name=TARGET,
        app_name="paceline",
        current_num_replicas=1,
        target_num_replicas=1,
        running_replicas=[],
        total_num_requests=lambda: 40.0,
        total_queued_requests=lambda: 0.0,
        aggregated_metrics=dict,
        raw_metrics=None,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=1e9,
        config=config.AutoscalingConfig(min_replicas=1, max_replicas=8, target_ongoing_requests=16),
    )
    counts, states = carried({DeploymentId(TARGET): of_serve})
    assert counts == {DeploymentId(TARGET): 3}
    assert states == {DeploymentId(TARGET): {"needed_at_s.3": 1e9, "rising_since_s": 1e9}}
