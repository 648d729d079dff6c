"""The orchestrator's HTTP face: OpenAI's endpoints for models, completions and chat, health, and metrics.

Translation between HTTP and the values of `paceline.generation`, as `api` is for gRPC. `docs/http.md` says what each
parameter means here. An ASGI application, served by a port of our own (`http_server`) or behind Ray Serve's proxy.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from orchestrator.door import Caller, Door
from orchestrator.http_errors import Problem, RequestRefused, problem_of
from orchestrator.http_exchange import CallerLeft, Exchange
from orchestrator.openai_answers import Answer, ChatAnswer, CompletionAnswer, model_object
from orchestrator.openai_requests import Asked, name_here, parse_chat, parse_completion
from orchestrator.slow_reader import deadline_while_unread, taken
from paceline.errors import (
    Draining,
    InvalidRequest,
    ModelNotFound,
    PacelineError,
    ReaderStalled,
    internal_error,
    quoted,
)
from paceline.generation import Event, ServedModel, Started
from paceline.interleaving import interleaved
from paceline.settings import OrchestratorSettings

logger = structlog.get_logger(__name__)

TIMEOUT_HEADER = "x-request-timeout"
"""Seconds that the caller waits for the answer, as a decimal number."""

_LONGEST_TIMEOUT_S = 86_400.0 * 365
_LAST_WORDS_S = 0.2

Respond = Callable[[Exchange], Awaitable[None]]


class OpenAIApi:
    """The endpoints over one door. `is_draining` may be set: health then says that no requests should come any more."""

    def __init__(
        self, door: Door, settings: OrchestratorSettings, *, registry: CollectorRegistry, names_requests: bool = True
    ) -> None:
        """`names_requests`: responses say the request's id; a proxy in front that does so itself needs it off."""
        self._door, self._settings, self._registry = door, settings, registry
        self._names_requests = names_requests
        self._created_s = int(time.time())
        self.is_draining = False

    def application(self) -> Starlette:
        routes = [
            self._route("GET", "/v1/models", self._list_models),
            self._route("GET", "/v1/models/{name:path}", self._describe_model),
            self._route("POST", "/v1/completions", self._complete),
            self._route("POST", "/v1/chat/completions", self._chat),
            self._route("GET", "/health", self._tell_health),
            self._route("GET", "/metrics", self._tell_metrics),
        ]
        application = Starlette(routes=routes, exception_handlers={HTTPException: _refuse_route})
        application.router.redirect_slashes = False
        return application

    def _route(self, method: str, path: str, respond: Respond) -> Route:
        return Route(path, _Endpoint(respond, names_requests=self._names_requests), methods=[method])

    # -----------------------------------------------------------------------------------------------------------------
    # What is said of the server

    async def _list_models(self, exchange: Exchange) -> None:
        self._caller(exchange)
        models = [model_object(served, created_s=self._created_s) for served in self._door.generator.models()]
        await exchange.send_json(200, {"object": "list", "data": models})

    async def _describe_model(self, exchange: Exchange) -> None:
        self._caller(exchange)
        served = self._served(exchange.path_parameters["name"])
        await exchange.send_json(200, model_object(served, created_s=self._created_s))

    async def _tell_health(self, exchange: Exchange) -> None:
        """For load balancers, which have no token: whether requests should come here."""
        if self._door.generator.is_ready and not self.is_draining:
            await exchange.send_json(200, {"status": "ok"})
        else:
            await exchange.send_json(503, {"status": "draining" if self.is_draining else "no target answers"})

    async def _tell_metrics(self, exchange: Exchange) -> None:
        self._caller(exchange)
        await exchange.send_bytes(200, generate_latest(self._registry), {"content-type": CONTENT_TYPE_LATEST})

    # -----------------------------------------------------------------------------------------------------------------
    # Answers

    async def _complete(self, exchange: Exchange) -> None:
        await self._answer(exchange, parse_completion, CompletionAnswer)

    async def _chat(self, exchange: Exchange) -> None:
        await self._answer(exchange, lambda body: parse_chat(body, max_tokens=self._longest_answer), ChatAnswer)

    async def _answer(self, exchange: Exchange, parse: Callable[[bytes], Asked], kind: type[Answer]) -> None:
        caller, began_s = self._caller(exchange), time.monotonic()
        with self._door.counting_refusals(caller):
            timeout_s = _timeout_s(exchange)
            asked = parse(await exchange.body(self._settings.http_max_body_bytes))
            served = self._served(asked.model)
            _require_room(asked, served)
            answer = kind(asked, served, self._door.generator.spell)
        if timeout_s is not None:
            timeout_s = max(0.0, timeout_s - (time.monotonic() - began_s))  # the body took its time
        with self._door.together(asked.requests, caller=caller) as use_tokens, deadline_while_unread():
            request = partial(
                self._door.generate,
                caller=caller,
                timeout_s=timeout_s,
                traceparent=exchange.headers.get("traceparent"),
                use_tokens=use_tokens,
            )
            events = _events([request(item) for item in asked.requests])
            async with exchange.while_connected(), aclosing(events):
                if asked.stream:
                    await _stream(exchange, answer, events, reader_timeout_s=self._door.generator.reader_timeout_s)
                else:
                    async for prompt, event in events:
                        answer.add(prompt, event)
        exchange.request_id = exchange.request_id or answer.request_id
        if asked.stream:
            await exchange.end_events(is_whole=True)
        else:
            await exchange.send_json(200, answer.whole())

    @property
    def _longest_answer(self) -> int:
        """Tokens that a chat answer may have unless it says otherwise: as with OpenAI, as many as there is room for."""
        return min(self._settings.max_tokens_limit, self._door.generator.models()[0].target.max_context)

    def _caller(self, exchange: Exchange) -> Caller:
        return self._door.caller(exchange.headers.get("authorization"), peer=exchange.peer)

    def _served(self, name: str) -> ServedModel:
        models = self._door.generator.models()
        served = next((model for model in models if model.name == name), None)
        if served is None:
            names = " or ".join(repr(model.name) for model in models)
            raise ModelNotFound(
                f"There is no model {quoted(name)} here; ask for {names}.", details={"parameter": "model"}
            )
        return served


def _events(answers: Sequence[AsyncGenerator[Event]]) -> AsyncGenerator[tuple[int, Event]]:
    """The events of the answers to all prompts, each with the number of its prompt."""
    streams = [_numbered(prompt, events) for prompt, events in enumerate(answers)]
    return interleaved(streams) if len(streams) > 1 else streams[0]


async def _numbered(prompt: int, events: AsyncGenerator[Event]) -> AsyncGenerator[tuple[int, Event]]:
    async with aclosing(events):
        async for event in events:
            yield prompt, event


async def _stream(
    exchange: Exchange, answer: Answer, events: AsyncGenerator[tuple[int, Event]], *, reader_timeout_s: float
) -> None:
    """Send each event when it comes; what fails before the first token fails with a status.

    Raises `ReaderStalled` if the caller does not read for so long.
    """
    waiting: list[dict[str, Any]] = []
    async for prompt, event in events:
        waiting += answer.chunks(prompt, event)
        if isinstance(event, Started) and not exchange.is_streaming:
            continue
        exchange.request_id = exchange.request_id or answer.request_id
        for chunk in waiting:
            await taken(exchange.send_event(chunk), within_s=reader_timeout_s)
        waiting = []
    last = answer.last_chunk()
    if last is not None:
        await taken(exchange.send_event(last), within_s=reader_timeout_s)


def _require_room(asked: Asked, served: ServedModel) -> None:
    """Several prompts are answered at once, so all of them must fit: else they would be refused for now for ever."""
    answers = sum(request.n for request in asked.requests)
    if len(asked.requests) > 1 and answers > served.max_choices:
        raise InvalidRequest(
            f"prompt asks for {answers} answers, and at most {served.max_choices} run at once here; ask for fewer.",
            parameter="prompt",
        )


def _timeout_s(exchange: Exchange) -> float | None:
    stated = exchange.headers.get(TIMEOUT_HEADER)
    if stated is None:
        return None
    try:
        timeout_s = float(stated)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s <= _LONGEST_TIMEOUT_S:
        raise InvalidRequest(
            "The header X-Request-Timeout must be a number of seconds above 0.", parameter=TIMEOUT_HEADER
        )
    return timeout_s


# ---------------------------------------------------------------------------------------------------------------------
# Errors


class _Endpoint:
    """One endpoint as an ASGI application: whatever it raises leaves in OpenAI's shape, and never with a traceback."""

    def __init__(self, respond: Respond, *, names_requests: bool) -> None:
        self._respond, self._names_requests = respond, names_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, names_itself=self._names_requests)
        try:
            await self._respond(exchange)
        except CallerLeft:
            pass
        except asyncio.CancelledError:
            # The server stops, or whoever is in front has given up; callers who still read hear of the former.
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await exchange.fail(
                        problem_of(Draining("The server is about to stop; ask again, another one will answer."))
                    )
            raise
        except RequestRefused as refusal:
            await exchange.fail(refusal.problem)
        except InvalidRequest as error:
            await exchange.fail(replace(problem_of(error), param=name_here(error.parameter)))
        except PacelineError as error:
            if isinstance(error, ReaderStalled) and exchange.is_streaming:
                return  # nobody reads it: the server closes the connection, and what came over it is not whole
            await exchange.fail(problem_of(error))
        except Exception:
            logger.exception("a request failed", path=scope["path"])
            await exchange.fail(problem_of(internal_error()))


async def _refuse_route(request: Request, refusal: Exception) -> JSONResponse:
    """For a path or a method that there is not."""
    assert isinstance(refusal, HTTPException)
    if refusal.status_code == 405:
        problem = Problem(
            status=405,
            message=f"{request.url.path} does not take {request.method}; use {(refusal.headers or {}).get('Allow', 'another')}.",
            code="method_not_allowed",
        )
    else:
        problem = Problem(
            status=refusal.status_code,
            message=f"There is no {request.url.path} here; there are /v1/models, /v1/completions and /v1/chat/completions.",
            code="path_not_found",
        )
    return JSONResponse(problem.body, problem.status, headers=refusal.headers)
