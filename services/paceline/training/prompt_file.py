"""Prompts from a file: one a line, or JSONL with a prompt or a conversation in each line."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from paceline.errors import StartupFailed

Conversation: TypeAlias = tuple[tuple[str, str], ...]
"""Messages, each a role and a content."""

Prompt: TypeAlias = str | Conversation
"""What a user says, or a conversation that the next answer belongs to."""


@dataclass(frozen=True, slots=True)
class PromptFile:
    """Prompts in the order of the file, each once, and the SHA-256 (hex) of the file."""

    prompts: tuple[Prompt, ...]
    sha256: str


def read_prompt_file(path: Path) -> PromptFile:
    """The prompts of a file: of a `*.jsonl` file the objects {"prompt": ...} or {"messages": [{"role": ..., "content":
    ...}, ...]}, of any other its lines; empty lines are none.

    Raises `StartupFailed`, naming the line that cannot be read.
    """
    try:
        content = path.read_bytes()
        lines = content.decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupFailed(f"Cannot read --prompts '{path}' ({error}); give a UTF-8 text file.") from error
    is_json = path.suffix == ".jsonl"
    prompts = [
        _parsed(line, where=f"Line {number} of '{path}'") if is_json else line
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise StartupFailed(f"There are no prompts in '{path}'; write one a line, or leave --prompts out.")
    return PromptFile(tuple(dict.fromkeys(prompts)), hashlib.sha256(content).hexdigest())


def _parsed(line: str, *, where: str) -> Prompt:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise StartupFailed(f"{where} is no JSON ({error}); correct it.") from error
    match fields:
        case {"prompt": str(prompt)} if prompt:
            return prompt
        case {"messages": [_, *_] as messages} if all(_is_message(message) for message in messages):
            return tuple((message["role"], message["content"]) for message in messages)
    raise StartupFailed(
        f'{where} is neither {{"prompt": "..."}} nor {{"messages": [{{"role": "...", "content": "..."}}]}}; correct it.'
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))
