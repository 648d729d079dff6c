"""Which cores a process computes on, so that each service stands for a machine of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.errors import InvalidRequest


def allowed_cores() -> tuple[int, ...]:
    """Those that this process may use; empty where the system does not say."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def cores_from(text: str, *, parameter: str) -> tuple[int, ...]:
    """Core numbers with commas between them; empty for an empty text, which means any.

    Raises `InvalidRequest`, naming the parameter, for what is no number or no core that this process may use.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    allowed = allowed_cores()
    if not all(name.isdigit() for name in names) or (allowed and not {*map(int, names)} <= {*allowed}):
        found = ", ".join(map(str, allowed)) or "none that could be named"
        raise InvalidRequest(
            f"{parameter} must name cores of this process ({found}), not {text!r}.", parameter=parameter
        )
    return tuple(map(int, names))


def pin(cores: Sequence[int]) -> None:
    """Keep this thread, and whatever it starts from now on, to these cores; does nothing if there are none given."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Keep to these cores what this thread starts within the block."""
    before = allowed_cores()
    pin(cores)
    try:
        yield
    finally:
        pin(before)
