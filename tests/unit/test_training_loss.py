"""The loss of a drafter: its value and gradient against the plain formula, and the targets it is taken against."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.training.loss import mixed_targets, sparse_cross_entropy


def _case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(0)
    states = torch.randn(5, 6, generator=dice)
    weight = torch.randn(11, 6, generator=dice)
    indices = torch.randint(11, (5, 4), generator=dice)
    indices[0] = torch.tensor([3, 3, 7, 3])  # a row of the head may come several times
    probs = torch.rand(5, 4, generator=dice)
    probs[1] = 0.0  # a row that nothing can be said of
    return states, weight, indices, probs


def _plain_loss(states: Tensor, weight: Tensor, indices: Tensor, probs: Tensor) -> Tensor:
    log_probs = (states @ weight.T).log_softmax(-1)
    return -(probs * log_probs.gather(1, indices)).sum() / len(states)


def test_loss_and_gradient_are_those_of_the_plain_formula() -> None:
    """What is computed in one pass, without keeping the rows over the vocabulary, is cross-entropy and its gradient."""
    states, weight, indices, probs = _case()
    first, second = states.clone().requires_grad_(), states.clone().requires_grad_()
    loss, expected = sparse_cross_entropy(first, weight, indices, probs), _plain_loss(second, weight, indices, probs)
    torch.testing.assert_close(loss, expected)
    (3.0 * loss).backward()  # type: ignore[no-untyped-call]
    (3.0 * expected).backward()  # type: ignore[no-untyped-call]
    assert second.grad is not None
    torch.testing.assert_close(first.grad, second.grad)


def test_loss_changes_none_of_its_inputs() -> None:
    """The head is shared with the target, and the targets with the next pass over the data."""
    inputs = _case()
    before = [tensor.clone() for tensor in inputs]
    sparse_cross_entropy(*inputs)
    for tensor, old in zip(inputs, before, strict=True):
        assert torch.equal(tensor, old)


def test_targets_are_normalised_over_what_can_be_proposed() -> None:
    """The target's probable tokens share 1 - given_weight among those that the head has; the given token has its own."""
    top_log_probs = torch.tensor([[0.5, 0.3, 0.1]]).log()
    row_of_id = torch.tensor([-1, 0, 1, -1, 2])
    indices, probs = mixed_targets(
        torch.tensor([[1, 3, 4]]), top_log_probs, torch.tensor([2]), row_of_id, given_weight=0.3
    )
    assert indices.tolist() == [[0, 0, 2, 1]]  # token 3 has no row: any will do, for its probability is 0
    torch.testing.assert_close(probs, torch.tensor([[0.7 * 5 / 6, 0.0, 0.7 * 1 / 6, 0.3]]))


def test_row_without_any_token_to_propose_asks_for_nothing() -> None:
    """Where the head has none of the probable tokens and not the given one, the row adds nothing to the loss."""
    _, probs = mixed_targets(
        torch.tensor([[0, 3]]), torch.zeros(1, 2), torch.tensor([0]), torch.tensor([-1, 0, 1, -1]), given_weight=0.3
    )
    assert probs.tolist() == [[0.0, 0.0, 0.0]]
