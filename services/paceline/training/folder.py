"""Writing the folder of a trained drafter (`engine.drafter_folder`) from a student."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.engine.drafter_folder import CONFIG_FILE, WEIGHTS_FILE, TrainedDrafter
from paceline.engine.drafter_network import target_fingerprint
from paceline.training.evaluation import Evaluation
from paceline.training.student import Student
from paceline.training.writing import write_whole


def write_drafter(folder: Path, student: Student, *, verifier: str, evaluation: Evaluation) -> None:
    """Write what `CausalModel.load` takes as a drafter; the file that makes the folder one comes last.

    `verifier` is the target's name, as `resolve_checkpoint` takes it, and `evaluation` has its costs. Raises
    `StartupFailed` if there is no room, or no permission.
    """
    shape, network = student.shape, student.network
    drafter = TrainedDrafter(
        verifier=verifier,
        verifier_architectures=(type(network).__name__,),
        target_sha256=target_fingerprint(network, shape.trained_layers),
        target_layers=shape.layers,
        trained_layers=shape.trained_layers,
        draft_ids=student.draft_ids,
        weights=student.state_dict(),
        layer_config=_public(json.loads(network.config.to_json_string(use_diff=False))),
        draft_length=evaluation.best_draft_length,
        expected_acceptance=evaluation.expected_acceptance,
        evaluation=evaluation.to_json(),
    )
    write_whole(folder / WEIGHTS_FILE, drafter.write_weights)
    write_whole(folder / CONFIG_FILE, drafter.write_config)


def _public(config: dict[str, Any]) -> dict[str, Any]:
    """Without what transformers notes for itself, such as where on this machine the target was loaded from."""
    return {name: value for name, value in config.items() if not name.startswith("_")}
