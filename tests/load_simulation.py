"""Simulated pools under load, driven by an autoscaling policy the way Ray Serve drives one.

Sessions arrive at random, wait for a place at a target, and last longer when they wait for drafts; replicas start
slowly. Shared by the tests of `orchestrator.scaling` and by `benchmarks.autoscaling`. Every figure of it is simulated.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from statistics import fmean
from typing import Any, NamedTuple, Protocol, TypeVar

from orchestrator.scaling import DRAFTER, ORCHESTRATOR, TARGET, DeploymentContext, ScalingRules, scale_pools

HOUR = 3600.0
STALL_TARGET = 0.05
KV_TARGET = 0.75
PLAIN_SPEED = 0.5  # of a session without drafts, or whose drafts come so late that it goes on without


class DeploymentId(NamedTuple):
    """Stands for Serve's `DeploymentID`."""

    name: str


class Config(NamedTuple):
    """Stands for Serve's `AutoscalingConfig`."""

    target_ongoing_requests: float = 16.0


@dataclass(frozen=True, kw_only=True)
class Context:
    """Stands for Serve's `AutoscalingContext`."""

    current_num_replicas: int = 1
    target_num_replicas: int = 1
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 8
    total_num_requests: float = 0.0
    total_queued_requests: float = 0.0
    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None = None
    policy_state: Mapping[str, Any] = field(default_factory=dict)
    current_time: float | None = 0.0
    config: Config = field(default_factory=Config)


Counts = dict[DeploymentId, int]
States = dict[DeploymentId, dict[str, Any]]
Policy = Callable[[Mapping[DeploymentId, DeploymentContext]], tuple[Counts, States]]


# ---------------------------------------------------------------------------------------------------------------------
# What drafters are worth


@cache
def stall_fraction(sessions: int, drafters: int, work: float) -> float:
    """The share of a round that a session waits for a free drafter, as the machine-repair model has it (Palm 1947).

    Each session asks for one draft a round, which keeps one of the drafters busy for the share `work` of an unstalled
    round, on average, exponentially distributed. Making the draft hides behind the target's step; only the wait for a
    free drafter counts. By Little's law it is the mean number of waiting sessions over all sessions.
    """
    if sessions == 0 or drafters == 0:
        return 0.0
    weight, total, waiting = 1.0, 1.0, 0.0  # unnormalised probability of so many sessions at the drafters
    for at_drafters in range(1, sessions + 1):
        weight *= (sessions - at_drafters + 1) * work / (1 - work) / min(at_drafters, drafters)
        total += weight
        waiting += weight * max(at_drafters - drafters, 0)
        if total > 1e200:
            weight, total, waiting = weight / total, 1.0, waiting / total
    return waiting / total / sessions


@cache
def fewest_drafters(sessions: int, work: float) -> int:
    """The fewest drafters with which that many sessions wait no more than the stall target."""
    enough = (count for count in itertools.count(1) if stall_fraction(sessions, count, work) <= STALL_TARGET)
    return next(enough) if sessions else 0


# ---------------------------------------------------------------------------------------------------------------------
# What comes in


ValueT = TypeVar("ValueT")


def always(value: ValueT) -> Callable[[float], ValueT]:
    return lambda _: value


_LIGHT_WORK, _LIGHT_MEMORY = always(0.09), always(0.03)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What comes in; functions are of the time in seconds. One of the first two is given."""

    duration_s: float
    arrivals_per_s: Callable[[float], float] | None = None  # of a Poisson process
    sessions: Callable[[float], int] | None = None  # open all the time, one for another
    mean_session_s: float = 60.0  # exponentially distributed, if nothing makes it wait
    work: Callable[[float], float] = _LIGHT_WORK  # share of a round that a draft keeps one drafter busy
    kv_per_session: Callable[[float], float] = _LIGHT_MEMORY  # of one target's KV memory
    wants_drafts: Callable[[float], bool] = lambda _: True
    seed: int = 1


def a_day(seed: int = 1) -> Load:
    """From a few sessions at night to about a hundred in the afternoon, with two bursts and two drops to zero.

    For three hours drafts take 1.6 times as long, and for one hour a session takes 2.3 times as much KV memory.
    """

    def arrivals_per_s(time_s: float) -> float:
        hour = time_s / HOUR
        if 3 <= hour < 4 or 17 <= hour < 17.75:
            return 0.0
        rate = 0.1 + 1.5 * max(0.0, math.sin(math.pi * (hour - 5) / 18)) ** 2
        if 10 <= hour < 10 + 1 / 6:
            return 2 * rate
        return 2.5 * rate if 20.5 <= hour < 20.5 + 1 / 12 else rate

    return Load(
        duration_s=24 * HOUR,
        arrivals_per_s=arrivals_per_s,
        work=lambda time_s: 0.144 if 13 * HOUR <= time_s < 16 * HOUR else 0.09,
        kv_per_session=lambda time_s: 0.07 if 19 * HOUR <= time_s < 20 * HOUR else 0.03,
        seed=seed,
    )


class Sessions(Protocol):
    """Who is there."""

    @property
    def offered(self) -> int:
        """That would be open if nobody had to wait for anything."""

    @property
    def open(self) -> int: ...

    @property
    def waiting(self) -> int:
        """For a place at a target."""

    def seat(self, now_s: float, step_s: float, places: int) -> None:
        """Let in who comes in this step."""

    def advance(self, unstalled_s: float) -> None:
        """Work off that much of every open session."""


class GivenSessions:
    """As many as a function says; none waits for a place."""

    def __init__(self, count_at: Callable[[float], int]) -> None:
        self._count_at = count_at
        self.offered = self.open = self.waiting = 0

    def seat(self, now_s: float, step_s: float, places: int) -> None:
        self.offered = self.open = self._count_at(now_s)

    def advance(self, unstalled_s: float) -> None:
        """They end when the function says so."""


class RandomSessions:
    """A Poisson process of exponentially long sessions, first come, first served."""

    def __init__(self, arrivals_per_s: Callable[[float], float], mean_session_s: float, seed: int) -> None:
        self._arrivals_per_s, self._mean_session_s, self._random = arrivals_per_s, mean_session_s, Random(seed)
        self._queue: deque[tuple[float, float]] = deque()  # when it came, how long it will last
        self._ends: list[float] = []  # of open sessions, in unstalled seconds
        self._offered_ends: list[float] = []  # of sessions if nobody had to wait
        self._unstalled_s = 0.0
        self.waits_s: list[float] = []

    @property
    def offered(self) -> int:
        return len(self._offered_ends)

    @property
    def open(self) -> int:
        return len(self._ends)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def seat(self, now_s: float, step_s: float, places: int) -> None:
        rate = self._arrivals_per_s(now_s)
        at_s = self._random.expovariate(rate) if rate > 0 else math.inf
        while at_s < step_s:
            length_s = self._random.expovariate(1 / self._mean_session_s)
            self._queue.append((now_s, length_s))
            heapq.heappush(self._offered_ends, now_s + length_s)
            at_s += self._random.expovariate(rate)
        _pop_until(self._offered_ends, now_s)
        while self._queue and len(self._ends) < places:
            came_s, length_s = self._queue.popleft()
            heapq.heappush(self._ends, self._unstalled_s + length_s)
            self.waits_s.append(now_s - came_s)

    def advance(self, unstalled_s: float) -> None:
        self._unstalled_s += unstalled_s
        _pop_until(self._ends, self._unstalled_s)


def _pop_until(ends: list[float], time_s: float) -> None:
    while ends and ends[0] <= time_s:
        heapq.heappop(ends)


# ---------------------------------------------------------------------------------------------------------------------
# What is there


@dataclass(frozen=True, kw_only=True)
class PoolSetting:
    minimum: int
    maximum: int
    sessions_per_replica: float
    start_s: tuple[float, float]  # a replica takes between these to start
    upscale_delay_s: float = 0.0  # Serve's, on top of the policy's own
    downscale_delay_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The pools, and how often the policy is asked."""

    target: PoolSetting = PoolSetting(minimum=1, maximum=16, sessions_per_replica=16, start_s=(150, 210))
    drafter: PoolSetting = PoolSetting(minimum=1, maximum=32, sessions_per_replica=64, start_s=(60, 120))
    max_sessions_per_target: int = 24  # more wait
    step_s: float = 5.0
    look_back_s: float = 15.0  # of Serve
    stall_look_back_s: float = 25.0  # Serve's and the orchestrators' own


class Pool:
    """The replicas of a pool: when each of them is or was ready."""

    def __init__(self, setting: PoolSetting, random: Random) -> None:
        self.setting, self._random = setting, random
        self._ready_at_s = [0.0] * setting.minimum

    @property
    def ordered(self) -> int:
        return len(self._ready_at_s)

    def running(self, now_s: float) -> int:
        return sum(ready_at_s <= now_s for ready_at_s in self._ready_at_s)

    def order(self, count: int, now_s: float) -> None:
        """Start some, or stop those furthest from ready."""
        while len(self._ready_at_s) < count:
            self._ready_at_s.append(now_s + self._random.uniform(*self.setting.start_s))
        self._ready_at_s.sort()
        del self._ready_at_s[count:]


class Serve:
    """What Serve 2.60 makes of a policy's count: bounds, delays, and a start at once for a pool without replicas."""

    def __init__(self) -> None:
        self._since_s: dict[str, tuple[bool, float]] = {}

    def apply(self, name: str, setting: PoolSetting, context: DeploymentContext, wanted: int) -> int:
        ordered, now_s = context.target_num_replicas, context.current_time or 0.0
        if context.current_num_replicas == 0 and context.total_num_requests > 0:
            return max(1, ordered)
        wanted = max(setting.minimum, min(setting.maximum, wanted))
        if wanted == ordered:
            self._since_s.pop(name, None)
            return ordered
        rises = wanted > ordered
        rose, since_s = self._since_s.get(name, (rises, now_s))
        self._since_s[name] = (rises, since_s if rose == rises else now_s)
        delay_s = setting.upscale_delay_s if rises else setting.downscale_delay_s
        if now_s - self._since_s[name][1] < delay_s:
            return ordered
        del self._since_s[name]
        return wanted if rises or ordered == 1 else max(wanted, 1)


# ---------------------------------------------------------------------------------------------------------------------
# What happens


@dataclass
class Trace:
    """What happened, one value for each step. The fewest counts are those for `offered` at that moment."""

    step_s: float
    time_s: list[float] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)  # sessions that would be open if nobody had to wait
    open: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    stall: list[float] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)  # ordered: what is paid for
    drafters: list[int] = field(default_factory=list)
    drafters_running: list[int] = field(default_factory=list)
    fewest_targets: list[int] = field(default_factory=list)
    fewest_drafters: list[int] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)  # of each session, for a place at a target

    def at(self, time_s: float) -> int:
        """The index of the step at that time."""
        return round(time_s / self.step_s)

    def hours(self, counts: Sequence[int]) -> float:
        return sum(counts) * self.step_s / HOUR

    def held(self, counts: Sequence[int], hold_s: float = 600.0) -> list[int]:
        """The largest count within the last `hold_s`, for each step."""
        window: deque[int] = deque()  # of indices; their counts fall
        largest = []
        for index, count in enumerate(counts):
            while window and counts[window[-1]] <= count:
                window.pop()
            window.append(index)
            if window[0] <= index - self.at(hold_s):
                window.popleft()
            largest.append(counts[window[0]])
        return largest

    def stalled_share(self) -> float:
        """The share of the sessions' time in which drafts were later than the stall target allows."""
        return sum(count for count, stall in zip(self.open, self.stall, strict=True) if stall > STALL_TARGET) / max(
            sum(self.open), 1
        )

    def mean_stall(self) -> float:
        """The mean over the sessions' time."""
        return sum(count * stall for count, stall in zip(self.open, self.stall, strict=True)) / max(sum(self.open), 1)


def direction_changes(counts: Sequence[int], *, window: int) -> int:
    """The most changes of direction that fall within any `window` steps."""
    moves = [
        (index, after > before) for index, (before, after) in enumerate(itertools.pairwise(counts)) if after != before
    ]
    most = 0
    for first, (start, _) in enumerate(moves):
        within = [rises for index, rises in moves[first:] if index <= start + window]
        most = max(most, sum(one != other for one, other in itertools.pairwise(within)))
    return most


def simulate(load: Load, policy: Policy, setting: Setting | None = None) -> Trace:
    return _Simulation(load, policy, setting or Setting()).run()


class _Simulation:
    def __init__(self, load: Load, policy: Policy, setting: Setting) -> None:
        self._load, self._policy, self._setting = load, policy, setting
        # A source of randomness for each purpose, so that all policies meet the same sessions.
        self._pools = {
            TARGET: Pool(setting.target, Random(load.seed + 1)),
            DRAFTER: Pool(setting.drafter, Random(load.seed + 2)),
        }
        self._sessions = _sessions_of(load)
        self._serve = Serve()
        self._states: States = {}
        self._seen_sessions = deque[tuple[int, int]](maxlen=round(setting.look_back_s / setting.step_s))
        self._seen_stalls = deque[float](maxlen=round(setting.stall_look_back_s / setting.step_s))
        self._trace = Trace(setting.step_s)

    def run(self) -> Trace:
        for step in range(round(self._load.duration_s / self._setting.step_s)):
            self._step(step * self._setting.step_s)
        if isinstance(self._sessions, RandomSessions):
            self._trace.waits_s = self._sessions.waits_s
        return self._trace

    def _step(self, now_s: float) -> None:
        targets, drafters = (self._pools[name].running(now_s) for name in (TARGET, DRAFTER))
        by_memory = int(targets / self._load.kv_per_session(now_s))
        places = min(targets * self._setting.max_sessions_per_target, by_memory)
        self._sessions.seat(now_s, self._setting.step_s, places)
        stall = 0.0
        if self._load.wants_drafts(now_s):
            stall = stall_fraction(self._sessions.open, drafters, self._load.work(now_s))
        self._seen_sessions.append((self._sessions.open, self._sessions.waiting))
        self._seen_stalls.append(stall)
        self._scale(now_s)
        self._note(now_s, stall)
        self._sessions.advance(self._setting.step_s * (max(1 - stall, PLAIN_SPEED) if drafters else PLAIN_SPEED))

    def _scale(self, now_s: float) -> None:
        contexts = self._contexts(now_s)
        counts, self._states = self._policy(contexts)
        for deployment_id, wanted in counts.items():
            pool = self._pools.get(deployment_id.name)
            if pool is not None:
                count = self._serve.apply(deployment_id.name, pool.setting, contexts[deployment_id], wanted)
                pool.order(count, now_s)

    def _contexts(self, now_s: float) -> dict[DeploymentId, Context]:
        """As Serve shows them: means over the look-back period."""
        seated, waiting = (fmean(column) for column in zip(*self._seen_sessions, strict=True))
        stall = fmean(self._seen_stalls)
        drafting = seated + waiting if self._load.wants_drafts(now_s) else 0.0
        of_targets = {"kv_used_fraction": {"sum": seated * self._load.kv_per_session(now_s)}}
        of_orchestrators = {"stall_fraction": {"one": stall}, "speculating_sessions": {"one": drafting}}
        contexts = {
            TARGET: self._context(
                TARGET,
                now_s,
                total_num_requests=seated + waiting,
                total_queued_requests=waiting,
                aggregated_metrics=of_targets,
            ),
            DRAFTER: self._context(DRAFTER, now_s, total_num_requests=drafting),
            ORCHESTRATOR: Context(current_time=now_s, aggregated_metrics=of_orchestrators),
        }
        return {DeploymentId(name): context for name, context in contexts.items()}

    def _context(self, name: str, now_s: float, **figures: Any) -> Context:
        pool = self._pools[name]
        return Context(
            current_num_replicas=pool.running(now_s),
            target_num_replicas=pool.ordered,
            capacity_adjusted_min_replicas=pool.setting.minimum,
            capacity_adjusted_max_replicas=pool.setting.maximum,
            policy_state=self._states.get(DeploymentId(name), {}),
            current_time=now_s,
            config=Config(pool.setting.sessions_per_replica),
            **figures,
        )

    def _note(self, now_s: float, stall: float) -> None:
        trace, sessions, offered = self._trace, self._sessions, self._sessions.offered
        target, drafter = self._pools[TARGET], self._pools[DRAFTER]
        trace.time_s.append(now_s)
        trace.offered.append(offered)
        trace.open.append(sessions.open)
        trace.waiting.append(sessions.waiting)
        trace.stall.append(stall)
        trace.targets.append(target.ordered)
        trace.drafters.append(drafter.ordered)
        trace.drafters_running.append(drafter.running(now_s))
        by_memory = offered * self._load.kv_per_session(now_s) / KV_TARGET
        needed = math.ceil(max(offered / target.setting.sessions_per_replica, by_memory) - 1e-9)
        trace.fewest_targets.append(max(needed, target.setting.minimum))
        needed = fewest_drafters(offered, self._load.work(now_s)) if self._load.wants_drafts(now_s) else 0
        trace.fewest_drafters.append(max(needed, drafter.setting.minimum))


def _sessions_of(load: Load) -> Sessions:
    if load.sessions is not None:
        return GivenSessions(load.sessions)
    assert load.arrivals_per_s is not None
    return RandomSessions(load.arrivals_per_s, load.mean_session_s, load.seed)


# ---------------------------------------------------------------------------------------------------------------------
# Policies


def coupled(rules: ScalingRules) -> Policy:
    """The policy of `orchestrator.scaling`."""
    return lambda contexts: scale_pools(contexts, rules)


def leases_alone(contexts: Mapping[DeploymentId, DeploymentContext]) -> tuple[Counts, States]:
    """Serve's default, each deployment by itself: as many replicas as its requests fill."""
    counts = {
        deployment_id: math.ceil(context.total_num_requests / context.config.target_ongoing_requests)
        for deployment_id, context in contexts.items()
    }
    return counts, {}
