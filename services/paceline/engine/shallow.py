"""A shallow copy of a model: few of its own layers between its own embedding and a part of its own output head.

What `paceline train` makes a drafter of. The first layers stay the target's and turn tokens into states as it does
(after Liu et al. 2024, "Kangaroo"); the last ones are trained. So only those, and which tokens can be proposed, are
stored: embedding, first layers and head are read from the target's checkpoint. Any decoder of transformers will do whose
layers stand in one list. Knows nothing of files, sessions or training.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.errors import ModelUnavailable

DRAFT_IDS = "draft_ids"

Network = PreTrainedModel
"""What is copied, for those who need no more of transformers than its name."""


class DraftHead(nn.Module):
    """An output head with rows for some tokens only.

    Gives logits over the whole vocabulary, -inf for tokens without a row, so that nobody behind it has to know.
    """

    def __init__(self, weight: Tensor, draft_ids: Tensor, *, bias: Tensor | None = None) -> None:
        """Take the rows `draft_ids` [draft_vocab_size] of a head's `weight` [vocab_size, hidden_size]."""
        super().__init__()
        self.vocab_size = len(weight)
        self.linear = nn.Linear(weight.shape[1], len(draft_ids), bias=bias is not None, dtype=weight.dtype)
        self.linear.weight = nn.Parameter(weight[draft_ids].detach().clone(), requires_grad=False)
        if bias is not None:
            self.linear.bias = nn.Parameter(bias[draft_ids].detach().clone(), requires_grad=False)
        self.draft_ids: Tensor
        self.register_buffer(DRAFT_IDS, draft_ids.clone())

    def forward(self, states: Tensor) -> Tensor:  # [..., hidden_size] -> [..., vocab_size]
        logits: Tensor = self.linear(states)
        return logits.new_full((*logits.shape[:-1], self.vocab_size), float("-inf")).index_copy_(
            -1, self.draft_ids.to(logits.device), logits
        )


def shallow_copy(network: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A network of `network`'s kind made of its layers with these numbers, in this order.

    Embedding and head are shared with `network`, all else is copied. Raises `ModelUnavailable` where the layers cannot
    be told.
    """
    source = decoder_layers(network)
    assert layers, "at least one layer"
    config = copy.deepcopy(network.config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = len(layers)
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[number] for number in layers]
    with torch.device("meta"):
        shallow: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=network.dtype, attn_implementation=network.config._attn_implementation
        )
    _fill_all_but_layers(shallow, network)
    for place, number in enumerate(layers):
        layer = copy.deepcopy(source[number])
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = place  # type: ignore[assignment]
            if hasattr(module, "config"):
                module.config = text  # type: ignore[assignment]
        decoder_layers(shallow)[place] = layer
    shallow.eval()  # type: ignore[no-untyped-call]
    return shallow


def decoder_layers(network: PreTrainedModel) -> nn.ModuleList:
    """The list of a decoder's layers. Raises `ModelUnavailable` if there is none of the stated length, or several."""
    count = network.config.get_text_config(decoder=True).num_hidden_layers
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList) and 0 < len(module) == count]
    if len(lists) != 1:
        raise ModelUnavailable(
            f"The layers of '{network.config.model_type}' models stand in {len(lists)} lists, not in one; a shallow copy "
            "cannot be made of them; choose a target of another family."
        )
    return lists[0]


def restrict_head(network: PreTrainedModel, draft_ids: Tensor) -> DraftHead:
    """Let the network propose these tokens only."""
    head: Any = network.get_output_embeddings()  # type: ignore[no-untyped-call]
    restricted = DraftHead(head.weight, draft_ids, bias=getattr(head, "bias", None))
    network.set_output_embeddings(restricted)  # type: ignore[no-untyped-call]
    return restricted


def _fill_all_but_layers(shallow: PreTrainedModel, network: PreTrainedModel) -> None:
    """Put the original's modules, or copies of the small ones, in place of the copy's empty ones."""
    ours, theirs = decoder_layers(shallow), decoder_layers(network)
    for name, module in list(shallow.named_modules()):
        if any(child is ours for child in module.children()):
            original = network.get_submodule(name)
            for child_name, child in original.named_children():
                if child is not theirs:
                    module.set_submodule(child_name, child if _is_embedding(child) else copy.deepcopy(child))
    head = network.get_output_embeddings()  # type: ignore[no-untyped-call]
    shallow.set_output_embeddings(head)  # type: ignore[no-untyped-call]


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding)
