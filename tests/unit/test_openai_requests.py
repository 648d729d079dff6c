"""Bodies of OpenAI's endpoints in our own words: every parameter arrives, and whatever is not honoured is refused by name."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.openai_requests import Asked, name_here, parse_chat, parse_completion
from paceline.errors import InvalidRequest
from paceline.generation import (
    ChatMessage,
    GenerationRequest,
    OutputOptions,
    Schedule,
    SpeculationOptions,
    StopConditions,
)
from paceline.types import SamplingParams, VerificationRule

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Why?"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Why?"}]}
LONGEST = 1000
"""`max_tokens` of chat answers that name none."""

SHAPED: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.25,
    "frequency_penalty": -0.5,
    "logit_bias": {"3": 1.5, "0": -100},
    "min_tokens": 2,
    "stop": ["END", "\n\n"],
    "stop_token_ids": [5, 6],
    "allowed_token_ids": [0, 1, 2, 3, 5],
    "banned_token_ids": [2],
    "ignore_eos": True,
    "seed": 2**64 - 1,
    "n": 3,
    "user": "somebody",
    "max_tokens": 9,
    "speculation": {"rule": "rejection", "draft_length": 3, "fan_out": 2, "schedule": "sequential"},
}
"""Every parameter that both endpoints take and that shapes the answer."""
EXPECTED = GenerationRequest(
    model="m",
    text="Why?",
    sampling=SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias=((3, 1.5), (0, -100.0)),
        min_tokens=2,
        allowed_token_ids=(0, 1, 2, 3, 5),
        banned_token_ids=(2,),
    ),
    stopping=StopConditions(max_tokens=9, stop=("END", "\n\n"), stop_token_ids=(5, 6), ignore_eos=True),
    speculation=SpeculationOptions(
        rule=VerificationRule.REJECTION, draft_length=3, fan_out=2, schedule=Schedule.SEQUENTIAL
    ),
    seed=2**64 - 1,
    n=3,
    tenant="somebody",
    output=OutputOptions(pieces=False),
)


def completion(**parameters: Any) -> Asked:
    return parse_completion(json.dumps(COMPLETION | parameters).encode())


def chat(**parameters: Any) -> Asked:
    return parse_chat(json.dumps(CHAT | parameters).encode(), max_tokens=LONGEST)


def refused(parse: Any, **parameters: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refusal:
        parse(**parameters)
    assert refusal.value.message.endswith((".", "?")), "a sentence"
    assert "Value error" not in refusal.value.message
    return refusal.value


# ---------------------------------------------------------------------------------------------------------------------
# What is honoured


def test_every_shared_parameter_arrives() -> None:
    """At both endpoints, with its value."""
    assert completion(**SHAPED).requests == (EXPECTED,)
    messages = (ChatMessage("user", "Why?"),)
    assert chat(**SHAPED).requests == (replace(EXPECTED, text=None, messages=messages),)


def test_defaults_are_openais() -> None:
    """Temperature 1, one answer, 16 tokens of a completion, and as many as fit of a chat answer."""
    (request,) = completion().requests
    assert (request.sampling, request.n, request.seed) == (SamplingParams(), 1, None)
    assert request.stopping == StopConditions(max_tokens=16)
    assert chat().requests[0].stopping == StopConditions(max_tokens=LONGEST)
    assert not completion().stream


@pytest.mark.parametrize("parse", [completion, chat])
def test_null_is_the_default(parse: Any) -> None:
    """Clients send null for what they do not set."""
    names = [*SHAPED, "stream", "stream_options", "logprobs"]
    assert parse(**dict.fromkeys(names)) == parse()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Why?", [{"text": "Why?"}]),
        (["Why?", "How?"], [{"text": "Why?"}, {"text": "How?"}]),
        ([1, 2], [{"token_ids": (1, 2)}]),
        ([[1, 2], [3]], [{"token_ids": (1, 2)}, {"token_ids": (3,)}]),
        (["Why?", [3]], [{"text": "Why?"}, {"token_ids": (3,)}]),
    ],
)
def test_prompts_are_text_or_ids_one_or_several(prompt: Any, prompts: list[dict[str, Any]]) -> None:
    """All four forms that OpenAI has."""
    asked = completion(prompt=prompt)
    found = [
        {"text": request.text} if request.text is not None else {"token_ids": request.token_ids}
        for request in asked.requests
    ]
    assert found == prompts
    assert asked.echoes == ("",) * len(prompts)


def test_stop_may_be_one_string() -> None:
    assert completion(stop="END").requests[0].stopping.stop == ("END",)


def test_top_k_may_be_switched_off_as_vllm_does() -> None:
    assert completion(top_k=-1).requests[0].sampling.top_k == 0


@pytest.mark.parametrize(
    ("parameters", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_log_probabilities_of_chat_answers(parameters: dict[str, Any], logprobs: int | None) -> None:
    """A switch and a number."""
    assert chat(**parameters).requests[0].logprobs == logprobs


def test_log_probabilities_of_completions() -> None:
    """A number alone."""
    assert completion(logprobs=0).requests[0].logprobs == 0
    assert completion(logprobs=20).requests[0].logprobs == 20


def test_echo_puts_the_text_of_the_prompt_before_its_answers() -> None:
    assert completion(prompt=["Why?", "How?"], echo=True).echoes == ("Why?", "How?")


def test_newer_name_of_max_tokens() -> None:
    """Both may be given if they agree."""
    assert chat(max_completion_tokens=5).requests[0].stopping.max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).requests[0].stopping.max_tokens == 5
    assert refused(chat, max_completion_tokens=5, max_tokens=6).parameter == "max_tokens"


def test_messages_become_turns() -> None:
    """Developers are the system's voice, and parts of text are lines of one."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "So.",
        "refusal": None,
        "tool_calls": [],
        "audio": None,
        "annotations": [],
    }
    asked = chat(messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}, answer])
    assert asked.requests[0].messages == (
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "one\ntwo"),
        ChatMessage("assistant", "So."),
    )


@pytest.mark.parametrize("off", [{"off": True}, {"off": True, "draft_length": 0}, {"off": True, "schedule": "plain"}])
def test_speculation_can_be_switched_off(off: dict[str, Any]) -> None:
    assert completion(speculation=off).requests[0].speculation.draft_length == 0


def test_usage_of_a_stream_is_an_option() -> None:
    asked = completion(stream=True, stream_options={"include_usage": True})
    assert (asked.stream, asked.include_usage) == (True, True)
    assert not completion(stream=True, stream_options={"include_usage": False}).include_usage


# ---------------------------------------------------------------------------------------------------------------------
# What asks for nothing, and what is refused

TOOL = {"type": "function", "function": {"name": "f"}}
REFUSED_IN_CHAT: dict[str, Any] = {
    "audio": {"voice": "x", "format": "mp3"},
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "metadata": {"a": "b"},
    "modalities": ["text", "audio"],
    "moderation": {"model": "x"},
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_key": "x",
    "prompt_cache_options": {"mode": "x"},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "high",
    "response_format": {"type": "json_object"},
    "safety_identifier": "x",
    "service_tier": "flex",
    "store": True,
    "tool_choice": "required",
    "tools": [TOOL],
    "verbosity": "low",
    "web_search_options": {},
}
NOTHING_IN_CHAT: dict[str, Any] = {
    "function_call": "none",
    "functions": [],
    "metadata": {},
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "prompt_cache_options": {},
    "reasoning_effort": "none",
    "response_format": {"type": "text"},
    "service_tier": "auto",
    "store": False,
    "tool_choice": "auto",
    "tools": [],
}


@pytest.mark.parametrize("name", REFUSED_IN_CHAT)
def test_what_chat_lacks_is_refused_by_name(name: str) -> None:
    refusal = refused(chat, **{name: REFUSED_IN_CHAT[name]})
    assert refusal.parameter == name
    assert refusal.message == f"{name} is not supported here; leave it out."


@pytest.mark.parametrize("name", REFUSED_IN_CHAT)
def test_null_asks_for_nothing(name: str) -> None:
    assert chat(**{name: None}) == chat()


@pytest.mark.parametrize("name", NOTHING_IN_CHAT)
def test_values_that_ask_for_nothing_are_taken(name: str) -> None:
    """Clients spell out defaults."""
    assert chat(**{name: NOTHING_IN_CHAT[name]}) == chat()


def test_parameters_of_openais_client_are_all_known() -> None:
    """None of them is called a mistake in spelling, at either endpoint."""
    chat_types = pytest.importorskip("openai.types.chat.completion_create_params")
    completion_types = pytest.importorskip("openai.types.completion_create_params")
    for parse, types in ((chat, chat_types), (completion, completion_types)):
        for name in types.CompletionCreateParamsBase.__annotations__.keys() - {"model", "messages", "prompt"}:
            assert parse(**{name: None}) == parse()


@pytest.mark.parametrize(
    ("parameters", "parameter"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"echo": True, "prompt": [1, 2]}, "echo"),
        ({"prompt": ["a", "b", "c"], "n": 6}, "prompt"),
        ({"messages": []}, "messages"),
        ({"tools": []}, "tools"),
    ],
)
def test_what_completions_lack_is_refused_by_name(parameters: dict[str, Any], parameter: str) -> None:
    assert refused(completion, **parameters).parameter == parameter


def test_as_many_best_ones_as_answers_ask_for_nothing() -> None:
    assert completion(best_of=2, n=2) == completion(n=2)
    assert completion(suffix="") == completion()


@pytest.mark.parametrize("parse", [completion, chat])
def test_unknown_parameters_are_refused_with_the_nearest_name(parse: Any) -> None:
    """A misspelt one changes the answer without a word wherever it is ignored."""
    refusal = refused(parse, temperatur=0.1)
    assert refusal.parameter == "temperatur"
    assert refusal.message == "temperatur is not a parameter of this endpoint; did you mean temperature?"
    assert refused(parse, zzz=1).message == "zzz is not a parameter of this endpoint; leave it out."
    assert refused(parse, speculation={"draft_len": 1}).parameter == "speculation.draft_len"
    assert refused(parse, **{"x" * 1000: 1}).parameter == "x" * 64


WRONG: list[tuple[str, Any, str]] = [
    ("model", 3, "model"),
    ("model", "", "model"),
    ("n", 0, "n"),
    ("n", 17, "n"),
    ("n", True, "n"),
    ("n", 1.5, "n"),
    ("n", "1", "n"),
    ("stream", 1, "stream"),
    ("stream", "true", "stream"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("stream_options", [], "stream_options"),
    ("temperature", "hot", "temperature"),
    ("temperature", -0.1, "temperature"),
    ("temperature", 1e-9, "temperature"),
    ("temperature", 10**400, "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.01, "top_p"),
    ("top_k", -2, "top_k"),
    ("top_k", 2**32, "top_k"),
    ("min_p", 1, "min_p"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("presence_penalty", 101, "presence_penalty"),
    ("frequency_penalty", -101, "frequency_penalty"),
    ("logit_bias", [1], "logit_bias"),
    ("logit_bias", {"a": 1}, "logit_bias"),
    ("logit_bias", {"-1": 1}, "logit_bias"),
    ("logit_bias", {"1": "2"}, "logit_bias"),
    ("logit_bias", {"1": True}, "logit_bias"),
    ("logit_bias", {"1": 10**400}, "logit_bias"),
    ("logit_bias", {"1": 2000}, "logit_bias"),
    ("logit_bias", {"99999999999": 1}, "logit_bias"),
    ("stop", 3, "stop"),
    ("stop", [3], "stop"),
    ("stop", "", "stop"),
    ("stop", ["x"] * 17, "stop"),
    ("stop_token_ids", [-1], "stop_token_ids"),
    ("stop_token_ids", "1", "stop_token_ids"),
    ("allowed_token_ids", [], "allowed_token_ids"),
    ("seed", -1, "seed"),
    ("seed", 2**64, "seed"),
    ("seed", 1.0, "seed"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", 2**40, "max_tokens"),
    ("min_tokens", -1, "min_tokens"),
    ("user", 5, "user"),
    ("user", "x" * 257, "user"),
    ("ignore_eos", 0, "ignore_eos"),
    ("speculation", 1, "speculation"),
    ("speculation", {"rule": "best"}, "speculation.rule"),
    ("speculation", {"draft_length": 65}, "speculation.draft_length"),
    ("speculation", {"fan_out": 17}, "speculation.fan_out"),
    ("speculation", {"schedule": "later"}, "speculation.schedule"),
    ("speculation", {"off": 1}, "speculation.off"),
    ("speculation", {"off": True, "draft_length": 3}, "speculation.off"),
    ("speculation", {"off": True, "schedule": "pipelined"}, "speculation.off"),
]


@pytest.mark.parametrize("parse", [completion, chat])
@pytest.mark.parametrize(("name", "value", "parameter"), WRONG)
def test_wrong_values_are_refused_by_name(parse: Any, name: str, value: Any, parameter: str) -> None:
    """Types as JSON has them: 1 is no boolean, true is no number, and "1" is neither."""
    refusal = refused(parse, **{name: value})
    assert refusal.parameter == parameter
    assert parameter.partition(".")[0] in refusal.message


@pytest.mark.parametrize(
    ("messages", "parameter"),
    [
        ([], "messages"),
        ("Why?", "messages"),
        (["Why?"], "messages"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "function", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": "Ann"}], "messages[0].name"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x", "tool_calls": [TOOL]}],
            "messages[1].tool_calls",
        ),
        ([{"role": "user", "content": "x", "mood": "good"}], "messages[0].mood"),
    ],
)
def test_messages_that_are_no_text_are_refused_by_place(messages: Any, parameter: str) -> None:
    assert refused(chat, messages=messages).parameter == parameter


@pytest.mark.parametrize(
    "prompt", [None, "x" * 0 or [], [[]], [1, "a"], [True], [-1], [2**32], [1.5], {}, [[1], [True]]]
)
def test_prompts_of_other_forms_are_refused(prompt: Any) -> None:
    assert refused(completion, prompt=prompt).parameter == "prompt"


def test_what_is_required_is_said() -> None:
    for body, parse, missing in (
        (b'{"prompt": "x"}', parse_completion, "model"),
        (b'{"model": "m"}', parse_completion, "prompt"),
    ):
        with pytest.raises(InvalidRequest) as refusal:
            parse(body)
        assert (refusal.value.parameter, refusal.value.message) == (missing, f"{missing} is required.")
    with pytest.raises(InvalidRequest, match="messages is required"):
        parse_chat(b'{"model": "m"}', max_tokens=1)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"x"', b"null", b'{"a": NaN}', b"\xff\xfe", b"[" * 5000, b'{"model": "\\ud800"}', b"{'a': 1}"],
)
def test_bodies_that_are_no_json_object_are_refused(body: bytes) -> None:
    for parse in (parse_completion, lambda content: parse_chat(content, max_tokens=1)):
        with pytest.raises(InvalidRequest) as refusal:
            parse(body)
        assert refusal.value.parameter == "body"


@pytest.mark.parametrize(
    ("ours", "here"),
    [
        ("token_ids", "prompt"),
        ("tenant", "user"),
        ("rule", "speculation.rule"),
        ("fan_out", "speculation.fan_out"),
        ("stop", "stop"),
    ],
)
def test_parameters_have_the_names_of_this_surface(ours: str, here: str) -> None:
    assert name_here(ours) == here


# ---------------------------------------------------------------------------------------------------------------------
# Anything

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from([*SHAPED, *REFUSED_IN_CHAT, "prompt", "messages", "model", "logprobs", "top_logprobs", "echo"])


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(NAMES | st.text(max_size=8), JSON, max_size=4), st.booleans())
def test_any_body_is_understood_or_refused_by_name(parameters: dict[str, Any], is_chat: bool) -> None:
    """300 random bodies around a good one: nothing else is ever raised."""
    with suppress(InvalidRequest):
        (chat if is_chat else completion)(**parameters)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_are_refused(body: bytes) -> None:
    """300 random bodies: hardly one of them is a JSON object with a model and a prompt."""
    with pytest.raises(InvalidRequest):
        parse_completion(body)
