"""C17 with the real default model, in float32 through three processes: greedy answers are those of `generate()`.

Every cell of draft length and schedule for a few prompts here, and for all of them in `make test-all`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator.text import Tokenizer
from paceline.client import GenerationClient
from paceline.engine.checkpoint import DEFAULT_MODEL, resolve_checkpoint
from paceline.generation import Schedule
from paceline.local_stack import LocalStack, LocalStackSettings
from tests.end_to_end.reference import Reference, assert_same
from tests.end_to_end.test_greedy_equality import CELLS
from tests.harness import complete_all, request

Cell = tuple[int, Schedule]
DRAFTERS = ("ngram", "suffix", "target as drafter", "noisy drafter", "hybrid")
QUESTIONS = (
    "Why is the sky blue?",
    "Name three primary colours.",
    "Write a Python function that adds two numbers.",
    "Repeat after me: the cat sat on the mat, the cat sat on the mat.",
    "What is the capital of France?",
    "Count from one to ten.",
    "Translate 'good morning' into Spanish.",
    "List the days of the week.",
    "Explain gravity to a child.",
    "Write a haiku about rain.",
    "What does a drafter do in a race?",
    "Give me a recipe for pancakes.",
    "Summarise: the quick brown fox jumps over the lazy dog. The quick brown fox jumps again.",
    "How many legs does a spider have?",
    "Write the alphabet in lower case.",
    "What is 17 times 3?",
    "Fix this code: def f(x) return x",
    "Who wrote Hamlet?",
    "Describe the taste of salt.",
    "Tell me a joke about computers.",
)


def drafter_settings(drafter: str) -> LocalStackSettings:
    match drafter:
        case "ngram" | "suffix":
            return LocalStackSettings(target=DEFAULT_MODEL, drafter=drafter, dtype="float32")
        case "hybrid":
            return LocalStackSettings(target=DEFAULT_MODEL, drafter=f"hybrid:{DEFAULT_MODEL}", dtype="float32")
        case "target as drafter":
            return LocalStackSettings(target=DEFAULT_MODEL, drafter=DEFAULT_MODEL, dtype="float32")
        case _:
            return LocalStackSettings(target=DEFAULT_MODEL, drafter=DEFAULT_MODEL, dtype="float32", logit_noise=2.0)


class Expected:
    """The default model's own answers, computed once for all drafters."""

    def __init__(self) -> None:
        folder = Path(resolve_checkpoint(DEFAULT_MODEL))
        self.reference, tokenizer = Reference(folder), Tokenizer.load(str(folder))
        self.prompts = [tuple(tokenizer.encode_chat([("user", question)])) for question in QUESTIONS]
        self._answers: dict[tuple[int, int], tuple[int, ...]] = {}

    def answer(self, number: int, max_tokens: int) -> tuple[int, ...]:
        key = (number, max_tokens)
        if key not in self._answers:
            self._answers[key] = self.reference.generate(self.prompts[number], max_tokens=max_tokens)
        return self._answers[key]


@pytest.fixture(scope="module")
def expected() -> Expected:
    return Expected()


async def compare(expected: Expected, drafter: str, runs: Sequence[tuple[int, Cell]], *, max_tokens: int) -> None:
    """Each run is the number of a prompt, and the cell of draft length and schedule it goes through."""
    requests = [
        request(
            expected.prompts[number],
            max_tokens=max_tokens,
            temperature=0,
            draft_length=draft_length,
            schedule=schedule,
            ignore_eos=False,
        )
        for number, (draft_length, schedule) in runs
    ]
    with LocalStack(drafter_settings(drafter)) as stack:
        async with GenerationClient(stack.endpoint) as client:
            answers = await complete_all(client, requests, concurrency=2)
    for (number, _), answer in zip(runs, answers, strict=True):
        whole = expected.answer(number, max_tokens)
        assert_same(expected.reference, expected.prompts[number], whole, answer.token_ids)
    drafted = sum(answer.speculation.num_draft_tokens for answer in answers)
    assert drafted > 0, "the comparison is empty if nothing was drafted"


@pytest.mark.parametrize(
    "drafter",
    [name if name == "ngram" else pytest.param(name, marks=pytest.mark.slow) for name in DRAFTERS],
)
async def test_default_model_equals_generate_through_three_processes(expected: Expected, drafter: str) -> None:
    """Two prompts, each with two draft lengths, half of them pipelined."""
    cells = [CELLS[number] for number in (0, 3, 4, 7)]
    await compare(expected, drafter, [(place % 2, cell) for place, cell in enumerate(cells)], max_tokens=8)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_default_model_equals_generate_in_every_cell(expected: Expected, drafter: str) -> None:
    """20 prompts x 4 draft lengths x 2 schedules."""
    runs = [(number, cell) for number in range(len(QUESTIONS)) for cell in CELLS]
    await compare(expected, drafter, runs, max_tokens=16)
