"""How much one request may hold: each list has a bound, and what is beyond it is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.generation import (
    MAX_CHOICES,
    MAX_LISTED_TOKEN_IDS,
    MAX_MESSAGES,
    MAX_STOP_STRINGS,
    ChatMessage,
    GenerationRequest,
    StopConditions,
)
from paceline.types import SamplingParams

IDS = tuple(range(MAX_LISTED_TOKEN_IDS))


def request_with(parameter: str, ids: tuple[int, ...]) -> GenerationRequest:
    values: dict[str, Any] = {parameter: tuple((each, 1.0) for each in ids) if parameter == "logit_bias" else ids}
    return GenerationRequest(text="a", sampling=SamplingParams(**values))


@pytest.mark.parametrize("parameter", ["logit_bias", "banned_token_ids", "allowed_token_ids", "stop_token_ids"])
def test_lists_of_token_ids_are_bounded(parameter: str) -> None:
    """At the bound they are taken."""
    request_with(parameter, IDS)
    with pytest.raises(InvalidRequest, match="at most 1024") as caught:
        request_with(parameter, (*IDS, MAX_LISTED_TOKEN_IDS))
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("parameter", "most", "request_of"),
    [
        ("messages", MAX_MESSAGES, lambda count: {"messages": (ChatMessage("user", "a"),) * count}),
        ("stop", MAX_STOP_STRINGS, lambda count: {"text": "a", "stopping": StopConditions(stop=("b",) * count)}),
        (
            "stop_token_ids",
            MAX_LISTED_TOKEN_IDS,
            lambda count: {"text": "a", "stopping": StopConditions(stop_token_ids=(1,) * count)},
        ),
        ("n", MAX_CHOICES, lambda count: {"text": "a", "n": count}),
    ],
)
def test_everything_else_is_bounded_too(parameter: str, most: int, request_of: Any) -> None:
    """At the bound it is taken, one beyond it is not."""
    GenerationRequest(**request_of(most))
    with pytest.raises(InvalidRequest) as caught:
        GenerationRequest(**request_of(most + 1))
    assert caught.value.parameter == parameter
