"""OpenAI's own Python client against the whole stack: every parameter, whole and streamed, equal to the answers over gRPC.

The target's logits hang on every token so far, except behind a prompt that begins with `SCRIPT_MARK`: then it says a text
that is known. The drafter is of another opinion now and then, so that blocks are of all lengths.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam

from orchestrator.text import Tokenizer
from paceline.generation import ChatMessage, Completion, GenerationRequest, SpeculationOptions, StopConditions
from paceline.types import SamplingParams, VerificationRule
from tests.checkpoints import END_OF_TEXT, TINY_VOCAB_SIZE, save_tiny_checkpoint, tiny_tokenizer
from tests.fakes import FakeModel, fake_info, hashed_logits
from tests.harness import System, model_drafter_of, system, target_of

TOKENIZER = Tokenizer(tiny_tokenizer())
(END_ID,) = TOKENIZER.encode(END_OF_TEXT)
SCRIPT_MARK = 5
TEXT = "Hi 👩‍👩‍👧 你好 é नि 🇩🇪, END of it."
SCRIPT = (*TOKENIZER.encode(TEXT), END_ID)
MODEL = "fake"
LIMIT_S = 60.0
shared = pytest.mark.asyncio(loop_scope="module")

hashed = hashed_logits(TINY_VOCAB_SIZE, salt=1)


def one_hot(token_id: int) -> list[float]:
    return [30.0 if other == token_id else 0.0 for other in range(TINY_VOCAB_SIZE)]


def target_logits(ids: Sequence[int]) -> Sequence[float]:
    return one_hot(SCRIPT[(len(ids) - 1) % len(SCRIPT)]) if ids[0] == SCRIPT_MARK else hashed(ids)


def drafter_logits(ids: Sequence[int]) -> Sequence[float]:
    """The target's, but for every fifth token."""
    return one_hot(len(ids) % 7) if len(ids) % 5 == 0 else target_logits(ids)


def slow_logits(ids: Sequence[int]) -> Sequence[float]:
    time.sleep(0.004)
    return hashed(ids)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", seed=1))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tokenizer: str) -> AsyncIterator[System]:
    target = FakeModel(target_logits, vocab_size=TINY_VOCAB_SIZE)
    drafter = model_drafter_of(FakeModel(drafter_logits, vocab_size=TINY_VOCAB_SIZE))
    async with system(target_of(target, fake_info(target, eos=(END_ID,))), drafter, tokenizer, http_port=0) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def slow(tokenizer: str) -> AsyncIterator[System]:
    """A target so slow that an answer of thousands of tokens does not end within a test."""
    target = target_of(FakeModel(slow_logits, vocab_size=TINY_VOCAB_SIZE))
    drafter = model_drafter_of(FakeModel(hashed, vocab_size=TINY_VOCAB_SIZE))
    async with system(target, drafter, tokenizer, http_port=0) as running:
        yield running


def url_of(running: System) -> str:
    return str(running.orchestrator.lifetime.details["http"])


def client_of(running: System) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url_of(running)}/v1", api_key="none", max_retries=0, timeout=LIMIT_S)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(services: System) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(services) as connected:
        yield connected


PARAMETERS: dict[str, Any] = {
    "max_tokens": 24,
    "temperature": 0.8,
    "top_p": 0.95,
    "seed": 11,
    "frequency_penalty": 0.3,
    "presence_penalty": -0.2,
    "logit_bias": {"70": 2.5, "71": -100},
    "stop": ["zzz", "END"],
    "user": "somebody",
}
EXTRA: dict[str, Any] = {
    "top_k": 60,
    "min_p": 0.001,
    "repetition_penalty": 1.1,
    "min_tokens": 20,
    "ignore_eos": False,
    "stop_token_ids": [80],
    "allowed_token_ids": list(range(40, 300)),
    "banned_token_ids": [90],
    "speculation": {"rule": "coupled", "draft_length": 4, "fan_out": 1, "schedule": "pipelined"},
}
ASKED = GenerationRequest(
    text="Why?",
    sampling=SamplingParams(
        temperature=0.8,
        top_p=0.95,
        top_k=60,
        min_p=0.001,
        repetition_penalty=1.1,
        frequency_penalty=0.3,
        presence_penalty=-0.2,
        logit_bias=((70, 2.5), (71, -100.0)),
        allowed_token_ids=tuple(range(40, 300)),
        banned_token_ids=(90,),
        min_tokens=20,
    ),
    stopping=StopConditions(max_tokens=24, stop=("zzz", "END"), stop_token_ids=(80,)),
    speculation=SpeculationOptions(rule=VerificationRule.COUPLED, draft_length=4),
    seed=11,
)
"""The same request over gRPC."""
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why?"},
]
CHAT = replace(ASKED, text=None, messages=(ChatMessage("system", "Be brief."), ChatMessage("user", "Why?")))


def is_same(text: str, reason: str | None, usage: Any, expected: Completion) -> bool:
    found = (text, reason, usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
    counted = expected.usage
    return found == (
        expected.text,
        expected.finish_reason.value,
        counted.prompt_tokens,
        counted.completion_tokens,
        counted.total_tokens,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Models


@shared
async def test_models_are_listed_and_looked_up(client: openai.AsyncOpenAI) -> None:
    (model,) = (await client.models.list()).data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "paceline")
    assert await client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError) as refusal:
        await client.models.retrieve("other/model")
    assert refusal.value.code == "model_not_found"


# ---------------------------------------------------------------------------------------------------------------------
# Whole answers and streams


@shared
async def test_completion_with_every_parameter_equals_the_answer_over_grpc(
    services: System, client: openai.AsyncOpenAI
) -> None:
    """The text, the reason, the usage and the seed, for the same request; another seed gives another text."""
    expected = await services.client.complete(ASKED)
    whole = await client.completions.create(model=MODEL, prompt="Why?", **PARAMETERS, extra_body=EXTRA)
    (choice,) = whole.choices
    assert is_same(choice.text, choice.finish_reason, whole.usage, expected)
    assert (whole.object, whole.model, whole.id[:5]) == ("text_completion", MODEL, "cmpl-")
    assert choice.model_extra == {"seed": 11}
    other = await client.completions.create(model=MODEL, prompt="Why?", **PARAMETERS | {"seed": 12}, extra_body=EXTRA)
    assert other.choices[0].text != choice.text


@shared
async def test_chat_with_every_parameter_equals_the_answer_over_grpc(
    services: System, client: openai.AsyncOpenAI
) -> None:
    """Through the model's own chat template."""
    expected = await services.client.complete(CHAT)
    whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, **PARAMETERS, extra_body=EXTRA)
    (choice,) = whole.choices
    assert is_same(choice.message.content or "", choice.finish_reason, whole.usage, expected)
    assert (choice.message.role, whole.object, whole.id[:9]) == ("assistant", "chat.completion", "chatcmpl-")
    assert whole.system_fingerprint is not None


@shared
async def test_streams_say_what_whole_answers_say(services: System, client: openai.AsyncOpenAI) -> None:
    """At both endpoints: the chunks join to the text, and the last chunk but the usage has the reason."""
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    expected = await services.client.complete(ASKED)
    stream = await client.completions.create(model=MODEL, prompt="Why?", **PARAMETERS, extra_body=EXTRA, **options)
    *chunks, usage = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert is_same(text, chunks[-1].choices[0].finish_reason, usage.usage, expected)
    assert (usage.choices, {chunk.usage for chunk in chunks}, len({chunk.id for chunk in chunks})) == ([], {None}, 1)
    expected = await services.client.complete(CHAT)
    spoken = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, **PARAMETERS, extra_body=EXTRA, **options
    )
    *parts, usage = [part async for part in spoken]
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert is_same(text, parts[-1].choices[0].finish_reason, usage.usage, expected)
    assert parts[0].choices[0].delta.role == "assistant"


@shared
async def test_client_without_an_event_loop(services: System) -> None:
    """The synchronous client, whole and streamed."""

    def ask() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{url_of(services)}/v1", api_key="none", timeout=LIMIT_S) as client:
            whole = client.completions.create(model=MODEL, prompt="Why?", **PARAMETERS, extra_body=EXTRA)
            with client.completions.create(
                model=MODEL, prompt="Why?", **PARAMETERS, extra_body=EXTRA, stream=True
            ) as stream:
                return whole.choices[0].text, "".join(chunk.choices[0].text for chunk in stream)

    whole, streamed = await asyncio.to_thread(ask)
    assert whole == streamed == (await services.client.complete(ASKED)).text


@shared
@pytest.mark.parametrize("draft_length", range(9))
async def test_streams_hold_whole_characters_whatever_the_blocks(client: openai.AsyncOpenAI, draft_length: int) -> None:
    """Emoji, CJK and combining text in drafts of 0 to 8 tokens, a fifth of them rejected; usage is exact to the end token."""
    stream = await client.completions.create(
        model=MODEL,
        prompt=[SCRIPT_MARK],
        max_tokens=200,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"speculation": {"draft_length": draft_length}},
    )
    *chunks, usage = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert not any("\ufffd" in chunk.choices[0].text for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert usage.usage is not None
    assert usage.usage.completion_tokens == len(SCRIPT)


@shared
@pytest.mark.parametrize("draft_length", range(9))
async def test_stop_strings_are_found_across_blocks(client: openai.AsyncOpenAI, draft_length: int) -> None:
    """ "END" is three tokens: the text ends in front of it, and the usage with the token that completes it."""
    for stop in ("END", ["nothing", "END"]):
        whole = await client.completions.create(
            model=MODEL,
            prompt=[SCRIPT_MARK],
            max_tokens=200,
            temperature=0,
            stop=stop,
            extra_body={"speculation": {"draft_length": draft_length}},
        )
        before = TEXT[: TEXT.index("END")]
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (before, "stop")
        assert whole.usage is not None
        assert whole.usage.completion_tokens == len(TOKENIZER.encode(before + "END"))


@shared
async def test_chat_answers_go_on_until_they_end(client: openai.AsyncOpenAI) -> None:
    """Without a limit on tokens they may have as many as there is room for, completions 16."""
    chat = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, extra_body={"ignore_eos": True, "stop_token_ids": list(range(100, 103))}
    )
    assert chat.usage is not None
    assert chat.choices[0].finish_reason == "stop"
    assert chat.usage.completion_tokens > 16
    completion = await client.completions.create(model=MODEL, prompt="Why?", extra_body={"ignore_eos": True})
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 16


# ---------------------------------------------------------------------------------------------------------------------
# Single parameters


@shared
async def test_every_choice_can_be_replayed_by_its_seed(client: openai.AsyncOpenAI) -> None:
    """Also where nobody gave one."""
    body = {"ignore_eos": True, "speculation": {"rule": "coupled"}}
    whole = await client.completions.create(model=MODEL, prompt="Why?", n=3, extra_body=body)
    assert len({choice.text for choice in whole.choices}) == 3
    for choice in whole.choices:
        assert choice.model_extra is not None
        again = await client.completions.create(
            model=MODEL, prompt="Why?", seed=choice.model_extra["seed"], extra_body=body
        )
        assert again.choices[0].text == choice.text


@shared
async def test_choices_of_a_stream_are_told_apart(client: openai.AsyncOpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "n": 2, "seed": 3, "max_tokens": 12}
    whole = await client.chat.completions.create(**ask)
    texts = ["", ""]
    async for chunk in await client.chat.completions.create(**ask, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


@shared
async def test_several_prompts_have_several_answers(client: openai.AsyncOpenAI) -> None:
    """Each is that of its prompt alone; text or token ids."""
    ask: dict[str, Any] = {"model": MODEL, "seed": 3, "max_tokens": 12}
    prompts: list[Any] = ["Why?", "How?", "When?"]
    together = await client.completions.create(**ask, prompt=prompts)
    alone = [await client.completions.create(**ask, prompt=prompt) for prompt in prompts]
    assert [choice.text for choice in together.choices] == [one.choices[0].text for one in alone]
    ids = await client.completions.create(**ask, prompt=[TOKENIZER.encode(prompt) for prompt in prompts])
    assert [choice.text for choice in ids.choices] == [choice.text for choice in together.choices]
    assert ids.usage is not None
    assert together.usage is not None
    assert (
        ids.usage.prompt_tokens == together.usage.prompt_tokens == sum(len(TOKENIZER.encode(each)) for each in prompts)
    )
    streamed = ["", "", ""]
    async for chunk in await client.completions.create(**ask, prompt=prompts, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in together.choices]


@shared
async def test_echo_begins_with_the_prompt(client: openai.AsyncOpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": "Why? ", "seed": 3, "max_tokens": 5}
    plain, echoed = await client.completions.create(**ask), await client.completions.create(**ask, echo=True)
    assert echoed.choices[0].text == "Why? " + plain.choices[0].text
    assert echoed.usage is not None
    assert echoed.usage.completion_tokens == 5


@shared
async def test_log_probabilities_are_those_over_grpc(services: System, client: openai.AsyncOpenAI) -> None:
    """At both endpoints, whole and streamed; those of completions name the token itself besides the likeliest."""
    expected = await services.client.complete(replace(CHAT, logprobs=3))
    ask: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, **PARAMETERS, "logprobs": True, "top_logprobs": 3}
    whole = await client.chat.completions.create(**ask, extra_body=EXTRA)
    streamed = [
        entry
        async for chunk in await client.chat.completions.create(**ask, extra_body=EXTRA, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content or []
    assert content == streamed
    assert [(entry.token, entry.logprob) for entry in content] == [
        (TOKENIZER.spell(entry.token_id).text, entry.logprob) for entry in expected.logprobs
    ]
    assert [[top.logprob for top in entry.top_logprobs] for entry in content] == [
        [logprob for _, logprob in entry.top] for entry in expected.logprobs
    ]
    joined = bytes(itertools.chain.from_iterable(entry.bytes or () for entry in content))
    assert joined.decode(errors="replace") == whole.choices[0].message.content
    expected = await services.client.complete(replace(ASKED, logprobs=2))
    completion = await client.completions.create(model=MODEL, prompt="Why?", **PARAMETERS, logprobs=2, extra_body=EXTRA)
    legacy = completion.choices[0].logprobs
    assert legacy is not None
    assert legacy.token_logprobs == [entry.logprob for entry in expected.logprobs]
    assert legacy.tokens == [TOKENIZER.spell(entry.token_id).text for entry in expected.logprobs]
    for token, top in zip(legacy.tokens, legacy.top_logprobs or (), strict=True):
        assert token in top
        assert len(top) in (2, 3)


@shared
async def test_bias_decides(client: openai.AsyncOpenAI) -> None:
    """A bias of 100 as OpenAI describes it: nothing else is said."""
    (token_id,) = TOKENIZER.encode("A")
    whole = await client.completions.create(
        model=MODEL, prompt="Why?", max_tokens=6, logit_bias={str(token_id): 100}, temperature=0
    )
    assert whole.choices[0].text == "AAAAAA"


@shared
async def test_speculation_is_reported_and_can_be_switched_off(client: openai.AsyncOpenAI) -> None:
    """The text is the same with and without, as is all usage but that of drafts."""
    ask: dict[str, Any] = {"model": MODEL, "prompt": "Why?", "seed": 5, "max_tokens": 40}
    with_drafts, without = [
        await client.completions.create(**ask, extra_body={"ignore_eos": True, "speculation": speculation})
        for speculation in ({"draft_length": 4}, {"off": True})
    ]
    assert with_drafts.choices[0].text == without.choices[0].text
    figures = [answer.usage.model_extra["speculation"] for answer in (with_drafts, without) if answer.usage]
    assert figures[0]["num_accepted_tokens"] > 0
    assert len(figures[0]["num_accepted_tokens_per_pos"]) == 4
    assert (figures[1]["num_drafts"], figures[1]["rounds"], figures[1]["schedule"]) == (0, 40, "plain")


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@shared
@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"stop": ["x" * 300]}, "stop"),
        ({"prompt": [TINY_VOCAB_SIZE]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 5}, "best_of"),
        ({"extra_body": {"min_tokens": 99}}, "min_tokens"),
        ({"extra_body": {"guided_json": {}}}, "guided_json"),
        ({"extra_body": {"speculation": {"rule": "greedy"}}}, "speculation.rule"),
        ({"extra_body": {"banned_token_ids": list(range(TINY_VOCAB_SIZE))}}, "banned_token_ids"),
    ],
)
async def test_refusals_name_the_parameter(client: openai.AsyncOpenAI, parameters: dict[str, Any], param: str) -> None:
    """Whoever finds the fault: the front, the request, or the generator that knows the model."""
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.completions.create(**{"model": MODEL, "prompt": "Why?", "stream": stream, **parameters})
        assert refusal.value.param == param
        assert refusal.value.type == "invalid_request_error"


@shared
async def test_prompt_that_is_too_long_is_refused_as_openai_does(client: openai.AsyncOpenAI) -> None:
    """Programs look for this code."""
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.completions.create(model=MODEL, prompt=[1] * 5000)
    assert refusal.value.code == "context_length_exceeded"


# ---------------------------------------------------------------------------------------------------------------------
# Ends in the middle

ENDLESS: dict[str, Any] = {
    "model": MODEL,
    "prompt": "Why?",
    "max_tokens": 3000,
    "extra_body": {"ignore_eos": True, "speculation": {"draft_length": 3}},
}


async def assert_nothing_is_left(running: System) -> None:
    for load in await running.loads():
        assert (load.sessions, load.kv_used_tokens) == (0, 0)


@shared
async def test_hanging_up_frees_both_models(slow: System) -> None:
    """In mid-stream, and while a whole answer is waited for."""
    async with client_of(slow) as client:
        async with await client.completions.create(**ENDLESS, stream=True) as stream:
            await anext(aiter(stream))
        await assert_nothing_is_left(slow)
        with pytest.raises(openai.APITimeoutError):
            await client.completions.create(**ENDLESS, timeout=0.5)
        await assert_nothing_is_left(slow)


@shared
async def test_late_answers_end_with_a_status_or_an_event(slow: System) -> None:
    """504 for a whole answer; behind the first token an event with the error, and no `[DONE]`."""
    headers = {"x-request-timeout": "0.7"}
    async with client_of(slow) as client:
        with pytest.raises(openai.InternalServerError) as refusal:
            await client.completions.create(**ENDLESS, extra_headers=headers)
        assert (refusal.value.status_code, refusal.value.code) == (504, "deadline_exceeded")
        stream = await client.completions.create(**ENDLESS, stream=True, extra_headers=headers)
        with pytest.raises(openai.APIError, match="time allowed"):
            async for _ in stream:
                pass
    body = {name: value for name, value in ENDLESS.items() if name != "extra_body"} | ENDLESS["extra_body"]
    async with httpx2.AsyncClient(timeout=LIMIT_S) as raw:
        response = await raw.post(f"{url_of(slow)}/v1/completions", json=body | {"stream": True}, headers=headers)
    *_, last, rest = response.text.split("\n\n")
    assert rest == ""
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    await assert_nothing_is_left(slow)


@shared
async def test_late_prompts_among_several_end_all(slow: System) -> None:
    """The caller's patience holds for each of them."""
    async with client_of(slow) as client:
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(
                **ENDLESS | {"prompt": ["Why?", "How?"]}, extra_headers={"x-request-timeout": "0.7"}
            )
    await assert_nothing_is_left(slow)
