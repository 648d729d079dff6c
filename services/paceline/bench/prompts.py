"""What is asked: conversations from a file, or a few that come along."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from paceline.errors import InvalidRequest
from paceline.generation import ChatMessage


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A conversation that waits for its next answer."""

    id: str
    messages: tuple[ChatMessage, ...]
    kind: str = ""  # what is asked for: "chat", "code", ...


def _asked(prompt_id: str, content: str, kind: str) -> BenchPrompt:
    return BenchPrompt(prompt_id, (ChatMessage("user", content),), kind)


BUILT_IN = (
    _asked("tyre", "How do I mend a puncture on the road, with nothing but what fits under a saddle?", "chat"),
    _asked("median", "Write a Python function that gives the median of a list, and three tests for it.", "code"),
    _asked("tides", "Explain to a ten-year-old why there are two high tides a day.", "chat"),
    _asked("retry", "Write a shell loop that runs a command until it succeeds, five times at most.", "code"),
    _asked("plan", "Plan a week of training for someone who has never ridden 100 km and wants to.", "chat"),
    _asked("invoice", "Write a short, friendly letter that reminds a customer of an unpaid invoice.", "chat"),
)


def read_prompts(path: Path) -> tuple[BenchPrompt, ...]:
    """The prompts of a file of lines `{"id", "kind", "messages": [{"role", "content"}, ...]}`; `kind` may be left out.

    Raises `InvalidRequest`, with the line, for one that is none of that or repeats an id, and for a file without any.
    """
    prompts: list[BenchPrompt] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The prompts in {path} cannot be read: {error}.", parameter="prompts") from error
    for number, line in enumerate(lines, start=1):
        try:
            prompts.append(_prompt(json.loads(line), prompts))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(f"{path}, line {number}, is no prompt: {error!r}.", parameter="prompts") from error
    if not prompts:
        raise InvalidRequest(f"{path} holds no prompt.", parameter="prompts")
    return tuple(prompts)


def _prompt(fields: dict[str, Any], earlier: Sequence[BenchPrompt]) -> BenchPrompt:
    if any(prompt.id == fields["id"] for prompt in earlier):
        raise ValueError(f"the id {fields['id']!r} is taken")
    messages = tuple(ChatMessage(message["role"], message["content"]) for message in fields["messages"])
    return BenchPrompt(fields["id"], messages, fields.get("kind", ""))


def limited(prompts: Sequence[BenchPrompt], most: int) -> tuple[BenchPrompt, ...]:
    """At most so many, the kinds in turn, so that few of them still stand for all; 0: as they are."""
    if not most:
        return tuple(prompts)
    kinds = dict.fromkeys(prompt.kind for prompt in prompts)
    by_kind = [[prompt for prompt in prompts if prompt.kind == kind] for kind in kinds]
    in_turn = [prompt for turn in zip_longest(*by_kind) for prompt in turn if prompt is not None]
    return tuple(in_turn[:most])
