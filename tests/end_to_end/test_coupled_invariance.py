"""Under `coupled` the text is a function of target, prompt, parameters and seed alone: whatever else happens.

No random outcome is judged here: the texts must be equal, so no test of this file can fail by chance.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from paceline.client import GenerationClient
from paceline.generation import Completion, GenerationRequest, Schedule
from paceline.types import VerificationRule
from tests.end_to_end import systems
from tests.faults import delayed_link, mixed_up_drafter
from tests.harness import complete_all, orchestrator_of, request, running, system

SEEDS = range(50)
MAX_TOKENS = 24


def requests_with(
    *, schedule: Schedule = Schedule.PIPELINED, draft_length: int = 4, temperature: float = 1.0
) -> list[GenerationRequest]:
    """One request a seed, each with its own prompt."""
    return [
        request(
            tuple((seed * 7 + offset * 13) % 300 for offset in range(1 + seed % 9)),
            seed=seed,
            max_tokens=MAX_TOKENS,
            schedule=schedule,
            draft_length=draft_length,
            temperature=temperature,
            rule=VerificationRule.COUPLED,
        )
        for seed in SEEDS
    ]


def texts(completions: list[Completion]) -> list[tuple[tuple[int, ...], str]]:
    return [(completion.token_ids, completion.text) for completion in completions]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain_texts(tiny_target: Path) -> list[tuple[tuple[int, ...], str]]:
    """What the target says by itself."""
    async with system(systems.target(tiny_target), None, str(tiny_target)) as plain:
        answers = texts(await complete_all(plain.client, requests_with(schedule=Schedule.PLAIN)))
    assert len({ids for ids, _ in answers}) > 45, "different seeds should give different texts"
    return answers


@pytest.mark.parametrize("drafter", ["ngram", "target as drafter", "noisy drafter"])
@pytest.mark.parametrize("schedule", [pytest.param(Schedule.SEQUENTIAL, marks=pytest.mark.slow), Schedule.PIPELINED])
async def test_drafter_schedule_and_draft_length_change_nothing(
    tiny_target: Path, plain_texts: list[tuple[tuple[int, ...], str]], drafter: str, schedule: Schedule
) -> None:
    """Every drafter, both schedules and two draft lengths give the target's own texts."""
    async with system(
        systems.target(tiny_target), systems.drafters_for(tiny_target)[drafter], str(tiny_target)
    ) as speculating:
        for draft_length in (1, 8):
            answers = await complete_all(
                speculating.client, requests_with(schedule=schedule, draft_length=draft_length)
            )
            assert texts(answers) == plain_texts
            assert sum(answer.speculation.num_draft_tokens for answer in answers) > 0


async def test_an_unrelated_drafter_changes_nothing(
    tiny_target: Path, tiny_drafter: Path, plain_texts: list[tuple[tuple[int, ...], str]]
) -> None:
    """A drafter that knows nothing of the target is rejected nearly always, and that is all."""
    async with system(systems.target(tiny_target), systems.draft_model(tiny_drafter), str(tiny_target)) as speculating:
        assert texts(await complete_all(speculating.client, requests_with())) == plain_texts


@pytest.mark.parametrize("schedule", [Schedule.SEQUENTIAL, Schedule.PIPELINED])
async def test_random_delays_on_both_links_change_nothing(
    tiny_target: Path, plain_texts: list[tuple[tuple[int, ...], str]], schedule: Schedule
) -> None:
    """Every chunk of bytes to and from drafter and target is held up for 0 to 8 ms."""
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(running(systems.target(tiny_target)))
        drafter = await stack.enter_async_context(running(systems.draft_model(tiny_target, logit_noise=systems.NOISE)))
        far_target = await stack.enter_async_context(delayed_link(target.address, longest_delay_s=0.008, seed=1))
        far_drafter = await stack.enter_async_context(delayed_link(drafter.address, longest_delay_s=0.008, seed=2))
        orchestrator = await stack.enter_async_context(
            running(orchestrator_of(far_target, far_drafter, str(tiny_target)))
        )
        client = await stack.enter_async_context(GenerationClient(orchestrator.address))
        assert texts(await complete_all(client, requests_with(schedule=schedule))) == plain_texts


async def test_lost_repeated_and_reordered_messages_change_nothing(
    tiny_target: Path, plain_texts: list[tuple[tuple[int, ...], str]]
) -> None:
    """A tenth of all items to and from the drafter is lost, another comes twice, another is overtaken."""
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(running(systems.target(tiny_target)))
        drafter = await stack.enter_async_context(running(systems.draft_model(tiny_target, logit_noise=systems.NOISE)))
        address, mixer = await stack.enter_async_context(mixed_up_drafter(drafter.address, seed=3))
        orchestrator = await stack.enter_async_context(
            running(orchestrator_of(target.address, address, str(tiny_target), draft_deadline_s=0.05))
        )
        client = await stack.enter_async_context(GenerationClient(orchestrator.address))
        answers = await complete_all(client, requests_with())
        assert texts(answers) == plain_texts
        assert mixer.there.mistreated > 20
        assert mixer.back.mistreated > 20
        assert sum(answer.speculation.num_accepted_tokens for answer in answers) > 50


async def test_a_drafter_that_goes_and_comes_back_changes_nothing(
    tiny_target: Path, plain_texts: list[tuple[tuple[int, ...], str]]
) -> None:
    """The drafter is restarted on its port while answers run; it is used before and after."""
    serve = systems.draft_model(tiny_target)
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(running(systems.target(tiny_target)))
        drafter = await stack.enter_async_context(running(serve))
        orchestrator = await stack.enter_async_context(
            running(orchestrator_of(target.address, drafter.address, str(tiny_target)))
        )
        client = await stack.enter_async_context(GenerationClient(orchestrator.address))
        first = await complete_all(client, requests_with()[:25])
        await drafter.stop()
        second = await complete_all(client, requests_with()[25:])
        assert texts(first + second) == plain_texts
        assert all(answer.speculation.num_accepted_tokens > 0 for answer in first)
        assert all(answer.speculation.fallback_rounds == answer.speculation.num_drafts for answer in second)
