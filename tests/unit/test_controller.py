"""How much each session drafts, round by round: by hand for single decisions, simulated for the promises.

The simulation is seeded, and its figures are simulated: what they show is that the controller finds the best way where
everything is as it says.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from orchestrator.controller import SessionController
from orchestrator.deployment import Deployment, Mode
from orchestrator.draft_length import choose
from orchestrator.fixed_planner import FixedPlanner
from orchestrator.loop import RoundOutcome, RoundPlan, RoundPlanner
from orchestrator.probing import ProbeClock
from paceline.generation import Schedule
from paceline.types import MAX_CREDIT, DraftOrigin
from tests.pipeline_simulation import ENDLESS, Hardware, Simulation

STEP_S = 0.03


def outcome(
    draft_length: int = 0, kept_length: int = 0, *, origin: DraftOrigin | None = None, waited_s: float = 0.0
) -> RoundOutcome:
    """One round of a session that is alone at a target of 30 ms."""
    step_s = STEP_S + 0.0001 * draft_length
    return RoundOutcome(
        draft_length=draft_length,
        kept_length=kept_length,
        emitted=kept_length + 1,
        origin=origin or (DraftOrigin.AHEAD if draft_length else DraftOrigin.NONE),
        waited_s=waited_s,
        is_rejection=kept_length < draft_length,
        has_continuation=kept_length == draft_length,
        verify_s=step_s + 0.001,
        step_s=step_s,
        queue_s=0.0,
        step_sessions=1,
        step_tokens=draft_length + 1,
        round_s=step_s + 0.001 + waited_s,
    )


def play(controller: SessionController, rounds: int, *, available: int = 64, kept: int = 64) -> list[RoundPlan]:
    """So many rounds in which so much is there, and of each draft at most `kept` tokens are kept."""
    plans = []
    for _ in range(rounds):
        order = controller.order(remaining=ENDLESS)
        there = min(available, order.draft_length)
        plan = controller.plan(available=there, remaining=ENDLESS)
        draft_length = min(plan.draft_length, there)
        controller.record(outcome(draft_length, min(kept, draft_length)))
        plans.append(plan)
    return plans


def warm(deployment: Deployment) -> SessionController:
    """A session that knows what rounds and drafts cost."""
    controller = SessionController(deployment, group="drafter")
    play(controller, 12)
    for _ in range(8):
        controller.on_draft(tokens=1, steps=1, seconds=0.001)
    play(controller, 60)
    return controller


def planners(sessions: int) -> list[RoundPlanner]:
    deployment = Deployment()
    return [SessionController(deployment, group="drafter") for _ in range(sessions)]


def plainly(sessions: int) -> list[RoundPlanner]:
    return [FixedPlanner(schedule=Schedule.PLAIN, draft_length=0) for _ in range(sessions)]


def fixed(sessions: int, draft_length: int, branches: int) -> list[RoundPlanner]:
    return [
        FixedPlanner(schedule=Schedule.PIPELINED, draft_length=draft_length, branches=branches, fan_out=4)
        for _ in range(sessions)
    ]


def is_on(planner: RoundPlanner) -> bool:
    order = planner.order(remaining=ENDLESS)
    return order.is_due and order.draft_length > 0


# ---------------------------------------------------------------------------------------------------------------------
# Single decisions


def test_a_deployment_decodes_plainly_before_it_speculates() -> None:
    """What plain decoding takes is measured first, while the drafter reads the prompt."""
    controller = SessionController(Deployment(), group="drafter")
    order = controller.order(remaining=ENDLESS)
    assert order.is_due
    assert order.draft_length == 0
    plans = play(controller, 12)
    assert [plan.draft_length for plan in plans[:9]] == [0] * 9
    assert plans[-1].draft_length > 0


def test_nothing_is_waited_for_before_anything_is_measured() -> None:
    """How long a draft takes is unknown, so that none is worth a wait."""
    controller = SessionController(Deployment(), group="drafter")
    plans = play(controller, 16, available=0)
    assert all(plan.enough_length == 0 for plan in plans)


def test_good_drafts_make_longer_drafts() -> None:
    """What is always kept is drafted far ahead; what is rarely kept is not."""
    good, bad = warm(Deployment()), SessionController(Deployment(), group="drafter")
    play(bad, 12, kept=0)
    bad.on_draft(tokens=1, steps=1, seconds=0.001)
    play(bad, 40, kept=0)
    play(good, 100)
    assert good.order(remaining=ENDLESS).draft_length > 8
    assert bad.order(remaining=ENDLESS).draft_length <= 2


def test_an_order_never_reaches_beyond_the_answer() -> None:
    """A round adds one token by itself."""
    controller = warm(Deployment())
    for remaining in (1, 2, 3, 8, 40, 200):
        order = controller.order(remaining=remaining)
        plan = controller.plan(available=100, remaining=remaining)
        assert order.draft_length <= max(0, remaining - 1)
        assert order.credit <= min(MAX_CREDIT, max(0, remaining - 1))
        assert plan.draft_length <= remaining - 1
        assert order.draft_length <= order.credit


def test_a_wait_is_bounded_by_what_is_expected() -> None:
    """Never the whole deadline of a draft: not much longer than a draft takes."""
    controller = warm(Deployment())
    for _ in range(20):
        controller.on_redraft(first_s=0.004)
    play(controller, 16)
    plan = controller.plan(available=0, remaining=ENDLESS)
    assert plan.enough_length > 0
    assert 0.004 < plan.patience_s < 0.1


def test_a_new_session_begins_where_the_others_are() -> None:
    """It neither decodes plainly first nor tries short drafts."""
    deployment = Deployment()
    controller = warm(deployment)
    play(controller, 100)
    newcomer = SessionController(deployment, group="drafter")
    assert newcomer.order(remaining=ENDLESS).draft_length >= controller.order(remaining=ENDLESS).draft_length // 2


def test_sessions_that_gain_nothing_do_not_stop_others() -> None:
    """Those at another temperature, or that wait for each draft, say nothing of what speculation is worth to these."""
    deployment = Deployment()
    waiting, ahead = deployment.group("sequential"), deployment.group("pipelined")
    for _ in range(64):
        deployment.record(outcome(), group=ahead, mode=Mode.PLAIN_PHASE, is_settled=True)
        deployment.record(outcome(4, 0, waited_s=STEP_S), group=waiting, mode=Mode.ON, is_settled=True)
    survival = [0.9**length for length in range(9)]
    costs = deployment.round_costs(
        survival=survival, longest=8, hits=(1.0, 0.5, 1.0), lines=1.0, bonus_is_drafted=False
    )
    assert deployment.gain(choose(costs), waiting) < 1.0 < deployment.gain(choose(costs), ahead)


def test_while_nothing_is_known_a_few_sessions_try() -> None:
    """Of 32 that begin together four speculate at first; behind what they find, all do."""
    deployment = Deployment()
    controllers = [SessionController(deployment, group="drafter") for _ in range(32)]
    for controller in controllers * 3:
        play(controller, 1, available=0)
    assert sum(map(is_on, controllers)) == 4
    controllers[0].on_draft(tokens=1, steps=1, seconds=0.001)
    play(controllers[0], 20)
    assert all(map(is_on, controllers))


def test_a_sequential_session_asks_for_one_draft_at_a_time() -> None:
    """No credit beyond it, and no branches."""
    controller = SessionController(Deployment(), group="drafter", schedule=Schedule.SEQUENTIAL)
    play(controller, 12)
    controller.on_draft(tokens=1, steps=1, seconds=0.001)
    play(controller, 40)
    order = controller.order(remaining=ENDLESS)
    assert order.draft_length > 0
    assert (order.credit, order.branches, order.fan_out) == (order.draft_length, 0, 0)


def test_a_lost_drafter_leaves_the_lookup_its_place() -> None:
    """Where the orchestrator's own lookup drafts well, rounds go on with it, and its drafts do not count as the drafter's."""
    controller = warm(Deployment())
    play(controller, 40, kept=1)
    accepted = controller.order(remaining=ENDLESS).acceptance
    for _ in range(80):
        controller.order(remaining=ENDLESS)
        plan = controller.plan(available=0, remaining=ENDLESS)
        length = plan.draft_length
        controller.record(outcome(length, length, origin=DraftOrigin.FALLBACK if length else None))
    assert controller.plan(available=0, remaining=ENDLESS).draft_length > 2
    assert controller.order(remaining=ENDLESS).acceptance == pytest.approx(accepted, abs=0.01)


def test_without_a_drafter_and_with_a_lookup_that_finds_nothing_rounds_are_plain() -> None:
    """Drafts that never come are soon not waited for any more, and no long ones are asked for."""
    controller = warm(Deployment())
    for _ in range(120):
        controller.order(remaining=ENDLESS)
        plan = controller.plan(available=0, remaining=ENDLESS)
        controller.record(outcome(waited_s=plan.patience_s if plan.enough_length else 0.0))
    plan = controller.plan(available=0, remaining=ENDLESS)
    assert plan.patience_s <= 0.002
    assert plan.draft_length <= 2


def test_every_decision_is_explained() -> None:
    """The round trace shows the two rates that were compared."""
    plans = play(warm(Deployment()), 4)
    assert "tok/s predicted, plain" in plans[-1].reason
    assert plans[-1].reason.startswith(f"draft {plans[-1].draft_length}")


def test_a_prompt_in_the_step_is_no_measure_of_rounds() -> None:
    """A step with hundreds of tokens of somebody's prompt counts for nothing."""
    deployment = Deployment()
    controller = warm(deployment)
    steps, round_s = deployment.verify.count, deployment.load.round_s.value
    usual = outcome(3, 3)
    for index in range(8):
        step_s = 0.4 + 0.001 * index
        controller.record(replace(usual, step_tokens=512, step_s=step_s, round_s=step_s))
    assert (deployment.verify.count, deployment.load.round_s.value) == (steps, round_s)


# ---------------------------------------------------------------------------------------------------------------------
# The promises, simulated

ROUNDS = {1: 1200, 4: 500, 32: 150}  # plain ones, that the time of a run is worth


def hardware(acceptance: float, draft_share: float, trip_share: float, token_share: float) -> Hardware:
    """Times as shares of the target's step with one token."""
    return Hardware(
        step_s=STEP_S,
        token_s=token_share * STEP_S,
        draft_step_s=draft_share * STEP_S,
        line_s=draft_share * STEP_S / 50,
        delay_s=trip_share * STEP_S / 2,
        acceptance=lambda now_s: acceptance,
    )


def rate(given: Hardware, session_planners: list[RoundPlanner]) -> float:
    sessions = len(session_planners)
    plain_step_s = given.step_s + given.token_s * (sessions - 1)
    return Simulation(given, session_planners).run(ROUNDS[sessions] * plain_step_s)


CELLS = list(itertools.product((1, 4, 32), (0.1, 0.5, 0.9), (0.05, 0.3, 1.0), (0.0, 1.0, 2.0), (0.007, 0.2)))
FEW_CELLS = [
    (1, 0.1, 0.3, 1.0, 0.2),
    (1, 0.5, 0.05, 1.0, 0.007),
    (1, 0.9, 0.3, 0.0, 0.2),
    (4, 0.1, 0.05, 2.0, 0.007),
    (4, 0.9, 0.05, 1.0, 0.007),
    (32, 0.5, 0.3, 0.0, 0.2),
]


def check_cell(cell: tuple[int, float, float, float, float], lengths: tuple[int, ...]) -> float:
    """Never slower than plain decoding; the rate as a share of the best fixed one."""
    sessions, *shares = cell
    given = hardware(*shares)
    automatic, plain = rate(given, planners(sessions)), rate(given, plainly(sessions))
    assert automatic >= 0.97 * plain, f"{automatic:.1f} tok/s, plain {plain:.1f}"
    best = max(rate(given, fixed(sessions, length, branches=7 if sessions < 32 else 1)) for length in lengths)
    return automatic / max(best, plain)


@pytest.mark.parametrize("cell", FEW_CELLS)
def test_never_slower_than_plain_and_near_the_best_fixed_length(cell: tuple[int, float, float, float, float]) -> None:
    """At each of a few loads, acceptances, drafters, round trips and prices of a token."""
    assert check_cell(cell, (4,)) >= 0.9


@pytest.mark.slow
def test_the_whole_grid_is_never_slower_and_mostly_within_a_tenth_of_the_best() -> None:
    """162 cells; in nine of ten no fixed length is more than a tenth faster."""
    shares = [check_cell(cell, (1, 4, 16)) for cell in CELLS]
    assert sum(share >= 0.9 for share in shares) >= 0.9 * len(shares)


def test_a_drafter_as_slow_as_the_target_is_left_alone() -> None:
    """It is told nothing in all but a few rounds."""
    (controller,) = planners(1)
    simulation = Simulation(hardware(0.5, 1.0, 1.0, 0.007), [controller])
    simulation.run(1000 * STEP_S)
    orders = simulation.sessions[0].orders[200:]
    assert sum(order.is_due for order in orders) < 0.1 * len(orders)


def test_speculation_comes_back_when_drafts_are_accepted_again() -> None:
    """Off while one token in ten is kept, on again within 600 rounds of the change, and it does not flutter."""
    (controller,) = planners(1)
    given = Hardware(token_s=0.2 * STEP_S, acceptance=lambda now_s: 0.9 if now_s > 600 * STEP_S else 0.1)
    simulation = Simulation(given, [controller])
    plain = simulation.run(600 * STEP_S)
    assert not is_on(controller)
    simulation.run(1200 * STEP_S)
    assert is_on(controller)
    assert simulation.run(1500 * STEP_S) > 1.8 * plain


def test_at_break_even_it_does_not_flutter() -> None:
    """In 2,000 rounds at which drafting and plain decoding are worth the same it is turned on at most four times."""
    (controller,) = planners(1)
    simulation = Simulation(Hardware(token_s=0.5 * STEP_S, acceptance=lambda now_s: 0.45), [controller])
    simulation.run(2000 * STEP_S)
    spans = itertools.groupby(order.is_due for order in simulation.sessions[0].orders)
    # A trial is shorter.
    assert sum(is_due and len(list(span)) > 16 for is_due, span in spans) <= 4


def test_trials_in_vain_cost_less_than_a_percent() -> None:
    """Tokens as dear as a step and none ever kept: once it is off, plain decoding keeps 99 % of its speed."""
    given = Hardware(step_s=STEP_S, token_s=STEP_S, acceptance=lambda now_s: 0.0)
    simulation = Simulation(given, planners(1))
    simulation.run(200 * STEP_S)
    plain = Simulation(given, plainly(1)).run(200 * STEP_S)
    assert simulation.run(2200 * STEP_S) >= 0.99 * plain


def test_what_drafting_costs_beside_the_step_is_found_out() -> None:
    """Where the drafter's work makes every step 60 % longer, speculation that looks good on paper is turned off."""
    given = Hardware(contention=0.6, draft_step_s=0.3 * STEP_S, acceptance=lambda now_s: 0.35)
    plain = Simulation(given, plainly(1)).run(300 * STEP_S)
    simulation = Simulation(given, planners(1))
    assert simulation.run(1200 * STEP_S) >= 0.97 * plain


def test_a_pause_in_a_trial_is_not_charged_to_it() -> None:
    """A target that is lost for ten seconds in the round of a trial: the next trial is a thousand steps away, not for ever."""
    deployment = Deployment()
    warm(deployment)
    deployment.charge(replace(outcome(), round_s=10.0), is_alone=True)
    for _ in range(1000):
        deployment.budget.earn(sessions=1)
    assert deployment.budget.allows_probe


def test_a_pause_does_not_switch_speculation_off() -> None:
    """Eight rounds of four seconds, for which no way to decode is to blame."""
    deployment = Deployment()
    controller = warm(deployment)
    play(controller, 600)
    before = deployment.rates.highest_gain(sessions=1.0, kind="drafter")
    assert before is not None
    for _ in range(8):
        deployment.record(
            replace(outcome(4, 4), round_s=4.0), group=deployment.group("drafter"), mode=Mode.ON, is_settled=True
        )
    assert deployment.rates.highest_gain(sessions=1.0, kind="drafter") == pytest.approx(before, rel=0.1)


def test_a_trial_that_turns_speculation_on_is_no_trial_in_vain() -> None:
    """When it is turned off again the first trial comes as soon as it ever does."""
    deployment = Deployment()
    controller = warm(deployment)
    play(controller, 4000, kept=0)  # bad drafts: it is turned off, and trials get rarer
    clock = deployment.group("drafter").clock
    rare = _steps_until_due(clock)
    play(controller, 4000)  # a trial finds them good
    assert controller.order(remaining=ENDLESS).draft_length > 0
    assert _steps_until_due(clock) < rare


def _steps_until_due(clock: ProbeClock) -> int:
    """Behind a trial that begins now and is in vain."""
    clock.begin()
    steps = 0
    while not clock.is_due:
        clock.tick(sessions=1)
        steps += 1
    return steps
