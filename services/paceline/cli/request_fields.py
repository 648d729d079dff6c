"""One request as flat fields, the form in which command line options and lines of a prompts file give it.

An unknown field, a wrong type or a value out of range is refused by name, with the nearest valid name beside it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from paceline.client import (
    ChatMessage,
    GenerationRequest,
    SamplingParams,
    Schedule,
    SpeculationOptions,
    StopConditions,
    VerificationRule,
)
from paceline.errors import InvalidRequest


class RuleChoice(StrEnum):
    """The rules to choose from; at temperature 0 both are greedy."""

    REJECTION = VerificationRule.REJECTION.value
    COUPLED = VerificationRule.COUPLED.value


class ChatTurn(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    role: Literal["system", "user", "assistant"]
    content: str


class RequestFields(BaseModel):
    """Everything one request can say; a field that is left out (or null) takes its default."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    prompt: str | None = None  # one user message, or with `raw` the text itself
    messages: tuple[ChatTurn, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    raw: bool | None = None

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    banned_token_ids: tuple[int, ...] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    min_tokens: int | None = None

    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None

    rule: RuleChoice | None = None
    schedule: Schedule | None = None
    draft_length: int | None = None
    fan_out: int | None = None

    seed: int | None = None
    n: int | None = None
    logprobs: int | None = None
    tenant: str | None = None
    model: str | None = None
    request_id: str | None = None

    @classmethod
    def of(cls, **values: object) -> Self:
        """The fields of the command line; raises `InvalidRequest` for text that is none."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise _refusal(error) from error

    @classmethod
    def from_json(cls, line: bytes) -> Self:
        """The fields of one JSON object; raises `InvalidRequest`, which names the first field at fault."""
        try:
            return cls.model_validate_json(line)
        except ValidationError as error:
            raise _refusal(error) from error

    def overridden_by(self, other: RequestFields) -> RequestFields:
        """These fields, except where the other says something."""
        return self.model_copy(update={name: getattr(other, name) for name in other.model_fields_set})

    def to_request(self) -> GenerationRequest:
        """Raises `InvalidRequest`, which names the parameter, for values out of range and contradicting prompts."""
        logit_bias = None if self.logit_bias is None else tuple(self.logit_bias.items())
        return GenerationRequest(
            text=self.prompt if self.raw else None,
            token_ids=self.token_ids,
            messages=self._messages(),
            sampling=SamplingParams(
                **self._given(
                    "temperature",
                    "top_k",
                    "top_p",
                    "min_p",
                    "repetition_penalty",
                    "presence_penalty",
                    "frequency_penalty",
                    "banned_token_ids",
                    "allowed_token_ids",
                    "min_tokens",
                ),
                logit_bias=logit_bias or (),
            ),
            stopping=StopConditions(**self._given("max_tokens", "stop", "stop_token_ids", "ignore_eos")),
            speculation=SpeculationOptions(
                rule=None if self.rule is None else VerificationRule(self.rule),
                draft_length=self.draft_length,
                schedule=self.schedule,
                fan_out=self.fan_out,
            ),
            seed=self.seed,
            logprobs=self.logprobs,
            **self._given("n", "tenant", "model", "request_id"),
        )

    def _messages(self) -> tuple[ChatMessage, ...] | None:
        if self.messages is not None and self.raw:
            raise InvalidRequest(
                "raw means no chat template, but messages need one; give one of them.", parameter="raw"
            )
        if self.messages is not None and self.prompt is not None:
            raise InvalidRequest("A request needs one prompt: give prompt or messages.", parameter="messages")
        if self.messages is not None:
            return tuple(ChatMessage(turn.role, turn.content) for turn in self.messages)
        if self.prompt is not None and not self.raw:
            return (ChatMessage("user", self.prompt),)
        return None

    def _given(self, *names: str) -> Mapping[str, Any]:
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


def _refusal(error: ValidationError) -> InvalidRequest:
    """One complaint as a sentence: an unknown field first, because what is missing may only be misspelt."""
    problems = error.errors(include_url=False)
    problem = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    field = _dotted(problem["loc"])
    complaint = problem["msg"][:1].lower() + problem["msg"][1:]
    match problem["type"]:
        case "json_invalid":
            return InvalidRequest(f"is no JSON ({problem['ctx']['error']}).", parameter="")
        case "model_type" | "model_attributes_type" if not field:
            return InvalidRequest('must be a JSON object, such as {"prompt": "Hello"}.', parameter="")
        case "extra_forbidden":
            return InvalidRequest(_unknown_field_sentence(field), parameter=field)
        case "missing":
            return InvalidRequest(f"{field} is missing.", parameter=field)
        case _:
            return InvalidRequest(f"{field}: {complaint}, not {problem['input']!r:.60}.", parameter=field)


def _unknown_field_sentence(field: str) -> str:
    """`field` may be nested: `messages[0].rolle` is compared with the fields of a message."""
    parent, _, name = field.rpartition(".")
    known = list((ChatTurn if parent else RequestFields).model_fields)
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"the fields are {', '.join(known)}."
    return f"has the unknown field {field}; {hint}"


def _dotted(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    name = ""
    for part in location:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name
