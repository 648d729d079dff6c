"""C17: at temperature 0 the answer is, token for token, what transformers' `generate()` makes of the target (float32).

The tiny network goes through every cell of prompts x draft lengths x schedules x ways of drafting;
`test_default_model.py` does the same with a real one.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from paceline.generation import Schedule
from tests.end_to_end import systems
from tests.end_to_end.reference import Reference, assert_same
from tests.end_to_end.systems import Folders
from tests.harness import complete_all, request, system

DRAFT_LENGTHS = (1, 2, 4, 8)
SCHEDULES = (Schedule.SEQUENTIAL, Schedule.PIPELINED)
CELLS = tuple(itertools.product(DRAFT_LENGTHS, SCHEDULES))


PROMPTS = [tuple((start * 11 + step * step) % 320 for step in range(1 + start % 7)) for start in range(20)]
MAX_TOKENS = 16


@pytest.fixture(scope="module")
def reference(tiny_target: Path) -> Reference:
    return Reference(tiny_target)


@pytest.fixture(scope="module")
def expected(reference: Reference) -> dict[tuple[int, ...], tuple[int, ...]]:
    return {prompt: reference.generate(prompt, max_tokens=MAX_TOKENS) for prompt in PROMPTS}


@pytest.mark.parametrize("drafter", systems.UNLIKE_ONE_ANOTHER)
async def test_tiny_model_equals_generate_in_every_cell(
    folders: Folders, reference: Reference, expected: dict[tuple[int, ...], tuple[int, ...]], drafter: str
) -> None:
    """20 prompts x 4 draft lengths x 2 schedules, over gRPC, for each way of drafting; many at once, so that the batches
    are of every kind."""
    runs = [(prompt, cell) for cell in CELLS for prompt in PROMPTS]
    services = (systems.target(folders.target), systems.drafter_for(drafter, folders), str(folders.target))
    async with system(*services, fallback="none") as speculating:
        answers = await complete_all(
            speculating.client,
            [
                request(prompt, max_tokens=MAX_TOKENS, temperature=0, schedule=schedule, draft_length=draft_length)
                for prompt, (draft_length, schedule) in runs
            ],
            concurrency=40,
        )
    for (prompt, _), answer in zip(runs, answers, strict=True):
        assert_same(reference, prompt, expected[prompt], answer.token_ids)
    assert sum(answer.speculation.num_accepted_tokens for answer in answers) > 0, "the comparison needs drafts"
