"""Log-probabilities through the real services: those of plain decoding, whatever drafts, rule and schedule.

The target's logits depend on every token so far, so a value that was taken at another row, or behind another prefix,
is wrong. The drafter is the same model with some other opinions: its drafts are accepted, rejected and kept whole.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import grpc
import pytest
import pytest_asyncio
import torch

from paceline.errors import InvalidRequest
from paceline.generation import Completion, GenerationRequest, Schedule
from paceline.rpc import open_channel
from paceline.types import FinishReason, Origin, SamplingParams, TokenLogprobs, VerificationRule
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1.generation_service_pb2_grpc import GenerationServiceStub
from tests.checkpoints import save_markov_checkpoint
from tests.contract.stream_peer import VOCAB
from tests.fakes import FakeModel, hashed_logits
from tests.harness import System, complete_all, model_drafter_of, request, system, target_of

PROMPT = (0, 1, 2)
MAX_TOKENS = 40
TARGET = hashed_logits(VOCAB, salt=1)
RULES = list(VerificationRule)
shared = pytest.mark.asyncio(loop_scope="module")


def drafter_logits(ids: Sequence[int]) -> list[float]:
    """The target's, leaning elsewhere behind every fourth token."""
    other = hashed_logits(VOCAB, salt=2)(ids) if len(ids) % 4 == 0 else [0.0] * VOCAB
    return [own + lean for own, lean in zip(TARGET(ids), other, strict=True)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    uniform = [[1 / VOCAB] * VOCAB] * VOCAB
    words = save_markov_checkpoint(tmp_path_factory.mktemp("models") / "words", uniform)
    drafter = model_drafter_of(FakeModel(drafter_logits, vocab_size=VOCAB))
    async with system(target_of(FakeModel(TARGET, vocab_size=VOCAB)), drafter, str(words)) as running:
        yield running


def asked_by(rule: VerificationRule, schedule: Schedule, *, seed: int = 7, logprobs: int = 3) -> GenerationRequest:
    """With penalties and a filter, which raw values must not show."""
    temperature = 0.0 if rule is VerificationRule.GREEDY else 0.9
    asked = request(
        PROMPT,
        max_tokens=MAX_TOKENS,
        seed=seed,
        schedule=schedule,
        rule=None if rule is VerificationRule.GREEDY else rule,
        draft_length=3,
        sampling=SamplingParams(temperature=temperature, frequency_penalty=0.2, top_k=6, logit_bias=((3, 0.5),)),
    )
    return replace(asked, logprobs=logprobs)


def expected(token_ids: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
    """From the target's logits behind each prefix, and nothing else."""
    entries: list[TokenLogprobs] = []
    for length, token_id in enumerate(token_ids):
        logits = TARGET([*PROMPT, *token_ids[:length]])
        log_probs = torch.tensor(logits).log_softmax(0).tolist()
        ranked = sorted(range(VOCAB), key=lambda other: (-log_probs[other], other))[:top]
        pieces = tuple(f"t{other}" for other in ranked)
        entries.append(
            TokenLogprobs(token_id, log_probs[token_id], tuple((other, log_probs[other]) for other in ranked), pieces)
        )
    return tuple(entries)


def bare(completion: Completion) -> tuple[object, ...]:
    return completion.token_ids, completion.text, completion.finish_reason, completion.usage


@shared
@pytest.mark.parametrize("schedule", [Schedule.PLAIN, Schedule.SEQUENTIAL, Schedule.PIPELINED])
@pytest.mark.parametrize("rule", RULES)
async def test_log_probabilities_are_those_of_plain_decoding(
    services: System, rule: VerificationRule, schedule: Schedule
) -> None:
    """Four answers of 40 tokens: drafted, correction, bonus and plain tokens alike, to the last bit."""
    answers = await complete_all(services.client, [asked_by(rule, schedule, seed=seed) for seed in range(4)])
    for answer in answers:
        assert answer.logprobs == expected(answer.token_ids, top=3)
    origins = {origin for answer in answers for origin in answer.origins}
    assert origins == ({Origin.PLAIN} if schedule is Schedule.PLAIN else set(Origin))


@shared
@pytest.mark.parametrize("logprobs", [0, 20])
async def test_as_many_as_are_asked_for_and_there_are(services: System, logprobs: int) -> None:
    """0: the token's own alone; more than the vocabulary has: all of it."""
    answer = await services.client.complete(asked_by(VerificationRule.COUPLED, Schedule.PIPELINED, logprobs=logprobs))
    assert answer.logprobs == expected(answer.token_ids, top=min(logprobs, VOCAB))


@shared
async def test_answer_is_the_same_with_and_without(services: System) -> None:
    """Asking costs no token its place."""
    asked = asked_by(VerificationRule.COUPLED, Schedule.PIPELINED)
    without = await services.client.complete(replace(asked, logprobs=None))
    assert without.logprobs == ()
    assert bare(await services.client.complete(asked)) == bare(without)


@shared
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("end", ["length", "stop token", "stop string"])
async def test_log_probabilities_end_at_the_boundary_of_the_answer(
    services: System, rule: VerificationRule, end: str
) -> None:
    """Every length of an answer, or its 2nd to 30th token as the one that stops it, mostly in the middle of a draft:
    ids, text, usage and log-probabilities stop together."""
    asked = asked_by(rule, Schedule.PIPELINED, seed=11)
    stopping = asked.stopping
    requests = []
    for place in range(1, 8):
        if end == "length":
            conditions = replace(stopping, max_tokens=place)
        elif end == "stop token":
            conditions = replace(stopping, stop_token_ids=(place,))
        else:
            conditions = replace(stopping, stop=(f"t{place}",))
        requests.append(replace(asked, stopping=conditions))
    answers = await complete_all(services.client, requests)
    assert any(answer.finish_reason is FinishReason.STOP for answer in answers) is (end != "length")
    for answer in answers:
        assert answer.logprobs == expected(answer.token_ids, top=3)
        assert len(answer.logprobs) == answer.usage.completion_tokens


@shared
async def test_resumed_answer_has_those_of_the_new_tokens(services: System) -> None:
    """Behind any cut, the ones that the uninterrupted answer has there."""
    asked = asked_by(VerificationRule.COUPLED, Schedule.PIPELINED)
    whole = await services.client.complete(asked)
    cuts = range(0, MAX_TOKENS + 1, 8)
    rest = await complete_all(services.client, [replace(asked, output_ids=whole.token_ids[:cut]) for cut in cuts])
    assert [part.logprobs for part in rest] == [whole.logprobs[cut:] for cut in cuts]


@shared
async def test_more_than_there_may_be_are_refused_by_name(services: System) -> None:
    """By the server too, whatever client asks."""
    with pytest.raises(InvalidRequest) as refusal:
        asked_by(VerificationRule.COUPLED, Schedule.PLAIN, logprobs=21)
    assert refusal.value.parameter == "logprobs"
    async with open_channel(services.orchestrator.address) as channel:
        call = GenerationServiceStub(channel).Generate(pb.GenerateRequest(text="t1", logprobs=21), timeout=30)
        with pytest.raises(grpc.aio.AioRpcError, match=r"logprobs must lie in \[0, 20\], not 21"):
            await call.read()
