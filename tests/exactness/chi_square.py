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


def conditional_p_value(
    counts: Tensor,  # [conditions, outcomes]
    law: Tensor,  # [conditions, outcomes] probabilities, each row adding up to 1
) -> float:
    """The p-value of all rows together, each judged given its own total; 0 if an impossible outcome was counted.

    Outcomes of a row that are expected fewer than five times are judged as one.
    """
    assert counts.shape == law.shape
    statistic, degrees = 0.0, 0
    for row_counts, row_law in zip(counts.double(), law.double(), strict=True):
        if row_counts[row_law == 0.0].any():
            return 0.0
        expected = row_law * row_counts.sum()
        is_rare = expected < 5.0
        observed = torch.cat([row_counts[~is_rare], row_counts[is_rare].sum()[None]])
        expected = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
        is_judged = expected > 0.0
        statistic += float(((observed - expected) ** 2)[is_judged].div(expected[is_judged]).sum())
        degrees += int(is_judged.sum()) - 1
    return float(torch.special.gammaincc(torch.tensor(degrees / 2.0, dtype=torch.float64), torch.tensor(statistic / 2)))
