"""The network of a trained drafter, put together from its folder and its target's checkpoint.

Only what the drafter needs of the target is read: the embedding, the first layers, and from the head the rows of the
tokens that can be proposed. What the folder holds must fit in every name and shape, and what is taken from the target
must be what the drafter was trained beside. Knows nothing of sessions or steps.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from paceline.engine.checkpoint import (
    load_network,
    reported_as_unavailable,
    resolve_checkpoint,
    without_progress_bars,
)
from paceline.engine.drafter_folder import TrainedDrafter, is_drafter_folder
from paceline.engine.shallow import decoder_layers, restrict_head, shallow_copy
from paceline.errors import ModelUnavailable

_FINGERPRINT_VALUES = 4096  # of each tensor


@dataclass(frozen=True, slots=True)
class DrafterNetwork:
    """A trained drafter that is ready to run."""

    network: PreTrainedModel
    target_checkpoint: Path | str  # resolved; its tokenizer is the drafter's
    expected_acceptance: tuple[tuple[float, float], ...]  # (temperature, acceptance) of its evaluation


def load_drafter(
    folder: Path,
    *,
    verifier: str | None,
    dtype: torch.dtype,
    device: torch.device,
    cache_dir: Path | None,
) -> DrafterNetwork:
    """The drafter in `folder`; `verifier` says where its target's checkpoint is, if not where the folder says.

    Raises `ModelUnavailable` if the folder or the target cannot be used, or do not belong together.
    """
    drafter = TrainedDrafter.read(folder)
    checkpoint = _find_target(drafter, verifier, folder, cache_dir)
    # float16 would round differently what the fingerprint is taken of.
    network = _start_of_target(drafter, checkpoint, torch.float32 if dtype is torch.float16 else dtype)
    shallow = shallow_copy(network, drafter.target_layers)
    shallow.generation_config = network.generation_config
    restrict_head(shallow, drafter.draft_ids)
    _fill_trained(shallow, drafter, folder)
    if target_fingerprint(shallow, drafter.trained_layers) != drafter.target_sha256:
        raise ModelUnavailable(
            f"The drafter in '{folder}' was trained for another revision of '{drafter.verifier}' than '{checkpoint}' has; "
            "name the checkpoint that it was trained for by --verifier, or train it anew."
        )
    with reported_as_unavailable(f"the drafter in '{folder}'"):  # layers may hold more than checkpoints do
        shallow.to(device, dtype)  # type: ignore[arg-type]  # its decorator hides the signature
    return DrafterNetwork(shallow, checkpoint, drafter.expected_acceptance)


def trained_modules(
    network: PreTrainedModel,  # a shallow copy
    trained_layers: int,
) -> dict[str, nn.Module]:
    """What is trained of a shallow copy, by name: its last layers, and the norm behind them."""
    layers = decoder_layers(network)
    names = {id(module): name for name, module in network.named_modules()}
    return {names[id(module)]: module for module in (*list(layers)[-trained_layers:], _final_norm(network, layers))}


def target_fingerprint(
    network: PreTrainedModel,  # a shallow copy with its head restricted
    trained_layers: int,
) -> str:
    """SHA-256 (hex) over what a shallow copy has of its target: all that is not trained.

    Of each tensor the name, the shape and some evenly spaced values, rounded to bfloat16, so that it is the same in
    whichever of float32 and bfloat16 the target is loaded.
    """
    trained = _trained_state(network, trained_layers)
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        if name not in trained and tensor.is_floating_point():
            stride = max(1, tensor.numel() // _FINGERPRINT_VALUES)
            values = tensor.flatten()[::stride].cpu().bfloat16().contiguous()
            digest.update(f"{name} {list(tensor.shape)}".encode())
            digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _find_target(drafter: TrainedDrafter, verifier: str | None, folder: Path, cache_dir: Path | None) -> Path | str:
    name = verifier or drafter.verifier
    try:
        checkpoint = resolve_checkpoint(name, cache_dir=cache_dir)
    except ModelUnavailable as error:
        raise ModelUnavailable(
            f"The drafter in '{folder}' needs its target's checkpoint. {error} --verifier names it, wherever it is."
        ) from error
    if is_drafter_folder(checkpoint):
        raise ModelUnavailable(
            f"'{name}' is a drafter itself and cannot be the target of the one in '{folder}'; name a whole model by "
            "--verifier."
        )
    return checkpoint


def _start_of_target(drafter: TrainedDrafter, checkpoint: Path | str, dtype: torch.dtype) -> PreTrainedModel:
    """The target on the CPU, with the weights of its first layers, as far as the drafter needs them, and no others."""
    with reported_as_unavailable(f"'{checkpoint}'"), without_progress_bars():
        config: PreTrainedConfig = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
    _refuse_unless_fitting(drafter, checkpoint, config)
    with reported_as_unavailable(f"'{checkpoint}'"), _silent():
        network = load_network(checkpoint, dtype=dtype, config=_shortened(config, _needed_layers(drafter, config)))
        _append_layers(network, config)
    return network


def _needed_layers(drafter: TrainedDrafter, config: PreTrainedConfig) -> int:
    """How many of the target's first layers are loaded: those that are its own in the drafter, and so many that there is
    one of each type, for what stands beside the layers (such as rotary embeddings) knows the types that it has met."""
    last_own = max(drafter.target_layers[: -drafter.trained_layers], default=0)
    layer_types = list(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    met = [layer_types.index(layer_types[layer]) for layer in drafter.target_layers if layer_types]
    return 1 + max([last_own, *met])


def _refuse_unless_fitting(drafter: TrainedDrafter, checkpoint: Path | str, config: PreTrainedConfig) -> None:
    text = config.get_text_config(decoder=True)
    if getattr(config, "quantization_config", None):
        raise ModelUnavailable(
            f"'{checkpoint}' is quantised, and a drafter takes its first layers from the weights as they were trained; "
            "name the checkpoint before quantisation by --verifier."
        )
    layers, tokens = 1 + max(drafter.target_layers), 1 + int(drafter.draft_ids[-1])
    if text.num_hidden_layers < layers or text.vocab_size < tokens:
        raise ModelUnavailable(
            f"'{checkpoint}' has {text.num_hidden_layers} layers and {text.vocab_size} tokens, and the drafter was trained "
            f"for a target of at least {layers} layers and {tokens} tokens; name that one by --verifier."
        )


def _shortened(config: PreTrainedConfig, count: int) -> PreTrainedConfig:
    """That of the same model with its first `count` layers alone."""
    shortened = copy.deepcopy(config)
    _set_layers(shortened, count, config)
    return shortened


def _set_layers(config: PreTrainedConfig, count: int, whole: PreTrainedConfig) -> None:
    """Have the configuration describe the first `count` layers of the whole model."""
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = count
    if layer_types := getattr(whole.get_text_config(decoder=True), "layer_types", None):
        text.layer_types = list(layer_types[:count])


def _append_layers(network: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Give a shortened network the layers it lacks, without memory for their weights."""
    with torch.device("meta"):
        whole: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=network.dtype)  # type: ignore[no-untyped-call]
    layers, all_layers = decoder_layers(network), decoder_layers(whole)
    layers.extend(list(all_layers)[len(layers) :])
    _set_layers(network.config, len(layers), config)


def _fill_trained(network: PreTrainedModel, drafter: TrainedDrafter, folder: Path) -> None:
    """Put what was trained in its place; raises `ModelUnavailable` unless it is exactly what belongs there."""
    places, weights = _trained_state(network, drafter.trained_layers), drafter.weights
    faults = [f"lacks {name}" for name in sorted(places.keys() - weights.keys())]
    faults += [f"has {name}, for which there is no place" for name in sorted(weights.keys() - places.keys())]
    faults += [
        f"has {name} in the shape {list(weights[name].shape)} and not {list(place.shape)}"
        for name, place in places.items()
        if name in weights and weights[name].shape != place.shape
    ]
    if faults:
        raise ModelUnavailable(
            f"The drafter in '{folder}' does not fit its target: it {faults[0]} ({len(faults)} such in all); name the "
            "checkpoint that it was trained for by --verifier, or train it anew."
        )
    network.load_state_dict({name: weights[name].to(network.dtype) for name in places}, strict=False, assign=True)


def _trained_state(network: PreTrainedModel, trained_layers: int) -> dict[str, Tensor]:
    """The tensors of what is trained, by their names in the network's state dict."""
    return {
        f"{prefix}.{name}": tensor
        for prefix, module in trained_modules(network, trained_layers).items()
        for name, tensor in module.state_dict().items()
    }


def _final_norm(network: PreTrainedModel, layers: nn.ModuleList) -> nn.Module:
    """The module behind the layers: the last beside them that has a weight as long as the states are."""
    parent = next(module for module in network.modules() if any(child is layers for child in module.children()))
    size: Any = network.config.get_text_config(decoder=True).hidden_size
    beside = [
        child
        for child in parent.children()
        if isinstance(getattr(child, "weight", None), Tensor) and child.weight.shape == (size,)
    ]
    return beside[-1]


@contextmanager
def _silent() -> Iterator[None]:
    """Keep transformers from reporting, at length, the layers that are left out on purpose."""
    previous = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(previous)
