"""What one row costs: the target distribution, the coupled sample and the verdict, at the vocabularies in use.

    python benchmarks/sampling.py

One thread. Times are CPU time of that thread, median of many, so that a busy machine blurs them less. "naive" scores
the whole vocabulary with the definition of the coupled sample, in float64; "plain" is what runs where nothing can be
compiled. A freed 28 MB tensor stands in for the model step that comes before: without it the C allocator returns memory
after each row, and page faults double some numbers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from paceline import noise, sampling
from paceline.noise import Purpose
from paceline.rejection import judge_draft
from paceline.sampling import (
    SparseDistribution,
    TokenHistory,
    argmax_token,
    coupled_sample,
    target_log_probs,
    truncate_to_top,
)
from paceline.types import SamplingParams, VerificationRule

VOCABULARIES = (49_152, 151_936)
REPEATS = 200
DRAFT_LENGTH = 4
HISTORY = TokenHistory(range(1_000), range(500, 1_000))
SETTINGS = {
    "temperature 1": SamplingParams(),
    "top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "top_k 50": SamplingParams(temperature=0.8, top_k=50),
    "penalties": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.1),
}


def main() -> None:
    torch.set_num_threads(1)
    torch.ones(7_000_000)  # see above
    print(f"torch {torch.__version__}, one thread, median of {REPEATS}, microseconds of CPU time a row")
    for vocab_size in VOCABULARIES:
        print(f"\nvocabulary {vocab_size:,}")
        for shape, row in rows(vocab_size).items():
            report_row(shape, row)


def rows(vocab_size: int) -> dict[str, Tensor]:
    """One confident row, as most are in a text, one broad row, and the worst cases; [vocab_size] each."""
    generator = torch.Generator().manual_seed(0)
    peaked = torch.randn(vocab_size, generator=generator) * 2.5
    peaked[[7, 11, 13]] = torch.tensor([20.0, 19.0, 17.0])
    return {
        "peaked": peaked,
        "broad": torch.randn(vocab_size, generator=generator) * 3.0,
        "near flat": torch.randn(vocab_size, generator=generator) * 0.1,
        "flat": torch.zeros(vocab_size),
    }


def report_row(shape: str, row: Tensor) -> None:
    log_probs = row.log_softmax(0)
    report(shape, "coupled_sample, naive", lambda seed: naive_coupled_sample(log_probs, seed))
    report(shape, "coupled_sample", lambda seed: coupled_sample(log_probs, seed, 5))
    filtered = target_log_probs(row, SETTINGS["top_k 50"], HISTORY, ())
    report(shape, "coupled_sample behind top_k 50", lambda seed: coupled_sample(filtered, seed, 5))
    with plain_algorithms():
        report(shape, "coupled_sample, plain", lambda seed: coupled_sample(log_probs, seed, 5))
    for name, params in SETTINGS.items():
        report(shape, f"target_log_probs, {name}", partial(distribute, row, params))
    for name in ("top_p 0.95", "top_k 50"):
        with plain_algorithms():
            report(shape, f"target_log_probs, {name}, plain", partial(distribute, row, SETTINGS[name]))
    for logits in (row, row.bfloat16()):
        report(shape, f"argmax_token, {logits.dtype}", partial(decide, logits))
    report(shape, "truncate_to_top", lambda _: truncate_to_top(log_probs))
    logits = row.repeat(DRAFT_LENGTH + 1, 1)
    sent = truncate_to_top(log_probs)
    likely = int(sent.ids[0])
    report_judgement(shape, logits, likely, VerificationRule.COUPLED, None)
    report_judgement(shape, logits, likely, VerificationRule.REJECTION, [sent] * DRAFT_LENGTH)


def report_judgement(
    shape: str, logits: Tensor, draft_id: int, rule: VerificationRule, sent: list[SparseDistribution] | None
) -> None:
    """The cost of a row that is judged, whatever the number of rows each seed needs."""
    judged = 0

    def judge(seed: int) -> None:
        nonlocal judged
        judged += len(
            judge_draft(
                logits,
                rule=rule,
                params=SETTINGS["temperature 1"],
                history=HISTORY,
                draft_ids=[draft_id] * DRAFT_LENGTH,
                draft_distributions=sent,
                seed=seed,
                base_length=5,
            )
        )

    started = time.thread_time()
    for seed in range(REPEATS):
        judge(seed)
    show(shape, f"judge_draft, {rule}", (time.thread_time() - started) / judged)


def distribute(row: Tensor, params: SamplingParams, _seed: int) -> Tensor:
    return target_log_probs(row, params, HISTORY, ())


def decide(row: Tensor, _seed: int) -> int:
    return argmax_token(row, SamplingParams(temperature=0.0), HISTORY, ())


def plain_algorithms() -> AbstractContextManager[object]:
    """As where nothing can be compiled."""
    return mock.patch.object(sampling, "_has_kernels", lambda row: False)  # noqa: PT008 - a mock would cost too much


def naive_coupled_sample(log_probs: Tensor, seed: int) -> int:
    """The definition over the whole vocabulary, with the logarithm of the C library."""
    counters = noise.first_counters(log_probs.numel(), log_probs.device)
    complements = noise.complements(counters, seed=seed, position=5, purpose=Purpose.TARGET_SAMPLE)
    uniforms = 1.0 - complements.double() * 2.0**-53
    return int((log_probs.double() - (-uniforms.log()).log()).argmax())


def report(shape: str, what: str, call: Callable[[int], object]) -> None:
    times: list[float] = []
    for seed in range(REPEATS):
        started = time.thread_time()
        call(seed)
        times.append(time.thread_time() - started)
    show(shape, what, statistics.median(times))


def show(shape: str, what: str, cost_s: float) -> None:
    print(f"  {shape:9} {what:38} {cost_s * 1e6:9.0f}")


if __name__ == "__main__":
    main()
