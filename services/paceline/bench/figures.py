"""From answers to figures: what each setting came to under one condition, beside the others and the limit. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.bench.limits import (
    Costs,
    Limit,
    LimitShare,
    Progress,
    estimated_acceptance,
    limit,
    pipelined_speed,
    sequential_speed,
    share_of,
)
from paceline.bench.measure import Answer, Wave
from paceline.bench.peer_figures import PeerFigures
from paceline.bench.plan import PLAIN, Condition, Setting
from paceline.bench.step_costs import StepCosts, StepSample
from paceline.generation import Schedule, SpeculationUsage
from paceline.rounds import RoundRecord
from paceline.types import DraftOrigin, VerificationRule

Repeats = Sequence[Sequence[Wave]]
"""The waves of one setting, by repeat; the waves of a repeat are the same prompts in every setting."""


# ---------------------------------------------------------------------------------------------------------------------
# Costs, as they were while this was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """What one condition's limit follows from; seconds."""

    plain_step_s: float  # T1, with all sessions of the condition in the step
    verify_s: Mapping[int, float]  # t_v by tokens of one session, of the lengths below
    draft_step_s: float  # t_d
    round_trip_s: float | None  # R; None: no draft was waited for
    acceptance: float  # a


_SHOWN_LENGTHS = (1, 2, 3, 4, 5, 7, 9, 13, 17)  # tokens of a session whose verify time is reported


def step_samples(rounds: Iterable[RoundRecord]) -> list[StepSample]:
    """Target steps as their sessions reported them, without those that also read prompts."""
    return [
        StepSample(record.step_sessions, record.step_tokens, record.step_time_s)
        for record in rounds
        if record.number and record.step_sessions
    ]


def draft_step_seconds(rounds: Iterable[RoundRecord]) -> list[float]:
    """Drafter steps of drafts that were made one behind the other, as a sequential schedule does."""
    return [record.draft_time_s / record.draft_steps for record in rounds if record.draft_steps and record.number]


def round_trip_seconds(rounds: Iterable[RoundRecord]) -> list[float]:
    """Of each draft that was made behind the verdict: from there to its arrival, without the drafter's own steps."""
    return [
        record.draft_arrived_s - record.began_s - record.draft_time_s
        for record in rounds
        if record.draft_origin is DraftOrigin.REDRAFT and record.draft_arrived_s is not None
    ]


def rounds_of(repeats: Repeats) -> list[RoundRecord]:
    return [record for waves in repeats for wave in waves for answer in wave.answers for record in answer.rounds]


def pooled_acceptance(answers: Iterable[Answer]) -> float:
    """`a` over many answers."""
    usages = [answer.usage for answer in answers]
    return estimated_acceptance(
        sum(usage.num_accepted_tokens for usage in usages), sum(usage.num_rejections for usage in usages)
    )


def answers_of(repeats: Repeats) -> list[Answer]:
    return [answer for waves in repeats for wave in waves for answer in wave.answers]


def measured_costs(
    results: Mapping[Setting, Repeats], condition: Condition, steps: StepCosts, *, usual_draft_step_s: float
) -> tuple[MeasuredCosts, Costs]:
    """As values to report, and as the formulas take them.

    `usual_draft_step_s` is that of one session, for conditions in which nothing is drafted sequentially: beside branches
    a step takes longer than the limit's.
    """
    sequential = _of_schedule(results, Schedule.SEQUENTIAL)
    drafted = sequential or _of_schedule(results, Schedule.PIPELINED)
    rounds = [record for repeats in drafted for record in rounds_of(repeats)]
    own_steps = draft_step_seconds(rounds) if sequential else []
    draft_step_s = statistics.median(own_steps) if own_steps else usual_draft_step_s
    trips = round_trip_seconds(rounds)
    sessions = condition.concurrency

    def verify_s(tokens: int) -> float:
        return steps.seconds(sessions, sessions * tokens)

    round_trip_s = max(0.0, statistics.median(trips)) if trips else None
    costs = Costs(verify_s=verify_s, draft_step_s=draft_step_s, round_trip_s=round_trip_s or 0.0)
    measured = MeasuredCosts(
        plain_step_s=verify_s(1),
        verify_s={tokens: verify_s(tokens) for tokens in _SHOWN_LENGTHS},
        draft_step_s=draft_step_s,
        round_trip_s=round_trip_s,
        acceptance=pooled_acceptance(answer for repeats in drafted for answer in answers_of(repeats)),
    )
    return measured, costs


def _of_schedule(results: Mapping[Setting, Repeats], schedule: Schedule) -> list[Repeats]:
    return [repeats for setting, repeats in results.items() if setting.schedule is schedule]


# ---------------------------------------------------------------------------------------------------------------------
# One setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one setting came to; times in seconds, shares from 0 to 1."""

    tokens: int  # in all answers
    tokens_per_second: float  # the median repeat, of all sessions together, behind the first tokens
    slowest_repeat: float  # tokens per second
    fastest_repeat: float
    ratio_to_plain: float  # the median of the ratios that were taken side by side
    ratio_to_sequential: float | None  # to the best sequential setting; None: there is none
    limit_share: LimitShare  # F, as its factors
    predicted_tokens_per_second: float | None  # by the formulas, where the draft length is fixed
    first_token_s: float  # median
    delivery_gap_s: tuple[float, float, float]  # between two deliveries of an answer: p50, p90, p99
    acceptance: float  # a
    acceptance_by_position: tuple[float, ...]  # kept, of the drafts that reach the position
    drafts_by_position: tuple[int, ...]
    tokens_per_round: float
    mean_draft_length: float  # of the rounds with a draft
    rounds_by_origin: Mapping[str, float]  # shares (`DraftOrigin`)
    rejections: int
    hit_rate: float | None  # h: drafted tokens were there behind a rejection; None: nothing was rejected
    target_busy: float
    draft_wait: float  # share of the answers' time
    verified_in_vain: float  # draft tokens that were verified and not kept, for each token of an answer
    drafted_in_vain: float  # draft tokens that were sent and not kept, likewise
    link_bytes_per_token: Mapping[str, float]  # by service
    cpu_s_per_token: Mapping[str, float]  # by service
    same_text: float | None  # answers with the tokens of plain decoding; None: the rule does not promise it


def figures_of(
    setting: Setting,
    results: Mapping[Setting, Repeats],
    condition: Condition,
    *,
    costs: Costs,
    acceptance: float,
    bound: Limit,
) -> Figures:
    repeats, plain = results[setting], results[PLAIN]
    answers, waves = answers_of(repeats), [wave for waves in repeats for wave in waves]
    usages = [answer.usage for answer in answers]
    speeds = speeds_of(repeats)
    sequential = best_sequential(results)
    rejections = sum(usage.num_rejections for usage in usages)
    kept, drafted = (
        sum(usage.num_accepted_tokens for usage in usages),
        sum(usage.num_draft_tokens for usage in usages),
    )
    received = sum(usage.num_received_draft_tokens for usage in usages)
    tokens, rounds = sum(wave.tokens for wave in waves), sum(usage.rounds for usage in usages)
    progress = progress_of(waves)
    gaps = sorted(gap for answer in answers for gap in answer.delivery_gaps_s)
    hit_rate = sum(usage.branch_hits for usage in usages) / rejections if rejections else None
    by_position = _by_position(usage.num_draft_tokens_per_pos for usage in usages)
    return Figures(
        tokens=tokens,
        tokens_per_second=statistics.median(speeds),
        slowest_repeat=min(speeds),
        fastest_repeat=max(speeds),
        ratio_to_plain=_ratio(speeds, speeds_of(plain)),
        ratio_to_sequential=None if sequential is None else _ratio(speeds, speeds_of(results[sequential])),
        limit_share=share_of(bound, progress),
        predicted_tokens_per_second=_predicted(setting, condition, costs, acceptance, hit_rate or 0.0),
        first_token_s=statistics.median(answer.first_token_s for answer in answers),
        delivery_gap_s=(_quantile(gaps, 0.5), _quantile(gaps, 0.9), _quantile(gaps, 0.99)),
        acceptance=estimated_acceptance(kept, rejections),
        acceptance_by_position=tuple(
            map(_share, _by_position(usage.num_accepted_tokens_per_pos for usage in usages), by_position)
        ),
        drafts_by_position=by_position,
        tokens_per_round=_share(tokens, rounds),
        mean_draft_length=_share(drafted, sum(usage.num_drafts for usage in usages)),
        rounds_by_origin=_rounds_by_origin(usages),
        rejections=rejections,
        hit_rate=hit_rate,
        target_busy=progress.busy_s / progress.elapsed_s,
        draft_wait=_share(sum(usage.draft_wait_s for usage in usages), sum(usage.elapsed_s for usage in usages)),
        verified_in_vain=_share(drafted - kept, tokens),
        drafted_in_vain=_share(max(0, received - kept), tokens),
        link_bytes_per_token=_per_token([wave.link_bytes for wave in waves], tokens),
        cpu_s_per_token=_per_token([wave.cpu_s for wave in waves], tokens),
        same_text=_same_text(repeats, plain, condition),
    )


def speeds_of(repeats: Repeats) -> list[float]:
    """Tokens per second of each repeat."""
    return [_tokens_per_second(waves) for waves in repeats]


def best_sequential(results: Mapping[Setting, Repeats]) -> Setting | None:
    """The fastest; None if nothing was measured sequentially."""
    candidates = [setting for setting in results if setting.schedule is Schedule.SEQUENTIAL]
    return max(candidates, key=lambda setting: statistics.median(speeds_of(results[setting])), default=None)


def _tokens_per_second(waves: Sequence[Wave]) -> float:
    """As the readers saw it, while all answers of a wave ran: prompts and stragglers are left out."""
    tokens, seconds = 0, 0.0
    for wave in waves:
        begin_s, end_s = _common_time([answer.arrivals_s for answer in wave.answers])
        seconds += end_s - begin_s
        tokens += sum(
            count
            for answer in wave.answers
            for at_s, count in zip(answer.arrivals_s, answer.token_counts, strict=True)
            if begin_s < at_s <= end_s
        )
    return _share(tokens, seconds)


def progress_of(waves: Iterable[Wave]) -> Progress:
    """The target's side of the same time, by the orchestrator's record of each round.

    A step that several sessions shared was reported by each of them, so it counts for a part with each.
    """
    elapsed_s = busy_s = steps = 0.0
    tokens = 0
    for wave in waves:
        begin_s, end_s = _common_time([[record.ended_s for record in answer.rounds] for answer in wave.answers])
        elapsed_s += end_s - begin_s
        for record in (record for answer in wave.answers for record in answer.rounds):
            if begin_s < record.ended_s <= end_s:
                share = 1.0 / max(1, record.step_sessions)
                busy_s += share * record.step_time_s
                steps += share
                tokens += record.emitted
    return Progress(elapsed_s=elapsed_s, busy_s=busy_s, steps=steps, tokens=tokens)


def _common_time(moments_s: Sequence[Sequence[float]]) -> tuple[float, float]:
    """From when the last has begun until the first ends; if there is no such time, from the first to the last of all."""
    begin_s, end_s = max(each[0] for each in moments_s), min(each[-1] for each in moments_s)
    if begin_s < end_s:
        return begin_s, end_s
    return min(each[0] for each in moments_s), max(each[-1] for each in moments_s)


def _predicted(
    setting: Setting, condition: Condition, costs: Costs, acceptance: float, hit_rate: float
) -> float | None:
    """Of one session alone: the formulas know no queueing."""
    if condition.concurrency > 1:
        return None
    if setting == PLAIN:
        return 1.0 / costs.verify_s(1)
    if not setting.draft_length:
        return None
    if setting.schedule is Schedule.SEQUENTIAL:
        return sequential_speed(acceptance, setting.draft_length, costs)
    return pipelined_speed(acceptance, setting.draft_length, costs, hit_rate=hit_rate)


def _ratio(speeds: Sequence[float], others: Sequence[float]) -> float:
    """The median of the ratios of repeats that ran side by side."""
    return statistics.median(_share(one, other) for one, other in zip(speeds, others, strict=True))


def _rounds_by_origin(usages: Sequence[SpeculationUsage]) -> dict[str, float]:
    counts = Counter[DraftOrigin]()
    for usage in usages:
        counts[DraftOrigin.AHEAD] += usage.ahead_rounds
        counts[DraftOrigin.BRANCH] += usage.branch_rounds
        counts[DraftOrigin.REDRAFT] += usage.redraft_rounds
        counts[DraftOrigin.FALLBACK] += usage.fallback_rounds
        counts[DraftOrigin.NONE] += usage.plain_rounds
    return {origin.value: _share(counts[origin], counts.total()) for origin in DraftOrigin}


def _same_text(repeats: Repeats, plain: Repeats, condition: Condition) -> float | None:
    if condition.rule is VerificationRule.REJECTION:
        return None
    pairs = zip(answers_of(repeats), answers_of(plain), strict=True)
    return statistics.mean(one.token_ids == other.token_ids for one, other in pairs)


def _per_token(counts: Sequence[Mapping[str, float]], tokens: int) -> dict[str, float]:
    """Of the services that every wave has a count for."""
    names = set.intersection(*(set(each) for each in counts))
    return {name: _share(sum(each[name] for each in counts), tokens) for name in sorted(names)}


def _by_position(counts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    total: Counter[int] = Counter()
    for of_answer in counts:
        total.update(dict(enumerate(of_answer)))
    return tuple(total[position] for position in range(len(total)))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The nearest rank; 0 where nothing was measured."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


# ---------------------------------------------------------------------------------------------------------------------
# All settings of one condition


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting under one condition."""

    setting: Setting
    figures: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionResult:
    """What was measured under one condition."""

    condition: Condition
    delay_s: float  # one way, as it was set
    costs: MeasuredCosts
    limit: Limit
    cells: tuple[Cell, ...]
    peers: tuple[PeerFigures, ...] = ()  # another implementation's answers to the same prompts


def result_of(
    condition: Condition,
    results: Mapping[Setting, Repeats],
    steps: StepCosts,
    *,
    delay_s: float,
    usual_draft_step_s: float,
) -> ConditionResult:
    """`results` hold plain decoding and at least one repeat of each setting, the same ones of all."""
    measured, costs = measured_costs(results, condition, steps, usual_draft_step_s=usual_draft_step_s)
    bound = limit(measured.acceptance, costs, sessions=condition.concurrency)
    cells = [
        Cell(
            setting,
            figures_of(setting, results, condition, costs=costs, acceptance=measured.acceptance, bound=bound),
        )
        for setting in results
    ]
    return ConditionResult(condition=condition, delay_s=delay_s, costs=measured, limit=bound, cells=tuple(cells))
