"""C17: at temperature 0 the answer is, token for token, what transformers' `generate()` makes of the target (float32).

The tiny network goes through every cell of prompts x draft lengths x schedules x drafters; `test_default_model.py`
does the same with a real one.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from paceline.generation import Schedule
from tests.end_to_end import systems
from tests.end_to_end.reference import Reference, assert_same
from tests.harness import complete_all, request, system

DRAFT_LENGTHS = (1, 2, 4, 8)
SCHEDULES = (Schedule.SEQUENTIAL, Schedule.PIPELINED)
CELLS = tuple(itertools.product(DRAFT_LENGTHS, SCHEDULES))


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
