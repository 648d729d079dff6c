"""What both fronts, gRPC and HTTP, go through: who asks, whether that is allowed, and then the answer.

Knows nothing of gRPC or HTTP; a front hands over the `authorization` that came with a call and translates the rest.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

from orchestrator.generator import Generator
from orchestrator.loop import RoundReport
from orchestrator.running_answers import RunningAnswers
from paceline.errors import InvalidRequest, PacelineError
from paceline.generation import Event, GenerationRequest, Started
from paceline.types import MAX_TENANT_LENGTH


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    name: str = ""  # of the token that came with the call; "": nobody needs one here


UseTokens = Callable[[int], None]
"""Told of so many tokens, of prompts or answers, whenever they have been used."""


class Gate(Protocol):
    """Decides who may ask, and how much (`orchestrator.access`)."""

    def caller(self, authorization: str | None, *, peer: str = "") -> Caller:
        """Whoever that value of the `authorization` header or metadata names; raises `Unauthenticated`.

        `peer` is from where the call comes, as its front knows it.
        """

    def answers(self, caller: Caller, *, count: int) -> AbstractContextManager[UseTokens]:
        """One request with so many answers, while the block runs; raises `RateLimited` instead if that is too much now,
        and `InvalidRequest` if it always is."""


class OpenGate:
    """Lets everybody in (`Gate`)."""

    def caller(self, authorization: str | None, *, peer: str = "") -> Caller:
        return Caller()

    def answers(self, caller: Caller, *, count: int) -> AbstractContextManager[UseTokens]:
        return nullcontext(_use_freely)


def _use_freely(_tokens: int) -> None:
    return None


class Door:
    """The answers of one generator, for those whom a gate lets in."""

    def __init__(self, generator: Generator, gate: Gate) -> None:
        self.generator, self._gate = generator, gate
        self._running = RunningAnswers()

    def caller(self, authorization: str | None, *, peer: str = "") -> Caller:
        """Raises `Unauthenticated`."""
        with self.counting_refusals():
            return self._gate.caller(authorization, peer=peer)

    @contextmanager
    def counting_refusals(self, caller: Caller | None = None) -> Iterator[None]:
        """Around what a front does before it has a request: errors raised there are counted and logged as all others."""
        try:
            yield
        except PacelineError as error:
            self.generator.watch.refuse(error, caller=caller.name if caller else "")
            raise

    @contextmanager
    def together(self, requests: Sequence[GenerationRequest], *, caller: Caller) -> Iterator[UseTokens | None]:
        """Around several that were asked for at once: they are one request to the gate, which takes all or none.

        What is given goes along to `generate` for each; None for a single one, which that asks the gate for. Raises
        `RateLimited` and `InvalidRequest`.
        """
        with ExitStack() as until_end:
            use_tokens = None
            if len(requests) > 1:
                with self.counting_refusals(caller):
                    count = sum(request.n for request in requests)
                    use_tokens = until_end.enter_context(self._gate.answers(caller, count=count))
            yield use_tokens

    async def generate(
        self,
        request: GenerationRequest,
        *,
        caller: Caller,
        timeout_s: float | None,
        traceparent: str | None = None,
        use_tokens: UseTokens | None = None,
    ) -> AsyncGenerator[Event]:
        """`Generator.generate`, for somebody who was let in; also raises `AnswerCancelled`, `RateLimited` and
        `RequestIdTaken`.

        `traceparent` is the W3C trace context that came with the call, if any; `use_tokens` is what `together` gave.
        """
        taken = self._gate.answers(caller, count=request.n) if use_tokens is None else nullcontext(use_tokens)
        with (
            self.generator.watch.watch(request, caller=caller.name, traceparent=traceparent) as watched,
            taken as use,
        ):

            def on_round(session_id: str, report: RoundReport) -> None:
                watched.on_round(session_id, report)
                use(report.outcome.emitted)

            request = _among_tenants(request, caller)
            answer = self._running.follow(
                self.generator.generate(
                    request, timeout_s=timeout_s, share=caller.name or request.tenant, on_round=on_round
                ),
                caller=caller.name,
                request_id=request.request_id,
                resumes=bool(request.output_ids),
            )
            async with aclosing(answer) as events:
                async for event in events:
                    if isinstance(event, Started):
                        use(event.prompt_tokens)
                    watched.on_event(event)
                    yield event

    async def cancel(self, request_id: str, *, caller: Caller) -> bool:
        """End an answer of the caller's own, and free what it holds; whether it was running or waiting here."""
        return await self._running.cancel(caller=caller.name, request_id=request_id)


def _among_tenants(request: GenerationRequest, caller: Caller) -> GenerationRequest:
    """The same, for a tenant that is this caller's alone: what one caller calls its tenants is no other's business."""
    if not caller.name:
        return request
    tenant = f"{caller.name}/{request.tenant}" if request.tenant else caller.name
    if len(tenant) > MAX_TENANT_LENGTH:
        raise InvalidRequest(
            f"tenant must have at most {MAX_TENANT_LENGTH - len(caller.name) - 1} characters for {caller.name}, whose name "
            "goes before it.",
            parameter="tenant",
        )
    return replace(request, tenant=tenant)
