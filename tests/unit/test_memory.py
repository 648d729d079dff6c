"""How much memory keys and values get: the arithmetic, and what the machine and its containers say."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.memory import (
    MAX_UNASKED_TOKENS,
    MIN_CONTEXT,
    Allocation,
    DeviceMemory,
    KVPlan,
    MemoryLimits,
    device_memory,
    estimate_step_bytes,
    host_memory,
    plan_kv,
    step_tokens,
    weight_bytes,
)
from paceline.errors import StartupFailed

GIB = 2**30
HOST = DeviceMemory("cpu", total_bytes=16 * GIB, free_bytes=9 * GIB)
GPU = DeviceMemory("cuda", total_bytes=100 * GIB, free_bytes=100 * GIB)
KIB_TOKEN = 1024  # bytes of keys and values of one token
MANY = MemoryLimits(max_sessions=10_000)  # more than fit


def plan(
    memory: DeviceMemory, limits: MemoryLimits, *, model_context: int = 8192, weights: int = 0, step: int = 0
) -> KVPlan:
    return plan_kv(
        memory,
        limits,
        bytes_per_token=KIB_TOKEN,
        weight_bytes=weights,
        model_context=model_context,
        step_bytes=step,
    )


# The plan


def test_a_host_gives_a_quarter_of_what_is_free_beside_the_weights() -> None:
    """Of 5 GiB with 3 GiB of weights, half of one."""
    given_plan = plan(replace(HOST, free_bytes=5 * GIB), MANY, weights=3 * GIB)
    assert given_plan.bytes == GIB // 2
    assert given_plan.capacity_tokens == GIB // 2 // KIB_TOKEN
    assert "--memory-fraction 0.25 of the 5.0 GiB" in given_plan.reason


@pytest.mark.parametrize(("model_context", "gibibytes"), [(8192, 1.0), (3 * 2**19, 1.5)])
def test_a_host_gives_unasked_a_gibibyte_or_one_whole_session(model_context: int, gibibytes: float) -> None:
    """Of 9 GiB that are free; asked by a fraction, it gives more."""
    given_plan = plan(HOST, MANY, weights=GIB, model_context=model_context)
    assert given_plan.bytes == gibibytes * GIB
    assert "unasked" in given_plan.reason
    assert plan(HOST, replace(MANY, memory_fraction=0.25), weights=GIB).bytes == 2 * GIB


def test_a_gpu_gives_nine_tenths_of_its_memory_less_weights_and_step() -> None:
    """Counted as vLLM counts gpu_memory_utilization; unasked, 4 Mi tokens are the most."""
    big_tokens = plan_kv(
        GPU, MANY, bytes_per_token=64 * KIB_TOKEN, weight_bytes=28 * GIB, model_context=8192, step_bytes=2 * GIB
    )
    assert big_tokens.bytes == 60 * GIB
    assert "--memory-fraction 0.9 of the GPU's 100.0 GiB" in big_tokens.reason


def test_what_others_hold_of_a_gpu_is_not_given_out_again() -> None:
    """The second replica on a shared GPU gets what the first has left, whatever its own fraction."""
    shared = replace(GPU, free_bytes=10 * GIB)
    given_plan = plan(shared, replace(MANY, memory_fraction=0.9), weights=8 * GIB)
    assert given_plan.bytes == 2 * GIB
    assert "10.0 GiB of the GPU's memory that were free" in given_plan.reason


def test_an_explicit_budget_wins_over_the_fraction() -> None:
    """And is never exceeded: whole blocks within it."""
    given_plan = plan(HOST, replace(MANY, kv_budget_tokens=1000, memory_fraction=0.5), model_context=512)
    assert (given_plan.capacity_tokens, given_plan.max_context) == (992, 512)
    assert given_plan.reason == "--kv-budget-tokens 1,000"


def test_never_more_is_taken_than_all_sessions_can_use() -> None:
    """A tiny model takes little, whatever there is; every session may fill its last block."""
    given_plan = plan(HOST, MemoryLimits(max_sessions=3), model_context=100)
    assert given_plan.num_blocks == 3 * 7
    assert given_plan.full_sessions == 3
    assert given_plan.reason == "--max-sessions 3 of 100 tokens each"
    assert plan(HOST, MemoryLimits(max_sessions=3, kv_budget_tokens=10**6), model_context=100) == given_plan


def test_unasked_no_pool_gets_too_large_to_keep_count_of() -> None:
    """A model of a few bytes a token, without a limit of its own: millions of blocks would be of no use to anybody."""
    limits = MemoryLimits(max_sessions=256)
    given_plan = plan_kv(HOST, limits, bytes_per_token=8, weight_bytes=0, model_context=2**20)
    assert given_plan.capacity_tokens == MAX_UNASKED_TOKENS
    asked = replace(limits, kv_budget_tokens=2 * MAX_UNASKED_TOKENS)
    assert plan_kv(HOST, asked, bytes_per_token=8, weight_bytes=0, model_context=2**20).capacity_tokens == 2**23


def test_a_context_longer_than_the_memory_is_lowered_and_the_reason_says_so() -> None:
    """No session can be longer than all blocks together."""
    given_plan = plan(HOST, MemoryLimits(kv_budget_tokens=1000), model_context=8192)
    assert given_plan.max_context == 992
    assert given_plan.reason == "--kv-budget-tokens 1,000, which lowers the context of 8,192 tokens"


def test_a_shorter_context_makes_room_for_more_sessions() -> None:
    """`max_context` is what a session is counted with, and a longer one than the model's is refused by name."""
    given_plan = plan(HOST, MemoryLimits(max_context=64, kv_budget_tokens=1024), model_context=8192)
    assert (given_plan.max_context, given_plan.full_sessions) == (64, 16)
    with pytest.raises(StartupFailed, match="--max-context 8193 is more than the 8192 tokens"):
        plan(HOST, MemoryLimits(max_context=8193), model_context=8192)


@pytest.mark.parametrize(
    ("memory", "limits", "words"),
    [
        (replace(HOST, free_bytes=GIB), MemoryLimits(), "does not hold one session.*raise --memory-fraction"),
        (replace(GPU, total_bytes=GIB, free_bytes=GIB), MemoryLimits(), "does not hold one session"),
        (replace(GPU, free_bytes=GIB), MemoryLimits(), "with 1.0 GiB free"),
        (HOST, MemoryLimits(kv_budget_tokens=MIN_CONTEXT - 1), "--kv-budget-tokens 63 is too little.*at least 64"),
        (HOST, MemoryLimits(kv_budget_tokens=10**7), "--kv-budget-tokens 10000000 takes 9.5 GiB.*lower it"),
    ],
)
def test_a_start_without_room_for_one_session_says_what_to_change(
    memory: DeviceMemory, limits: MemoryLimits, words: str
) -> None:
    """Before anything is allocated, in a sentence that names a setting."""
    with pytest.raises(StartupFailed, match=words):
        plan(memory, limits, weights=GIB)


def test_a_model_with_a_short_context_needs_no_more_than_that() -> None:
    """`MIN_CONTEXT` is not asked of a model that cannot reach it."""
    assert plan(HOST, MemoryLimits(kv_budget_tokens=16), model_context=8).max_context == 8


@given(
    free=st.integers(0, 2**32),
    used=st.integers(0, 2**32),
    kind=st.sampled_from(["cpu", "cuda"]),
    fraction=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    budget=st.sampled_from([0, 1, 100, 5000, 10**7]),
    sessions=st.integers(1, 300),
    context=st.integers(1, 10_000),
    block_size=st.sampled_from([1, 7, 16]),
    weights=st.integers(0, 2**30),
)
def test_a_plan_keeps_within_every_limit(
    free: int,
    used: int,
    kind: str,
    fraction: float,
    budget: int,
    sessions: int,
    context: int,
    block_size: int,
    weights: int,
) -> None:
    """Whatever the figures, 100 at random: within memory, budget and need, with one whole session, or refused."""
    memory = DeviceMemory(kind, total_bytes=free + used, free_bytes=free)
    limits = MemoryLimits(
        memory_fraction=fraction, kv_budget_tokens=budget, max_sessions=sessions, block_size=block_size
    )
    try:
        given_plan = plan(memory, limits, model_context=context, weights=weights)
    except StartupFailed:
        return
    assert given_plan.bytes == given_plan.capacity_tokens * KIB_TOKEN
    assert given_plan.bytes + weights <= free
    assert min(context, MIN_CONTEXT) <= given_plan.max_context <= min(context, given_plan.capacity_tokens)
    assert given_plan.num_blocks <= sessions * -(-context // block_size)
    assert given_plan.full_sessions >= 1
    if budget:
        assert given_plan.capacity_tokens <= budget
    elif kind == "cuda":
        assert given_plan.bytes + weights <= (fraction or 0.9) * memory.total_bytes


def test_the_start_says_what_was_allocated_and_why() -> None:
    """One sentence with every figure that an operator would ask for."""
    allocation = Allocation(plan(HOST, MemoryLimits(kv_budget_tokens=20_000), model_context=8192), 3 * GIB // 2)
    assert str(allocation) == (
        "1.5 GiB of weights and 19.5 MiB for the keys and values of 20,000 tokens (2 sessions of 8,192), limited by "
        "--kv-budget-tokens 20,000."
    )


# Steps


def test_a_step_is_longer_on_a_gpu_unless_told_otherwise() -> None:
    """0 leaves it to the device."""
    assert (step_tokens(0, "cpu"), step_tokens(0, "cuda"), step_tokens(100, "cuda")) == (256, 8192, 100)


def test_a_step_is_estimated_by_its_widest_layer_and_its_logits() -> None:
    """Qwen3-14B, bfloat16, 8192 tokens: 1.3 GiB of activations and 2.3 GiB of logits."""
    shape = {"hidden_size": 5120, "intermediate_size": 17_408, "itemsize": 2}
    activations = estimate_step_bytes(tokens=8192, vocab_size=0, **shape)
    assert activations == 8192 * 2 * (6 * 5120 + 3 * 17_408)
    assert estimate_step_bytes(tokens=8192, vocab_size=151_936, **shape) - activations == 8192 * 151_936 * 2


# What there is


MEMINFO = "MemTotal:       16000 kB\nMemFree:         1000 kB\nMemAvailable:   12000 kB\nHugePages_Total:       0\n"


def machine(folder: Path, files: dict[str, str]) -> dict[str, Path]:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"proc": folder / "proc", "cgroups": folder / "cgroup"}


def kib(*figures: int) -> tuple[int, ...]:
    return tuple(1024 * figure for figure in figures)


def test_a_host_without_containers_tells_its_own_memory(tmp_path: Path) -> None:
    """What is available, not what is unused: file pages can be had at once."""
    assert host_memory(**machine(tmp_path, {})) == kib(16_000, 12_000)


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    """Control groups of version 2, in their own namespace: the limit is at the root; idle file pages are not in use."""
    files = {
        "proc/self/cgroup": "0::/\n",
        "cgroup/memory.max": f"{1024 * 8000}\n",
        "cgroup/memory.current": f"{1024 * 3000}\n",
        "cgroup/memory.stat": f"anon 1\ninactive_file {1024 * 1000}\n",
    }
    assert host_memory(**machine(tmp_path, files)) == kib(8000, 6000)


def test_the_narrowest_group_above_a_process_counts(tmp_path: Path) -> None:
    """A group without a limit of its own ("max") is still bound by those above it."""
    files = {"proc/self/cgroup": "0::/pod/service\n"}
    for group, limit, used in (("pod", str(1024 * 5000), 4000), ("pod/service", "max", 10)):
        files |= {
            f"cgroup/{group}/memory.max": f"{limit}\n",
            f"cgroup/{group}/memory.current": f"{1024 * used}\n",
            f"cgroup/{group}/memory.stat": "inactive_file 0\n",
        }
    assert host_memory(**machine(tmp_path, files)) == kib(5000, 1000)


def test_groups_of_version_1_count_and_a_path_of_the_host_is_looked_for_at_the_root(tmp_path: Path) -> None:
    """Where a container sees its own group as the root; no limit there is a number beyond all memory."""
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/docker/1\n2:memory:/docker/1\n",
        "cgroup/memory/memory.limit_in_bytes": f"{1024 * 9000}\n",
        "cgroup/memory/memory.usage_in_bytes": f"{1024 * 9500}\n",
        "cgroup/memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {1024 * 1500}\n",
    }
    assert host_memory(**machine(tmp_path, files)) == kib(9000, 1000)
    (tmp_path / "cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert host_memory(proc=tmp_path / "proc", cgroups=tmp_path / "cgroup") == kib(16_000, 12_000)


def test_a_system_that_tells_the_total_alone_has_half_of_it_free(tmp_path: Path) -> None:
    """Such as macOS."""
    total, free = host_memory(proc=tmp_path, cgroups=tmp_path)
    assert total == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert free == total // 2


def test_this_machine_has_memory() -> None:
    """The real thing, for every device that is not a GPU of its own."""
    memory = device_memory(torch.device("cpu"))
    assert (memory.kind, memory.is_gpu) == ("cpu", False)
    assert 0 < memory.free_bytes <= memory.total_bytes


# What the model takes


def test_shared_weights_count_once() -> None:
    """An output layer that is tied to the embeddings takes no memory of its own."""
    network = torch.nn.Sequential(
        torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False), torch.nn.BatchNorm1d(10)
    )
    separate = weight_bytes(network)
    network[1].weight = network[0].weight
    assert separate - weight_bytes(network) == 10 * 4 * 4
    assert separate == 2 * 160 + 4 * 40 + 8  # the norm: scale, shift, two statistics, and a count of batches
