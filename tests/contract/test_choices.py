"""Several answers to one prompt, through the real services: their seeds, their admission, and how they end together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace

import grpc
import pytest
import pytest_asyncio

from orchestrator.generator import choice_seed
from paceline.errors import DeadlineExceeded, InvalidRequest, QueueFull
from paceline.generation import Completion, Delta, Finished, GenerationRequest, Schedule, Started
from paceline.rpc import open_channel
from paceline.types import FinishReason, VerificationRule
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1.generation_service_pb2_grpc import GenerationServiceStub
from tests.checkpoints import save_markov_checkpoint
from tests.contract.stream_peer import VOCAB
from tests.fakes import FakeModel, hashed_logits
from tests.harness import System, complete_all, model_drafter_of, request, system, target_of

PROMPT = (0, 1, 2)
LIMIT = 4
"""Answers that run at once at most."""
COUPLED = request(PROMPT, max_tokens=24, rule=VerificationRule.COUPLED, draft_length=3)
ENDLESS = replace(COUPLED, stopping=replace(COUPLED.stopping, max_tokens=3000))
SHORT = replace(COUPLED, stopping=replace(COUPLED.stopping, max_tokens=3))
shared = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    uniform = [[1 / VOCAB] * VOCAB] * VOCAB
    return str(save_markov_checkpoint(tmp_path_factory.mktemp("models") / "words", uniform))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tokenizer: str) -> AsyncIterator[System]:
    target = FakeModel(hashed_logits(VOCAB, salt=1), vocab_size=VOCAB)
    drafter = FakeModel(hashed_logits(VOCAB, salt=1, scale=2.0), vocab_size=VOCAB)
    async with system(target_of(target), model_drafter_of(drafter), tokenizer, max_sessions=LIMIT) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def slow(tokenizer: str) -> AsyncIterator[System]:
    """A target that takes 4 ms for each row, so that an answer of 3,000 tokens does not end within a test."""
    quick = hashed_logits(VOCAB, salt=1)

    def logits(ids: Sequence[int]) -> Sequence[float]:
        time.sleep(0.004)
        return quick(ids)

    drafter = model_drafter_of(FakeModel(quick, vocab_size=VOCAB))
    target = target_of(FakeModel(logits, vocab_size=VOCAB))
    async with system(target, drafter, tokenizer, max_sessions=LIMIT, max_queued_requests=0) as running:
        yield running


def bare(completion: Completion) -> tuple[object, ...]:
    """What an answer says, without how it was made."""
    return completion.token_ids, completion.text, completion.finish_reason, completion.usage, completion.seed


# ---------------------------------------------------------------------------------------------------------------------
# Seeds


def test_seeds_of_choices_are_what_they_have_always_been() -> None:
    """Stored answers are replayed by them; those that we make have 53 bits, for JSON readers that keep doubles."""
    assert [choice_seed(7, choice) for choice in range(3)] == [7, 8558292891254773, 7923515918811736]
    seeds = {choice_seed(seed, choice) for seed in (0, 1, 7, 2**64 - 1) for choice in range(16)}
    assert len(seeds) == 64
    assert all(choice_seed(2**64 - 1, choice) < 2**53 for choice in range(1, 16))


@shared
@pytest.mark.parametrize("schedule", list(Schedule))
async def test_each_choice_is_the_answer_to_its_seed_alone(services: System, schedule: Schedule) -> None:
    """With log-probabilities and a stop token: ids, text, reason and usage; the first has the seed of the request."""
    asked = replace(COUPLED, logprobs=2, speculation=replace(COUPLED.speculation, schedule=schedule))
    asked = replace(asked, stopping=replace(asked.stopping, stop_token_ids=(3,)))
    choices = await services.client.complete_choices(replace(asked, n=LIMIT))
    alone = await complete_all(
        services.client, [replace(asked, seed=choice.seed) for choice in choices], concurrency=LIMIT
    )
    assert [bare(choice) for choice in choices] == [bare(answer) for answer in alone]
    assert [choice.logprobs for choice in choices] == [answer.logprobs for answer in alone]
    assert [choice.seed for choice in choices] == [choice_seed(7, number) for number in range(LIMIT)]
    assert len({choice.token_ids for choice in choices}) == LIMIT
    assert {choice.finish_reason for choice in choices} >= {FinishReason.STOP}


@shared
async def test_choices_without_a_seed_get_one_that_is_reported(services: System) -> None:
    """Drawn for the first, mixed for the others."""
    first, second = await services.client.complete_choices(replace(COUPLED, seed=None, n=2))
    assert second.seed == choice_seed(first.seed, 1)
    assert bare(await services.client.complete(replace(COUPLED, seed=second.seed))) == bare(second)


@shared
async def test_choices_at_temperature_zero_are_equal(services: System) -> None:
    """There is nothing to draw."""
    greedy = request(PROMPT, max_tokens=8, temperature=0.0)
    first, second = await services.client.complete_choices(replace(greedy, n=2))
    assert first.token_ids == second.token_ids


@shared
async def test_events_say_which_choice_they_are_of(services: System) -> None:
    """One `Started` in front, one `Finished` behind the tokens of each choice, each with its own counts."""
    events = [event async for event in services.client.generate(replace(COUPLED, n=3))]
    assert isinstance(events[0], Started)
    for choice in range(3):
        own = [event for event in events[1:] if not isinstance(event, Started) and event.choice == choice]
        assert [type(event) for event in own] == [Delta] * (len(own) - 1) + [Finished]
        finished = own[-1]
        assert isinstance(finished, Finished)
        assert finished.usage.completion_tokens == sum(
            len(event.token_ids) for event in own if isinstance(event, Delta)
        )
        assert finished.speculation.rounds == len(own) - 1


# ---------------------------------------------------------------------------------------------------------------------
# Admission


@shared
async def test_more_choices_than_may_ever_run_are_refused_by_name(slow: System) -> None:
    """Waiting would not help."""
    with pytest.raises(InvalidRequest, match="at most 4") as refusal:
        await slow.client.complete_choices(replace(SHORT, n=LIMIT + 1))
    assert refusal.value.parameter == "n"


@shared
async def test_choices_of_a_resumed_answer_are_refused_by_name(slow: System) -> None:
    """By the server too, whatever client asks."""
    async with open_channel(slow.orchestrator.address) as channel:
        message = pb.GenerateRequest(text="t1", seed=1, n=2, output_ids=[1])
        with pytest.raises(grpc.aio.AioRpcError, match="n must be 1") as refusal:
            await GenerationServiceStub(channel).Generate(message, timeout=30).read()
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def until_idle(services: System) -> None:
    """Until nothing of any answer is left at the orchestrator, and at the models no session; bounded."""
    async with asyncio.timeout(20):
        while (await services.client.pool_status()).orchestrator.running_answers:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.01)
    assert [load.sessions for load in await services.loads()] == [0, 0]


@shared
async def test_all_choices_are_admitted_or_none(slow: System) -> None:
    """Two run already: three more are refused at once, two more are answered."""
    async with aclosing(slow.client.generate(replace(ENDLESS, n=2))) as events:
        for _ in range(5):
            await anext(events)
        assert (await slow.client.pool_status()).orchestrator.running_answers == 2
        with pytest.raises(QueueFull, match="2 answers are running"):
            await slow.client.complete_choices(replace(SHORT, n=3))
        assert len(await slow.client.complete_choices(replace(SHORT, n=2))) == 2
    await until_idle(slow)


# ---------------------------------------------------------------------------------------------------------------------
# The end of all


@shared
async def test_caller_that_leaves_ends_all_choices(slow: System) -> None:
    """In mid-answer: no session stays, and all places are free again."""
    async with aclosing(slow.client.generate(replace(ENDLESS, n=LIMIT))) as events:
        for _ in range(8):
            await anext(events)
    await until_idle(slow)
    assert len(await slow.client.complete_choices(replace(SHORT, n=LIMIT))) == LIMIT


@shared
async def test_deadline_ends_all_choices(slow: System) -> None:
    """The time is that of the request."""
    with pytest.raises(DeadlineExceeded):
        await slow.client.complete_choices(replace(ENDLESS, n=LIMIT), timeout_s=0.3)
    await until_idle(slow)


async def test_choice_without_a_place_at_a_target_ends_the_request(tokenizer: str) -> None:
    """A target of two sessions cannot answer three: all are given up, with the error that one of them met."""
    target = target_of(FakeModel(hashed_logits(VOCAB), vocab_size=VOCAB), max_sessions=2)
    async with system(target, None, tokenizer) as services:
        with pytest.raises(QueueFull):
            await services.client.complete_choices(replace(ENDLESS, n=3))
        assert len(await until_answered(services, replace(SHORT, n=2))) == 2


async def until_answered(services: System, asked: GenerationRequest) -> tuple[Completion, ...]:
    """The target learns a moment later that the sessions have ended."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await services.client.complete_choices(asked)
            except QueueFull:
                await asyncio.sleep(0.02)
