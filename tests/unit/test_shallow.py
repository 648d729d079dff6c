"""Shallow copies of networks, and heads that propose some tokens only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.engine.checkpoint import load_network
from paceline.engine.shallow import DraftHead, decoder_layers, restrict_head, shallow_copy
from paceline.errors import ModelUnavailable
from tests.checkpoints import FAMILIES, save_tiny_checkpoint

IDS = torch.arange(24)[None] * 13 % 320  # longer than the sliding windows


@torch.inference_mode()
def logits_of(network: Any) -> Tensor:
    result: Tensor = network(input_ids=IDS, use_cache=False).logits[0]
    return result


@pytest.fixture(params=FAMILIES)
def network(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Three layers of a family."""
    folder = save_tiny_checkpoint(tmp_path / "model", seed=3, family=request.param, layers=3)
    return load_network(folder, dtype=torch.float32)


def test_copy_of_all_layers_is_the_original(network: Any) -> None:
    """Nothing that a family has beside its layers is lost: the same logits, bit for bit."""
    assert torch.equal(logits_of(shallow_copy(network, (0, 1, 2))), logits_of(network))


def test_copy_has_the_layers_that_were_chosen(network: Any) -> None:
    """It is the original with the others taken out, and the original stays as it was."""
    expected_whole = logits_of(network)
    copied = shallow_copy(network, (0, 2))
    assert torch.equal(logits_of(network), expected_whole)
    got = logits_of(copied)
    del decoder_layers(network)[1]
    network.config.get_text_config(decoder=True).num_hidden_layers = 2
    if getattr(network.config, "layer_types", None):
        network.config.layer_types = [network.config.layer_types[number] for number in (0, 2)]
    assert torch.equal(got, logits_of(network))
    assert not torch.equal(got, expected_whole)


def test_training_a_copy_leaves_the_original_alone(network: Any) -> None:
    """Layers are copied; only embedding and head, which nobody trains, are shared."""
    expected = logits_of(network)
    copied = shallow_copy(network, (0, 1, 2))
    with torch.no_grad():
        for parameter in decoder_layers(copied).parameters():
            parameter.add_(1.0)
    assert torch.equal(logits_of(network), expected)


def test_network_without_one_list_of_layers_is_refused(network: Any) -> None:
    """Which layers to copy cannot be guessed."""
    network.config.get_text_config(decoder=True).num_hidden_layers = 7
    with pytest.raises(ModelUnavailable, match="another family"):
        decoder_layers(network)


def test_rows_of_a_reduced_head_land_on_the_targets_ids() -> None:
    """Field case C49: of the draft vocabulary [7, 2, 5], best index 0 proposes 7; all else cannot be proposed."""
    weight = torch.eye(9)
    head = DraftHead(weight, torch.tensor([7, 2, 5]))
    states = torch.zeros(1, 9)
    states[0, 7], states[0, 2], states[0, 5], states[0, 4] = 3.0, 2.0, 1.0, 9.0
    row = head(states)[0]
    assert int(row.argmax()) == 7
    assert row[[7, 2, 5]].tolist() == [3.0, 2.0, 1.0]
    assert sorted(row.isneginf().nonzero()[:, 0].tolist()) == [0, 1, 3, 4, 6, 8]
    assert row.softmax(0)[[0, 1, 3, 4, 6, 8]].tolist() == [0.0] * 6


def test_restricted_network_gives_the_targets_logits_where_it_has_any(network: Any) -> None:
    """Rows of the head are taken as they are, with their biases if there are any."""
    expected = logits_of(network)
    draft_ids = torch.tensor([2, 5, 7, 319])
    restrict_head(network, draft_ids)
    got = logits_of(network)
    torch.testing.assert_close(got[:, draft_ids], expected[:, draft_ids])
    assert int(got.isneginf().sum()) == len(got) * (320 - 4)
