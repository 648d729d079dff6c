"""How much memory a model's keys and values get, decided once at start, and why.

The plan is arithmetic over numbers; beside it stands what reads them from the machine, where the limit of a container
counts as much as the memory of the host. Knows nothing of models beyond the size of their weights and of a token.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.errors import StartupFailed
from paceline.types import MAX_DRAFT_LENGTH

GPU_FRACTION = 0.9  # of all its memory, weights included; the rest is for the libraries and for fragmentation
# Of what is free beside the weights. Target, drafter and whatever else runs share the memory: two models that start at
# the same time, each finding all of it free, still leave half.
HOST_FRACTION = 0.25
# And no more than this unasked, or one session of the longest length: a small model has no use for a quarter of a large
# host, and the memory is taken at once.
HOST_UNASKED_BYTES = 2**30
GPU_STEP_TOKENS = 8192
HOST_STEP_TOKENS = 256  # a prompt's chunk: about as long a step as running sessions can be made to wait for
HOST_BLOCK_SIZE = 16  # tokens
GPU_BLOCK_SIZE = 256  # FlashAttention 2 reads no smaller ones
MIN_CONTEXT = MAX_DRAFT_LENGTH  # tokens; a session that is shorter is of no use to anybody
# The most that is taken unasked: beyond it come models of a few kilobytes, whose blocks are dearer to keep count of.
MAX_UNASKED_TOKENS = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """What the settings say of memory; 0 leaves a figure to `plan_kv`."""

    memory_fraction: float = 0.0  # of a GPU's memory, or of a host's free memory: `plan_kv`
    kv_budget_tokens: int = 0  # wins over the fraction
    max_context: int = 0  # tokens of one session
    max_sessions: int = 256
    block_size: int = 0  # tokens


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device before the model was loaded onto it, in bytes."""

    kind: str  # torch's name of it, such as "cpu" or "cuda"
    total_bytes: int
    free_bytes: int

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"


@dataclass(frozen=True, slots=True)
class KVPlan:
    """Blocks for keys and values, and the longest session that they allow."""

    num_blocks: int
    block_size: int  # tokens
    bytes: int  # of all blocks
    max_context: int  # tokens
    reason: str  # what decided, to be read behind "limited by"

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def full_sessions(self) -> int:
        """Sessions of `max_context` tokens that fit at the same time; at least 1."""
        return self.num_blocks // _blocks(self.max_context, self.block_size)


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a model was given at start."""

    plan: KVPlan
    weight_bytes: int
    device: str = "cpu"  # torch's name of its kind

    def __str__(self) -> str:
        """One sentence for the log."""
        plan = self.plan
        return (
            f"{_size(self.weight_bytes)} of weights and {_size(plan.bytes)} for the keys and values of "
            f"{plan.capacity_tokens:,} tokens ({plan.full_sessions:,} sessions of {plan.max_context:,}), "
            f"limited by {plan.reason}."
        )


# ---------------------------------------------------------------------------------------------------------------------
# The plan


def plan_kv(
    memory: DeviceMemory,
    limits: MemoryLimits,
    *,
    bytes_per_token: int,  # of keys and values in all layers
    weight_bytes: int,
    model_context: int,  # tokens
    step_bytes: int = 0,  # what the largest step needs besides
) -> KVPlan:
    """As many blocks as the limits allow, and never more than `max_sessions` sessions of the longest length can use.

    The fraction is counted on a GPU as vLLM's gpu_memory_utilization is: of all memory, weights and step included, and
    no more than was free. On a host it is a share of what is free beside the weights. A session longer than all blocks
    is impossible, so the context is lowered to them. Raises `StartupFailed` for a `max_context` beyond the model's,
    and where the memory does not hold one session of `MIN_CONTEXT` tokens or what `kv_budget_tokens` asks for.
    """
    block_size = limits.block_size or (GPU_BLOCK_SIZE if memory.is_gpu else HOST_BLOCK_SIZE)
    context = _context(limits.max_context, model_context)
    wanted = limits.max_sessions * _blocks(context, block_size)
    block_bytes, other_bytes = bytes_per_token * block_size, weight_bytes + step_bytes
    allowed, reason = _allowed_blocks(memory, limits, block_size, block_bytes, other_bytes)
    unasked = max(HOST_UNASKED_BYTES // block_bytes, _blocks(context, block_size))
    if not (memory.is_gpu or limits.memory_fraction or limits.kv_budget_tokens) and unasked < allowed:
        allowed, reason = unasked, "what is taken unasked; raise it by --memory-fraction or --kv-budget-tokens"
    if wanted <= allowed:
        allowed, reason = wanted, f"--max-sessions {limits.max_sessions:,} of {context:,} tokens each"
    capacity = allowed * block_size
    needed = min(context, MIN_CONTEXT)
    if capacity < needed:
        raise StartupFailed(_too_small(memory, limits, needed * bytes_per_token, weight_bytes + step_bytes))
    if capacity < context:
        reason += f", which lowers the context of {context:,} tokens"
    return KVPlan(
        num_blocks=allowed,
        block_size=block_size,
        bytes=capacity * bytes_per_token,
        max_context=min(context, capacity),
        reason=reason,
    )


def step_tokens(requested: int, kind: str) -> int:
    """Tokens of one step (`--max-num-batched-tokens`) on a device of that kind; 0 takes the usual for it."""
    return requested or (GPU_STEP_TOKENS if kind == "cuda" else HOST_STEP_TOKENS)


def estimate_step_bytes(
    *, tokens: int, hidden_size: int, intermediate_size: int, vocab_size: int, itemsize: int
) -> int:
    """About what one step holds at its widest: a layer's activations, and the logits of every token.

    In a layer: the residual, its norm, queries, keys, values and attention, and three arrays within the feed-forward
    network. What is made of logits is made on the host.
    """
    return tokens * itemsize * (6 * hidden_size + 3 * intermediate_size + vocab_size)


def _context(requested: int, model_context: int) -> int:
    if requested > model_context:
        raise StartupFailed(
            f"--max-context {requested} is more than the {model_context} tokens that the model can read; lower it, or "
            "leave it out."
        )
    return requested or model_context


def _allowed_blocks(
    memory: DeviceMemory, limits: MemoryLimits, block_size: int, block_bytes: int, other_bytes: int
) -> tuple[int, str]:
    """Blocks that the explicit budget or the fraction allows, whatever the sessions can use, and which of them it was.

    `other_bytes` is what weights and steps take.
    """
    free_blocks = max(0, memory.free_bytes - other_bytes) // block_bytes
    if limits.kv_budget_tokens:
        blocks = limits.kv_budget_tokens // block_size
        if blocks > free_blocks:
            raise StartupFailed(_over_budget(memory, limits, blocks * block_bytes, other_bytes))
        return blocks, f"--kv-budget-tokens {limits.kv_budget_tokens:,}"
    fraction = limits.memory_fraction or (GPU_FRACTION if memory.is_gpu else HOST_FRACTION)
    if memory.is_gpu:
        blocks = max(0, int(fraction * memory.total_bytes) - other_bytes) // block_bytes
        reason = f"--memory-fraction {fraction:g} of the GPU's {_size(memory.total_bytes)}"
        if free_blocks < blocks:
            blocks, reason = free_blocks, f"the {_size(memory.free_bytes)} of the GPU's memory that were free"
    else:
        blocks = int(fraction * free_blocks)
        reason = f"--memory-fraction {fraction:g} of the {_size(memory.free_bytes)} that were free, less the weights"
    most = MAX_UNASKED_TOKENS // block_size
    if most < blocks:
        return most, f"the {MAX_UNASKED_TOKENS:,} tokens beyond which --kv-budget-tokens must ask"
    return blocks, reason


def _over_budget(memory: DeviceMemory, limits: MemoryLimits, kv_bytes: int, other_bytes: int) -> str:
    return (
        f"--kv-budget-tokens {limits.kv_budget_tokens} takes {_size(kv_bytes)} beside {_size(other_bytes)} for the "
        f"model, and {_size(memory.free_bytes)} are free; lower it, or leave it out."
    )


def _too_small(memory: DeviceMemory, limits: MemoryLimits, needed_bytes: int, other_bytes: int) -> str:
    if limits.kv_budget_tokens:
        return (
            f"--kv-budget-tokens {limits.kv_budget_tokens} is too little for one session; give at least {MIN_CONTEXT}."
        )
    remedy = "raise --memory-fraction, free memory, or choose a smaller model or --quantization"
    return (
        f"The memory does not hold one session: the model takes {_size(other_bytes)} and its keys and values at least "
        f"{_size(needed_bytes)}, of {_size(memory.total_bytes)} with {_size(memory.free_bytes)} free; {remedy}."
    )


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


# ---------------------------------------------------------------------------------------------------------------------
# What there is


def device_memory(device: torch.device) -> DeviceMemory:
    """Memory of a CUDA device, or of the host for any other; to be read before the model is loaded."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(device.type, total_bytes=total, free_bytes=free)
    total, free = host_memory()
    return DeviceMemory(device.type, total_bytes=total, free_bytes=free)


def host_memory(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Total and free bytes for this process: the host's, or those of a container that is allowed less.

    Free is what can be had without swapping. The folders are those of Linux; a system without them tells the total
    alone, and half of it counts as free.
    """
    total, free = _machine_memory(proc)
    for limit, used in _container_limits(proc, cgroups):
        total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


def _machine_memory(proc: Path) -> tuple[int, int]:
    try:
        fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text(encoding="ascii").splitlines())
        total, available = (1024 * int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    except (OSError, ValueError, KeyError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total // 2
    return total, available


def _container_limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes of each control group that limits this process: its own and all above it.

    Within a container the path of the group may be the host's, which does not exist here; the limit then stands at the
    root. Pages of files that were not used lately do not count as used: the kernel drops them before anything else.
    """
    for root, path, names in _memory_groups(proc, cgroups):
        folder = root / path.strip("/")
        for group in (folder, *folder.parents):
            with suppress(OSError, ValueError, KeyError):
                limit, used = (int((group / name).read_text(encoding="ascii")) for name in names[:2])
                lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
                statistics = dict(line.split(maxsplit=1) for line in lines)
                yield limit, used - int(statistics[names[2]])
            if group == root:
                break


def _memory_groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, str, tuple[str, str, str]]]:
    """Root folder, path below it, and names of limit, use and idle file pages, of the groups that count memory."""
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            yield cgroups, path, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):  # version 1
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield cgroups / "memory", path, names


# ---------------------------------------------------------------------------------------------------------------------
# What the model takes


def weight_bytes(network: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones once; quantized ones as they are stored."""
    return sum(_stored_bytes(tensor) for tensor in (*network.parameters(), *network.buffers()))


def _stored_bytes(tensor: torch.Tensor) -> int:
    # Quantized weights are tensors made of others, and `nbytes` tells what they stand for.
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(_stored_bytes(getattr(tensor, name)) for name in names)
