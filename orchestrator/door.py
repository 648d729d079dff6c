"""What both fronts, gRPC and HTTP, go through: who asks, whether that is allowed, and then the answer.

Knows nothing of gRPC or HTTP; a front hands over the `authorization` that came with a call and translates the rest.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Protocol

from orchestrator.generator import Generator
from orchestrator.running_answers import RunningAnswers
from paceline.errors import PacelineError
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
        self._running = RunningAnswers()

    def caller(self, authorization: str | None) -> Caller:
        """Raises `Unauthenticated`."""
        with self.counting_refusals():
            return self._gate.caller(authorization)

    @contextmanager
    def counting_refusals(self, caller: Caller | None = None) -> Iterator[None]:
        """Around what a front does before it has a request: errors raised there are counted and logged as all others."""
        try:
            yield
        except PacelineError as error:
            self.generator.watch.refuse(error, caller=caller.name if caller else "")
            raise

    async def generate(
        self, request: GenerationRequest, *, caller: Caller, timeout_s: float | None, traceparent: str | None = None
    ) -> AsyncGenerator[Event]:
        """`Generator.generate`, for somebody who was let in; also raises `AnswerCancelled` and `RequestIdTaken`.

        `traceparent` is the W3C trace context that came with the call, if any.
        """
        with self.generator.watch.watch(request, caller=caller.name, traceparent=traceparent) as watched:
            answer = self._running.follow(
                self.generator.generate(
                    request, timeout_s=timeout_s, share=caller.name or request.tenant, on_round=watched.on_round
                ),
                caller=caller.name,
                request_id=request.request_id,
                resumes=bool(request.output_ids),
            )
            async with aclosing(answer) as events:
                async for event in events:
                    watched.on_event(event)
                    yield event

    async def cancel(self, request_id: str, *, caller: Caller) -> bool:
        """End an answer of the caller's own, and free what it holds; whether it was running or waiting here."""
        return await self._running.cancel(caller=caller.name, request_id=request_id)
