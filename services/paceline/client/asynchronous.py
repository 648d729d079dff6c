"""The asynchronous client: one connection, any number of concurrent requests, and answers that survive broken streams."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from paceline.client.connection import Connection
from paceline.client.failures import CANCELLED_SENTENCE, ClientClosed, ServerUnavailable, explained, reported_error
from paceline.client.resumption import Answer, Asked, Choices, Interrupted, TimeLimit
from paceline.errors import Draining, InvalidRequest, PacelineError, QueueFull, ReaderStalled, RequestIdTaken
from paceline.generation import (
    Completion,
    CompletionBuilder,
    DeploymentStatus,
    Event,
    GenerationRequest,
    IncompleteAnswer,
    ServedModel,
    ServerInfo,
)
from paceline.generation_wire import (
    deployment_status_from_proto,
    event_from_proto,
    request_to_proto,
    served_models_from_proto,
    server_info_from_proto,
    traced_rounds_from_proto,
)
from paceline.interleaving import interleaved
from paceline.rounds import TracedRounds
from paceline.rpc import DEADLINE_METADATA_KEY
from paceline.tls import ClientTls
from paceline.v1 import generation_service_pb2 as generation_pb
from paceline.v1.generation_service_pb2_grpc import GenerationServiceStub

ReplyT = TypeVar("ReplyT")

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_RESUMPTIONS = 8
INFO_TIMEOUT_S = 10.0
FIRST_PAUSE_S = 0.1

_FIRST_TRIES = 3  # calls that find nobody, before any answer has begun
_LONGEST_PAUSE_S = 2.0

# What a dying server, or a proxy before it, makes of a stream that is not at its end.
_BROKEN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
    }
)


class GenerationClient:
    """One connection to an orchestrator, for any number of concurrent requests; an asynchronous context manager.

    An answer whose stream breaks in its middle is resumed: the client calls again, with the seed and the tokens it has,
    and whichever orchestrator answers at the endpoint goes on from there; of a request for several answers each goes on
    by itself. Every method raises a `PacelineError`:
    `ServerUnavailable` if nothing answers, `DeadlineExceeded` after `timeout_s`, otherwise the error that the server
    reported, under its own reason.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        token: str | None = None,
        tls: ClientTls | None = None,
        trust_network: bool = False,
        max_resumptions: int = DEFAULT_RESUMPTIONS,
        max_queue_retries: int = 0,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """`endpoint` is HOST:PORT; raises `InvalidRequest` if it is not.

        `token` says who asks. It travels over `tls` or to this machine itself, and elsewhere only if `trust_network` says
        that nobody listens on the way; else it is refused (`InvalidRequest`).

        `max_resumptions` is how often in a row an answer is taken up again without a new token coming; 0: never.
        `max_queue_retries` is how often a request that the server has no room for is made again before it has begun; each
        time it waits for as long as the server says. `first_pause_s` comes before the first new call, and each further one
        waits twice as long, up to 2 s, or as long as the server asked for.
        """
        self._connection = Connection(endpoint, token=token, tls=tls, trust_network=trust_network)
        self._max_resumptions, self._max_queue_retries = max_resumptions, max_queue_retries
        self._first_pause_s = first_pause_s
        self._channel: grpc.aio.Channel | None = None

    @property
    def endpoint(self) -> str:
        return self._connection.endpoint

    async def __aenter__(self) -> Self:
        self._channel = self._connection.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # First of all, so that the streams which break now are not resumed.
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def generate(
        self, request: GenerationRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> AsyncGenerator[Event]:
        """Stream one answer: `Started`, any number of `Delta`, `Finished`, without a gap or a repetition.

        With n > 1 the events of all choices are mixed, those of one choice in their order, and each has its `Finished`.
        Closing the generator cancels the request at the server. Raises `IncompleteAnswer` if the stream ends without
        `Finished`, whatever its status says, and cannot be resumed. Resumed under `greedy` and `coupled`, the answer is
        the very one that was interrupted; under `rejection` it has the same law.
        """
        limit = TimeLimit(timeout_s)
        several = request.n > 1
        missing = self._choices(Choices(request, limit)) if several else self._answer(Answer(request, limit))
        async with aclosing(missing) as events:
            async for event in events:
                yield event

    async def complete(self, request: GenerationRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Completion:
        """The whole answer at once. Raises `InvalidRequest` where several are asked for: see `complete_choices`."""
        if request.n != 1:
            raise InvalidRequest("complete gives one answer; with n above 1 call complete_choices.", parameter="n")
        (completion,) = await self.complete_choices(request, timeout_s=timeout_s)
        return completion

    async def complete_choices(
        self, request: GenerationRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> tuple[Completion, ...]:
        """The whole answers to one prompt at once, `request.n` of them, in the order of their numbers."""
        builder = CompletionBuilder()
        async with aclosing(self.generate(request, timeout_s=timeout_s)) as events:
            async for event in events:
                builder.add(event)
        return builder.build_choices()

    async def cancel(self, request_id: str, *, timeout_s: float = INFO_TIMEOUT_S) -> bool:
        """End an answer by its id, whoever reads it, and free what it holds; whether it was running or waiting.

        It is `Started.request_id`, or what the request chose. Whoever reads the answer gets `AnswerCancelled`. Behind an
        endpoint there may be several orchestrators; of one that is not on Ray Serve, only the one that answers looks. Of a
        request for several answers whose stream broke, each answer goes on under an id of its own: the request's, a hyphen
        and the number of the choice, for all but the first.
        """
        request = generation_pb.CancelRequest(request_id=request_id)
        reply = await self._ask(self._stub().Cancel, request, timeout_s=timeout_s)
        return bool(reply.was_running)

    async def list_models(self, *, timeout_s: float = INFO_TIMEOUT_S) -> tuple[ServedModel, ...]:
        """The models that requests can be for, with their limits and defaults."""
        request = generation_pb.ListModelsRequest()
        return served_models_from_proto(await self._ask(self._stub().ListModels, request, timeout_s=timeout_s))

    async def server_info(self, *, timeout_s: float = INFO_TIMEOUT_S) -> ServerInfo:
        request = generation_pb.GetServerInfoRequest()
        return server_info_from_proto(await self._ask(self._stub().GetServerInfo, request, timeout_s=timeout_s))

    async def pool_status(self, *, timeout_s: float = INFO_TIMEOUT_S) -> DeploymentStatus:
        """The pools as one orchestrator sees them, and how busy it is; behind an endpoint there may be several."""
        request = generation_pb.GetPoolStatusRequest()
        return deployment_status_from_proto(await self._ask(self._stub().GetPoolStatus, request, timeout_s=timeout_s))

    async def round_trace(
        self, *, request_id: str = "", limit: int = 0, timeout_s: float = INFO_TIMEOUT_S
    ) -> TracedRounds:
        """The last `limit` rounds (0: all) that one orchestrator remembers, of one request alone if its id is given.

        `request_id` is `Started.request_id`; of a request for several answers, all of them. Behind an endpoint there may
        be several orchestrators, each of which knows its own rounds.
        """
        request = generation_pb.GetRoundTraceRequest(request_id=request_id, limit=limit)
        return traced_rounds_from_proto(await self._ask(self._stub().GetRoundTrace, request, timeout_s=timeout_s))

    async def _ask(self, method: Callable[..., Awaitable[ReplyT]], request: Message, *, timeout_s: float) -> ReplyT:
        """The one reply to a question about the server."""
        try:
            return await method(request, timeout=timeout_s, metadata=self._connection.metadata)
        except grpc.aio.AioRpcError as error:
            late = f"No reply from {self.endpoint} within {timeout_s:g} s; allow more time, or see how busy it is."
            raise explained(error, endpoint=self.endpoint, late=late) from error
        except asyncio.CancelledError:
            if _is_cancelled_by_caller():
                raise
            raise ClientClosed from None

    async def _answer(self, answer: Answer, interruption: Interrupted | None = None) -> AsyncGenerator[Event]:
        """What is missing of one answer, in as many calls as it takes; `interruption` is what ended the last one."""
        while True:
            if interruption is not None:
                await self._pause(answer, interruption)
            try:
                async with aclosing(self._call(answer)) as events:
                    async for event in events:
                        yield event
                return
            except Interrupted as error:
                interruption = error

    async def _choices(self, choices: Choices) -> AsyncGenerator[Event]:
        """All choices of a request: in one call, and from where that breaks in one call for each that is not whole."""
        while not choices.has_started:
            try:
                async with aclosing(self._call(choices)) as events:
                    async for event in events:
                        yield event
                return
            except Interrupted as error:
                interruption = error
            if not choices.has_started:
                await self._pause(choices, interruption)
        async with aclosing(
            interleaved([self._answer(answer, interruption) for answer in choices.unfinished])
        ) as events:
            async for event in events:
                yield event

    async def _call(self, asked: Asked) -> AsyncGenerator[Event]:
        """The events of one call that the caller has not seen. Raises `Interrupted` where another call may help."""
        call = self._stub().Generate(
            request_to_proto(asked.next_request()),
            timeout=asked.limit.remaining_s,
            metadata=(*self._connection.metadata, (DEADLINE_METADATA_KEY, str(asked.limit.deadline_unix_ms))),
        )
        has_begun = False
        try:
            async for response in call:
                event = event_from_proto(response)
                if event is None:
                    continue
                has_begun = True
                fresh = asked.take(event)
                if fresh is not None:
                    yield fresh
        except grpc.aio.AioRpcError as error:
            if asked.is_finished:
                return  # the answer is whole, whatever became of the connection then
            late = f"No whole answer within {asked.limit.timeout_s:g} s; allow more time or ask for fewer tokens."
            failure = explained(error, endpoint=self.endpoint, late=late, in_mid_answer=asked.has_started)
            if _may_be_resumed(error, failure, asked, has_begun=has_begun):
                raise Interrupted(failure) from error
            raise failure from error
        except asyncio.CancelledError as error:
            if _is_cancelled_by_caller():
                raise
            if asked.is_finished:
                return
            raise Interrupted(IncompleteAnswer(CANCELLED_SENTENCE)) from error
        finally:
            call.cancel()
        if not asked.is_finished:
            raise Interrupted(IncompleteAnswer("The server's stream ended before the answer did; ask again."))

    async def _pause(self, asked: Asked, interruption: Interrupted) -> None:
        """Wait before the next call; raises what ended the last one if there is to be none."""
        failure = interruption.failure
        pause_s = min(_LONGEST_PAUSE_S, self._first_pause_s * 2.0 ** min(asked.failures, 32))
        # Clients that lost the same server must not come back all at once.
        pause_s = max(pause_s, failure.retry_after_s or 0.0) * random.uniform(1.0, 1.25)
        asked.failures += 1
        may_call = asked.can_go_on and asked.failures <= self._most_failures(asked, failure)
        if may_call and pause_s < asked.limit.remaining_s:
            await asyncio.sleep(pause_s)
            if self._channel is not None:
                return
        raise failure from None  # in our words; what gRPC calls it says no more

    def _most_failures(self, asked: Asked, failure: PacelineError) -> int:
        """Failures in a row after which another call is made."""
        if asked.has_started:
            return self._max_resumptions
        if isinstance(failure, QueueFull):
            return self._max_queue_retries
        # Nothing is lost yet: a server that restarts is waited for briefly, any other trouble is the caller's to judge.
        return min(_FIRST_TRIES - 1, self._max_resumptions) if isinstance(failure, ServerUnavailable) else 0

    def _stub(self) -> GenerationServiceStub:
        if self._channel is None:
            raise ClientClosed
        return GenerationServiceStub(self._channel)


def _is_cancelled_by_caller() -> bool:
    """gRPC raises CancelledError also when the channel is closed, which must not end a task that nobody cancelled."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _may_be_resumed(error: grpc.aio.AioRpcError, failure: PacelineError, asked: Asked, *, has_begun: bool) -> bool:
    """Whether another call may go on where this one ended, of which any event came if it `has_begun`.

    It may not where the request itself is at fault.
    """
    if reported_error(error) is not None:
        # An orchestrator tries itself to go on at another target for as long as it is told to; full and draining are its
        # own troubles, which another one need not have; and who did not read for long may read now. Without a token nothing
        # is lost: the caller may judge.
        if not asked.has_started:
            return isinstance(failure, QueueFull)  # as often as the caller wants
        if isinstance(failure, RequestIdTaken):
            return True  # by the very answer whose stream has broken
        return asked.has_tokens and isinstance(failure, Draining | QueueFull | ReaderStalled)
    # Full is a place where the answer was to go on, before it does; later it is a message too large to be sent.
    return error.code() in _BROKEN or (error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and not has_begun)
