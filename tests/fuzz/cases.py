"""What a stranger does to the services, and what may come of it: an answer, or an error of ours."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

import paceline.errors
from paceline.errors import PacelineError
from paceline.v1 import drafter_service_pb2 as drafter_pb
from paceline.v1 import generation_service_pb2 as generation_pb
from paceline.v1 import session_pb2 as session_pb
from paceline.v1 import target_service_pb2 as target_pb
from tests.checkpoints import TINY_VOCAB_SIZE
from tests.fuzz.arena import DRAFTER, GENERATION, PATIENCE_S, TARGET, Arena, drafter_logits, greedy, target_logits
from tests.fuzz.http_requests import HttpRequest
from tests.fuzz.messages import NAME_MARK

REASONS = {
    kind.reason for kind in vars(paceline.errors).values() if isinstance(kind, type) and issubclass(kind, PacelineError)
} - {PacelineError.reason}
"""Those of the page of errors, but for the one that says that a fault is ours."""
_HTTP_CODES = {reason.lower() for reason in REASONS} | {
    *("context_length_exceeded", "unsupported_media_type", "body_too_large", "method_not_allowed", "path_not_found")
}
_LOOK_S = 0.3  # how long a request that may never be answered is listened to
_READ_AHEAD = 2**15  # bytes of a request that fit into any buffer
_PROMPT = (1, 2, 3)

METHODS: tuple[MethodDescriptor, ...] = tuple(
    method for service in (GENERATION, TARGET, DRAFTER) for method in service.methods
)


# ---------------------------------------------------------------------------------------------------------------------
# gRPC


@dataclass(frozen=True, slots=True)
class Call:
    """One request of any bytes to a method that takes one."""

    method: str  # its full name
    data: bytes
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    patience_s: float = PATIENCE_S
    leaves_after: int | None = None  # events, of a stream

    async def play(self, arena: Arena) -> None:
        method = _method(self.method)
        call = self._begin(arena, method)
        answers: list[bytes] = []
        try:
            async for answer in _answers(call, is_stream=method.server_streaming):
                answers.append(answer)
                if len(answers) == self.leaves_after:
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            assert_typed(error, is_in_a_hurry=self.patience_s < PATIENCE_S)
        except asyncio.CancelledError:
            assert self.leaves_after, "nobody has cancelled the call"
        else:
            self._check(method, answers)

    def _begin(self, arena: Arena, method: MethodDescriptor) -> Any:
        service = method.containing_service.full_name
        make: Any = getattr(arena.channels[service], "unary_stream" if method.server_streaming else "unary_unary")
        data = self.data.replace(NAME_MARK.encode(), arena.new_name().encode())
        return make(f"/{service}/{method.name}")(data, metadata=self.metadata, timeout=self.patience_s)

    def _check(self, method: MethodDescriptor, answers: list[bytes]) -> None:
        kind = message_factory.GetMessageClass(method.output_type)
        messages: list[Any] = [kind.FromString(answer) for answer in answers]
        if method.server_streaming:
            events = [message.WhichOneof("event") for message in messages]
            assert events[0] == "started"
            assert events.count("finished") == len(messages[0].started.seeds)
            assert None not in events


async def _answers(call: Any, *, is_stream: bool) -> AsyncIterator[bytes]:
    if not is_stream:
        yield await call
        return
    async for answer in call:
        yield answer


def assert_typed(error: grpc.aio.AioRpcError, *, is_in_a_hurry: bool = False) -> None:
    """One of our errors, with its reason; or the caller's own clock, if it had to be quick."""
    packed = dict(error.trailing_metadata() or ()).get(rpc_status.GRPC_DETAILS_METADATA_KEY)
    if packed is None:
        assert is_in_a_hurry, error
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED, error
        return
    info = error_details_pb2.ErrorInfo()
    assert status_pb2.Status.FromString(packed).details[0].Unpack(info), error
    assert info.reason in REASONS, error
    assert info.domain == "paceline"
    assert error.details(), error


@dataclass(frozen=True, slots=True)
class Stream:
    """Messages of any bytes on a stream of its own to a model service, with a well-behaved session behind them."""

    service: str  # its full name
    data: tuple[bytes, ...]
    is_readable: bool  # all are messages of the protocol, so that the stream must live on

    async def play(self, arena: Arena) -> None:
        is_target = self.service == TARGET.full_name
        name = arena.new_name()
        expected = _TargetWitness(name) if is_target else _DrafterWitness(name)
        call: Any = arena.channels[self.service].stream_stream(f"/{self.service}/{expected.method}")()
        marked = NAME_MARK.encode(), arena.new_name().encode()
        try:
            async with asyncio.timeout(PATIENCE_S):
                # A stream that has ended takes no more; reading says why it has.
                with suppress(asyncio.InvalidStateError):
                    for data in (*self.data, expected.opening.SerializeToString()):
                        await call.write(data.replace(*marked))
                while not expected.has_seen(await call.read()):
                    pass
        except grpc.aio.AioRpcError as error:
            if self.is_readable:
                raise AssertionError("the stream has ended") from error
            assert_typed(error)
        finally:
            call.cancel()


class _Witness(ABC):
    """A session that behaves, and the event that must come for it."""

    method: str
    answer: Any  # the type of a message that comes back
    opening: Any  # the message that asks

    def __init__(self, name: str) -> None:
        self.session_id = f"witness-{name}"
        self._open = session_pb.OpenSession(
            committed_ids=_PROMPT,
            prompt_length=len(_PROMPT),
            sampling=session_pb.SamplingParams(temperature=0.0),
            rule=session_pb.VERIFICATION_RULE_GREEDY,
            vocab_size=TINY_VOCAB_SIZE,
        )

    def has_seen(self, data: Any) -> bool:
        """Whether the event is among those in a message; all others are looked at as well."""
        assert data is not grpc.aio.EOF, "the stream has ended without a status"
        return sum(map(self._is_it, self.answer.FromString(data).events)) > 0

    def _is_it(self, event: Any) -> bool:
        if event.WhichOneof("event") == "failed":
            assert event.session_id != self.session_id, event
            assert event.failed.reason in REASONS, event
            assert event.failed.message, event
        return event.session_id == self.session_id and self._is_right(event)

    @abstractmethod
    def _is_right(self, event: Any) -> bool:
        """Whether an event of the session is the one that must come."""


class _TargetWitness(_Witness):
    method, answer = "Verify", target_pb.VerifyResponse

    def __init__(self, name: str) -> None:
        super().__init__(name)
        verify = target_pb.VerifyDraft(base_length=len(_PROMPT))
        commands = [
            target_pb.TargetCommand(session_id=self.session_id, epoch=1, open=self._open),
            target_pb.TargetCommand(session_id=self.session_id, epoch=1, verify=verify),
        ]
        self.opening = target_pb.VerifyRequest(commands=commands)

    def _is_right(self, event: Any) -> bool:
        assert list(event.verdict.token_ids) == [greedy(target_logits(_PROMPT))], event
        return True


class _DrafterWitness(_Witness):
    method, answer = "Draft", drafter_pb.DraftResponse

    def __init__(self, name: str) -> None:
        super().__init__(name)
        commit = drafter_pb.Commit(base_length=len(_PROMPT), draft_length=1, credit=1)
        commands = [
            drafter_pb.DrafterCommand(session_id=self.session_id, epoch=1, open=self._open),
            drafter_pb.DrafterCommand(session_id=self.session_id, epoch=1, commit=commit),
        ]
        self.opening = drafter_pb.DraftRequest(commands=commands)

    def _is_right(self, event: Any) -> bool:
        assert list(event.proposal.draft_ids) == [greedy(drafter_logits(_PROMPT))], event
        return True


def _method(full_name: str) -> MethodDescriptor:
    return next(method for method in METHODS if method.full_name == full_name)


GENERATE = next(method.full_name for method in METHODS if method.name == "Generate")
INPUTS = {method.full_name: message_factory.GetMessageClass(method.input_type) for method in METHODS}
assert INPUTS[GENERATE] is generation_pb.GenerateRequest


# ---------------------------------------------------------------------------------------------------------------------
# HTTP


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request on a connection of its own."""

    request: HttpRequest

    async def play(self, arena: Arena) -> None:
        host, port = arena.url.removeprefix("http://").rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            async with asyncio.timeout(PATIENCE_S):
                response = await self._talk(reader, writer)
        except ConnectionError:
            # Whoever is refused while sending much may lose the answer, for the rest is not read.
            assert not self.request.is_whole or len(self.request.data) > _READ_AHEAD, "there was no answer"
            return
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        if self.request.is_whole:
            assert_answer(response)
        elif response:
            assert_no_fault(response, is_in_a_hurry=b"x-request-timeout" in self.request.data)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(self.request.data)
        if self.request.is_whole:
            return await reader.read(-1)
        begun = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                begun = await reader.read(2**16)
        if not reader.at_eof():
            writer.write_eof()
        return begun + await reader.read(-1)


def assert_no_fault(response: bytes, *, is_in_a_hurry: bool) -> None:
    """It was no fault of the server, whatever it was."""
    status = int(response.split(b" ", 2)[1])
    assert 100 <= status < 500 or (status == 504 and is_in_a_hurry), response


def assert_answer(response: bytes) -> None:
    """One whole response: an answer, a stream of one, or an error in OpenAI's shape."""
    head, _, body = response.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    assert 200 <= status < 500, response
    if b"transfer-encoding: chunked" in head.lower():
        body = b"".join(_unchunked(body))
    if status != 200:
        assert_error(json.loads(body))
    elif b"text/event-stream" in head:
        assert_events(body)
    else:
        assert json.loads(body)["choices"]


def _unchunked(body: bytes) -> Iterator[bytes]:
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        yield rest[:length]
        assert rest[length : length + 2] == b"\r\n", "a chunk is not whole"
        body = rest[length + 2 :]


def assert_events(body: bytes) -> None:
    """Events of an answer that end with `[DONE]`, or with an error instead."""
    *events, rest = body.decode().split("\n\n")
    assert rest == ""
    *contents, last = [event.removeprefix("data: ") for event in events]
    assert all("choices" in json.loads(content) for content in contents)
    if last != "[DONE]":
        assert_error(json.loads(last))


def assert_error(content: Any) -> None:
    """OpenAI's shape, with one of our codes."""
    assert content.keys() == {"error"}
    error = content["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"], error
    assert error["code"] in _HTTP_CODES, error
