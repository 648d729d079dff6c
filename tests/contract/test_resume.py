"""An answer that is resumed behind any of its tokens is the answer that was never interrupted.

The models write a text with accents, CJK and joined emoji byte by byte, with slips that depend on every token so far:
whatever a resumption got wrong (a position, a penalty, a byte held back, the beginning of a stop string) shows in what
follows. Under `rejection` the continuation may differ, so its law is judged.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import torch

from orchestrator.text import Tokenizer
from paceline.client import GenerationClient
from paceline.errors import InvalidRequest
from paceline.generation import Completion, CompletionBuilder, Delta, GenerationRequest, Schedule
from paceline.rpc import Server, open_channel
from paceline.types import FinishReason, Origin, SamplingParams, VerificationRule
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1.generation_service_pb2_grpc import (
    GenerationServiceServicer,
    GenerationServiceStub,
    add_GenerationServiceServicer_to_server,
)
from tests.checkpoints import save_markov_checkpoint
from tests.end_to_end.test_markov_law import DRAFTER, SIGNIFICANCE, TARGET, VOCAB_SIZE, check_law, law_of_pairs
from tests.exactness.chi_square import conditional_p_value
from tests.fakes import FakeModel, hashed_logits, markov_logits
from tests.harness import (
    System,
    complete_all,
    model_drafter_of,
    orchestrator_of,
    request,
    running,
    system,
    target_of,
)
from tests.unit.test_text import byte_level_tokenizer

PROMPT = tuple(b"Say: ")
SCRIPT = "naïve 你好 👩‍👩‍👧 END é ".encode()
MAX_TOKENS = 44  # a little more than the whole script
PENALTIES = SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.4, frequency_penalty=0.3)

CASES: dict[str, GenerationRequest] = {
    "greedy": request(PROMPT, max_tokens=MAX_TOKENS, temperature=0.0, seed=None),
    "greedy, penalties": request(PROMPT, max_tokens=MAX_TOKENS, sampling=PENALTIES, seed=None),
    # Each beginning of the joined emoji, and of END, is held back until it is known to be no stop string, or one.
    "greedy, stop string": request(
        PROMPT, max_tokens=MAX_TOKENS, temperature=0.0, seed=None, stop=("👩‍👩‍👦", "END é n", "END")
    ),
    "greedy, min_tokens": request(
        PROMPT,
        max_tokens=MAX_TOKENS,
        sampling=SamplingParams(temperature=0.0, min_tokens=20),
        seed=None,
        stop_token_ids=(0x9F,),  # the second byte of an emoji
    ),
    "coupled": request(PROMPT, max_tokens=MAX_TOKENS, rule=VerificationRule.COUPLED),
    "coupled, sequential": request(
        PROMPT, max_tokens=MAX_TOKENS, rule=VerificationRule.COUPLED, schedule=Schedule.SEQUENTIAL, seed=3
    ),
    "coupled, penalties and stop strings": request(
        PROMPT,
        max_tokens=MAX_TOKENS,
        rule=VerificationRule.COUPLED,
        sampling=replace(PENALTIES, temperature=0.8, min_tokens=5),
        seed=11,
        stop=("👩‍👩‍👦", "END"),
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every byte a token, and some runs of bytes that begin or end inside a character."""
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level_tokenizer().save_pretrained(folder)
    return folder


def scripted(vocab_size: int, *, salt: int, pause_s: float = 0.0) -> FakeModel:
    """Writes `SCRIPT` over and over; how surely, and what else, depends on all tokens before."""
    noise = hashed_logits(vocab_size, scale=1.0, salt=salt)

    def logits(ids: Sequence[int]) -> Sequence[float]:
        time.sleep(pause_s)
        row = list(noise(ids))
        row[SCRIPT[(len(ids) - len(PROMPT)) % len(SCRIPT)]] += 8.0
        return row

    return FakeModel(logits, vocab_size=vocab_size)


Writer = tuple[System, FakeModel]
shared = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def writer(tokenizer: Path) -> AsyncIterator[Writer]:
    """A system that writes the script, and the target's model."""
    vocab_size = Tokenizer.load(str(tokenizer)).vocab_size
    model = scripted(vocab_size, salt=1)
    drafter = model_drafter_of(scripted(vocab_size, salt=2))
    async with system(target_of(model), drafter, str(tokenizer)) as services:
        yield services, model


def resumed_behind(asked: GenerationRequest, whole: Completion, length: int) -> GenerationRequest:
    """Asks for the rest of an answer of which `length` tokens have come."""
    seed = None if asked.sampling.is_greedy else whole.seed
    return replace(asked, seed=seed, output_ids=whole.token_ids[:length])


def head(whole: Completion, length: int) -> str:
    """The text that had come with the first tokens."""
    return "".join(whole.pieces[:length])


# ---------------------------------------------------------------------------------------------------------------------
# The same answer


@shared
@pytest.mark.parametrize("case", CASES)
async def test_answer_resumed_behind_any_token_is_the_uninterrupted_one(writer: Writer, case: str) -> None:
    """Every cut from none to all of the tokens: ids, text, the piece of every token, reason and usage."""
    client, asked = writer[0].client, CASES[case]
    whole = await client.complete(asked)
    assert "" in whole.pieces, "text is held back across some of the cuts"
    cuts = range(len(whole.token_ids) + 1)
    parts = await complete_all(client, [resumed_behind(asked, whole, cut) for cut in cuts])
    for cut, part in zip(cuts, parts, strict=True):
        assert whole.token_ids[:cut] + part.token_ids == whole.token_ids, cut
        assert whole.pieces[:cut] + part.pieces == whole.pieces, cut
        assert head(whole, cut) + part.text == whole.text, cut
        assert (part.finish_reason, part.usage, part.seed) == (whole.finish_reason, whole.usage, part.seed), cut
        assert (part.resumed_tokens, part.resumptions) == (cut, 0)
    assert sum(part.speculation.num_accepted_tokens for part in parts) > 0


@shared
async def test_cases_end_in_the_ways_they_are_meant_to(writer: Writer) -> None:
    """By length and by stop string; the stop token that comes before `min_tokens` ends nothing."""
    answers = {case: await writer[0].client.complete(asked) for case, asked in CASES.items()}
    assert answers["greedy"].text == (SCRIPT * 2)[:MAX_TOKENS].decode(errors="ignore")
    assert answers["greedy"].finish_reason is FinishReason.LENGTH
    stopped = answers["greedy, stop string"]
    assert (stopped.text, stopped.finish_reason) == (SCRIPT.decode().partition("END")[0], FinishReason.STOP)
    waited = answers["greedy, min_tokens"]
    assert (waited.token_ids[-1], waited.finish_reason) == (0x9F, FinishReason.STOP)
    assert len(waited.token_ids) > 20


@shared
@pytest.mark.parametrize("case", ["greedy", "greedy, stop string"])
async def test_whole_answer_is_finished_without_a_model(writer: Writer, case: str) -> None:
    """The caller has everything: reason and usage come, no text twice, and no model takes a step."""
    services, model = writer
    whole = await services.client.complete(CASES[case])
    steps = model.steps
    rest = await services.client.complete(resumed_behind(CASES[case], whole, len(whole.token_ids)))
    assert (rest.token_ids, head(whole, len(whole.token_ids)) + rest.text) == ((), whole.text)
    assert (rest.finish_reason, rest.usage) == (whole.finish_reason, whole.usage)
    assert rest.speculation.rounds == 0
    assert model.steps == steps


@shared
@pytest.mark.parametrize("case", ["greedy", "greedy, stop string", "greedy, min_tokens"])
async def test_tokens_behind_the_end_are_refused(writer: Writer, case: str) -> None:
    """Whether max_tokens, a stop string or a stop token ended it: such ids are no beginning of this answer."""
    client = writer[0].client
    whole = await client.complete(CASES[case])
    with pytest.raises(InvalidRequest, match=f"ends with number {len(whole.token_ids)}") as refusal:
        await client.complete(replace(CASES[case], output_ids=(*whole.token_ids, 65)))
    assert refusal.value.parameter == "output_ids"


@shared
async def test_tokens_outside_the_vocabulary_are_refused(writer: Writer) -> None:
    """By name, before any model sees them."""
    services, model = writer
    with pytest.raises(InvalidRequest, match=str(model.vocab_size)) as refusal:
        await services.client.complete(replace(CASES["greedy"], output_ids=(65, model.vocab_size)))
    assert refusal.value.parameter == "output_ids"


@shared
async def test_sampled_answer_is_not_resumed_without_its_seed(writer: Writer) -> None:
    """The server refuses it too, whatever client asks: another seed would give another answer."""
    message = pb.GenerateRequest(text="Say:", output_ids=[65])
    async with open_channel(writer[0].orchestrator.address) as channel:
        call = GenerationServiceStub(channel).Generate(message, timeout=30)
        with pytest.raises(grpc.aio.AioRpcError, match="seed must be given") as refusal:
            await call.read()
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# ---------------------------------------------------------------------------------------------------------------------
# The client, when its stream breaks


class BreakingProxy(GenerationServiceServicer):
    """Passes answers on from one orchestrator after the other, and breaks off as many events into each as it is told."""

    def __init__(self, stubs: Sequence[GenerationServiceStub]) -> None:
        self._stubs = itertools.cycle(stubs)
        self.breaks: list[int] = []  # of the next calls; those behind them are let through

    async def Generate(  # noqa: N802 - the name is the contract's
        self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        limit = self.breaks.pop(0) if self.breaks else None
        call = next(self._stubs).Generate(message, timeout=context.time_remaining())
        events = 0
        async for response in call:
            if events == limit:
                call.cancel()
                await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            yield response
            events += 1


@asynccontextmanager
async def behind_a_proxy(services: System, tokenizer: Path) -> AsyncIterator[tuple[BreakingProxy, GenerationClient]]:
    """A client of two orchestrators, which share target and drafter."""
    assert services.drafter is not None
    second = orchestrator_of(services.target.address, services.drafter.address, str(tokenizer))
    async with AsyncExitStack() as stack:
        orchestrators = [services.orchestrator, await stack.enter_async_context(running(second))]
        channels = [await stack.enter_async_context(open_channel(each.address)) for each in orchestrators]
        proxy = BreakingProxy([GenerationServiceStub(channel) for channel in channels])
        server = Server(host="127.0.0.1", port=0)
        add_GenerationServiceServicer_to_server(proxy, server.registrar)
        await server.start("paceline.v1.GenerationService")
        stack.push_async_callback(server.stop, 0)
        client = await stack.enter_async_context(GenerationClient(server.address, first_pause_s=0.001))
        yield proxy, client


@shared
@pytest.mark.parametrize("case", ["greedy, stop string", "coupled", "coupled, penalties and stop strings"])
async def test_answer_survives_a_break_after_any_event(writer: Writer, tokenizer: Path, case: str) -> None:
    """The other orchestrator goes on, and the caller sees the answer that was never interrupted."""
    async with behind_a_proxy(writer[0], tokenizer) as (proxy, client):
        whole = await client.complete(CASES[case])
        for events in range(1, whole.speculation.rounds + 2):
            proxy.breaks = [events]
            answer = await client.complete(CASES[case])
            assert (answer.token_ids, answer.text, answer.pieces) == (whole.token_ids, whole.text, whole.pieces)
            assert (answer.finish_reason, answer.usage) == (whole.finish_reason, whole.usage)
            assert answer.resumptions <= 1


@shared
async def test_answer_survives_a_break_in_every_round(writer: Writer, tokenizer: Path) -> None:
    """No orchestrator gives more than one round before it breaks off, and the answer still comes whole."""
    async with behind_a_proxy(writer[0], tokenizer) as (proxy, client):
        whole = await client.complete(CASES["coupled"])
        proxy.breaks = [2] * (MAX_TOKENS - 1)
        answer = await client.complete(CASES["coupled"])
        assert (answer.token_ids, answer.text, answer.usage) == (whole.token_ids, whole.text, whole.usage)
        assert answer.resumptions > 10


@shared
async def test_choices_survive_a_break_each_by_itself(writer: Writer, tokenizer: Path) -> None:
    """Whatever each had by then, the other orchestrator goes on with it: all are the answers never interrupted."""
    asked = replace(CASES["coupled, penalties and stop strings"], n=3, logprobs=1)
    async with behind_a_proxy(writer[0], tokenizer) as (proxy, client):
        whole = await client.complete_choices(asked)
        assert len({answer.token_ids for answer in whole}) == 3
        events = sum(answer.speculation.rounds + 1 for answer in whole)
        for limit in range(1, events, 7):
            proxy.breaks = [limit, 3]
            choices = await client.complete_choices(asked)
            for answer, expected in zip(choices, whole, strict=True):
                assert (answer.token_ids, answer.text, answer.pieces) == (
                    expected.token_ids, expected.text, expected.pieces,
                )  # fmt: skip
                assert (answer.finish_reason, answer.usage, answer.seed) == (
                    expected.finish_reason, expected.usage, expected.seed,
                )  # fmt: skip
                assert answer.logprobs == expected.logprobs
            assert sum(answer.resumptions for answer in choices) >= 1


async def test_answer_survives_the_end_of_its_orchestrator(tokenizer: Path) -> None:
    """It is stopped in mid-answer and started again on its port; the client finds it, and goes on where it was."""
    asked = request(PROMPT, max_tokens=24, rule=VerificationRule.COUPLED, schedule=Schedule.PLAIN)
    vocab_size = Tokenizer.load(str(tokenizer)).vocab_size
    # So slow that more than a second of the answer is left when its orchestrator stops, which takes half of one.
    target = target_of(scripted(vocab_size, salt=1, pause_s=0.05))
    async with system(target, None, str(tokenizer)) as services, AsyncExitStack() as stack:
        whole = await services.client.complete(asked)
        builder = CompletionBuilder()
        client = await stack.enter_async_context(GenerationClient(services.orchestrator.address))
        events = await stack.enter_async_context(aclosing(client.generate(asked)))
        async for event in events:
            builder.add(event)
            if isinstance(event, Delta) and not services.orchestrator.task.done():
                await services.orchestrator.stop()
                port = int(services.orchestrator.address.rpartition(":")[2])
                again = orchestrator_of(services.target.address, None, str(tokenizer), port=port)
                await stack.enter_async_context(running(again))
        answer = builder.build()
    assert (answer.token_ids, answer.text, answer.usage) == (whole.token_ids, whole.text, whole.usage)
    assert answer.resumptions == 1


# ---------------------------------------------------------------------------------------------------------------------
# The law under rejection

ANSWERS = 80
LENGTH = 24


async def answer_in_legs(client: GenerationClient, seed: int) -> tuple[list[int], list[int], int]:
    """An answer to a prompt of one token that is broken off after every 1 to 6 tokens, often in the middle of a round.

    Gives the prompt and the answer, the lengths of both together at which it was resumed, and how many tokens were
    drafted. Where it breaks is fixed beforehand, so the tokens themselves have no influence on it.
    """
    prompt = seed % VOCAB_SIZE
    asked = request((prompt,), max_tokens=LENGTH, rule=VerificationRule.REJECTION, draft_length=3, seed=1000 + seed)
    output_ids: list[int] = []
    cuts: list[int] = []
    drafted = 0
    legs = itertools.cycle([1 + (seed + leg * leg) % 6 for leg in range(6)])
    while len(output_ids) < LENGTH:
        leg_length = min(next(legs), LENGTH - len(output_ids))
        cuts.append(1 + len(output_ids))
        came: list[tuple[int, Origin]] = []
        async with aclosing(client.generate(replace(asked, output_ids=tuple(output_ids)))) as events:
            async for event in events:
                if isinstance(event, Delta):
                    came += zip(event.token_ids, event.origins, strict=True)
                if len(came) >= leg_length:
                    break
        output_ids += [token_id for token_id, _ in came[:leg_length]]
        drafted += sum(origin is Origin.DRAFT for _, origin in came[:leg_length])
    return [prompt, *output_ids], cuts[1:], drafted


async def test_resumed_answers_have_the_law_of_the_target_under_rejection(tmp_path: Path) -> None:
    """80 answers of 24 tokens from Markov chains, each resumed some six times, which is about 500 cuts.

    Judged are all transitions, all pairs of transitions, and the pairs across the cuts (the last token that had come
    and the two behind it), by chi-square at a significance of 1e-6 each. The seeds are fixed, but which drafts come in
    time is not: the odds of a false alarm are below 3e-6 a run.
    """
    words = save_markov_checkpoint(tmp_path / "words", TARGET.tolist())
    target = FakeModel(markov_logits(TARGET.tolist()), vocab_size=VOCAB_SIZE)
    drafter = FakeModel(markov_logits(DRAFTER.tolist()), vocab_size=VOCAB_SIZE)
    gate = asyncio.Semaphore(8)

    async with system(target_of(target), model_drafter_of(drafter), str(words)) as services:

        async def one(seed: int) -> tuple[list[int], list[int], int]:
            async with gate:
                return await answer_in_legs(services.client, seed)

        answers = await asyncio.gather(*(one(seed) for seed in range(ANSWERS)))
    check_law([sequence for sequence, _, _ in answers])
    across = torch.zeros(VOCAB_SIZE, VOCAB_SIZE * VOCAB_SIZE, dtype=torch.float64)
    for sequence, cuts, _ in answers:
        for cut in cuts:
            if cut + 1 < len(sequence):
                last, first, second = sequence[cut - 1 : cut + 2]
                across[last, first * VOCAB_SIZE + second] += 1
    assert across.sum() > 450
    assert conditional_p_value(across, law_of_pairs(TARGET)) > SIGNIFICANCE
    assert sum(drafted for _, _, drafted in answers) > 250
