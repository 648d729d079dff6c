"""Chi-square tests of drawn tokens against a law, in torch alone."""

from __future__ import annotations

import torch
from torch import Tensor

SIGNIFICANCE = 1e-4
"""Odds of a false alarm of one test whose seeds were drawn afresh; with fixed seeds the outcome never changes."""


def chi_square_p_value(
    counts: Tensor,  # [outcomes] how often each outcome was drawn
    law: Tensor,  # [outcomes] probabilities, adding up to 1
) -> float:
    """The p-value of the counts under the law; 0 if an outcome of probability 0 was drawn."""
    assert counts.shape == law.shape
    counts, law = counts.double().flatten(), law.double().flatten()
    is_possible = law > 0.0
    if counts[~is_possible].any():
        return 0.0
    expected = law[is_possible] * counts.sum()
    degrees = int(is_possible.sum()) - 1
    if degrees == 0:
        return 1.0
    statistic = ((counts[is_possible] - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor(degrees / 2.0, dtype=torch.float64), statistic / 2.0))
