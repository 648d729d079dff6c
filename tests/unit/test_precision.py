"""Which number format is chosen, with the measurement replaced by a table."""

from __future__ import annotations

import pytest
import torch

from paceline.engine.precision import MIN_SPEEDUP, PROBE_ROWS, choose_dtype, time_matmul
from paceline.errors import StartupFailed


def bfloat16_speedup(speedup: float) -> torch.dtype:
    """What "auto" chooses where bfloat16 multiplies `speedup` times as fast as float32."""
    seconds = {torch.float32: 1.0, torch.bfloat16: 1.0 / speedup}
    return choose_dtype("auto", "cpu", time_matmul=lambda dtype, rows, device: seconds[dtype])


def test_auto_takes_bfloat16_where_it_is_clearly_faster() -> None:
    """Twice the speed is worth the lost bits."""
    assert bfloat16_speedup(2.0) is torch.bfloat16


@pytest.mark.parametrize("speedup", [0.1, 1.0, MIN_SPEEDUP - 0.01])
def test_auto_stays_with_float32_where_bfloat16_gains_little_or_loses(speedup: float) -> None:
    """A gain within measurement noise must not decide."""
    assert bfloat16_speedup(speedup) is torch.float32


def test_auto_weighs_all_probed_row_counts_together() -> None:
    """A loss at one token does not outweigh a large gain on the blocks that verification feeds."""

    def seconds(dtype: torch.dtype, rows: int, device: torch.device) -> float:
        return 1.1 if (dtype, rows) == (torch.bfloat16, PROBE_ROWS[0]) else {torch.float32: 1.0}.get(dtype, 0.2)

    assert choose_dtype("auto", "cpu", time_matmul=seconds) is torch.bfloat16


def test_auto_measures_on_the_device_of_the_model() -> None:
    """The probe runs where the model will run."""
    seen: set[str] = set()

    def seconds(dtype: torch.dtype, rows: int, device: torch.device) -> float:
        seen.add(str(device))
        return 1.0

    choose_dtype("auto", "cuda:1", time_matmul=seconds)
    assert seen == {"cuda:1"}


@pytest.mark.parametrize(
    ("requested", "device", "expected"),
    [
        ("float32", "cpu", torch.float32),
        ("bfloat16", "cpu", torch.bfloat16),
        ("float16", "cuda", torch.float16),
    ],
)
def test_named_dtype_is_taken_without_measuring(requested: str, device: str, expected: torch.dtype) -> None:
    """Whoever names a dtype gets it."""

    def refuse(dtype: torch.dtype, rows: int, device: torch.device) -> float:
        raise AssertionError("measured")

    assert choose_dtype(requested, device, time_matmul=refuse) is expected


@pytest.mark.parametrize(("requested", "named"), [("float16", "CPU"), ("int3", "int3")])
def test_unusable_dtype_is_refused_by_name(requested: str, named: str) -> None:
    """float16 on a CPU, and names torch does not know, stop the start with a sentence that says what to use."""
    with pytest.raises(StartupFailed, match=named) as raised:
        choose_dtype(requested, "cpu")
    assert "bfloat16" in raised.value.message


def test_probe_measures_a_positive_time() -> None:
    """The real probe runs for both formats on this machine."""
    for dtype in (torch.float32, torch.bfloat16):
        assert time_matmul(dtype, 1, torch.device("cpu")) > 0.0
