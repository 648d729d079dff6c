"""The folder of a trained drafter: the few tensors that were trained, which target they belong to, how good they are.

Two files, after the conventions of the `speculators` checkpoints that vLLM reads: `config.json`, and `model.safetensors`
with the tensors in bfloat16 by the names of the shallow network's state dict, beside `d2t` [draft_vocab_size] int64: the
id that the target has for draft id i is i + d2t[i] (as in EAGLE-3, Li et al. 2025). Knows nothing of networks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from paceline.errors import ModelUnavailable

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"

_ARCHITECTURE, _MODEL_TYPE = "PacelineShallowDrafter", "paceline_shallow"
_ID_OFFSETS = "d2t"
_READ_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, SafetensorError)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedDrafter:
    """What such a folder holds.

    The drafter is a shallow copy of the target named `verifier`: its layers `target_layers`, of which the last
    `trained_layers` were trained, and a head for `draft_ids`.
    """

    verifier: str  # as `resolve_checkpoint` takes it
    verifier_architectures: tuple[str, ...]
    target_sha256: str  # of what is taken from the target (`drafter_network.target_fingerprint`)
    target_layers: tuple[int, ...]
    trained_layers: int
    draft_ids: Tensor  # [draft_vocab_size] int64, ascending
    weights: Mapping[str, Tensor]  # what was trained
    layer_config: Mapping[str, Any]  # the shallow network's configuration
    draft_length: int  # at which the evaluation predicts the highest speed
    expected_acceptance: tuple[tuple[float, float], ...] = ()  # (temperature, acceptance) of the evaluation
    evaluation: Mapping[str, Any] = field(default_factory=dict)  # all of it, as JSON

    def write_weights(self, path: Path) -> None:
        """Write the tensors to a file, `WEIGHTS_FILE` in the end. Raises `OSError` if that fails."""
        tensors = {name: tensor.detach().cpu().bfloat16().contiguous() for name, tensor in self.weights.items()}
        tensors[_ID_OFFSETS] = self.draft_ids.cpu() - torch.arange(len(self.draft_ids))
        path.write_bytes(save(tensors, metadata={"format": "pt"}))

    def write_config(self, path: Path) -> None:
        """Write all the rest to a file, `CONFIG_FILE` in the end. Raises `OSError` if that fails."""
        path.write_text(json.dumps(self._config(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> TrainedDrafter:
        """Raises `ModelUnavailable` if it is a drafter of another kind, incomplete or damaged."""
        try:
            config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
            kind = config["speculators_model_type"]
            if kind != _MODEL_TYPE:
                raise ModelUnavailable(
                    f"'{folder}' is a drafter of the kind {kind!r}, which Paceline does not run; train one by `paceline "
                    "train`, or choose a whole model."
                )
            return cls._of(config, load_file(folder / WEIGHTS_FILE))
        except _READ_ERRORS as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ModelUnavailable(
                f"The drafter in '{folder}' is incomplete or damaged ({reason}); copy the folder again, or train it anew."
            ) from error

    @classmethod
    def _of(cls, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> TrainedDrafter:
        offsets = tensors.pop(_ID_OFFSETS)
        draft_ids = offsets + torch.arange(len(offsets))
        if len(draft_ids) != config["draft_vocab_size"] or not bool((draft_ids.diff() > 0).all()) or draft_ids[0] < 0:
            raise ValueError(f"{_ID_OFFSETS} does not name {config['draft_vocab_size']} tokens in ascending order")
        layers, trained_layers = tuple(config["target_layers"]), config["trained_layers"]
        if not 0 < trained_layers <= len(layers) or min(layers) < 0:
            raise ValueError(f"{trained_layers} of the layers {list(layers)} cannot have been trained")
        speculators = config["speculators_config"]
        return cls(
            verifier=speculators["verifier"]["name_or_path"],
            verifier_architectures=tuple(speculators["verifier"]["architectures"]),
            target_sha256=config["target_sha256"],
            target_layers=layers,
            trained_layers=trained_layers,
            draft_ids=draft_ids,
            weights=tensors,
            layer_config=config["transformer_layer_config"],
            draft_length=speculators["proposal_methods"][0]["speculative_tokens"],
            expected_acceptance=tuple((float(at), float(share)) for at, share in config["expected_acceptance"]),
            evaluation=config["evaluation"],
        )

    def _config(self) -> dict[str, Any]:
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": self.draft_length,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        return {
            "architectures": [_ARCHITECTURE],
            "speculators_model_type": _MODEL_TYPE,
            "draft_vocab_size": len(self.draft_ids),
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "transformer_layer_config": dict(self.layer_config),
            "speculators_config": {
                "algorithm": _MODEL_TYPE,
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": self.verifier, "architectures": list(self.verifier_architectures)},
            },
            "target_layers": list(self.target_layers),
            "trained_layers": self.trained_layers,
            "target_sha256": self.target_sha256,
            "expected_acceptance": [list(pair) for pair in self.expected_acceptance],
            "evaluation": dict(self.evaluation),
        }


def is_drafter_folder(checkpoint: Path | str) -> bool:
    """Whether a resolved checkpoint is a folder with a drafter, of whatever kind, and not with a whole model."""
    if isinstance(checkpoint, str):
        return False
    try:
        config = json.loads((checkpoint / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # whoever loads it as a model says what is wrong
        return False
    return isinstance(config, dict) and "speculators_model_type" in config
