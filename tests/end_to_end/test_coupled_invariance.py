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
from tests.end_to_end.systems import Folders
from tests.faults import delayed_link, mixed_up_drafter
from tests.harness import complete_all, orchestrator_of, request, running, system

SEEDS = range(50)
MAX_TOKENS = 24
AT_ONCE = 32

# The faults meet the hybrid by default, which is two ways of drafting at once, and a drafter with branches.
WITH_FAULTS = systems.by_default("hybrid", "noisy drafter")
FAN_OUTS = (None, 0, 1, 8)


def requests_with(
    *, schedule: Schedule = Schedule.PIPELINED, draft_length: int = 4, temperature: float = 1.0
) -> list[GenerationRequest]:
    """One request a seed, each with its own prompt, and in turn: all left to the controller, no branches, few, many."""
    return [
        request(
            tuple((seed * 7 + offset * 13) % 300 for offset in range(1 + seed % 9)),
            seed=seed,
            max_tokens=MAX_TOKENS,
            schedule=schedule,
            draft_length=None if seed % len(FAN_OUTS) == 0 else draft_length,
            fan_out=FAN_OUTS[seed % len(FAN_OUTS)],
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
        answers = texts(await complete_all(plain.client, requests_with(schedule=Schedule.PLAIN), concurrency=AT_ONCE))
    assert len({ids for ids, _ in answers}) > 45, "different seeds should give different texts"
    return answers


@pytest.mark.parametrize("drafter", systems.UNLIKE_ONE_ANOTHER)
@pytest.mark.parametrize("schedule", [pytest.param(Schedule.SEQUENTIAL, marks=pytest.mark.slow), Schedule.PIPELINED])
async def test_drafter_schedule_and_draft_length_change_nothing(
    folders: Folders, plain_texts: list[tuple[tuple[int, ...], str]], drafter: str, schedule: Schedule
) -> None:
    """Every way of drafting, both schedules and two draft lengths give the target's own texts; what is asked a second
    time is drafted from the first answer, too, by those that remember."""
    services = (systems.target(folders.target), systems.drafter_for(drafter, folders), str(folders.target))
    async with system(*services) as speculating:
        asked = [*requests_with(schedule=schedule, draft_length=1), *requests_with(schedule=schedule, draft_length=8)]
        answers = await complete_all(speculating.client, asked, concurrency=AT_ONCE)
    assert texts(answers) == 2 * plain_texts
    assert sum(answer.speculation.num_draft_tokens for answer in answers) > 0


async def test_an_unrelated_drafter_changes_nothing(
    tiny_target: Path, tiny_drafter: Path, plain_texts: list[tuple[tuple[int, ...], str]]
) -> None:
    """A drafter that knows nothing of the target is rejected nearly always, and that is all."""
    async with system(systems.target(tiny_target), systems.draft_model(tiny_drafter), str(tiny_target)) as speculating:
        assert texts(await complete_all(speculating.client, requests_with(), concurrency=AT_ONCE)) == plain_texts


@pytest.mark.parametrize("drafter", WITH_FAULTS)
@pytest.mark.parametrize("schedule", [pytest.param(Schedule.SEQUENTIAL, marks=pytest.mark.slow), Schedule.PIPELINED])
async def test_random_delays_on_both_links_change_nothing(
    folders: Folders, plain_texts: list[tuple[tuple[int, ...], str]], drafter: str, schedule: Schedule
) -> None:
    """Every chunk of bytes to and from drafter and target is held up for 0 to 8 ms."""
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(running(systems.target(folders.target)))
        drafting = await stack.enter_async_context(running(systems.drafter_for(drafter, folders)))
        far_target = await stack.enter_async_context(delayed_link(target.address, longest_delay_s=0.008, seed=1))
        far_drafter = await stack.enter_async_context(delayed_link(drafting.address, longest_delay_s=0.008, seed=2))
        orchestrator = await stack.enter_async_context(
            running(orchestrator_of(far_target, far_drafter, str(folders.target)))
        )
        client = await stack.enter_async_context(GenerationClient(orchestrator.address))
        answers = await complete_all(client, requests_with(schedule=schedule))
        assert texts(answers) == plain_texts
        if drafter == "noisy drafter" and schedule is Schedule.PIPELINED:
            assert sum(answer.speculation.branch_rounds for answer in answers) > 0


@pytest.mark.parametrize("drafter", WITH_FAULTS)
async def test_lost_repeated_and_reordered_messages_change_nothing(
    folders: Folders, plain_texts: list[tuple[tuple[int, ...], str]], drafter: str
) -> None:
    """A tenth of all items to and from the drafter is lost, another comes twice, another is overtaken."""
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(running(systems.target(folders.target)))
        drafting = await stack.enter_async_context(running(systems.drafter_for(drafter, folders)))
        address, mixer = await stack.enter_async_context(mixed_up_drafter(drafting.address, seed=3))
        orchestrator = await stack.enter_async_context(
            running(orchestrator_of(target.address, address, str(folders.target), draft_deadline_s=0.05))
        )
        client = await stack.enter_async_context(GenerationClient(orchestrator.address))
        answers = await complete_all(client, requests_with())
        assert texts(answers) == plain_texts
        assert mixer.there.mistreated > 20
        assert mixer.back.mistreated > 20
        if drafter not in {"ngram", "suffix"}:  # little repeats itself here
            assert sum(answer.speculation.num_accepted_tokens for answer in answers) > 0
        if drafter == "noisy drafter":
            assert sum(answer.speculation.branch_rounds for answer in answers) > 0


@pytest.mark.parametrize("drafter", WITH_FAULTS)
async def test_a_drafter_that_goes_away_changes_nothing(
    folders: Folders, plain_texts: list[tuple[tuple[int, ...], str]], drafter: str
) -> None:
    """The drafter is stopped between answers: it is used before, and missed without harm after."""
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(running(systems.target(folders.target)))
        drafting = await stack.enter_async_context(running(systems.drafter_for(drafter, folders)))
        orchestrator = await stack.enter_async_context(
            running(orchestrator_of(target.address, drafting.address, str(folders.target)))
        )
        client = await stack.enter_async_context(GenerationClient(orchestrator.address))
        first = await complete_all(client, requests_with()[:25])
        await drafting.stop()
        second = await complete_all(client, requests_with()[25:])
        assert texts(first + second) == plain_texts
        assert sum(answer.speculation.num_drafts - answer.speculation.fallback_rounds for answer in first) > 0
        assert all(answer.speculation.fallback_rounds == answer.speculation.num_drafts for answer in second)
