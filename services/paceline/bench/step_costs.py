"""How long a target step takes by sessions and tokens, from the steps that were seen. Pure."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

_FEWEST_SAMPLES = 5  # a median of fewer is no measurement


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step."""

    sessions: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepLine:
    """base + per_session x sessions + per_token x tokens, in seconds; no part is below 0."""

    base_s: float
    per_session_s: float
    per_token_s: float

    def seconds(self, sessions: int, tokens: int) -> float:
        return self.base_s + self.per_session_s * sessions + self.per_token_s * tokens

    def times(self, factor: float) -> StepLine:
        return StepLine(self.base_s * factor, self.per_session_s * factor, self.per_token_s * factor)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What was seen of one session by tokens, and the line through everything that was seen."""

    alone_s: Mapping[int, float]  # of steps with one session, by tokens: medians, never falling
    line: StepLine

    def seconds(self, sessions: int, tokens: int) -> float:
        """As seen where it was, between two lengths that were seen in proportion, else by the line."""
        if sessions != 1 or not self.alone_s:
            return self.line.seconds(sessions, tokens)
        lengths = sorted(self.alone_s)
        place = bisect_left(lengths, tokens)
        if place == len(lengths):
            return self.alone_s[lengths[-1]] + self.line.per_token_s * (tokens - lengths[-1])
        above = lengths[place]
        if above == tokens or place == 0:
            return self.alone_s[above]
        below = lengths[place - 1]
        share = (tokens - below) / (above - below)
        return (1 - share) * self.alone_s[below] + share * self.alone_s[above]


def adjusted(usual: StepCosts, samples: Sequence[StepSample]) -> StepCosts:
    """The same machine at another time: what was seen then counts as it was, the rest by how much all of that differs.

    So speeds are compared with a limit of the same minutes, whatever others did to the machine before.
    """
    ratios = [
        sample.seconds / expected_s
        for sample in samples
        if (expected_s := usual.seconds(sample.sessions, sample.tokens)) > 0
    ]
    if not ratios:
        return usual
    factor = statistics.median(ratios)
    seen = step_costs(samples).alone_s
    alone = {tokens: seconds * factor for tokens, seconds in usual.alone_s.items()} | dict(seen)
    weighted = [(tokens, alone[tokens], 1) for tokens in sorted(alone)]
    return replace(usual, alone_s=_never_falling(weighted), line=usual.line.times(factor))


def step_costs(samples: Iterable[StepSample]) -> StepCosts:
    """Medians by sessions and tokens, and the line that fits them best, weighted by how many each stands for.

    A median withstands the hiccups of a machine that others use too. Lengths seen fewer than five times count for the
    line alone. Raises `ValueError` without any sample.
    """
    groups: dict[tuple[int, int], list[float]] = defaultdict(list)
    for sample in samples:
        groups[sample.sessions, sample.tokens].append(sample.seconds)
    if not groups:
        raise ValueError("no step was measured")
    medians = {key: statistics.median(seconds) for key, seconds in groups.items()}
    weights = {key: len(seconds) for key, seconds in groups.items()}
    alone = [
        (tokens, medians[sessions, tokens], weights[sessions, tokens])
        for sessions, tokens in sorted(groups)
        if sessions == 1 and weights[sessions, tokens] >= _FEWEST_SAMPLES
    ]
    return StepCosts(_never_falling(alone), _fitted_line(medians, weights))


def _never_falling(points: Sequence[tuple[int, float, int]]) -> dict[int, float]:
    """More tokens never take less time: where they seem to, all of them take the mean (pool adjacent violators).

    `points` are tokens, in ascending order, with seconds and weight.
    """
    pools: list[tuple[list[int], float, int]] = []
    for tokens, seconds, weight in points:
        pools.append(([tokens], seconds, weight))
        while len(pools) > 1 and pools[-2][1] > pools[-1][1]:
            (fewer, fewer_s, fewer_weight), (more, more_s, more_weight) = pools[-2:]
            both = fewer_weight + more_weight
            pools[-2:] = [([*fewer, *more], (fewer_s * fewer_weight + more_s * more_weight) / both, both)]
    return {tokens: seconds for members, seconds, _ in pools for tokens in members}


def _fitted_line(medians: Mapping[tuple[int, int], float], weights: Mapping[tuple[int, int], int]) -> StepLine:
    """Weighted least squares; a part that comes out below 0, or that nothing tells apart, is 0."""
    rows = [(1.0, float(sessions), float(tokens)) for sessions, tokens in medians]
    parts = [0] + [part for part in (1, 2) if len({row[part] for row in rows}) > 1]
    while True:
        solution = _least_squares([[row[part] for part in parts] for row in rows], medians.values(), weights.values())
        if solution is None:
            parts.remove(parts[-1] if len(parts) == 2 else 1)
            continue
        worst = min(range(len(parts)), key=lambda index: solution[index])
        if solution[worst] >= 0 or len(parts) == 1:
            values = dict(zip(parts, solution, strict=True))
            return StepLine(*(values.get(part, 0.0) for part in range(3)))
        del parts[worst]


def _least_squares(
    rows: Sequence[Sequence[float]], values: Iterable[float], weights: Iterable[float]
) -> list[float] | None:
    """The weighted normal equations, by elimination; None where they have no single solution."""
    size = len(rows[0])
    matrix = [[0.0] * (size + 1) for _ in range(size)]
    for row, value, weight in zip(rows, values, weights, strict=True):
        for line, factor in zip(matrix, row, strict=True):
            for column, entry in enumerate((*row, value)):
                line[column] += weight * factor * entry
    for pivot in range(size):
        best = max(range(pivot, size), key=lambda index: abs(matrix[index][pivot]))
        matrix[pivot], matrix[best] = matrix[best], matrix[pivot]
        if abs(matrix[pivot][pivot]) < 1e-9 * max(1.0, abs(matrix[0][0])):
            return None
        for index in range(size):
            if index != pivot:
                factor = matrix[index][pivot] / matrix[pivot][pivot]
                matrix[index] = [
                    entry - factor * above for entry, above in zip(matrix[index], matrix[pivot], strict=True)
                ]
    return [line[-1] / line[index] for index, line in enumerate(matrix)]
