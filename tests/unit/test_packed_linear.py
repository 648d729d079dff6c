"""Packed linear layers compute what the layers they replace do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.engine import packed_linear
from paceline.engine.packed_linear import PackedLinear, pack_linears

# Operands are bfloat16 and sums longer: outputs of about 1 agree to their last bit or two.
ROUNDING = 2.0**-6


class Special(nn.Linear):
    """As a quantised layer would be: a linear layer of another kind."""


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(48, 96), nn.SiLU(), Special(96, 96), nn.Linear(96, 33, bias=False))
    return layers.to(dtype).eval()


@pytest.mark.parametrize("rows", [1, 3, 8, 70])
@torch.inference_mode()
def test_packed_layers_compute_the_same(rows: int) -> None:
    """For any number of rows, with and without bias."""
    plain, packed = network(torch.bfloat16), network(torch.bfloat16)
    inputs = torch.randn(1, rows, 48, dtype=torch.bfloat16)
    count = pack_linears(packed)
    assert count in (0, 2), "all plain layers, or none where torch cannot"
    torch.testing.assert_close(packed(inputs).float(), plain(inputs).float(), atol=ROUNDING, rtol=ROUNDING)


def test_other_formats_and_kinds_stay_as_they_are() -> None:
    """float32, in which results must be exact, and layers of other classes."""
    assert pack_linears(network(torch.float32)) == 0
    layers = network(torch.bfloat16)
    pack_linears(layers)
    assert type(layers[2]) is Special


def test_nothing_is_packed_where_torch_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators are not torch's public ones: should they go or change, the plain layers serve."""

    def fail(self: PackedLinear, linear: nn.Linear) -> None:
        raise AttributeError("no such operator")

    layers = network(torch.bfloat16)
    monkeypatch.setattr(packed_linear.PackedLinear, "__init__", fail)
    assert pack_linears(layers) == 0
    assert all(type(layer) is not PackedLinear for layer in layers)
