"""What the door adds to a request: whose it is, and what its caller has used."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, cast

import pytest

from orchestrator.door import Caller, Door, OpenGate, UseTokens
from orchestrator.generator import Generator
from paceline.errors import InvalidRequest, PacelineError, RateLimited
from paceline.generation import Event, GenerationRequest, Started
from tests.watching import watch_alone

ASKED = GenerationRequest(text="a", n=2, tenant="x")


class FakeGenerator:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.watch = watch_alone()
        self.asked: list[tuple[GenerationRequest, str]] = []

    async def generate(self, request: GenerationRequest, *, share: str, **_: Any) -> AsyncGenerator[Event]:
        self.asked.append((request, share))
        yield Started(request_id="r", seeds=(1, 2), prompt_tokens=7)


class CountingGate(OpenGate):
    """Counts, and refuses when told to."""

    def __init__(self, refusal: PacelineError | None = None) -> None:
        self.refusal = refusal
        self.begun: list[tuple[str, int]] = []
        self.used = 0

    @contextmanager
    def answers(self, caller: Caller, *, count: int) -> Iterator[UseTokens]:
        if self.refusal is not None:
            raise self.refusal
        self.begun.append((caller.name, count))
        yield self._use

    def _use(self, tokens: int) -> None:
        self.used += tokens


async def answered(door: Door, asked: GenerationRequest, caller: Caller) -> list[Event]:
    async with aclosing(door.generate(asked, caller=caller, timeout_s=None)) as events:
        return [event async for event in events]


@pytest.mark.parametrize(
    ("caller", "tenant", "told", "share"),
    [("a", "x", "a/x", "a"), ("a", "", "a", "a"), ("", "x", "x", "x"), ("", "", "", ""), ("b", "a/x", "b/a/x", "b")],
)
async def test_tenants_of_callers_are_kept_apart(caller: str, tenant: str, told: str, share: str) -> None:
    """Two callers that name the same tenant share nothing that was learned from answers; without tokens it is as it was."""
    generator = FakeGenerator()
    await answered(
        Door(cast(Generator, generator), OpenGate()), GenerationRequest(text="a", tenant=tenant), Caller(caller)
    )
    ((asked, asked_share),) = generator.asked
    assert (asked.tenant, asked_share) == (told, share)


async def test_a_tenant_that_is_too_long_behind_its_caller_is_refused_by_name() -> None:
    """With how long it may be; nothing was asked of the generator."""
    generator = FakeGenerator()
    door = Door(cast(Generator, generator), OpenGate())
    await answered(door, GenerationRequest(text="a", tenant="x" * 254), Caller("a"))
    with pytest.raises(InvalidRequest, match="at most 254 characters for a") as caught:
        await answered(door, GenerationRequest(text="a", tenant="x" * 255), Caller("a"))
    assert caught.value.parameter == "tenant"
    assert len(generator.asked) == 1


async def test_a_request_counts_with_all_its_choices_and_its_prompt() -> None:
    """At its gate, under the caller's name."""
    gate = CountingGate()
    await answered(Door(cast(Generator, FakeGenerator()), gate), ASKED, Caller("a"))
    assert gate.begun == [("a", 2)]
    assert gate.used == 7


async def test_a_caller_beyond_its_limits_costs_the_generator_nothing() -> None:
    """It is never asked."""
    generator = FakeGenerator()
    door = Door(cast(Generator, generator), CountingGate(RateLimited("Too often.", retry_after_s=3)))
    with pytest.raises(RateLimited):
        await answered(door, ASKED, Caller("a"))
    assert generator.asked == []
