"""Files that are written whole or not at all, so that whatever ends a run leaves nothing half done behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from paceline.errors import StartupFailed

# What torch and safetensors raise, besides the usual, when a disk is full.
_WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` fill a file beside `path`, which then takes its name and its place.

    The folder is made if need be. Raises `StartupFailed` if there is no room, or no permission.
    """
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        partial.replace(path)
    except _WRITE_ERRORS as error:
        partial.unlink(missing_ok=True)
        raise StartupFailed(
            f"Cannot write '{path}' ({error}); make room, or see to its permissions, and run the same command again."
        ) from error
