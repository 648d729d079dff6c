"""Prompts to train on: from a file, or written by the model itself, so that no data set is needed.

An instruct model that continues an empty user turn writes what users ask (after Xu et al. 2024, "Magpie"). Openings
steer it towards kinds of work that it seldom thinks of by itself; tasks about a text use its own earlier answers as the
text. Knows nothing of models or files.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.errors import StartupFailed

OPENINGS = (
    *[""] * 8,
    "Write a Python function that",
    "Write a Python class",
    "Write a SQL query",
    "Write a JavaScript function",
    "Here is some Python code:\n\n```python\ndef ",
    "Fix the bug in this code:\n\n```python\n",
    "Explain how",
    "Explain why",
    "Explain the difference between",
    "What is",
    "What are the",
    "How do I",
    "How does",
    "Why do",
    "Who was",
    "Give me a list of",
    "Give me five tips",
    "Compare",
    "Write a short story about",
    "Write a poem about",
    "Write an email to",
    "Write a letter",
    "Describe",
    "Translate",
    "Solve",
    "Plan a",
    "I am",
    "My",
    "Can you",
)

TASKS = (
    "Summarize the following text in one sentence:\n\n{text}",
    "Summarize the following text in three sentences.\n\n{text}",
    "Summarize this:\n\n{text}",
    "Give a short summary of this passage.\n\n{text}\n\nSummary:",
    "List the key points of the following text as bullet points.\n\n{text}",
    "Rewrite the following text in simpler words:\n\n{text}",
    "What is the main idea of this text?\n\n{text}",
    "{text}\n\nSummarize the text above in two sentences.",
)


class TextEncoder(Protocol):
    """A tokenizer (`transformers.PreTrainedTokenizerBase`)."""

    chat_template: str | None
    bos_token_id: int | None
    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str: ...


_MARK = "@PACELINE-TURN@"


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a conversation of one user turn is spelt: what stands before the turn, and between it and the answer.

    Nothing does for a model without a chat template, which continues the turn.
    """

    before_turn: str
    before_answer: str

    @classmethod
    def of(cls, tokenizer: TextEncoder) -> ChatFormat:
        """That of a tokenizer's model. Raises `StartupFailed` if its template does not give what the user says."""
        if not tokenizer.chat_template:
            return cls("", "")
        turn = [{"role": "user", "content": _MARK}]
        text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        before, mark, after = text.partition(_MARK)
        if not mark:
            raise StartupFailed(
                "The target's chat template does not give what a user says as it stands; choose another target, or one "
                "without a template."
            )
        return cls(before, after)

    def prompt(self, turn: str) -> str:
        return self.before_turn + turn + self.before_answer


def openings(count: int, seed: int) -> list[str]:
    """Beginnings of user turns, drawn at random."""
    return random.Random(seed).choices(OPENINGS, k=count)


def text_tasks(texts: Sequence[str], count: int, seed: int) -> list[str]:
    """User turns that ask something about a text; none where there are no texts."""
    dice = random.Random(seed)
    return [dice.choice(TASKS).format(text=dice.choice(texts).strip()) for _ in range(count)] if texts else []
