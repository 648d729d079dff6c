"""How good a student is: what share of its drafts the target keeps, and what that is worth at given costs.

Teacher-forced over answers that the target drew by itself. Speculation changes no token's law, so such an answer is also
what drafting would have given, and each row of it tells how likely it is that the token there had been drafted. Rounds
are then followed through each answer, token by token, with these odds: drafts do not begin anywhere with equal odds, but
behind corrections, where text is hard to foresee, and a mean over all places would promise too much.

Knows nothing of training, folders or services.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paceline.errors import StartupFailed
from paceline.training.corpus import Sample
from paceline.training.trainer import Batch, collate

TEMPERATURES = (0.0, 0.7, 1.0)

_BATCH_SAMPLES = 8
_ROWS_AT_ONCE = 512  # of logits
_WHOLE_PROMPT = 2**30  # tokens
_LEAST_LOG_PROB, _LEAST_PROB = -1e4, 1e-30


class Proposer(Protocol):
    """Whoever is evaluated (`student.Student`)."""

    @property
    def head_weight(self) -> Tensor:
        """`[draft_vocab_size, hidden_size]`."""

    @property
    def row_of_id(self) -> Tensor:
        """`[vocab_size]` int64: the head's row for each token, ascending, -1 where there is none."""

    def states(self, ids: Tensor) -> Tensor:
        """`[sequences, tokens]` int64 -> `[sequences, tokens, hidden_size]`, what goes into the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """What comes of drafts at one temperature. Tuples count draft lengths, or positions in a draft, from 1."""

    temperature: float
    rows: int  # judged
    acceptance: float  # of all rows: accepted / (accepted + rejected) where every row is judged, as in a pipeline
    by_position: tuple[float, ...]  # given that all before was accepted, in sequential rounds of the longest draft
    tokens_per_round: tuple[float, ...]  # sequential: the accepted ones, and the correction or the bonus
    tokens_per_block: tuple[float, ...]  # pipelined: the next block stands in for the bonus


@dataclass(frozen=True, slots=True)
class Costs:
    """Times in units of the target's step of one token."""

    step: float  # a step of the drafter
    verify: tuple[float, ...]  # a step of the target with 1, 2, ... tokens of a session


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Predicted tokens a second at one draft length, plain decoding being 1 (design section 6, without a network between
    the two and without branches)."""

    draft_length: int
    sequential: float
    pipelined: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What is recorded with a drafter, by temperature in ascending order."""

    results: tuple[Acceptance, ...]
    costs: Costs | None = None

    def with_costs(self, step_cost_ratio: float, verify_cost: Sequence[float] | None = None) -> Evaluation:
        """The same with predictions. `step_cost_ratio` is the drafter's step over the target's; `verify_cost` those of
        the target's step with 1, 2, ... tokens over that with one, at least one more than the longest draft; None: 1."""
        longest = len(self.results[0].by_position)
        verify = tuple(verify_cost or (1.0,) * (longest + 1))
        assert len(verify) > longest, f"{len(verify)} costs for drafts of up to {longest} tokens"
        return replace(self, costs=Costs(step_cost_ratio, verify))

    def speed_ups(self, result: Acceptance) -> tuple[SpeedUp, ...]:
        """For each draft length from 1; there must be costs."""
        return tuple(self._speed_up(result, length) for length in range(1, len(result.by_position) + 1))

    @property
    def best_draft_length(self) -> int:
        """That of the highest predicted speed in a pipeline at the lowest temperature; there must be costs."""
        return max(self.speed_ups(self.results[0]), key=lambda one: one.pipelined).draft_length

    @property
    def expected_acceptance(self) -> tuple[tuple[float, float], ...]:
        """(temperature, acceptance) each."""
        return tuple((result.temperature, result.acceptance) for result in self.results)

    def to_json(self) -> dict[str, Any]:
        """With the predictions, for whoever reads it."""
        results = [asdict(result) for result in self.results]
        if self.costs is None:
            return {"results": results}
        for result, fields in zip(self.results, results, strict=True):
            fields["speed_ups"] = [asdict(one) for one in self.speed_ups(result)]
        return {"results": results, "costs": asdict(self.costs), "best_draft_length": self.best_draft_length}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Evaluation:
        """What `to_json` gave, or a JSON text of it. Raises `KeyError` and `TypeError` for anything else."""
        costs = fields.get("costs")
        return cls(
            tuple(
                Acceptance(
                    temperature=result["temperature"],
                    rows=result["rows"],
                    acceptance=result["acceptance"],
                    by_position=tuple(result["by_position"]),
                    tokens_per_round=tuple(result["tokens_per_round"]),
                    tokens_per_block=tuple(result["tokens_per_block"]),
                )
                for result in fields["results"]
            ),
            Costs(costs["step"], tuple(costs["verify"])) if costs else None,
        )

    def _speed_up(self, result: Acceptance, draft_length: int) -> SpeedUp:
        assert self.costs is not None, "predictions need costs"
        draft_time, verify_time = draft_length * self.costs.step, self.costs.verify[draft_length]
        # Behind a rejection the target waits for a whole draft, and the drafter has none.
        time_per_block = max(verify_time, draft_time) / result.tokens_per_block[draft_length - 1]
        return SpeedUp(
            draft_length,
            sequential=result.tokens_per_round[draft_length - 1] / (draft_time + verify_time),
            pipelined=1.0 / (time_per_block + (1.0 - result.acceptance) * draft_time),
        )


def evaluate(
    student: Proposer,
    samples: Sequence[Sample],
    *,
    temperatures: Sequence[float] = TEMPERATURES,
    max_draft_length: int = 8,
) -> Evaluation:
    """Drafts of up to `max_draft_length` tokens judged on samples drawn at these temperatures.

    At temperature 0 a draft token is accepted where the student's arg max, the lowest id on a tie, is the token of the
    answer. Above, the rule is `rejection` (Leviathan et al. 2023; `coupled` accepts a little less). A row accepts
    sum_x min(p(x), q(x)) of the student's q, and if the token that came out is x, it was a draft token with the odds
    min(1, q(x) / p(x)): accepted ones have the law min(p, q), all together p. The target's p is known for the stored
    tokens alone. The others count as 0, and their mass as what it can at most be at this temperature: no row is
    flattered. A token that is not stored counts as probable as the last that is.

    Temperatures without samples are left out; raises `StartupFailed` if that leaves none.
    """
    usable = [sample for sample in samples if len(sample.answer_ids) > 1]
    results = []
    for temperature in sorted(set(temperatures)):
        chosen = [sample for sample in usable if sample.temperature == temperature]
        if chosen:
            results.append(_acceptance(_odds(student, chosen, temperature), temperature, max_draft_length))
    if not results:
        named = ", ".join(f"{temperature:g}" for temperature in temperatures)
        raise StartupFailed(f"None of the held-out answers was drawn at temperature {named}; hold out more answers.")
    return Evaluation(tuple(results))


@dataclass(frozen=True, slots=True)
class Odds:
    """The rows of some answers side by side, float64, 0 behind the end of each."""

    accepting: Tensor  # [samples, rows], that a draft token is accepted, whatever comes out
    drafted: Tensor  # [samples, rows], that the token which came out was drafted
    present: Tensor  # [samples, rows], 1 where there is a row


def _odds(student: Proposer, samples: Sequence[Sample], temperature: float) -> Odds:
    rows = [answer for batch in _batches(samples) for answer in _judge(student, batch, temperature)]
    accepting, drafted, present = (
        pad_sequence(list(parts), batch_first=True)
        for parts in zip(*((*answer, torch.ones_like(answer[0])) for answer in rows), strict=True)
    )
    return Odds(accepting, drafted, present)


def _batches(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Samples of about equal lengths together."""
    ordered = sorted(samples, key=lambda sample: sample.length)
    for start in range(0, len(ordered), _BATCH_SAMPLES):
        yield ordered[start : start + _BATCH_SAMPLES]


@torch.inference_mode()
def _judge(student: Proposer, samples: Sequence[Sample], temperature: float) -> Iterator[tuple[Tensor, Tensor]]:
    """For each sample, what `Odds` has of it."""
    batch = collate(samples, prompt_tokens=_WHOLE_PROMPT, entries=samples[0].top_ids.shape[1])
    with torch.autocast("cpu", torch.bfloat16):  # as it is served
        states = student.states(batch.ids).flatten(0, 1)[batch.judged]
    parts = []
    for start in range(0, len(states), _ROWS_AT_ONCE):
        window = slice(start, start + _ROWS_AT_ONCE)
        logits = states[window].to(student.head_weight.dtype) @ student.head_weight.T
        parts.append(_row_odds(logits.float(), student.row_of_id, batch, window, temperature))
    lengths = [len(sample.answer_ids) - 1 for sample in samples]
    accepting, drafted = (torch.split(torch.cat(pieces).double(), lengths) for pieces in zip(*parts, strict=True))
    return zip(accepting, drafted, strict=True)


def _row_odds(
    logits: Tensor,  # [rows, draft_vocab_size] float32
    row_of_id: Tensor,  # [vocab_size]
    batch: Batch,
    window: slice,  # of the batch's rows
    temperature: float,
) -> tuple[Tensor, Tensor]:  # [rows] each
    given = row_of_id[batch.given_ids[window]]
    if temperature == 0.0:
        hits = logits.argmax(-1) == given
        return hits, hits
    top_log_probs = batch.top_log_probs[window]
    target_probs = _tempered(top_log_probs, temperature, others=len(row_of_id) - top_log_probs.shape[1])
    draft_log_probs = (logits / temperature).log_softmax(-1)
    draft_probs = _probs_at(draft_log_probs, row_of_id[batch.top_ids[window]])
    accepting = torch.minimum(target_probs, draft_probs).sum(-1)
    is_given = batch.top_ids[window] == batch.given_ids[window, None]
    given_prob = torch.where(is_given.any(-1), (target_probs * is_given).sum(-1), target_probs[:, -1])
    draft_prob = _probs_at(draft_log_probs, given[:, None])[:, 0]
    return accepting, (draft_prob / given_prob.clamp_min(_LEAST_PROB)).clamp_max(1.0)


def _tempered(
    top_log_probs: Tensor,  # [rows, entries], at temperature 1, descending
    temperature: float,
    others: int,  # tokens that are not stored
) -> Tensor:  # [rows, entries], at this temperature: at most as probable as they are
    power = 1.0 / temperature
    tail = (1.0 - top_log_probs.exp().sum(-1, keepdim=True)).clamp_min(0.0) * (others > 0)
    if temperature <= 1.0:  # most if each of the others is as probable as the last that is stored
        log_tail = tail.log() + (power - 1.0) * top_log_probs[:, -1:].clamp_min(_LEAST_LOG_PROB)
    else:  # most if all of them are equal
        log_tail = power * tail.log() + (1.0 - power) * math.log(max(1, others))
    scores = power * top_log_probs
    return (scores - torch.cat((scores, log_tail), -1).logsumexp(-1, keepdim=True)).exp()


def _probs_at(
    log_probs: Tensor,  # [rows, draft_vocab_size]
    places: Tensor,  # [rows, entries], -1 for none
) -> Tensor:  # [rows, entries], 0 for none
    return log_probs.gather(1, places.clamp_min(0)).exp() * (places >= 0)


# ---- rounds ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rounds:
    """What is to be expected of rounds of one draft length through some answers, in all."""

    begun: float
    judged: Tensor  # [draft_length], draft tokens by position that all before were accepted of
    accepted: Tensor  # [draft_length], of those


def follow_rounds(odds: Odds, draft_length: int, *, has_bonus: bool) -> Rounds:
    """Drafts follow each other through the answers. A rejection begins another behind its correction; a draft that was
    kept whole is followed by a bonus token and then by another draft, or, as in a pipeline, by that at once.

    At each row the odds are known of how many tokens of a draft have been accepted there. They depend on the tokens
    before the row alone, so what is counted has the expectation that rounds with real dice have.
    """
    samples, rows = odds.accepting.shape
    at = torch.zeros(samples, draft_length + has_bonus, dtype=torch.float64)  # last: whole, and its bonus is due
    at[:, 0] = 1.0
    begun = 0.0
    judged, accepted = torch.zeros(2, draft_length, dtype=torch.float64)
    for row in range(rows):
        present = at[:, :draft_length] * odds.present[:, row, None]
        begun += float(present[:, 0].sum())
        judged += present.sum(0)
        accepted += (present * odds.accepting[:, row, None]).sum(0)
        going_on = at[:, :draft_length] * odds.drafted[:, row, None]
        at = torch.zeros_like(at)
        at[:, 1:] = going_on[:, : at.shape[1] - 1]
        at[:, 0] = 1.0 - at[:, 1:].sum(1)
    return Rounds(begun, judged, accepted)


def _acceptance(odds: Odds, temperature: float, max_draft_length: int) -> Acceptance:
    rows = float(odds.present.sum())
    lengths = range(1, max_draft_length + 1)
    sequential = [follow_rounds(odds, length, has_bonus=True) for length in lengths]
    pipelined = [follow_rounds(odds, length, has_bonus=False) for length in lengths]
    longest = sequential[-1]
    return Acceptance(
        temperature=temperature,
        rows=int(rows),
        acceptance=float(odds.accepting.sum()) / rows,
        by_position=tuple((longest.accepted / longest.judged.clamp_min(1e-9)).tolist()),
        tokens_per_round=tuple(rows / rounds.begun for rounds in sequential),
        tokens_per_block=tuple(rows / rounds.begun for rounds in pipelined),
    )
