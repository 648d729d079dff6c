"""C17: at temperature 0 the answer is, token for token, what transformers' `generate()` makes of the target (float32).

The tiny network goes through every cell of prompts x draft lengths x schedules x drafters; the default model goes
through three processes, each cell for a few prompts here and for all of them in `make test-all`.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from orchestrator.text import Tokenizer
from paceline.client import GenerationClient
from paceline.engine.checkpoint import DEFAULT_MODEL, resolve_checkpoint
from paceline.generation import Schedule
from paceline.local_stack import LocalStack, LocalStackSettings
from tests.end_to_end import systems
from tests.end_to_end.reference import Reference, assert_same
from tests.harness import complete_all, request, system

DRAFT_LENGTHS = (1, 2, 4, 8)
SCHEDULES = (Schedule.SEQUENTIAL, Schedule.PIPELINED)
CELLS = tuple(itertools.product(DRAFT_LENGTHS, SCHEDULES))
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


@pytest.mark.parametrize("drafter", ["ngram", "target as drafter", "noisy drafter"])
async def test_tiny_model_equals_generate_in_every_cell(tiny_target: Path, drafter: str) -> None:
    """20 prompts x 4 draft lengths x 2 schedules, over gRPC, for each kind of drafter."""
    reference = Reference(tiny_target)
    prompts = [tuple((start * 11 + step * step) % 320 for step in range(1 + start % 7)) for start in range(20)]
    expected = [reference.generate(prompt, max_tokens=16) for prompt in prompts]
    async with system(
        systems.target(tiny_target), systems.drafters_for(tiny_target)[drafter], str(tiny_target)
    ) as speculating:
        for draft_length, schedule in CELLS:
            answers = await complete_all(
                speculating.client,
                [
                    request(prompt, max_tokens=16, temperature=0, schedule=schedule, draft_length=draft_length)
                    for prompt in prompts
                ],
            )
            for prompt, whole, answer in zip(prompts, expected, answers, strict=True):
                assert_same(reference, prompt, whole, answer.token_ids)


def drafter_settings(drafter: str) -> LocalStackSettings:
    match drafter:
        case "ngram":
            return LocalStackSettings(target=DEFAULT_MODEL, drafter="ngram", dtype="float32")
        case "target as drafter":
            return LocalStackSettings(target=DEFAULT_MODEL, drafter=DEFAULT_MODEL, dtype="float32")
        case _:
            return LocalStackSettings(target=DEFAULT_MODEL, drafter=DEFAULT_MODEL, dtype="float32", logit_noise=2.0)


async def compare_default_model(drafter: str, *, max_tokens: int, cells_a_prompt: int) -> None:
    """Each prompt goes through `cells_a_prompt` of the eight cells, taken in turn, so that all cells are used."""
    folder = Path(resolve_checkpoint(DEFAULT_MODEL))
    reference, tokenizer = Reference(folder), Tokenizer.load(str(folder))
    prompts = [tuple(tokenizer.encode_chat([("user", question)])) for question in QUESTIONS]
    expected = [reference.generate(prompt, max_tokens=max_tokens) for prompt in prompts]
    runs = [
        (number, CELLS[(number * cells_a_prompt + cell) % len(CELLS)])
        for number in range(len(prompts))
        for cell in range(cells_a_prompt)
    ]
    with LocalStack(drafter_settings(drafter)) as stack:
        async with GenerationClient(stack.endpoint) as client:
            answers = await complete_all(
                client,
                [
                    request(
                        prompts[number],
                        max_tokens=max_tokens,
                        temperature=0,
                        draft_length=draft_length,
                        schedule=schedule,
                        ignore_eos=False,
                    )
                    for number, (draft_length, schedule) in runs
                ],
                concurrency=2,
            )
    for (number, _), answer in zip(runs, answers, strict=True):
        assert_same(reference, prompts[number], expected[number], answer.token_ids)
    drafted = sum(answer.speculation.num_draft_tokens for answer in answers)
    assert drafted > 0, "the comparison is empty if nothing was drafted"


@pytest.mark.parametrize("drafter", ["ngram", "target as drafter", "noisy drafter"])
async def test_default_model_equals_generate_through_three_processes(drafter: str) -> None:
    """20 prompts, one of the eight cells of draft length and schedule each."""
    await compare_default_model(drafter, max_tokens=12, cells_a_prompt=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("drafter", ["ngram", "target as drafter", "noisy drafter"])
async def test_default_model_equals_generate_in_every_cell(drafter: str) -> None:
    """20 prompts x 4 draft lengths x 2 schedules through three processes."""
    await compare_default_model(drafter, max_tokens=24, cells_a_prompt=len(CELLS))
