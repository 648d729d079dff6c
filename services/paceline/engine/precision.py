"""Which number format a model computes in, decided by measurement where the user leaves it open.

Knows nothing of models: the probe multiplies matrices of the shapes that decoding does.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from paceline.errors import StartupFailed

TimeMatmul = Callable[[torch.dtype, int, torch.device], float]
"""From (dtype, rows, device) to the seconds that a weight matrix takes to multiply that many rows."""

PROBE_ROWS = (1, 4, 8)  # one token, and the blocks that verification feeds
MIN_SPEEDUP = 1.2  # below it bfloat16 is not worth its lost bits, and the choice would hang on noise
_REPEATS = 15
_CPU_SHAPE = (2048, 1024)
_ACCELERATOR_SHAPE = (8192, 8192)  # small ones would measure the launch, not the arithmetic

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def time_matmul(dtype: torch.dtype, rows: int, device: torch.device) -> float:
    """Fewest seconds that `[rows, in] @ [in, out]` took on `device`, with the threads torch has now.

    The fewest, since whatever else the machine is doing can only add to them.
    """
    out_features, in_features = _CPU_SHAPE if device.type == "cpu" else _ACCELERATOR_SHAPE
    weight = torch.ones(out_features, in_features, dtype=dtype, device=device)
    inputs = torch.ones(rows, in_features, dtype=dtype, device=device)

    def multiply() -> float:
        started = time.perf_counter()
        torch.nn.functional.linear(inputs, weight)[0, 0].item()  # .item() waits for the device
        return time.perf_counter() - started

    multiply()  # the first one also chooses and prepares a kernel
    return min(multiply() for _ in range(_REPEATS))


def choose_dtype(requested: str, device: torch.device | str, *, time_matmul: TimeMatmul = time_matmul) -> torch.dtype:
    """The dtype that `requested` ("auto", "float32", "bfloat16", "float16") stands for on `device`.

    "auto" is bfloat16 where a probe of a few hundredths of a second finds it faster by `MIN_SPEEDUP`, else float32.
    Raises `StartupFailed` for an unknown name, and for float16 on a CPU.
    """
    device = torch.device(device)
    if requested == "auto":
        return _faster_dtype(device, time_matmul)
    if requested not in _DTYPES:
        raise StartupFailed(f"There is no dtype '{requested}'; use auto, {', '.join(_DTYPES)}.")
    if requested == "float16" and device.type == "cpu":
        raise StartupFailed("float16 overflows easily and is slow on a CPU; use auto, bfloat16 or float32 there.")
    return _DTYPES[requested]


def _faster_dtype(device: torch.device, time_matmul: TimeMatmul) -> torch.dtype:
    float32_s, bfloat16_s = (
        sum(time_matmul(dtype, rows, device) for rows in PROBE_ROWS) for dtype in (torch.float32, torch.bfloat16)
    )
    return torch.bfloat16 if float32_s >= MIN_SPEEDUP * bfloat16_s else torch.float32
