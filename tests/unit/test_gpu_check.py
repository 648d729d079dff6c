"""The parts of the GPU's self-check that run without one: a check that cannot fail would be worth nothing there."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
import typer
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks import gpu_check
from benchmarks.engine import PaddedGenerate, Request, TargetEngine
from benchmarks.gpu_check import (
    ATTENTION_TOLERANCE,
    TIE_TOLERANCE,
    AttentionCase,
    Report,
    attention_difference,
    check_attention,
    check_tokens,
    count_synchronisations,
    random_network,
    small_requests,
    step_times_s,
    worst_gap,
)
from paceline.engine.attention import SHORT_ROWS, Attention, RaggedAttention, Scoring
from paceline.engine.batch import RaggedBatch
from paceline.engine.kv_memory import KVMemory
from paceline.engine.memory import MemoryLimits
from paceline.engine.model import CausalModel

CPU = torch.device("cpu")
VOCAB_SIZE = 256
CASE = AttentionCase(torch.bfloat16, head_dim=64, heads=9, kv_heads=3, sliding_window=100, block_size=16)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads, and lose much where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def lines() -> list[str]:
    """What a report has printed."""
    return []


@pytest.fixture
def report(lines: list[str]) -> Report:
    return Report(lines.append)


def tiny_network(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return random_network(CPU, dtype, hidden=64, layers=1, vocab_size=VOCAB_SIZE)


class Changed:
    """Attention by matrix products, given something else than it should be."""

    def __init__(self, inner: Attention, change: Callable[[Scoring], Scoring], *, forgets: bool = False) -> None:
        self._inner, self._change, self._forgets = inner, change, forgets

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        if self._forgets:
            value = torch.zeros_like(value)
        return self._inner.attend(layer, query, key, value, self._change(scoring))


@pytest.mark.parametrize("case", [CASE, replace(CASE, dtype=torch.float32, sliding_window=None, block_size=256)])
def test_two_right_ways_of_attention_agree(case: AttentionCase) -> None:
    """The kernel that reads blocks in place against matrix products, also where the batch is packed differently."""
    assert attention_difference(case, CPU, RaggedAttention, short=SHORT_ROWS) < ATTENTION_TOLERANCE
    assert attention_difference(case, CPU, RaggedAttention) == 0.0


@pytest.mark.parametrize(
    ("change", "forgets"),
    [
        (lambda scoring: replace(scoring, sliding_window=99), False),
        (lambda scoring: replace(scoring, sliding_window=None), False),
        (lambda scoring: replace(scoring, scale=scoring.scale * 1.2), False),
        (lambda scoring: scoring, True),
    ],
    ids=["window one short", "no window", "scale", "values not written"],
)
def test_wrong_attention_differs(change: Callable[[Scoring], Scoring], forgets: bool) -> None:
    """By more than the tolerance, in the worst row."""

    def wrong(memory: KVMemory, batch: RaggedBatch, slots: Tensor) -> Attention:
        return Changed(RaggedAttention(memory, batch, slots), change, forgets=forgets)

    assert attention_difference(CASE, CPU, wrong) > ATTENTION_TOLERANCE


def test_block_sizes_that_the_kernel_refuses_are_named_and_fail_the_check(report: Report, lines: list[str]) -> None:
    """On a CPU it refuses all of them."""
    assert check_attention(report, CPU) == []
    assert len(report.failed) == 1
    assert sum("refused" in line for line in lines) == len(gpu_check.BLOCK_SIZES)
    assert "none" in lines[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_the_engine_pass(report: Report, lines: list[str], dtype: torch.dtype) -> None:
    """Without a GPU too, and all memory is free afterwards."""
    check_tokens(report, tiny_network(dtype), block_size=16)
    assert report.failed == []
    assert len(lines) == 2


def test_wrong_tokens_fail(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer with one wrong token is enough."""
    right = TargetEngine.answer

    def wrong(engine: TargetEngine, requests: Sequence[Request]) -> list[list[int]]:
        answers = right(engine, requests)
        answers[1][3] = (answers[1][3] + 1) % VOCAB_SIZE
        return answers

    monkeypatch.setattr(TargetEngine, "answer", wrong)
    check_tokens(report, tiny_network(), block_size=16)
    assert len(report.failed) == 1


def test_network_is_the_same_at_each_call_and_its_answers_wander() -> None:
    """Else one token repeated for ever would pass for right."""
    first, second = tiny_network(), tiny_network()
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
    for request in small_requests(VOCAB_SIZE):
        (answer,) = PaddedGenerate(first).answer([request])
        assert len(set(answer)) > 3


def test_wrong_token_has_a_gap() -> None:
    """The network's own answer has none, one with any token changed has a large one."""
    network = tiny_network()
    request = small_requests(VOCAB_SIZE)[2]
    (answer,) = PaddedGenerate(network).answer([request])
    assert worst_gap(network, request, answer) < 1e-4
    answer[7] = (answer[7] + 1) % VOCAB_SIZE
    assert worst_gap(network, request, answer) > TIE_TOLERANCE


def test_only_warnings_of_synchronisation_count() -> None:
    """Each with its place; torch warns of none afterwards."""
    modes: list[str] = []

    def run() -> None:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)

    found = count_synchronisations(run, set_mode=modes.append)
    assert len(found) == 2
    assert all("test_gpu_check.py" in place for place in found)
    assert modes == ["warn", "default"]


def test_timed_steps_leave_no_session_behind() -> None:
    """A time for each round, and all memory is free."""
    network = tiny_network()
    model = CausalModel(network, model_id="random", limits=MemoryLimits(kv_budget_tokens=4096))
    engine = TargetEngine(model)
    assert len(step_times_s(engine, 3, prompt_length=40, rounds=4)) == 4
    assert model.memory.held_tokens == 0
    assert not engine.scheduler.has_work()


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, and exit code 2."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(typer.Exit) as stopped:
        gpu_check.main()
    assert stopped.value.exit_code == 2
    assert capsys.readouterr().err.count(".") == 1
