"""`GenerationService` on the orchestrator's own port, whole: cancellation, models, what is sent of an answer, and calls that
reach no method.

The models count: behind token t comes t + 1, around a vocabulary of 8, one word a token.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from grpc_status import rpc_status

from paceline.client import (
    Delta,
    GenerationClient,
    OutputOptions,
    Started,
    StopConditions,
    SyncGenerationClient,
)
from paceline.errors import (
    AnswerCancelled,
    ContextTooLong,
    InvalidRequest,
    ModelNotFound,
    PacelineError,
    RequestIdTaken,
)
from paceline.generation import ChatMessage, Finished
from paceline.rpc import MAX_MESSAGE_BYTES, open_channel
from paceline.types import VerificationRule
from tests.checkpoints import save_markov_checkpoint
from tests.contract.stream_peer import LIMIT_S, VOCAB
from tests.contract.test_orchestrator import LONG, SERVICE_NAME, counting, greedy, in_mid_answer, patient
from tests.harness import System, model_drafter_of, orchestrator_of, running, system, target_of

TEXT = "t3 t4 t5 t6 t7 t0"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One word a token: t0, t1, ..."""
    uniform = [[1 / VOCAB] * VOCAB] * VOCAB
    return str(save_markov_checkpoint(tmp_path_factory.mktemp("models") / "words", uniform))


@pytest.fixture
async def services(tokenizer: str) -> AsyncIterator[System]:
    async with system(target_of(counting()), model_drafter_of(counting()), tokenizer) as services:
        yield services


@pytest.fixture
async def slow(tokenizer: str) -> AsyncIterator[System]:
    """Answers of `LONG` tokens do not end within a test; two at a time, and one in line."""
    settings = {"max_sessions": 2, "max_queued_requests": 4, "queue_timeout_s": LIMIT_S}
    async with system(target_of(patient()), model_drafter_of(counting()), tokenizer, **settings) as services:
        yield services


# ---------------------------------------------------------------------------------------------------------------------
# Cancellation


@pytest.mark.parametrize("chosen", ["", "mine"])
async def test_running_answer_is_cancelled_by_its_id(slow: System, chosen: str) -> None:
    """Its reader gets the error, both model services are free, and another answer is not disturbed."""
    async with in_mid_answer(slow.client, greedy(LONG)) as other:
        client = GenerationClient(slow.orchestrator.address, first_pause_s=0.001)  # one that would resume it
        async with client, aclosing(client.generate(replace(greedy(LONG), request_id=chosen))) as events:
            started = await anext(events)
            assert isinstance(started, Started)
            assert started.request_id == chosen or not chosen
            await anext(events)
            assert await slow.client.cancel(started.request_id)
            with pytest.raises(AnswerCancelled):
                await read_all(events)
            assert not await slow.client.cancel(started.request_id)
        assert isinstance(await anext(other), Delta)
    assert [load.sessions for load in await slow.loads()] == [0, 0]


async def test_all_choices_are_cancelled_together(slow: System) -> None:
    """One id, one stream, one error."""
    asked = replace(greedy(LONG), n=2, request_id="mine")
    async with aclosing(slow.client.generate(asked)) as events:
        assert isinstance(await anext(events), Started)
        assert await slow.client.cancel("mine")
        with pytest.raises(AnswerCancelled):
            await read_all(events)
    assert [load.sessions for load in await slow.loads()] == [0, 0]


async def test_answer_that_waits_in_line_is_cancelled_too(slow: System) -> None:
    """Under the id that its caller chose, for it has not been told another."""
    async with in_mid_answer(slow.client, replace(greedy(LONG), n=2)):
        waiting = asyncio.ensure_future(slow.client.complete(replace(greedy(4), request_id="in-line")))
        async with asyncio.timeout(LIMIT_S):
            while not await slow.client.cancel("in-line"):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.01)
            with pytest.raises(AnswerCancelled):
                await waiting


async def test_ids_are_unique_while_their_answers_run(slow: System) -> None:
    """The second is refused and the first goes on; a resumption takes its place; behind the end the id is free."""
    asked = replace(greedy(LONG), request_id="mine")
    async with in_mid_answer(slow.client, asked) as events:
        with pytest.raises(RequestIdTaken):
            await slow.client.complete(replace(greedy(2), request_id="mine"))
        assert isinstance(await anext(events), Delta)
        resumed = replace(replace(greedy(5), request_id="mine"), output_ids=(3, 4, 5))
        assert (await slow.client.complete(resumed)).token_ids == (6, 7)
        with pytest.raises(AnswerCancelled):
            await read_all(events)
    assert (await slow.client.complete(replace(greedy(2), request_id="mine"))).request_id == "mine"


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 65, "ü"])
async def test_cancelling_what_can_be_no_id_is_refused_by_name(services: System, request_id: str) -> None:
    """An id that no answer has is another thing: nothing was running."""
    with pytest.raises(InvalidRequest) as refusal:
        await services.client.cancel(request_id)
    assert refusal.value.parameter == "request_id"
    assert not await services.client.cancel("nobody")


async def test_traces_call_an_answer_by_its_id(services: System) -> None:
    """That of the request, and none of one that only looks like a choice of it."""
    for request_id in ("job", "job-1", "jobs"):
        await services.client.complete(replace(greedy(6), request_id=request_id))
    traced = await services.client.round_trace(request_id="job")
    assert traced.records
    assert {record.session_id.partition("~")[0] for record in traced.records} == {"job"}


# ---------------------------------------------------------------------------------------------------------------------
# Models


async def test_models_are_listed_with_their_limits(services: System) -> None:
    """The one there is, as the server info has it too; with the defaults that requests get."""
    (model,) = await services.client.list_models()
    info = await services.client.server_info()
    assert (model.target, model.drafter, model.speculation) == (info.target, info.drafter, info.speculation)
    assert (model.name, model.target.vocab_size) == (info.target.model_id, VOCAB)
    assert (model.default_max_tokens, model.max_choices) == (256, 16)
    assert model.max_prompt_tokens == model.target.max_context - 1


async def test_request_names_the_served_model_or_none(services: System) -> None:
    """Another one is an error that says which there is."""
    (model,) = await services.client.list_models()
    asked = greedy(6)
    assert await services.client.complete(replace(asked, model=model.name)) is not None
    with pytest.raises(ModelNotFound, match=model.name):
        await services.client.complete(replace(asked, model="gpt-unknown"))


# ---------------------------------------------------------------------------------------------------------------------
# What is sent


@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=3))[:-1])
@pytest.mark.parametrize("stop", [(), ("t7",)], ids=["no stop", "stop string"])
async def test_only_what_is_wanted_is_sent(
    services: System, wanted: tuple[bool, bool, bool], stop: tuple[str, ...]
) -> None:
    """Each part as in the whole answer or absent; the end, its reason and the usage do not change."""
    asked = greedy(6, stop=stop)
    whole = await services.client.complete(asked)
    text, token_ids, pieces = wanted
    some = await services.client.complete(
        replace(asked, output=OutputOptions(text=text, token_ids=token_ids, pieces=pieces))
    )
    assert some.text == (whole.text if text else "")
    assert (some.token_ids, some.origins) == ((whole.token_ids, whole.origins) if token_ids else ((), ()))
    assert some.pieces == (whole.pieces if pieces else ())
    assert (some.finish_reason, some.usage) == (whole.finish_reason, whole.usage)
    assert whole.text == TEXT.partition("t7")[0] if stop else TEXT


async def test_log_probabilities_come_without_text(services: System) -> None:
    """Of the token ids alone; the text of the most probable tokens is left out with the pieces."""
    asked = greedy(4, rule=VerificationRule.GREEDY)
    asked = replace(asked, logprobs=2, output=OutputOptions(text=False, pieces=False))
    completion = await services.client.complete(asked)
    assert [len(entry.top) for entry in completion.logprobs] == [2] * 4
    assert {entry.top_pieces for entry in completion.logprobs} == {()}


# ---------------------------------------------------------------------------------------------------------------------
# Calls that reach no method


async def refused(address: str, method: str, data: bytes, *, kind: str = "unary_unary") -> grpc.aio.AioRpcError:
    """How a call of raw bytes ends that must fail."""
    async with open_channel(address) as channel:
        call = getattr(channel, kind)(method)(data, timeout=LIMIT_S)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await (call if kind == "unary_unary" else read_all(call))
    return refusal.value


async def read_all(events: AsyncIterable[object]) -> None:
    async for _ in events:
        pass


def details_of(error: grpc.aio.AioRpcError) -> tuple[error_details_pb2.ErrorInfo, error_details_pb2.BadRequest]:
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    packed = dict(error.trailing_metadata() or ())[rpc_status.GRPC_DETAILS_METADATA_KEY]
    for detail in status_pb2.Status.FromString(packed).details:
        detail.Unpack(info)
        detail.Unpack(bad_request)
    return info, bad_request


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x01\xff", b"\x0a\xff\xff\xff\xff\x0f"])
async def test_bytes_that_are_no_request_are_refused_in_words(services: System, kind: str, data: bytes) -> None:
    """A typed error with all its details, and nothing of our own insides; the server goes on."""
    method = f"/{SERVICE_NAME}/{'Generate' if kind == 'unary_stream' else 'Cancel'}"
    error = await refused(services.orchestrator.address, method, data, kind=kind)
    info, bad_request = details_of(error)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (info.reason, info.domain) == ("PAYLOAD_INVALID", "paceline")
    assert [violation.description for violation in bad_request.field_violations] == [error.details()]
    assert "Error" not in (error.details() or "")
    assert (await services.client.complete(greedy(6))).text == TEXT


@pytest.mark.parametrize("method", [f"/{SERVICE_NAME}/Improve", "/other.Service/Generate", "/nonsense"])
@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
async def test_unknown_method_is_refused_in_words(services: System, method: str, kind: str) -> None:
    """Whatever its bytes are and however it would stream."""
    error = await refused(services.orchestrator.address, method, b"\xff\xff", kind=kind)
    info, _ = details_of(error)
    assert (error.code(), info.reason, info.domain) == (grpc.StatusCode.UNIMPLEMENTED, "METHOD_NOT_FOUND", "paceline")
    assert method in (error.details() or "")


async def test_message_beyond_the_limit_is_refused_by_grpc_itself(services: System) -> None:
    """No code of ours sees it, so there are no details; the next call is answered."""
    async with grpc.aio.insecure_channel(
        services.orchestrator.address, options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        cancel: Any = channel.unary_unary(f"/{SERVICE_NAME}/Cancel")
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await cancel(b"x" * (MAX_MESSAGE_BYTES + 1), timeout=LIMIT_S)
    assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await services.client.complete(greedy(6))).text == TEXT


# ---------------------------------------------------------------------------------------------------------------------
# Sizes


LONGEST_PROMPT, LONGEST_ANSWER, CONTEXT = 8, 16, 64


@pytest.mark.parametrize(
    ("wanted", "refusal", "parameter"),
    [
        ({"token_ids": (1,) * (LONGEST_PROMPT + 1)}, ContextTooLong, None),
        ({"token_ids": None, "text": "t1 " * (LONGEST_PROMPT + 1)}, ContextTooLong, None),
        ({"token_ids": None, "text": "x" * 10_000}, ContextTooLong, None),  # refused before it is tokenized
        ({"token_ids": None, "messages": (ChatMessage("user", "x" * 10_000),)}, ContextTooLong, None),
        ({"stopping": StopConditions(max_tokens=LONGEST_ANSWER + 1)}, InvalidRequest, "max_tokens"),
        ({"output_ids": (1,) * (CONTEXT + 1)}, InvalidRequest, "output_ids"),
    ],
    ids=["ids", "text", "characters", "messages", "max_tokens", "output_ids"],
)
async def test_what_is_longer_than_it_may_be_is_refused(
    tokenizer: str, wanted: dict[str, Any], refusal: type[PacelineError], parameter: str | None
) -> None:
    """One more than the limit is refused by name, and the limit itself is answered."""
    limits = {"max_prompt_tokens": LONGEST_PROMPT, "max_tokens_limit": LONGEST_ANSWER, "default_max_tokens": 4}
    target = target_of(counting(max_context=CONTEXT))
    async with system(target, model_drafter_of(counting()), tokenizer, **limits) as services:
        with pytest.raises(refusal) as caught:
            await services.client.complete(replace(greedy(4), **wanted))
        assert getattr(caught.value, "parameter", None) == parameter
        asked = replace(greedy(LONGEST_ANSWER), token_ids=(1,) * LONGEST_PROMPT)
        assert len((await services.client.complete(asked)).token_ids) == LONGEST_ANSWER


async def test_old_connection_takes_no_further_call_and_ends_none(
    tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server parts with a connection that nothing runs on; an answer on another goes on to its end, many ages later,
    and the next call comes over a new one."""
    monkeypatch.setattr("orchestrator.service._CONNECTION_AGE_S", 0.1)
    async with system(target_of(patient()), model_drafter_of(counting()), tokenizer) as services:
        address, is_ready = services.orchestrator.address, grpc.ChannelConnectivity.READY
        async with open_channel(address) as idle, in_mid_answer(services.client, greedy(300)) as events:
            await idle.channel_ready()
            await asyncio.wait_for(idle.wait_for_state_change(is_ready), LIMIT_S)
            rest = [event async for event in events]
            assert isinstance(rest[-1], Finished)
            assert rest[-1].usage.completion_tokens == 300
            assert await services.client.list_models()


# ---------------------------------------------------------------------------------------------------------------------
# Reflection


async def described(address: str, symbol: str) -> FileDescriptorProto:
    """What a client that knows no protocol is told of a symbol."""
    async with open_channel(address) as channel:
        call = ServerReflectionStub(channel).ServerReflectionInfo(
            iter([ServerReflectionRequest(file_containing_symbol=symbol)]), timeout=LIMIT_S
        )
        async for response in call:
            return FileDescriptorProto.FromString(response.file_descriptor_response.file_descriptor_proto[0])
    raise AssertionError("no description came")


async def test_reflection_describes_the_service_where_it_is_on(services: System, tokenizer: str) -> None:
    """By its setting alone; off, the method does not exist."""
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await described(services.orchestrator.address, SERVICE_NAME)
    assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert services.drafter is not None
    serve = orchestrator_of(services.target.address, services.drafter.address, tokenizer, reflection=True)
    async with running(serve) as orchestrator:
        file = await described(orchestrator.address, SERVICE_NAME)
    (service,) = file.service
    assert {method.name for method in service.method} >= {"Generate", "Cancel", "ListModels", "GetServerInfo"}


# ---------------------------------------------------------------------------------------------------------------------
# The blocking client


async def test_blocking_client_is_answered_by_the_real_service(slow: System) -> None:
    """From a thread: the same tokens, and an early end that frees the sessions."""

    def ask() -> str:
        with SyncGenerationClient(slow.orchestrator.address) as client:
            events = client.generate(greedy(LONG))
            assert isinstance(next(events), Started)
            assert isinstance(next(events), Delta)
            events.close()
            return client.complete(greedy(6)).text

    assert await asyncio.to_thread(ask) == TEXT
    assert [load.sessions for load in await slow.loads()] == [0, 0]
