"""What a drafter is trained for, on and how, as one value; and the folder that remembers it.

Knows nothing of models, and loads none, so that a command line can check what it was given at once.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import StartupFailed
from paceline.training.writing import write_whole

WAVE_ANSWERS = 512
_LEAST_WAVES = (
    4  # so that a small run, too, is asked about its own earlier answers, and loses little when it ends early
)
_HELD_OUT = 160
_PASSES = 10  # over all answers


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """All that the weights of a drafter depend on, but for the machine. None leaves a figure to the others.

    `temperatures` are pairs (temperature, share of the answers), the shares summing to 1; `prompts` is the SHA-256 of
    the prompts' file, None where the target writes its own.
    """

    target: str
    prompts: str | None = None
    answers: int = 4096
    answer_tokens: int = 160
    temperatures: tuple[tuple[float, float], ...] = ((0.0, 0.5), (0.7, 0.3), (1.0, 0.2))
    layers: tuple[int, ...] | None = None  # of the target: its first two and its last
    trained_layers: int = 2
    draft_vocab_size: int = 8192  # 0: all tokens
    steps: int | None = None  # ten passes over the answers
    batch_samples: int = 4
    learning_rate: float = 1.5e-3
    held_out: int | None = None  # 160 answers, or an eighth of a small number
    sessions: int = 128
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"

    @property
    def wave_answers(self) -> int:
        """Answers of one wave; the last may have fewer."""
        return min(WAVE_ANSWERS, -(-self.answers // _LEAST_WAVES))

    @property
    def waves(self) -> int:
        return -(-self.answers // self.wave_answers)

    @property
    def held_out_answers(self) -> int:
        """How many of the first answers are for evaluation alone. Raises `StartupFailed` if too few are left."""
        held_out = min(_HELD_OUT, max(1, self.answers // 8)) if self.held_out is None else self.held_out
        if self.answers - held_out < self.batch_samples:
            raise StartupFailed(
                f"--held-out {held_out} of --answers {self.answers} leaves fewer than one batch of --batch-samples "
                f"{self.batch_samples} to train on; make more answers, or hold fewer out."
            )
        return held_out

    def check(self) -> None:
        """Raises `StartupFailed` if they contradict each other."""
        assert self.held_out_answers

    @property
    def trained_steps(self) -> int:
        return self.steps or _PASSES * ((self.answers - self.held_out_answers) // self.batch_samples)

    def layers_of(self, count: int) -> tuple[int, ...]:
        """Which layers of a target with `count` layers the student begins as. Raises `StartupFailed` for others."""
        layers = self.layers or tuple(sorted({0, min(1, count - 1), count - 1}))
        if outside := [layer for layer in layers if not 0 <= layer < count]:
            raise StartupFailed(
                f"--layers names layer {outside[0]}, and the target's are numbered from 0 to {count - 1}; choose among those."
            )
        if not 1 <= self.trained_layers <= len(layers):
            raise StartupFailed(
                f"--trained-layers {self.trained_layers} is none of 1 to {len(layers)}, the number of layers that the "
                "drafter has; choose one of these, or more --layers."
            )
        return layers

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]  # tuples become lists


def remember(folder: Path, settings: TrainingSettings) -> None:
    """Write the settings to the folder, or compare them with those that are there.

    Raises `StartupFailed` if a run in this folder was begun with others, by the names of the options that differ.
    """
    path, given = folder / "settings.json", settings.to_json()
    if not path.exists():
        text = json.dumps(given, indent=2) + "\n"
        write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))
        return
    begun = _read(path)
    if changed := [_difference(name, begun.get(name)) for name in given if begun.get(name) != given[name]]:
        raise StartupFailed(
            f"The run in '{folder}' was begun {', '.join(changed)}; give the same options, or another --output."
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartupFailed(f"Cannot read '{path}' ({error}); choose another --output.") from error
    return settings if isinstance(settings, dict) else {}


def _difference(name: str, begun: Any) -> str:
    option = "--" + name.replace("_", "-")
    if begun is None:
        return f"without {option}"
    if name == "prompts":
        return f"with other contents of {option}"
    if name == "temperatures":
        return f"with {option} " + ",".join(f"{temperature:g}:{share:g}" for temperature, share in begun)
    return f"with {option} " + (",".join(map(str, begun)) if isinstance(begun, list) else str(begun))
