"""Prompts for the benchmarks, as users ask them: one file of JSON lines is one workload (`prompts/README.md`).

Knows nothing of services or of how an answer is measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from paceline.generation import ChatMessage

FOLDER = Path(__file__).parent / "prompts"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation that waits for its next answer."""

    id: str
    kind: str  # what is asked for: "chat", "code", "quote", ...
    messages: tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts that are reported together; `name` is that of their file, without its ending."""

    name: str
    prompts: tuple[Prompt, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Each once, in the order in which they first come."""
        return tuple(dict.fromkeys(prompt.kind for prompt in self.prompts))

    def limited(self, most: int) -> Workload:
        """At most so many prompts, the kinds in turn, so that few of them still stand for all; 0: as it is."""
        if not most:
            return self
        by_kind = [[prompt for prompt in self.prompts if prompt.kind == kind] for kind in self.kinds]
        in_turn = [prompt for turn in zip_longest(*by_kind) for prompt in turn if prompt is not None]
        return Workload(self.name, tuple(in_turn[:most]))


def load_workload(path: Path) -> Workload:
    """The prompts in a file of lines `{"id", "kind", "messages": [{"role", "content"}, ...]}`.

    Raises `ValueError`, with the line, for one that is none of that or repeats an id, and for a file without any.
    """
    prompts: list[Prompt] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            prompts.append(_prompt(json.loads(line), prompts))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}, is no prompt: {error!r}") from error
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return Workload(path.stem, tuple(prompts))


def _prompt(fields: dict[str, Any], earlier: Sequence[Prompt]) -> Prompt:
    if any(prompt.id == fields["id"] for prompt in earlier):
        raise ValueError(f"the id {fields['id']!r} is taken")
    messages = tuple(ChatMessage(message["role"], message["content"]) for message in fields["messages"])
    return Prompt(fields["id"], fields["kind"], messages)
