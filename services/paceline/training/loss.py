"""The distance of a drafter's distribution to the target's, and its gradient.

Acceptance is 1 - TV at temperature 1 and agreement of the arg max at temperature 0. Cross-entropy against the target's
most probable tokens (Hinton et al. 2015), mixed with that of the token it gave, serves both: it bounds TV from above
(Pinsker), and its gradient does not vanish where the two disagree.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _SparseCrossEntropy(torch.autograd.Function):
    """Cross-entropy of softmax(states @ weight.T) against sparse targets, the mean over rows.

    The gradient of a row is softmax - targets, so it is made in the same pass: the rows over the vocabulary, by far the
    largest thing in training, are never kept.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, indices: Tensor, probs: Tensor) -> Tensor:
        logits = (states.to(weight.dtype) @ weight.T).float()
        peaks = logits.amax(-1, keepdim=True)
        scores = logits.gather(1, indices) - peaks
        masses = logits.sub_(peaks).exp_()
        totals = masses.sum(-1, keepdim=True)
        loss = -(probs * (scores - totals.log())).sum() / len(states)
        gradient = masses.mul_(probs.sum(-1, keepdim=True) / totals).scatter_add_(1, indices, -probs)
        ctx.save_for_backward(gradient.to(weight.dtype) @ weight)
        ctx.rows, ctx.dtype = len(states), states.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return (gradient.float() * (gradients[0] / ctx.rows)).to(ctx.dtype), None, None, None


def sparse_cross_entropy(
    states: Tensor,  # [rows, hidden_size], what goes into the head
    weight: Tensor,  # [draft_vocab_size, hidden_size], the head, which is not trained
    indices: Tensor,  # [rows, entries] int64, rows of the head; may repeat within a row
    probs: Tensor,  # [rows, entries] float32, at least 0
) -> Tensor:  # scalar, in nats
    """Mean cross-entropy against targets that give `probs` to `indices`."""
    loss: Tensor = _SparseCrossEntropy.apply(states, weight, indices, probs)  # type: ignore[no-untyped-call]
    return loss


def mixed_targets(
    top_ids: Tensor,  # [rows, entries] int64, of the target's vocabulary
    top_log_probs: Tensor,  # [rows, entries], at temperature 1
    given_ids: Tensor,  # [rows] int64, the tokens that the target gave
    row_of_id: Tensor,  # [vocab_size] int64: the row of the head for each token, -1 where there is none
    *,
    given_weight: float,
) -> tuple[Tensor, Tensor]:  # indices and probs, [rows, entries + 1]
    """What the loss is taken against: the target's most probable tokens, normalised over those that can be proposed, and
    with weight `given_weight` the token that it gave."""
    rows = row_of_id[torch.cat((top_ids, given_ids[:, None]), 1)]
    probs = top_log_probs.float().exp() * (rows[:, :-1] >= 0)
    probs = probs / probs.sum(-1, keepdim=True).clamp_min(1e-6) * (1.0 - given_weight)
    given = (rows[:, -1:] >= 0).float() * given_weight
    return rows.clamp_min(0), torch.cat((probs, given), 1)
