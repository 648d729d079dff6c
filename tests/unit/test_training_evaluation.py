"""What is predicted of a drafter: against exact enumeration of speculative decoding, and against counts by hand."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from paceline.engine.interface import Extension, Memory
from paceline.errors import StartupFailed
from paceline.training.corpus import Sample
from paceline.training.costs import step_costs
from paceline.training.evaluation import Acceptance, Evaluation, evaluate
from tests.training import sample

# A target that chooses evenly between two tokens at every temperature, and a drafter of every opinion.
TARGET = torch.tensor([[0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], [0.5, 0, 0, 0.5], [0, 0, 0.5, 0.5]], dtype=torch.float64)
DRAFTER = torch.tensor(
    [[0.7, 0.2, 0.05, 0.05], [0.3, 0.3, 0.3, 0.1], [0.1, 0.4, 0.4, 0.1], [0.05, 0.05, 0.3, 0.6]], dtype=torch.float64
)


class MarkovStudent:
    """A student whose next token depends on the last one alone; it can propose `draft_ids`."""

    def __init__(
        self,
        probs: Tensor,  # [vocab_size, draft_vocab_size]
        draft_ids: Sequence[int] | None = None,
    ) -> None:
        self.head_weight = probs.log().float().T.contiguous()
        ids = list(range(probs.shape[1])) if draft_ids is None else draft_ids
        self.row_of_id = torch.full((len(probs),), -1)
        self.row_of_id[torch.tensor(ids)] = torch.arange(len(ids))

    def states(self, ids: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(ids, self.head_weight.shape[1]).float()


def all_answers(length: int, temperature: float) -> list[Sample]:
    """Every answer of the target behind token 0, each as often as it is probable."""
    samples = []
    for coins in itertools.product((0, 1), repeat=length):
        ids, rows = [0], []
        for coin in coins:
            row = TARGET[ids[-1]]
            rows.append(row.sort(descending=True, stable=True))
            ids.append(int(row.nonzero()[coin]))
        samples.append(
            sample(
                ids[1:],
                prompt_ids=(0,),
                top_ids=[row.indices.tolist() for row in rows],
                top_log_probs=[row.values.log().tolist() for row in rows],
                temperature=temperature,
            )
        )
    return samples


@dataclass(slots=True)
class ExactRounds:
    """Speculative decoding itself (Leviathan et al. 2023, algorithm 1), by enumeration of all that can happen."""

    begun: float = 0.0
    judged: list[float] = field(default_factory=lambda: [0.0] * 9)
    accepted: list[float] = field(default_factory=lambda: [0.0] * 9)

    @classmethod
    def of(cls, drafter: Tensor, *, length: int, draft_length: int, has_bonus: bool) -> ExactRounds:
        """An answer of so many tokens behind token 0, the first of which nobody drafts."""
        rounds = cls()
        states = {(token_id, 0): float(TARGET[0, token_id]) for token_id in range(4)}
        for _ in range(length - 1):
            following = dict.fromkeys(itertools.product(range(4), range(draft_length + 1)), 0.0)
            for (last, kept), odds in states.items():
                target, drafted = TARGET[last], drafter[last]
                if kept == draft_length:
                    for token_id in range(4):
                        following[token_id, 0] += odds * float(target[token_id])
                    continue
                rounds.begun += odds * (kept == 0)
                rounds.judged[kept] += odds
                for token_id in range(4):
                    share = min(float(target[token_id]), float(drafted[token_id]))
                    rounds.accepted[kept] += odds * share
                    goes_on = has_bonus or kept + 1 < draft_length
                    following[token_id, kept + 1 if goes_on else 0] += odds * share
                    following[token_id, 0] += odds * (float(target[token_id]) - share)
            states = following
        return rounds


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_rounds_are_those_of_speculative_decoding(temperature: float) -> None:
    """Acceptance by position and tokens per round, sequential and pipelined, are exactly what enumeration gives."""
    length = 7
    tempered = (DRAFTER.log() / temperature).softmax(1)
    evaluation = evaluate(
        MarkovStudent(DRAFTER), all_answers(length, temperature), temperatures=[temperature], max_draft_length=4
    )
    (result,) = evaluation.results
    sequential, pipelined = (
        [
            ExactRounds.of(tempered, length=length, draft_length=draft_length, has_bonus=has_bonus)
            for draft_length in range(1, 5)
        ]
        for has_bonus in (True, False)
    )
    rows = length - 1
    longest, single = sequential[-1], pipelined[0]
    assert result.temperature == temperature
    assert result.rows == rows * 2**length
    # A pipeline judges every row.
    assert result.acceptance == pytest.approx(single.accepted[0] / single.judged[0], rel=1e-5)
    exact = [accepted / judged for accepted, judged in zip(longest.accepted[:4], longest.judged[:4], strict=True)]
    assert result.by_position == pytest.approx(exact, rel=1e-5)
    assert result.tokens_per_round == pytest.approx([rows / rounds.begun for rounds in sequential], rel=1e-5)
    assert result.tokens_per_block == pytest.approx([rows / rounds.begun for rounds in pipelined], rel=1e-5)


def test_greedy_rounds_are_counted_by_hand() -> None:
    """At temperature 0 a round goes on exactly as long as the arg max is the answer's token."""
    # Hits behind 0 and 1, misses behind 2: of the rows behind 0 1 2 0 1 2, H H M H H M and so on.
    student = MarkovStudent(torch.tensor([[0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [0.1, 0.8, 0.1]]))
    (result,) = evaluate(student, [sample([0, 1, 2] * 4 + [0])], max_draft_length=3).results
    assert result.rows == 12
    assert result.acceptance == pytest.approx(8 / 12)
    # Drafts of three: each ends with the miss, after two hits.
    assert result.by_position == pytest.approx((1.0, 1.0, 0.0))
    # Of one: hit and bonus, miss, hit and bonus, miss. Of two: two hits and the bonus instead of the miss.
    assert result.tokens_per_round == pytest.approx((12 / 8, 3.0, 3.0))
    # Without a bonus the block behind two hits is judged too.
    assert result.tokens_per_block == pytest.approx((1.0, 12 / 8, 3.0))


def test_lowest_id_wins_a_tie_as_it_does_in_service() -> None:
    """Two tokens with the same logit: the lower one is what is drafted."""
    student = MarkovStudent(torch.tensor([[0.2, 0.4, 0.4]] * 3))
    lower, higher = evaluate(student, [sample([0, 1])]), evaluate(student, [sample([0, 2])])
    assert (lower.results[0].acceptance, higher.results[0].acceptance) == (1.0, 0.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_token_outside_the_draft_vocabulary_is_never_accepted(temperature: float) -> None:
    """Ids of the head are not those of the target: row 0 of the head proposes token 1, and nothing proposes 0 or 2."""
    student = MarkovStudent(torch.ones(4, 2) / 2, draft_ids=(1, 3))
    for token_id, expected in ((0, 0.0), (1, 1.0 if temperature == 0.0 else 0.5), (2, 0.0)):
        (result,) = evaluate(student, [sample([3, token_id], temperature=temperature)]).results
        assert result.acceptance == pytest.approx(expected)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_tokens_that_were_not_stored_flatter_nobody(temperature: float) -> None:
    """With fewer entries of the target's distribution no more is reported than those entries do accept."""
    probs = torch.tensor([0.35, 0.3, 0.2, 0.1, 0.05])
    student = MarkovStudent(torch.tensor([[0.4, 0.3, 0.1, 0.1, 0.1]] * 5))
    tempered = [(one.log() / temperature).softmax(0) for one in (probs, student.head_weight[:, 0].exp())]
    accepted = torch.minimum(*tempered)
    for entries in range(1, 6):
        top_ids = [list(range(entries))] * 2
        top_log_probs = [probs[:entries].log().tolist()] * 2
        stored = sample([0, 0], top_ids=top_ids, top_log_probs=top_log_probs, temperature=temperature)
        share = evaluate(student, [stored], temperatures=[temperature]).results[0].acceptance
        most = float(accepted[:entries].sum()) * 1.001  # stored in float16
        assert (0.998 if entries == 5 else 0.5) * most < share < most


def test_answers_of_all_lengths_count_alike_in_any_order() -> None:
    """Padding of a batch is nobody's row, and an answer of one token, which nobody drafts, has none."""
    samples = [one for length in (1, 2, 5) for one in all_answers(length, 1.0)]
    together = evaluate(MarkovStudent(DRAFTER), samples).results[0]
    apart = [evaluate(MarkovStudent(DRAFTER), [one]).results[0] for one in samples if len(one.answer_ids) > 1]
    rows = sum(result.rows for result in apart)
    assert together.rows == rows == 4 * 1 + 32 * 4
    assert together.acceptance == pytest.approx(sum(one.acceptance * one.rows for one in apart) / rows)
    rounds = sum(one.rows / one.tokens_per_round[2] for one in apart)
    assert together.tokens_per_round[2] == pytest.approx(rows / rounds)
    assert evaluate(MarkovStudent(DRAFTER), samples[::-1]).results[0].by_position == pytest.approx(together.by_position)


def test_each_temperature_is_judged_on_its_own_answers() -> None:
    """Temperatures come in ascending order, and those without answers are left out."""
    samples = [*all_answers(3, 1.0), *all_answers(3, 0.0)]
    evaluation = evaluate(MarkovStudent(DRAFTER), samples, temperatures=(1.0, 0.7, 0.0))
    assert [result.temperature for result in evaluation.results] == [0.0, 1.0]
    assert evaluation.expected_acceptance == tuple((one.temperature, one.acceptance) for one in evaluation.results)


def test_evaluation_without_answers_is_refused() -> None:
    """Nothing can be said of temperatures at which nothing was drawn."""
    with pytest.raises(StartupFailed, match=r"drawn at temperature 0\.7; hold out more"):
        evaluate(MarkovStudent(DRAFTER), all_answers(3, 1.0), temperatures=[0.7])


# Predictions


def independent(acceptance: float, longest: int = 8) -> Acceptance:
    """Each token accepted with the same odds, whatever came before: the closed forms of design section 6."""
    lengths = range(1, longest + 1)
    return Acceptance(
        temperature=0.0,
        rows=1000,
        acceptance=acceptance,
        by_position=(acceptance,) * longest,
        tokens_per_round=tuple((1 - acceptance ** (length + 1)) / (1 - acceptance) for length in lengths),
        tokens_per_block=tuple((1 - acceptance**length) / (1 - acceptance) for length in lengths),
    )


def test_predictions_follow_the_formulas_of_the_design() -> None:
    """Sequential E / (g t_d + t_v); pipelined (1 - a) [max(t_v, g t_d) / (1 - a^g) + g t_d] seconds a token."""
    share, step = 0.7, 0.3
    verify = [1.0 + 0.05 * tokens for tokens in range(9)]
    evaluation = Evaluation((independent(share),)).with_costs(step, verify)
    for one in evaluation.speed_ups(evaluation.results[0]):
        length = one.draft_length
        draft_time, verify_time = length * step, verify[length]
        tokens = (1 - share ** (length + 1)) / (1 - share)
        assert one.sequential == pytest.approx(tokens / (draft_time + verify_time))
        seconds = (1 - share) * (max(verify_time, draft_time) / (1 - share**length) + draft_time)
        assert one.pipelined == pytest.approx(1 / seconds)


def test_long_answers_reach_the_closed_forms() -> None:
    """Rounds through a long answer with the same odds everywhere are those of the formulas, but for its last round."""
    share, length, longest = 0.75, 400, 3
    # The target's two tokens are even, and the drafter gives 0.375 to each of them.
    student = MarkovStudent(torch.tensor([[0.375, 0.375, 0.25]] * 3))
    answer = sample(
        [0, 1] * (length // 2),
        top_ids=[[0, 1]] * length,
        top_log_probs=[[math.log(0.5)] * 2] * length,
        temperature=1.0,
    )
    (result,) = evaluate(student, [answer], max_draft_length=longest).results
    expected = independent(share, longest)
    assert result.acceptance == pytest.approx(share, rel=1e-3)
    assert result.by_position == pytest.approx(expected.by_position, rel=1e-3)
    assert result.tokens_per_round == pytest.approx(expected.tokens_per_round, rel=1e-2)
    assert result.tokens_per_block == pytest.approx(expected.tokens_per_block, rel=1e-2)


@pytest.mark.parametrize(("step", "expected"), [(1.0, 1), (1e-6, 8)])
def test_best_draft_length_depends_on_the_costs(step: float, expected: int) -> None:
    """A drafter as slow as the target drafts one token, one that costs nothing as many as it may."""
    assert Evaluation((independent(0.6),)).with_costs(step).best_draft_length == expected


def test_evaluation_survives_json() -> None:
    """What is stored with a drafter is all there is, and it can be read without this code."""
    evaluation = evaluate(MarkovStudent(DRAFTER), all_answers(4, 1.0)).with_costs(
        0.125, [1.0 + n / 10 for n in range(9)]
    )
    stored = json.loads(json.dumps(evaluation.to_json()))
    assert Evaluation.from_json(stored) == evaluation
    assert stored["best_draft_length"] == evaluation.best_draft_length
    assert stored["results"][0]["speed_ups"][2]["draft_length"] == 3
    without = evaluate(MarkovStudent(DRAFTER), all_answers(4, 1.0))
    assert Evaluation.from_json(json.loads(json.dumps(without.to_json()))) == without


# Costs


@dataclass(slots=True)
class FakeCache:
    length: int = 0


class SlowModel:
    """Its steps take `base + per_token * tokens` seconds of a clock that nobody else moves, and sometimes far more."""

    vocab_size = 50
    memory: Memory

    def __init__(self, clock: list[float], *, base: float, per_token: float, max_context: int = 1000) -> None:
        self._clock, self._base, self._per_token, self.max_context = clock, base, per_token, max_context
        self.held = 0
        self._steps = 0

    def new_cache(self) -> FakeCache:
        self.held += 1
        return FakeCache()

    def step(self, batch: Sequence[Extension[FakeCache]]) -> list[Tensor]:
        (extension,) = batch
        extension.cache.length += len(extension.ids)
        assert extension.cache.length <= self.max_context
        assert max(extension.ids) < self.vocab_size
        self._steps += 1
        disturbance = 10.0 if self._steps % 3 == 0 else 0.0
        self._clock[0] += self._base + self._per_token * len(extension.ids) + disturbance
        return [torch.zeros(extension.rows, self.vocab_size)]

    def truncate(self, cache: FakeCache, length: int) -> None:
        cache.length = length

    def release(self, cache: FakeCache) -> None:
        self.held -= 1

    def fork(self, cache: FakeCache, length: int) -> FakeCache:
        self.held += 1
        return FakeCache(length)

    def adopt(self, cache: FakeCache) -> None:
        """It counts caches, whoever owns them."""

    def reserve(self, cache: FakeCache, length: int) -> bool:
        return True

    def reuse_prefix(self, cache: FakeCache, ids: Sequence[int]) -> int:
        return cache.length

    def share_prefix(self, cache: FakeCache, ids: Sequence[int]) -> None:
        pass


@pytest.mark.parametrize("max_context", [1000, 12])
def test_step_costs_are_in_units_of_the_targets_step(max_context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disturbed steps do not count, nothing is fed beyond the context, and the memory is given back."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    target = SlowModel(clock, base=0.9, per_token=0.1, max_context=max_context)
    drafter = SlowModel(clock, base=0.2, per_token=0.05)
    ratio, verify = step_costs(target, drafter, repeats=7, max_draft_length=4)
    assert ratio == pytest.approx(0.25)
    assert verify == pytest.approx((1.0, 1.1, 1.2, 1.3, 1.4))
    assert (target.held, drafter.held) == (0, 0)
