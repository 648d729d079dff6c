"""The log of a training: a file of JSON lines that grows with the steps, and is cut back to where a run goes on from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import StartupFailed
from paceline.training.writing import write_whole


class TrainingLog:
    """The entries of one file; each has a `step`, in ascending order."""

    def __init__(self, path: Path) -> None:
        """Read what is there. Raises `StartupFailed` if that is no log."""
        self._path = path
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            self.entries: list[dict[str, Any]] = [json.loads(line) for line in lines]
        except (OSError, ValueError) as error:
            raise StartupFailed(
                f"Cannot read '{path}' ({error}); delete it, and run the same command again."
            ) from error

    def append(self, entry: Mapping[str, Any]) -> None:
        self.entries.append(dict(entry))
        self._write()

    def cut_back(self, step: int) -> None:
        """Forget what came behind `step`: the run goes on from there."""
        self.entries = [entry for entry in self.entries if entry["step"] <= step]
        self._write()

    def _write(self) -> None:
        text = "".join(json.dumps(entry) + "\n" for entry in self.entries)
        write_whole(self._path, lambda partial: partial.write_text(text, encoding="utf-8"))
