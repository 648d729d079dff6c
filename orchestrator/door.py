"""What both fronts, gRPC and HTTP, go through: who asks, whether that is allowed, and then the answer.

Knows nothing of gRPC or HTTP; a front hands over the `authorization` that came with a call and translates the rest.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from orchestrator.generator import Generator
from paceline.generation import Event, GenerationRequest


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    name: str = ""  # of the token that came with the call; "": nobody needs one here


class Gate(Protocol):
    """Decides who may ask."""

    def caller(self, authorization: str | None) -> Caller:
        """Whoever that value of the `authorization` header or metadata names; raises `Unauthenticated`."""


class OpenGate:
    """Lets everybody in (`Gate`)."""

    def caller(self, authorization: str | None) -> Caller:
        return Caller()


class Door:
    """The answers of one generator, for those whom a gate lets in."""

    def __init__(self, generator: Generator, gate: Gate) -> None:
        self.generator, self._gate = generator, gate

    def caller(self, authorization: str | None) -> Caller:
        """Raises `Unauthenticated`."""
        return self._gate.caller(authorization)

    async def generate(
        self, request: GenerationRequest, *, caller: Caller, timeout_s: float | None
    ) -> AsyncGenerator[Event]:
        """`Generator.generate`, for somebody who was let in."""
        async with aclosing(self.generator.generate(request, timeout_s=timeout_s, share=caller.name or request.tenant)) as events:
            async for event in events:
                yield event
