"""The student: a shallow copy of the target with a small head, and which of its parameters learn.

Knows nothing of data, steps or sessions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.engine.drafter_network import trained_modules
from paceline.engine.shallow import DraftHead, Network, restrict_head, shallow_copy
from paceline.errors import StartupFailed


@dataclass(frozen=True, slots=True)
class Shape:
    """`layers`: which of the target's layers the student begins as; the last `trained_layers` of them, and the norm
    behind them, learn."""

    layers: tuple[int, ...]
    trained_layers: int
    draft_vocab_size: int  # 0: all tokens


class Student:
    """A network that learns. `network` gives logits over the target's vocabulary; `states` what goes into the head."""

    def __init__(self, target: Network, shape: Shape, draft_ids: Tensor) -> None:
        self.shape = shape
        self.network = shallow_copy(target, shape.layers)
        self.head: DraftHead = restrict_head(self.network, draft_ids)
        self.network.requires_grad_(False)
        for module in self._trained_modules().values():
            module.requires_grad_(True)
        self.head_weight = self.head.linear.weight.detach().bfloat16()
        self.row_of_id = torch.full((self.head.vocab_size,), -1, dtype=torch.int64)
        self.row_of_id[draft_ids] = torch.arange(len(draft_ids))

    @property
    def draft_ids(self) -> Tensor:  # [draft_vocab_size] int64, ascending
        return self.head.draft_ids

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that learn."""
        return [parameter for module in self._trained_modules().values() for parameter in module.parameters()]

    def states(self, ids: Tensor) -> Tensor:  # [sequences, tokens] -> [sequences, tokens, hidden_size]
        decoder = self.network.base_model
        states: Tensor = decoder(input_ids=ids, use_cache=False).last_hidden_state
        return states

    def state_dict(self) -> dict[str, Tensor]:
        """What has been learned, by the names of `network.state_dict()`."""
        return {
            f"{prefix}.{name}": tensor.detach()
            for prefix, module in self._trained_modules().items()
            for name, tensor in module.state_dict().items()
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what `state_dict` gave. Raises `StartupFailed` if it is another student's."""
        own = self.state_dict()
        if {name: tensor.shape for name, tensor in tensors.items()} != {name: each.shape for name, each in own.items()}:
            raise StartupFailed(
                "The checkpoint holds the weights of another student; give the options that it was begun with, or "
                "another --output."
            )
        self.network.load_state_dict(tensors, strict=False)

    def _trained_modules(self) -> dict[str, nn.Module]:
        return trained_modules(self.network, self.shape.trained_layers)
