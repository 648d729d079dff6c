"""How many replicas each pool should have: one policy for the three pools together. Pure.

`decide` is the policy; it reads no clock, and what it must remember goes in and comes out as a value. `PoolPolicy` puts
it behind Ray Serve's application-level autoscaling, by duck typing. Knows nothing of Ray, and starts or stops nothing.

The rules, and why:

- Targets follow the load itself: ceil(max(sessions / sessions a replica, KV in use / `kv_target`, queue / queue a
  replica)). None of the three depends on how many replicas run, so replicas that start slowly are not ordered twice.
- Drafters follow the load that the desired targets are computed from, not the targets that run: both pools start at
  once instead of one after the other. The load is a real number, in full targets: half the sessions, half the drafts.
- How many drafters a full target takes, the ratio, nobody can know beforehand: it depends on both models, the draft
  length and the hardware. It is learned from the stall, the share of a round in which orchestrators waited for a draft.
- A stall says how many drafters are missing: with n drafters always busy and a share s of the rounds' time lost,
  n / (1 - s) would do. One judgement raises the ratio by that much, by `max_raise` at most and by one drafter at least.
- The stall is judged only once every drafter ordered runs, and has run for `settle_s`; it would tell of the time before
  the order otherwise, and drafters that start slowly would be ordered again and again. So nothing is learned while the
  cluster has no room for an ordered one; what is ordered follows the load alone then.
- Next to no stall (less than half the target) does not say how many drafters are spare. So it lowers the ratio at which
  drafters are kept, by one drafter or `max_lower`, and not the one at which more are ordered. If all stays well for the
  hold, that drafter goes and the ratio follows. A count that stalled is remembered, in proportion to its load, and is
  not tried again for `forget_after_s`; every such try costs a stall for as long as a drafter takes to start.
- A raise must pay. If it took off the stall less than `least_gain` of what it could have, it is not drafters that
  are missing: a draft that takes longer than a target's step stalls with any number of them. The raise is taken back and
  that stall accepted for `forget_after_s`, or until it goes away by itself. Without this rule such a pool climbs to its
  maximum and stays there. Not judged so: a raise made while the load changed, and a stall that is still falling.
- Up after `raise_delay_s`, from zero at once; down to the most that was needed within the last `hold_s`. So no raise
  is followed by a cut within the hold: by default at most one change of direction in ten minutes, whatever the load.
- A pool goes to zero only if nobody has held or awaited a place in it for the whole hold. Serve starts a replica as
  soon as a pool without any is asked for a place, and counts requests over a look-back period; so a pool that is cut
  earlier comes straight back (ray #33416). Whoever turns drafts off must therefore return the drafters' places too.
- If no session wants drafts (speculation does not pay), drafters go to their minimum.

Two things are Serve's own. While a pool has no running replica and is asked for a place, Serve orders one whatever the
policy says: from zero, the other drafters are ordered when the first one runs. And Serve applies the delays of each
deployment's `autoscaling_config` to what the policy returns. The policy relies on its own delays: set `upscale_delay_s`
and `downscale_delay_s` to 0 beside it. Other values do no harm; they only add to the waiting.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar

_ROUNDING = 1e-9  # a load of 2.0000000001 replicas is two
_TELLING_STALL = 0.9  # beyond it drafts come too late to be waited for: no telling how many drafters are missing
_SAME_LOAD = 1.25  # a load between so many times and so much of another is about the same
_STILL = 0.98  # of the stall one judgement earlier: it has stopped falling
_MIN_GROWTH = 1.02  # of the drafters for the load, to tell anything
_FAILED_MARGIN = 1.1  # a count that stalled is tried again at 1 / 1.1 of that load
_MAY_BE_ZERO = frozenset(
    {"least_gain", "max_lower", "judge_interval_s", "settle_s", "raise_delay_s"}
    | {"target_hold_s", "drafter_hold_s", "orchestrator_hold_s"}
)
_NEEDED_AT = "needed_at_s."  # before the count, in a state that Serve keeps


# ---------------------------------------------------------------------------------------------------------------------
# Values


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRules:
    """What the pools aim at. Raises `ValueError` with the name of a field that makes no sense."""

    kv_target: float = 0.75  # share of a target's KV memory to use
    queue_per_target: float = 16  # places awaited and items waiting for a step that one target may have
    stall_target: float = 0.05  # share of a round that waiting for a draft may take
    initial_ratio: float = 1.0  # drafters for a full target, until a stall has told more
    max_ratio: float = 8.0  # also bounds what a few sessions get: two drafters for a quarter of a target's
    max_raise: float = 0.25  # of the drafters for a load, at one judgement
    least_gain: float = 0.25  # of what a raise could take off the stall, or it is taken back; 0: it never is
    max_lower: float = 0.10  # of the drafters, at one cut that no fall of the load explains
    judge_interval_s: float = 10.0
    settle_s: float = (
        30.0  # until the stall tells of now: Serve's look-back, the orchestrators' own, and a report's way
    )
    raise_delay_s: float = 10.0  # for how long more must be needed before more is ordered
    target_hold_s: float = 600.0  # for how long a count is kept after it was last needed
    drafter_hold_s: float = 600.0
    orchestrator_hold_s: float = 600.0
    forget_after_s: float = 3600.0  # then a count that stalled may be tried again

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (math.isfinite(value) and value >= 0 and (value > 0 or each.name in _MAY_BE_ZERO)):
                raise ValueError(f"{each.name} cannot be {value}")
        for name in ("stall_target", "max_lower"):
            if getattr(self, name) >= 1:
                raise ValueError(f"{name} is a share of 1, so it cannot be {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """One pool as it is now."""

    running: int  # replicas ready to work
    desired: int  # replicas ordered, running ones included
    minimum: int
    maximum: int
    sessions_per_replica: float  # what one replica is meant to carry
    sessions: float = 0.0  # that hold or await a place in this pool, averaged over the look-back period
    queued: float = 0.0  # places awaited, and items waiting for a step

    def clamp(self, count: int) -> int:
        return max(self.minimum, min(self.maximum, count))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingView:
    """All pools as they are now."""

    now_s: float
    target: PoolView
    drafter: PoolView | None = None
    orchestrator: PoolView | None = None
    kv_used: float = 0.0  # sum over the targets of the used share of their KV memory
    drafting_sessions: float | None = None  # that want drafts, have they a drafter or not; None: unknown, so all
    stall: float | None = None  # share of a round spent waiting for a draft; None: nobody waited for any


@dataclass(frozen=True, slots=True)
class Need:
    """A count that a pool needed, and when last."""

    count: int
    at_s: float


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """What is remembered of one pool. Invariant: `needs` fall in count and rise in time."""

    needs: tuple[Need, ...] = ()
    rising_since_s: float | None = None  # since when more has been needed than was ordered

    def to_numbers(self) -> dict[str, float]:
        numbers = {f"{_NEEDED_AT}{need.count}": need.at_s for need in self.needs}
        return numbers if self.rising_since_s is None else numbers | {"rising_since_s": self.rising_since_s}

    @classmethod
    def from_numbers(cls, numbers: Mapping[str, object]) -> PoolMemory:
        """Other keys are passed over: Serve keeps its own beside ours."""
        counts = [int(key.removeprefix(_NEEDED_AT)) for key in numbers if key.startswith(_NEEDED_AT)]
        times = {count: _number(numbers[f"{_NEEDED_AT}{count}"]) for count in sorted(counts, reverse=True)}
        needs = tuple(Need(count, at_s) for count, at_s in times.items() if at_s is not None)
        return cls(needs, _number(numbers.get("rising_since_s")))


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioMemory:
    """What has been learned about drafters for one full target."""

    ratio: float  # at which the count is raised
    kept_ratio: float  # at which it is kept; below `ratio` while drafters seem spare
    judge_at_s: float  # earliest next judgement
    judged_count: int  # drafters that it will be about
    steady_load: float = 0.0  # full targets, of late
    steady_since_s: float = 0.0
    failed_count: int = 0  # drafters that stalled
    failed_load: float = 0.0  # full targets they drafted for; 0: none stalled
    failed_at_s: float = 0.0
    raised_from_stall: float | None = None  # theirs, until the raise that followed has been judged
    unpaid_stall: float | None = None  # after that raise, when it last seemed not to pay
    accepted_stall: float = 0.0  # that more drafters did not take away
    accepted_at_s: float = 0.0

    def to_numbers(self) -> dict[str, float]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: float(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_numbers(cls, numbers: Mapping[str, object]) -> RatioMemory | None:
        """None if nothing of the kind is among them."""
        values: dict[str, Any] = {each.name: _number(numbers.get(each.name)) for each in fields(cls)}
        if any(values[each.name] is None for each in fields(cls) if each.default is not None):
            return None
        counts = {name: int(values[name]) for name in ("judged_count", "failed_count")}
        return cls(**values | counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingMemory:
    """What a decision leaves for the next one. Empty at first: then what is ordered is taken for needed."""

    target: PoolMemory = PoolMemory()
    drafter: PoolMemory = PoolMemory()
    orchestrator: PoolMemory = PoolMemory()
    ratio: RatioMemory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Replicas that each pool should have, within its bounds; None for a pool that is not there."""

    target: int
    drafter: int | None
    orchestrator: int | None
    memory: ScalingMemory


# ---------------------------------------------------------------------------------------------------------------------
# The policy


def decide(view: ScalingView, memory: ScalingMemory, rules: ScalingRules) -> Decision:
    """The counts for now, and what to remember. Made to be called often, and at any intervals."""
    need = target_need(view, rules)
    target, target_memory = _choose(
        view.target, memory.target, need=need, kept=need, now_s=view.now_s, hold_s=rules.target_hold_s, rules=rules
    )
    drafter, drafter_memory, ratio = _decide_drafters(view, memory, rules)
    orchestrator, orchestrator_memory = _decide_orchestrators(view, memory, rules)
    return Decision(
        target=target,
        drafter=drafter,
        orchestrator=orchestrator,
        memory=ScalingMemory(
            target=target_memory, drafter=drafter_memory, orchestrator=orchestrator_memory, ratio=ratio
        ),
    )


def target_need(view: ScalingView, rules: ScalingRules) -> int:
    """Targets that the load is worth, before bounds and delays."""
    target = view.target
    return _ceil(
        max(
            target.sessions / target.sessions_per_replica,
            view.kv_used / rules.kv_target,
            target.queued / rules.queue_per_target,
        )
    )


def drafting_load(view: ScalingView) -> float:
    """Sessions that want drafts, in full targets; no more than the target pool may have."""
    target = view.target
    wanting = target.sessions if view.drafting_sessions is None else min(target.sessions, view.drafting_sessions)
    return min(wanting / target.sessions_per_replica, target.maximum)


def _decide_drafters(
    view: ScalingView, memory: ScalingMemory, rules: ScalingRules
) -> tuple[int | None, PoolMemory, RatioMemory | None]:
    pool = view.drafter
    if pool is None:
        return None, memory.drafter, memory.ratio
    load = drafting_load(view)
    learned = memory.ratio or _first_ratio(pool, load, view.now_s, rules)
    learned = _note_load(load, learned, view.now_s)
    if memory.drafter.rising_since_s is None:  # what the last judgement asked for is on order
        learned = _judge(pool, load, view.stall, learned, view.now_s, rules)
    # What any drafter carries at most, and one for whoever holds or awaits a place.
    floor = max(load * view.target.sessions_per_replica / pool.sessions_per_replica, min(pool.sessions, 1.0))
    need, kept = (pool.clamp(_ceil(max(ratio * load, floor))) for ratio in (learned.ratio, learned.kept_ratio))
    count, pool_memory = _choose(
        pool, memory.drafter, need=need, kept=kept, now_s=view.now_s, hold_s=rules.drafter_hold_s, rules=rules
    )
    if count < pool.desired:  # fewer are tried: the next judgement is about them
        learned = replace(learned, ratio=learned.kept_ratio)
    return count, pool_memory, learned


def _decide_orchestrators(
    view: ScalingView, memory: ScalingMemory, rules: ScalingRules
) -> tuple[int | None, PoolMemory]:
    pool = view.orchestrator
    if pool is None:
        return None, memory.orchestrator
    need = _ceil(pool.sessions / pool.sessions_per_replica)
    hold_s = rules.orchestrator_hold_s
    return _choose(pool, memory.orchestrator, need=need, kept=need, now_s=view.now_s, hold_s=hold_s, rules=rules)


def _choose(
    pool: PoolView, memory: PoolMemory, *, need: int, kept: int, now_s: float, hold_s: float, rules: ScalingRules
) -> tuple[int, PoolMemory]:
    """The pool's count: raised to `need` after the delay, lowered to the most that `kept` was within the hold."""
    need, kept, desired = pool.clamp(need), pool.clamp(kept), pool.clamp(pool.desired)
    rising_since_s = None
    if need > desired:
        kept = desired
        rising_since_s = now_s if memory.rising_since_s is None else min(memory.rising_since_s, now_s)
        if desired == 0 or now_s - rising_since_s >= rules.raise_delay_s:
            kept = need
    # Without a memory, after a restart of the controller or at the first look, what is ordered counts as needed.
    needs = _with_need(memory.needs or (Need(desired, now_s),), Need(kept, now_s), hold_s)
    # A held count keeps what is there; it is no reason to order.
    count = min(needs[0].count, max(desired, kept))
    return count, PoolMemory(needs, rising_since_s)


def _with_need(needs: Iterable[Need], newest: Need, hold_s: float) -> tuple[Need, ...]:
    """Those still held that are more than the newest, and the newest. The first is the most."""
    held = [need for need in needs if need.count > newest.count and newest.at_s - need.at_s < hold_s]
    return (*held, newest)


# ---------------------------------------------------------------------------------------------------------------------
# Learning the ratio


def _first_ratio(pool: PoolView, load: float, now_s: float, rules: ScalingRules) -> RatioMemory:
    """The smallest ratio that explains what is ordered, so that a restarted controller does not begin anew."""
    ratio = rules.initial_ratio
    if load > 0 and pool.desired > max(pool.minimum, 1):
        ratio = min(max(ratio, (pool.desired - 0.5) / load), rules.max_ratio)
    return RatioMemory(
        ratio=ratio,
        kept_ratio=ratio,
        judge_at_s=now_s + rules.settle_s,
        judged_count=pool.running,
        steady_load=load,
        steady_since_s=now_s,
    )


def _note_load(load: float, memory: RatioMemory, now_s: float) -> RatioMemory:
    """Since when the load has been about the same."""
    if memory.steady_load / _SAME_LOAD <= load <= memory.steady_load * _SAME_LOAD:
        return memory
    return replace(memory, steady_load=load, steady_since_s=now_s)


def _judge(
    pool: PoolView, load: float, stall: float | None, memory: RatioMemory, now_s: float, rules: ScalingRules
) -> RatioMemory:
    """What the stall says of the drafters that run, if it can be told by now; `load` is in full targets."""
    if pool.running != pool.desired or pool.running != memory.judged_count:
        return replace(memory, judge_at_s=now_s + rules.settle_s, judged_count=pool.running)
    if now_s < memory.judge_at_s or stall is None or load <= 0 or pool.running == 0:
        return memory
    memory = replace(_forget(memory, stall, now_s, rules), judge_at_s=now_s + rules.judge_interval_s)
    excess = stall - memory.accepted_stall
    if excess > rules.stall_target:
        if not _raise_paid(pool.running, load, stall, memory, rules):
            return _doubt(stall, memory, now_s)
        return _raise(pool, load, stall, memory, now_s, rules)
    memory = replace(memory, raised_from_stall=None, unpaid_stall=None)
    return _spare(pool, load, memory, rules) if excess < rules.stall_target / 2 else memory


def _raise(
    pool: PoolView, load: float, stall: float, memory: RatioMemory, now_s: float, rules: ScalingRules
) -> RatioMemory:
    """As many more drafters as the stall says are missing."""
    now_ratio = pool.running / load
    # Busy drafters give 1 - stall of the rounds that could be; the aim is half the stall target.
    missing = (1 - memory.accepted_stall - rules.stall_target / 2) / max(1 - stall, _ROUNDING)
    raised = min(max(memory.ratio, now_ratio) * min(missing, 1 + rules.max_raise), rules.max_ratio)
    ratio = max(memory.ratio, raised)
    # A stall that may still be on its way to what the load makes of it is nothing to compare with.
    has_settled = now_s - memory.steady_since_s >= rules.settle_s
    grows = pool.running < pool.maximum and ratio > now_ratio
    return replace(
        memory,
        ratio=ratio,
        kept_ratio=ratio,
        failed_count=pool.running,
        failed_load=load,
        failed_at_s=now_s,
        raised_from_stall=stall if grows and has_settled else None,
        unpaid_stall=None,
    )


def _raise_paid(count: int, load: float, stall: float, memory: RatioMemory, rules: ScalingRules) -> bool:
    """Whether the last raise did what it was for. True also where that cannot be told, as something else has changed."""
    before = memory.raised_from_stall
    if before is None or memory.failed_load == 0 or rules.least_gain == 0:
        return True
    growth = (count / load) / (memory.failed_count / memory.failed_load)
    if growth < _MIN_GROWTH or stall > before + rules.stall_target:
        return True
    working = 1 - min(before, _TELLING_STALL)
    possible = min(working * (growth - 1), 1 - memory.accepted_stall - working)
    return before - stall >= rules.least_gain * possible


def _doubt(stall: float, memory: RatioMemory, now_s: float) -> RatioMemory:
    """The last raise taken back and the stall accepted, unless it is still falling: then that is worth another look."""
    if memory.unpaid_stall is None or stall < _STILL * memory.unpaid_stall:
        return replace(memory, unpaid_stall=stall)
    ratio = memory.failed_count / memory.failed_load
    return replace(
        memory,
        ratio=ratio,
        kept_ratio=ratio,
        failed_load=0.0,
        raised_from_stall=None,
        unpaid_stall=None,
        accepted_stall=stall,
        accepted_at_s=now_s,
    )


def _spare(pool: PoolView, load: float, memory: RatioMemory, rules: ScalingRules) -> RatioMemory:
    """Keep one drafter fewer, or `max_lower` of many, but none that stalled, and never fewer than one."""
    fewer = min(pool.running - 1, pool.running * (1 - rules.max_lower))
    failed = 0.0
    if memory.failed_load > 0:
        # A larger load needs no fewer than stalled; a smaller one its share of them.
        failed = _FAILED_MARGIN * memory.failed_count * min(1.0, load / memory.failed_load)
    return replace(memory, kept_ratio=min(memory.kept_ratio, max(fewer, failed, 1.0) / load))


def _forget(memory: RatioMemory, stall: float, now_s: float, rules: ScalingRules) -> RatioMemory:
    """Without what is too old to go by, and without an accepted stall that has gone away by itself."""
    if now_s - memory.failed_at_s >= rules.forget_after_s:
        memory = replace(memory, failed_load=0.0)
    has_gone = stall < max(memory.accepted_stall - 2 * rules.stall_target, memory.accepted_stall / 2)
    if has_gone or now_s - memory.accepted_at_s >= rules.forget_after_s:
        memory = replace(memory, accepted_stall=0.0)
    return memory


def _ceil(replicas: float) -> int:
    return math.ceil(replicas - _ROUNDING)


def _number(value: object) -> float | None:
    """The value if it is a finite number."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


# ---------------------------------------------------------------------------------------------------------------------
# Behind Ray Serve


class DeploymentName(Hashable, Protocol):
    """The part of Serve's `DeploymentID` that is used."""

    @property
    def name(self) -> str: ...


class DeploymentContext(Protocol):
    """The part of Serve's `AutoscalingContext` that is used. A session's place in a pool is a request to Serve."""

    @property
    def current_num_replicas(self) -> int: ...
    @property
    def target_num_replicas(self) -> int: ...
    @property
    def capacity_adjusted_min_replicas(self) -> int: ...
    @property
    def capacity_adjusted_max_replicas(self) -> int: ...
    @property
    def total_num_requests(self) -> float: ...
    @property
    def total_queued_requests(self) -> float: ...
    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...
    @property
    def policy_state(self) -> Mapping[str, Any]: ...
    @property
    def current_time(self) -> float | None: ...
    @property
    def config(self) -> Any:
        """Its `target_ongoing_requests` are the sessions that a replica is meant to carry."""


IdT = TypeVar("IdT", bound=DeploymentName)
TARGET, DRAFTER, ORCHESTRATOR = "Target", "Drafter", "Orchestrator"


class PoolPolicy:
    """What an application names as its `policy_function`; the `policy_kwargs` are fields of `ScalingRules`.

    Serve makes one instance and calls it about ten times a second. (It ignores `policy_kwargs` for a plain function.)
    """

    def __init__(self, **rules: float) -> None:
        self._rules = ScalingRules(**rules)

    def __call__(self, contexts: Mapping[IdT, DeploymentContext]) -> tuple[dict[IdT, int], dict[IdT, dict[str, Any]]]:
        return scale_pools(contexts, self._rules)


def scale_pools(
    contexts: Mapping[IdT, DeploymentContext], rules: ScalingRules
) -> tuple[dict[IdT, int], dict[IdT, dict[str, Any]]]:
    """Replicas and state by deployment. Decides nothing while Serve does not list the Target deployment.

    Reads from `record_autoscaling_stats` of the replicas, where they report it: `kv_used_fraction` and `queued` of
    targets; of orchestrators `speculating_sessions` (those that want drafts, have they a drafter or not) and
    `stall_fraction`.
    """
    ids = {deployment_id.name: deployment_id for deployment_id in contexts}
    by_name = {name: contexts[deployment_id] for name, deployment_id in ids.items()}
    view = view_from_contexts(by_name)
    if view is None:
        return {}, {deployment_id: dict(context.policy_state) for deployment_id, context in contexts.items()}
    states = {name: context.policy_state for name, context in by_name.items()}
    decision = decide(view, memory_from_states(states), rules)
    counts = {TARGET: decision.target, DRAFTER: decision.drafter, ORCHESTRATOR: decision.orchestrator}
    return (
        {ids[name]: count for name, count in counts.items() if count is not None},
        {ids[name]: state for name, state in states_from_memory(decision.memory).items() if name in ids},
    )


def view_from_contexts(contexts: Mapping[str, DeploymentContext]) -> ScalingView | None:
    """The pools as Serve knows them; a figure that is missing or no number counts as not reported."""
    target, drafter, orchestrator = (contexts.get(name) for name in (TARGET, DRAFTER, ORCHESTRATOR))
    if target is None or target.current_time is None:
        return None
    of_targets = target.aggregated_metrics or {}
    of_orchestrators = (orchestrator.aggregated_metrics if orchestrator is not None else None) or {}
    drafting = _numbers(of_orchestrators, "speculating_sessions")
    return ScalingView(
        now_s=target.current_time,
        target=_pool_view(target, queued=sum(_numbers(of_targets, "queued").values())),
        drafter=None if drafter is None else _pool_view(drafter),
        orchestrator=None if orchestrator is None else _pool_view(orchestrator),
        kv_used=sum(_numbers(of_targets, "kv_used_fraction").values()),
        drafting_sessions=sum(drafting.values()) if drafting else None,
        stall=_weighted_mean(_numbers(of_orchestrators, "stall_fraction"), drafting),
    )


def states_from_memory(memory: ScalingMemory) -> dict[str, dict[str, Any]]:
    """The memory as Serve keeps it: plain numbers, for each deployment its own."""
    ratio = {} if memory.ratio is None else memory.ratio.to_numbers()
    return {
        TARGET: memory.target.to_numbers(),
        DRAFTER: memory.drafter.to_numbers() | ratio,
        ORCHESTRATOR: memory.orchestrator.to_numbers(),
    }


def memory_from_states(states: Mapping[str, Mapping[str, Any]]) -> ScalingMemory:
    """The inverse of `states_from_memory`; a state that is missing is an empty memory."""
    target, drafter, orchestrator = (states.get(name, {}) for name in (TARGET, DRAFTER, ORCHESTRATOR))
    return ScalingMemory(
        target=PoolMemory.from_numbers(target),
        drafter=PoolMemory.from_numbers(drafter),
        orchestrator=PoolMemory.from_numbers(orchestrator),
        ratio=RatioMemory.from_numbers(drafter),
    )


def _pool_view(context: DeploymentContext, *, queued: float = 0.0) -> PoolView:
    return PoolView(
        running=context.current_num_replicas,
        desired=context.target_num_replicas,
        minimum=context.capacity_adjusted_min_replicas,
        maximum=context.capacity_adjusted_max_replicas,
        sessions_per_replica=context.config.target_ongoing_requests,
        sessions=_number(context.total_num_requests) or 0.0,
        queued=(_number(context.total_queued_requests) or 0.0) + queued,
    )


def _numbers(metrics: Mapping[str, Mapping[Any, object]], name: str) -> dict[Any, float]:
    """One figure by replica."""
    numbers = {replica: _number(value) for replica, value in metrics.get(name, {}).items()}
    return {replica: max(number, 0.0) for replica, number in numbers.items() if number is not None}


def _weighted_mean(values: Mapping[Any, float], weights: Mapping[Any, float]) -> float | None:
    """A replica without a weight counts once; None if nothing has weight."""
    weighted = [(value, weights.get(replica, 1.0)) for replica, value in values.items()]
    total = sum(weight for _, weight in weighted)
    return sum(value * weight for value, weight in weighted) / total if total > 0 else None
