"""What a request to the OpenAI-compatible endpoints asks for, in our own words.

Everything in a body is either honoured or refused by name; nothing is ignored. Names that OpenAI does not know are spelled
as vLLM spells them. Knows nothing of HTTP.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError
from pydantic_core import from_json

from paceline.errors import InvalidRequest
from paceline.generation import (
    MAX_CHOICES,
    ChatMessage,
    GenerationRequest,
    OutputOptions,
    Schedule,
    SpeculationOptions,
    StopConditions,
)
from paceline.types import (
    MAX_DRAFT_LENGTH,
    MAX_FAN_OUT,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_TENANT_LENGTH,
    SamplingParams,
    VerificationRule,
)

DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that names none, as OpenAI and vLLM have it."""
_MAX_TOKEN_ID = 2**32 - 1
_LONGEST_NAME = 64  # characters of an unknown parameter's name that are repeated
_LARGEST_BIAS = 1e6  # what the model allows is less; larger whole numbers may be no float

# What we do not have, with the values besides null that ask for nothing.
_UNSUPPORTED_IN_CHAT: Mapping[str, Sequence[object]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
_UNSUPPORTED_IN_COMPLETIONS: Mapping[str, Sequence[object]] = {"suffix": ("",)}
_UNSUPPORTED_IN_MESSAGES: Mapping[str, Sequence[object]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}

# Where this surface has another name for a parameter of `GenerationRequest` or its parts.
_NAMES_HERE = {"token_ids": "prompt", "tenant": "user"} | {
    name: f"speculation.{name}" for name in ("rule", "draft_length", "fan_out", "schedule")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One call to an endpoint."""

    requests: tuple[GenerationRequest, ...]  # one a prompt; all have the same n
    echoes: tuple[str, ...]  # one a prompt: text to put before each of its answers
    stream: bool
    include_usage: bool  # of a stream: send the usage in a chunk of its own

    @property
    def model(self) -> str:
        return self.requests[0].model

    @property
    def n(self) -> int:
        """Answers to each prompt."""
        return self.requests[0].n


def parse_completion(body: bytes) -> Asked:
    """What a body for `/v1/completions` asks for; raises `InvalidRequest`, which names the parameter."""
    return _parsed(_CompletionBody, body, _UNSUPPORTED_IN_COMPLETIONS).asked()


def parse_chat(body: bytes, *, max_tokens: int) -> Asked:
    """What a body for `/v1/chat/completions` asks for, `max_tokens` unless it says otherwise.

    Raises `InvalidRequest`, which names the parameter.
    """
    return _parsed(_ChatBody, body, _UNSUPPORTED_IN_CHAT).asked(max_tokens)


def name_here(parameter: str) -> str:
    """What this surface calls a parameter that an `InvalidRequest` names."""
    return _NAMES_HERE.get(parameter, parameter)


# ---------------------------------------------------------------------------------------------------------------------
# Values of more than one form


def _stop_strings(value: object) -> object:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError("must be a string or a list of strings.")


def _prompts(value: object) -> object:
    """One prompt or several: each is text, or token ids."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if _are_token_ids(value):
            return (tuple(value),)
        if all(isinstance(item, str) or (isinstance(item, list) and item and _are_token_ids(item)) for item in value):
            return tuple(item if isinstance(item, str) else tuple(item) for item in value)
    raise ValueError("must be a string, a list of token ids, or a list of such prompts, and not empty.")


def _are_token_ids(items: Iterable[object]) -> bool:
    return all(type(item) is int and 0 <= item <= _MAX_TOKEN_ID for item in items)


def _token_ids(value: object) -> object:
    if isinstance(value, list) and _are_token_ids(value):
        return tuple(value)
    raise ValueError("must be a list of token ids, which are whole numbers from 0 on.")


def _content(value: object) -> object:
    """The text of a message: a string, or parts of type text, which are lines of it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(map(_is_text_part, value)):
        return "\n".join(part["text"] for part in value)
    raise ValueError("must be a string or a list of parts like {'type': 'text', 'text': '...'}; there is only text.")


def _is_text_part(part: object) -> bool:
    return (
        isinstance(part, dict)
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and isinstance(part["text"], str)
    )


def _biases(value: object) -> object:
    """Token ids come as strings, for they are keys of a JSON object."""
    if value is None:
        return ()
    if isinstance(value, dict) and all(map(_is_token_id, value)) and all(map(_is_number, value.values())):
        return tuple((int(token_id), float(bias)) for token_id, bias in value.items())
    raise ValueError("must be an object whose keys are token ids in digits and whose values are numbers.")


def _is_token_id(key: object) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= _MAX_TOKEN_ID


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST_BIAS


def _no_negative_top_k(value: object) -> object:
    return 0 if value == -1 else value  # as vLLM switches it off


# ---------------------------------------------------------------------------------------------------------------------
# Bodies

_TokenIds = Annotated[tuple[int, ...], BeforeValidator(_token_ids)]
_Count = Annotated[int, Field(ge=0, le=_MAX_TOKEN_ID)]
_MaxTokens = Annotated[int, Field(ge=1, le=_MAX_TOKEN_ID)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def _no_other_names(kind: type[_Section], place: str) -> BeforeValidator:
    """Refuses an unknown parameter of a section before pydantic makes a list of all that there are."""

    def check(value: object) -> object:
        if isinstance(value, dict):
            _require_known(value, kind.model_fields, place=place)
        return value

    return BeforeValidator(check)


class _StreamOptions(_Section):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None  # chunks are not padded


class _Speculation(_Section):
    """How to speculate (`SpeculationOptions`); `off` decodes plainly."""

    rule: Literal["greedy", "rejection", "coupled"] | None = None
    draft_length: Annotated[int, Field(ge=0, le=MAX_DRAFT_LENGTH)] | None = None
    fan_out: Annotated[int, Field(ge=0, le=MAX_FAN_OUT)] | None = None
    schedule: Literal["plain", "sequential", "pipelined"] | None = None
    off: bool | None = None

    def options(self) -> SpeculationOptions:
        if self.off and (self.draft_length or self.schedule not in (None, "plain")):
            raise InvalidRequest(
                "speculation.off goes without a draft length and a schedule; leave out one or the other.",
                parameter="speculation.off",
            )
        return SpeculationOptions(
            rule=VerificationRule(self.rule) if self.rule else None,
            draft_length=0 if self.off else self.draft_length,
            schedule=Schedule(self.schedule) if self.schedule else None,
            fan_out=self.fan_out,
        )


class _Body(_Section):
    """What both endpoints take."""

    model: str = Field(min_length=1)
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: Annotated[_StreamOptions, _no_other_names(_StreamOptions, "stream_options.")] | None = None
    user: Annotated[str, Field(max_length=MAX_TENANT_LENGTH)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(_biases)] = ()
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop_strings)] = ()
    max_tokens: _MaxTokens | None = None
    # Not OpenAI's.
    top_k: Annotated[_Count, BeforeValidator(_no_negative_top_k)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: _Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: _TokenIds | None = None
    allowed_token_ids: _TokenIds | None = None
    banned_token_ids: _TokenIds | None = None
    speculation: Annotated[_Speculation, _no_other_names(_Speculation, "speculation.")] | None = None

    def _request(self, *, max_tokens: int, logprobs: int | None, **prompt: Any) -> GenerationRequest:
        """One prompt's request. Raises `InvalidRequest`, with our own name of the parameter."""
        return GenerationRequest(
            model=self.model,
            sampling=SamplingParams(
                temperature=_unless_none(self.temperature, 1.0),
                top_k=self.top_k or 0,
                top_p=_unless_none(self.top_p, 1.0),
                min_p=self.min_p or 0.0,
                repetition_penalty=_unless_none(self.repetition_penalty, 1.0),
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                logit_bias=self.logit_bias,
                banned_token_ids=self.banned_token_ids or (),
                allowed_token_ids=self.allowed_token_ids,
                min_tokens=self.min_tokens or 0,
            ),
            stopping=StopConditions(
                max_tokens=max_tokens,
                stop=self.stop,
                stop_token_ids=self.stop_token_ids or (),
                ignore_eos=bool(self.ignore_eos),
            ),
            speculation=(self.speculation or _Speculation()).options(),
            seed=self.seed,
            logprobs=logprobs,
            n=self.n or 1,
            tenant=self.user or "",
            output=OutputOptions(pieces=False),
            **prompt,
        )

    def _streamed(self, requests: Sequence[GenerationRequest], echoes: Sequence[str]) -> Asked:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options go together with stream; ask for a stream.", parameter="stream_options"
            )
        return Asked(
            requests=tuple(requests),
            echoes=tuple(echoes),
            stream=bool(self.stream),
            include_usage=bool(self.stream_options and self.stream_options.include_usage),
        )


class _CompletionBody(_Body):
    prompt: Annotated[tuple[str | tuple[int, ...], ...], BeforeValidator(_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None

    def asked(self) -> Asked:
        n = self.n or 1
        if self.best_of not in (None, n):
            raise InvalidRequest("best_of is not supported here; leave it out, or give that of n.", parameter="best_of")
        if len(self.prompt) * n > MAX_CHOICES:
            raise InvalidRequest(
                f"prompt holds {len(self.prompt)} prompts with {n} answers each; ask for at most {MAX_CHOICES} answers in "
                "one request.",
                parameter="prompt",
            )
        return self._streamed(
            [self._to(prompt) for prompt in self.prompt], [self._echo(prompt) for prompt in self.prompt]
        )

    def _to(self, prompt: str | tuple[int, ...]) -> GenerationRequest:
        max_tokens = self.max_tokens or DEFAULT_COMPLETION_TOKENS
        given: dict[str, Any] = {"text": prompt} if isinstance(prompt, str) else {"token_ids": prompt}
        return self._request(max_tokens=max_tokens, logprobs=self.logprobs, **given)

    def _echo(self, prompt: str | tuple[int, ...]) -> str:
        if not self.echo:
            return ""
        if not isinstance(prompt, str):
            raise InvalidRequest("echo needs a prompt of text, not of token ids; leave it out.", parameter="echo")
        if self.logprobs is not None:
            raise InvalidRequest(
                "echo goes without logprobs, for a prompt has none here; leave out one.", parameter="echo"
            )
        return prompt


class _Message(_Section):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]

    def turn(self) -> ChatMessage:
        return ChatMessage("system" if self.role == "developer" else self.role, self.content)


def _messages(value: object) -> object:
    """Without what asks for nothing: an answer may be sent back as it came."""
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        return tuple(_message(index, message) for index, message in enumerate(value))
    raise ValueError("must be a list of objects with a role and a content, and not empty.")


def _message(index: int, content: dict[str, object]) -> dict[str, object]:
    place = f"messages[{index}]."
    content = _without_unsupported(content, _UNSUPPORTED_IN_MESSAGES, place=place)
    _require_known(content, _Message.model_fields, place=place)
    return content


class _ChatBody(_Body):
    messages: Annotated[tuple[_Message, ...], FailFast(), BeforeValidator(_messages)]
    max_completion_tokens: _MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    def asked(self, max_tokens: int) -> Asked:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs go together with logprobs; ask for both.", parameter="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens mean the same; give one of them.", parameter="max_tokens"
            )
        request = self._request(
            max_tokens=self.max_completion_tokens or self.max_tokens or max_tokens,
            logprobs=self.top_logprobs or 0 if self.logprobs else None,
            messages=tuple(message.turn() for message in self.messages),
        )
        return self._streamed([request], [""])


def _unless_none(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


# ---------------------------------------------------------------------------------------------------------------------
# From bytes, with errors in words

BodyT = TypeVar("BodyT", _CompletionBody, _ChatBody)


def _parsed(kind: type[BodyT], body: bytes, unsupported: Mapping[str, Sequence[object]]) -> BodyT:
    try:
        content = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"The body must be valid JSON: {error}.", parameter="body") from error
    if not isinstance(content, dict):
        raise InvalidRequest("The body must be a JSON object.", parameter="body")
    content = _without_unsupported(content, unsupported)
    _require_known(content, kind.model_fields, others=unsupported)
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise _refusal(error) from error


def _without_unsupported(
    content: Mapping[str, object], unsupported: Mapping[str, Sequence[object]], *, place: str = ""
) -> dict[str, object]:
    """The rest of the parameters; raises `InvalidRequest` for one that asks for something we do not have."""
    for name in unsupported.keys() & content.keys():
        value = content[name]
        if value is not None and value not in unsupported[name]:
            raise InvalidRequest(f"{place}{name} is not supported here; leave it out.", parameter=f"{place}{name}")
    return {name: value for name, value in content.items() if name not in unsupported}


def _require_known(
    content: Mapping[str, object], names: Iterable[str], *, place: str = "", others: Iterable[str] = ()
) -> None:
    """Raises `InvalidRequest` for a parameter of another name, with the nearest of `names` and `others`."""
    known = set(names)
    unknown = next((name for name in content if name not in known), None)
    if unknown is None:
        return
    unknown = unknown[:_LONGEST_NAME]
    nearest = difflib.get_close_matches(unknown, [*known, *others], n=1)
    hint = f"did you mean {place}{nearest[0]}?" if nearest else "leave it out."
    raise InvalidRequest(
        f"{place}{unknown} is not a parameter of this endpoint; {hint}", parameter=f"{place}{unknown}" or "body"
    )


def _refusal(error: ValidationError) -> InvalidRequest:
    """The first fault in a sentence."""
    fault = error.errors(include_url=False, include_input=False)[0]
    parameter = _place(fault["loc"])
    match fault["type"]:
        case "missing":
            sentence = f"{parameter} is required."
        case "value_error":
            complaint = fault["msg"].removeprefix("Value error, ")
            sentence = f"{parameter} {complaint}"
        case "model_type" | "model_attributes_type" | "dict_type":
            sentence = f"{parameter} must be an object."
        case _:
            # "Input should be a valid integer", "String should have at most 256 characters", and others of that form.
            sentence = f"{parameter} must{fault['msg'].partition('should')[2]}."
    return InvalidRequest(sentence, parameter=parameter)


def _place(location: Sequence[int | str]) -> str:
    """`messages[0].role`"""
    place = ""
    for part in location:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else part
    return place
