"""The orchestrator over real gRPC: what it refuses and by which name, and what it does when its peers come and go.

The models count: behind token t comes t + 1, around a vocabulary of 8. At temperature 0 every answer is plain to see.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.text import Tokenizer
from paceline.client import GenerationClient
from paceline.errors import (
    DeadlineExceeded,
    ModelMismatch,
    PacelineError,
    QueueFull,
    StartupFailed,
    TargetUnavailable,
)
from paceline.generation import Completion, Delta, Event, GenerationRequest, Schedule
from paceline.rpc import open_channel
from paceline.types import Origin, VerificationRule
from paceline.v1 import generation_service_pb2 as generation_pb
from paceline.v1 import session_pb2 as session_pb
from paceline.v1.generation_service_pb2_grpc import GenerationServiceStub
from tests.checkpoints import save_markov_checkpoint
from tests.contract.stream_peer import (
    BAD_SAMPLING,
    LIMIT_S,
    MAX_CONTEXT,
    NO_SHRINKING,
    VOCAB,
    any_sampling,
    assert_is_sentence,
    drafter_peer,
    health_of,
    id_lists,
    legal_sampling,
    sampling_with,
    target_peer,
    token_ids,
    uint32s,
)
from tests.fakes import FakeModel, counting_logits, fake_info
from tests.harness import (
    Running,
    System,
    model_drafter_of,
    ngram_drafter,
    orchestrator_of,
    request,
    running,
    start,
    system,
    target_of,
)

PROMPT = (0, 1, 2)
SERVICE_NAME = "paceline.v1.GenerationService"
LONG = 3000
"""Tokens of an answer that takes many seconds with the patient model."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One word a token: t0, t1, ..."""
    uniform = [[1 / VOCAB] * VOCAB] * VOCAB
    return str(save_markov_checkpoint(tmp_path_factory.mktemp("models") / "words", uniform))


def counting(
    *, vocab_size: int = VOCAB, padding_logit: float = -9.0, max_context: int = 4096, pause_s: float = 0.0
) -> FakeModel:
    """A model that counts up to 7 and begins again; `pause_s` is how long it takes for each row.

    A larger `vocab_size` is padding, which scores `padding_logit`; the next token scores 8.
    """
    row_behind = counting_logits(VOCAB)

    def logits(ids: Sequence[int]) -> Sequence[float]:
        time.sleep(pause_s)
        return [*row_behind(ids), *[padding_logit] * (vocab_size - VOCAB)]

    return FakeModel(logits, vocab_size=vocab_size, max_context=max_context)


def patient() -> FakeModel:
    """So slow that an answer of `LONG` tokens cannot end within a test."""
    return counting(pause_s=0.004)


def counted(length: int, *, behind: int = PROMPT[-1]) -> tuple[int, ...]:
    """The answer of the counting model."""
    return tuple((behind + 1 + index) % VOCAB for index in range(length))


def greedy(max_tokens: int, **fields: Any) -> GenerationRequest:
    return request(PROMPT, temperature=0.0, max_tokens=max_tokens, **fields)


@asynccontextmanager
async def in_mid_answer(
    client: GenerationClient, asked: GenerationRequest, *, timeout_s: float = 60.0
) -> AsyncIterator[AsyncIterator[Event]]:
    """The rest of an answer of which three rounds have come; cancelled at the end of the block."""
    async with aclosing(client.generate(asked, timeout_s=timeout_s)) as events:
        deltas = 0
        async for event in events:
            deltas += isinstance(event, Delta)
            if deltas == 3:
                break
        yield events


async def until_answered(
    client: GenerationClient,
    asked: GenerationRequest,
    *,
    accept: Callable[[Completion], bool] = lambda _: True,
    while_: type[PacelineError] = TargetUnavailable,
) -> Completion:
    """Ask again until an answer comes that is accepted; only errors of one kind are put up with."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                completion = await client.complete(asked)
            except while_:
                await asyncio.sleep(0.02)
            else:
                if accept(completion):
                    return completion


async def killed(service: Running) -> int:
    """Kill a service; gives its port, which another can take."""
    await service.kill()
    return service.port


@contextmanager
def silent_port() -> Iterator[int]:
    """A port on which nobody listens, and nobody else will for the time being."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@dataclass(frozen=True)
class Refusal:
    """The status of a refused request, with what it carries."""

    code: grpc.StatusCode
    sentence: str
    reason: str
    fields: tuple[str, ...]  # of the request, that are at fault
    retry_after_s: float | None


async def refusal_of(channel: grpc.aio.Channel, message: generation_pb.GenerateRequest) -> Refusal:
    """Ask, and expect to be refused with a rich status and a sentence."""
    call = GenerationServiceStub(channel).Generate(message, timeout=LIMIT_S)
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    status = await rpc_status.aio.from_call(call)
    assert status is not None, await call.details()
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    has_retry = False
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(bad)
        has_retry |= detail.Unpack(retry)
    assert info.domain == "paceline"
    assert_is_sentence(status.message)
    return Refusal(
        code=await call.code(),
        sentence=status.message,
        reason=info.reason,
        fields=tuple(violation.field for violation in bad.field_violations),
        retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9 if has_retry else None,
    )


def message(**changes: Any) -> generation_pb.GenerateRequest:
    """A valid request, but for the fields named in `changes`."""
    fields: dict[str, Any] = {
        "token_ids": session_pb.TokenIds(ids=PROMPT),
        "sampling": session_pb.SamplingParams(temperature=0.0),
        "stopping": generation_pb.StopConditions(max_tokens=3),
    }
    if {"text", "chat"} & set(changes):
        del fields["token_ids"]
    return generation_pb.GenerateRequest(**(fields | changes))


def stopping(**changes: Any) -> generation_pb.GenerateRequest:
    return message(stopping=generation_pb.StopConditions(**({"max_tokens": 3} | changes)))


def speculation(**options: Any) -> generation_pb.GenerateRequest:
    return message(speculation=generation_pb.SpeculationOptions(**options))


def chat(*turns: tuple[str, str]) -> generation_pb.GenerateRequest:
    messages = [generation_pb.ChatMessage(role=role, content=content) for role, content in turns]
    return message(chat=generation_pb.ChatMessages(messages=messages))


def prompt(*ids: int) -> generation_pb.GenerateRequest:
    return message(token_ids=session_pb.TokenIds(ids=ids))


BAD_REQUESTS: dict[str, tuple[str, generation_pb.GenerateRequest]] = {
    "no prompt": ("prompt", generation_pb.GenerateRequest()),
    "empty text": ("prompt", message(text="")),
    "no token ids": ("prompt", prompt()),
    "no messages": ("messages", chat()),
    "unknown role": ("messages", chat(("narrator", "t0"))),
    "token id of the vocabulary size": ("token_ids", prompt(0, VOCAB)),
    "token id 2^31 - 1": ("token_ids", prompt(2**31 - 1)),
    "token id 2^32 - 1": ("token_ids", prompt(2**32 - 1)),
    "max_tokens 0": ("max_tokens", stopping(max_tokens=0)),
    "min_tokens above max_tokens": ("min_tokens", message(sampling=sampling_with(min_tokens=4))),
    "too many stop strings": ("stop", stopping(stop=["t1"] * 17)),
    "empty stop string": ("stop", stopping(stop=["t1", ""])),
    "endless stop string": ("stop", stopping(stop=["t" * 10_000])),
    "stop token id outside the vocabulary": ("stop_token_ids", stopping(stop_token_ids=[VOCAB])),
    "rule greedy above temperature 0": (
        "rule",
        message(
            sampling=sampling_with(),
            speculation=generation_pb.SpeculationOptions(rule=session_pb.VERIFICATION_RULE_GREEDY),
        ),
    ),
    "unknown rule": ("rule", speculation(rule=99)),
    "unknown schedule": ("schedule", speculation(schedule=99)),
    "draft_length 65": ("draft_length", speculation(draft_length=65)),
    "draft_length 2^32 - 1": ("draft_length", speculation(draft_length=2**32 - 1)),
}

Peers = tuple[System, grpc.aio.Channel]
shared = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def peers(tokenizer: str) -> AsyncIterator[Peers]:
    """One system and a bare channel to it, which no refused request may disturb."""
    model = counting(max_context=MAX_CONTEXT)
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(system(target_of(model), model_drafter_of(counting()), tokenizer))
        yield services, await stack.enter_async_context(open_channel(services.orchestrator.address))


async def assert_refused(peers: Peers, refused: generation_pb.GenerateRequest, field: str) -> None:
    """By name and in a sentence, and the next request is answered."""
    services, channel = peers
    refusal = await refusal_of(channel, refused)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert refusal.fields == (field,)
    assert (await services.client.complete(greedy(3))).token_ids == counted(3)


@shared
@pytest.mark.parametrize("what", BAD_REQUESTS)
async def test_request_out_of_range_is_refused_by_name(peers: Peers, what: str) -> None:
    """INVALID_ARGUMENT and a BadRequest that names the field; others are answered as before."""
    field, refused = BAD_REQUESTS[what]
    await assert_refused(peers, refused, field)


@shared
@pytest.mark.parametrize(("parameter", "value"), BAD_SAMPLING)
async def test_sampling_value_out_of_range_is_refused_by_name(peers: Peers, parameter: str, value: Any) -> None:
    """INVALID_ARGUMENT and a BadRequest that names the parameter; others are answered as before."""
    await assert_refused(peers, message(sampling=sampling_with(**{parameter: value})), parameter)


@shared
async def test_stop_token_ids_among_the_sampling_parameters_are_not_ignored(peers: Peers) -> None:
    """They end the answer as those among the stop conditions do, or are refused by name."""
    _, channel = peers
    sampling = session_pb.SamplingParams(temperature=0.0, stop_token_ids=[4])
    asked = message(sampling=sampling, stopping=generation_pb.StopConditions(max_tokens=6))
    call = GenerationServiceStub(channel).Generate(asked, timeout=LIMIT_S)
    try:
        ids = [token_id async for response in call for token_id in response.delta.token_ids]
    except grpc.aio.AioRpcError:
        assert (await refusal_of(channel, asked)).fields == ("stop_token_ids",)
    else:
        assert ids == [3, 4]


@shared
@pytest.mark.parametrize("length", [MAX_CONTEXT, MAX_CONTEXT + 1, 5000])
async def test_prompt_beyond_the_context_is_refused(peers: Peers, length: int) -> None:
    """OUT_OF_RANGE with the reason CONTEXT_TOO_LONG and both lengths; one token less is answered."""
    services, channel = peers
    refusal = await refusal_of(channel, prompt(*[0] * length))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.OUT_OF_RANGE, "CONTEXT_TOO_LONG")
    assert str(length) in refusal.sentence
    assert str(MAX_CONTEXT - 1) in refusal.sentence
    longest = await services.client.complete(replace(greedy(5), token_ids=(0,) * (MAX_CONTEXT - 1)))
    assert longest.token_ids == (1,)


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 100.0},
        {"temperature": 5e-324},
        {"temperature": 5e-324, "top_k": 2},
        {"temperature": 5e-324, "top_p": 0.5},
        {"temperature": 1e-40, "min_p": 0.5},
        {"top_k": 2**32 - 1},
        {"top_p": 5e-324},
        {"min_p": 0.9999999999999999},
        {"repetition_penalty": 5e-324},
        {"repetition_penalty": 100.0, "presence_penalty": 100.0, "frequency_penalty": -100.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("rule", [session_pb.VERIFICATION_RULE_REJECTION, session_pb.VERIFICATION_RULE_COUPLED])
async def test_sampling_value_at_the_end_of_its_range_is_answered_or_refused_by_name(
    tokenizer: str, parameters: dict[str, Any], rule: session_pb.VerificationRule
) -> None:
    """No legal value makes a row of the model unusable, least of all the target as a whole."""
    # All tokens of the vocabulary have been seen, so that penalties meet the best one.
    asked = message(
        token_ids=session_pb.TokenIds(ids=range(VOCAB)),
        sampling=sampling_with(**parameters),
        speculation=generation_pb.SpeculationOptions(rule=rule),
    )
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(
            system(target_of(counting()), model_drafter_of(counting()), tokenizer)
        )
        channel = await stack.enter_async_context(open_channel(services.orchestrator.address))
        call = GenerationServiceStub(channel).Generate(asked, timeout=LIMIT_S)
        try:
            events = [response.WhichOneof("event") async for response in call]
        except grpc.aio.AioRpcError:
            assert (await refusal_of(channel, asked)).fields[:1] == tuple(parameters)[:1]
        else:
            assert events[-1] == "finished"
        assert (await services.client.complete(greedy(3))).token_ids == counted(3)


async def test_requests_beyond_the_limit_are_refused_at_once(tokenizer: str) -> None:
    """RESOURCE_EXHAUSTED with a time to wait, while the running answer goes on; when it has ended there is room."""
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(system(target_of(patient()), None, tokenizer, max_sessions=1))
        channel = await stack.enter_async_context(open_channel(services.orchestrator.address))
        async with in_mid_answer(services.client, greedy(LONG)) as events:
            refusal = await refusal_of(channel, message())
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
            assert refusal.retry_after_s is not None
            assert refusal.retry_after_s > 0.0
            assert isinstance(await anext(events), Delta)
        assert (await until_answered(services.client, greedy(3), while_=QueueFull)).token_ids == counted(3)


async def test_target_without_room_for_a_session_is_reported_as_such(tokenizer: str) -> None:
    """RESOURCE_EXHAUSTED with a time to wait, though the orchestrator itself has room."""
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(system(target_of(patient(), max_sessions=1), None, tokenizer))
        channel = await stack.enter_async_context(open_channel(services.orchestrator.address))
        async with in_mid_answer(services.client, greedy(LONG)):
            refusal = await refusal_of(channel, message())
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
            assert refusal.retry_after_s is not None


async def test_drafter_without_room_for_a_session_costs_no_answer(tokenizer: str) -> None:
    """The session goes on with prompt lookup."""
    drafter = model_drafter_of(counting(), max_sessions=1)
    async with (
        system(target_of(patient()), drafter, tokenizer) as services,
        in_mid_answer(services.client, greedy(LONG)),
    ):
        assert (await services.client.complete(greedy(20))).token_ids == counted(20)


# ---------------------------------------------------------------------------------------------------------------------
# Anything at all

any_request = st.builds(
    lambda prompt, **fields: generation_pb.GenerateRequest(**prompt, **fields),
    st.one_of(
        st.builds(lambda ids: {"token_ids": session_pb.TokenIds(ids=ids)}, st.lists(token_ids, min_size=1, max_size=5)),
        st.builds(lambda ids: {"token_ids": session_pb.TokenIds(ids=ids)}, id_lists),
        st.builds(lambda text: {"text": text}, st.text(max_size=8)),
        st.builds(
            lambda role, content: {
                "chat": generation_pb.ChatMessages(messages=[generation_pb.ChatMessage(role=role, content=content)])
            },
            st.sampled_from(["user", "system", ""]),
            st.text(max_size=8),
        ),
        st.just({}),
    ),
    sampling=any_sampling | legal_sampling,
    stopping=st.builds(
        generation_pb.StopConditions,
        max_tokens=st.integers(0, 12),
        stop=st.just([]) | st.lists(st.text(max_size=3), max_size=3),
        stop_token_ids=st.just([]) | id_lists,
        ignore_eos=st.booleans(),
    ),
    speculation=st.builds(
        generation_pb.SpeculationOptions,
        rule=st.integers(0, 4),
        draft_length=st.none() | st.integers(0, 6) | uint32s,
        schedule=st.integers(0, 4),
    ),
    seed=st.none() | st.integers(0, 2**64 - 1),
    logprobs=st.none() | st.integers(0, 21),
    n=st.none() | st.integers(0, 2) | st.just(17),
    tenant=st.text(max_size=4) | st.just("x" * 257),
)

TYPED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.FAILED_PRECONDITION,
}


@pytest.fixture(scope="module")
def ask(tokenizer: str) -> Iterator[Callable[[generation_pb.GenerateRequest], grpc.StatusCode]]:
    """Asks for one answer and gives its status, then sees to it that the next one is answered."""

    async def start_all(stack: AsyncExitStack) -> Peers:
        model = counting(max_context=MAX_CONTEXT)
        services = await stack.enter_async_context(system(target_of(model), model_drafter_of(counting()), tokenizer))
        return services, await stack.enter_async_context(open_channel(services.orchestrator.address))

    async def status_of(peers: Peers, asked: generation_pb.GenerateRequest) -> grpc.StatusCode:
        services, channel = peers
        call = GenerationServiceStub(channel).Generate(asked, timeout=LIMIT_S)
        try:
            events = [response.WhichOneof("event") async for response in call]
        except grpc.aio.AioRpcError as error:
            assert_is_sentence(error.details() or "")
        else:
            assert events[-1] == "finished"
        assert (await services.client.complete(greedy(3))).token_ids == counted(3)
        code: grpc.StatusCode = await call.code()
        return code

    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        peers = runner.run(start_all(stack))
        yield lambda asked: runner.run(status_of(peers, asked))
        runner.run(stack.aclose())


@given(asked=any_request)
@settings(max_examples=100, deadline=None, derandomize=True, phases=NO_SHRINKING)
def test_whatever_is_asked_is_answered_or_refused_by_name(
    ask: Callable[[generation_pb.GenerateRequest], grpc.StatusCode], asked: generation_pb.GenerateRequest
) -> None:
    """100 requests, the same each time: a whole answer or a typed refusal that blames the request, and the next request is answered."""
    assert ask(asked) in TYPED | {grpc.StatusCode.OK}


# ---------------------------------------------------------------------------------------------------------------------
# Cancelling and deadlines


async def test_cancelled_answer_frees_its_sessions_and_disturbs_no_other(tokenizer: str) -> None:
    """When a client goes away in mid-answer, both services let go of its session, and the other answer is whole."""
    async with mid_answer_system(tokenizer) as (services, no_sessions):
        other = asyncio.ensure_future(services.client.complete(greedy(60)))
        async with in_mid_answer(services.client, greedy(LONG)):
            pass
        assert (await other).token_ids == counted(60)
        await no_sessions()


async def test_answer_out_of_time_frees_its_sessions_and_disturbs_no_other(tokenizer: str) -> None:
    """A deadline in mid-answer is DEADLINE_EXCEEDED, and both services let go of the session."""
    async with mid_answer_system(tokenizer) as (services, no_sessions):
        other = asyncio.ensure_future(services.client.complete(greedy(60)))
        with pytest.raises(DeadlineExceeded):
            await services.client.complete(greedy(LONG), timeout_s=0.3)
        assert (await other).token_ids == counted(60)
        await no_sessions()


async def test_refused_or_finished_answers_leave_no_session_behind(tokenizer: str) -> None:
    """Whatever way an answer ends, its sessions end with it."""
    async with (
        mid_answer_system(tokenizer) as (services, no_sessions),
        open_channel(services.orchestrator.address) as channel,
    ):
        await services.client.complete(greedy(5))
        await services.client.complete(greedy(5, stop=("t4",)))
        await refusal_of(channel, stopping(max_tokens=0))
        await no_sessions()


@asynccontextmanager
async def mid_answer_system(tokenizer: str) -> AsyncIterator[tuple[System, Callable[[], Any]]]:
    """A patient system, and a wait until neither service holds a session."""
    target = target_of(patient(), heartbeat_s=0.02)
    drafter = model_drafter_of(counting(), heartbeat_s=0.02)
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(system(target, drafter, tokenizer))
        assert services.drafter is not None
        witnesses = (
            await stack.enter_async_context(target_peer(services.target.address)),
            await stack.enter_async_context(drafter_peer(services.drafter.address)),
        )

        async def no_sessions() -> None:
            for witness in witnesses:
                await witness.load(lambda load: load.sessions == 0)

        yield services, no_sessions


# ---------------------------------------------------------------------------------------------------------------------
# Peers that are missing, do not fit, come and go


async def test_target_that_is_not_there_fails_the_start(tokenizer: str) -> None:
    """StartupFailed, with a sentence that names the address."""
    with silent_port() as port, pytest.raises(StartupFailed) as failure:
        await start(orchestrator_of(f"127.0.0.1:{port}", None, tokenizer, connect_timeout_s=0.3))
    assert f"127.0.0.1:{port}" in failure.value.message
    assert_is_sentence(failure.value.message)


async def test_target_address_that_is_another_service_fails_the_start(tokenizer: str) -> None:
    """StartupFailed as well: a drafter is no target."""
    async with running(ngram_drafter()) as drafter:
        with pytest.raises(StartupFailed) as failure:
            await start(orchestrator_of(drafter.address, None, tokenizer, connect_timeout_s=0.3))
    assert drafter.address in failure.value.message


async def test_tokenizer_that_is_not_the_targets_fails_the_start(tokenizer: str) -> None:
    """StartupFailed, naming the tokenizer and what to do."""
    model = counting()
    async with running(target_of(model, replace(fake_info(model), tokenizer_sha256="f" * 64))) as target:
        with pytest.raises(StartupFailed) as failure:
            await start(orchestrator_of(target.address, None, tokenizer))
    assert "--tokenizer" in failure.value.message
    assert "ffffffffffff" in failure.value.message


async def test_drafter_with_another_tokenizer_is_refused_with_both_fingerprints(tokenizer: str) -> None:
    """Equal size, other ids (field case C46): the pairing fails the start, and both are named."""
    model = counting()
    info = fake_info(model, method="draft_model")
    async with (
        running(target_of(model, replace(info, tokenizer_sha256=Tokenizer.load(tokenizer).fingerprint))) as target,
        running(model_drafter_of(counting(), replace(info, tokenizer_sha256="d" * 64))) as drafter,
    ):
        with pytest.raises(ModelMismatch) as failure:
            await start(orchestrator_of(target.address, drafter.address, tokenizer))
    assert "dddddddddddd" in failure.value.message
    assert Tokenizer.load(tokenizer).fingerprint[:12] in failure.value.message
    assert_is_sentence(failure.value.message)


async def test_drafter_that_comes_back_with_another_tokenizer_is_not_used(tokenizer: str) -> None:
    """A restart with another model must not slip past the check: answers go on without that drafter."""
    model = counting()
    fitting = replace(fake_info(model, method="draft_model"), tokenizer_sha256=Tokenizer.load(tokenizer).fingerprint)
    target = target_of(model, fitting)
    async with system(target, model_drafter_of(counting(), fitting), tokenizer, fallback="none") as services:
        assert services.drafter is not None
        port = await killed(services.drafter)
        other = model_drafter_of(counting(), replace(fitting, tokenizer_sha256="d" * 64), port=port)
        async with running(other):
            for _ in range(20):  # for longer than it takes to connect again
                answer = await services.client.complete(greedy(20))
                assert (answer.token_ids, answer.speculation.num_draft_tokens) == (counted(20), 0)
                await asyncio.sleep(0.05)
            assert (await services.client.server_info()).drafter is None


async def test_target_that_comes_back_with_another_tokenizer_is_not_used(tokenizer: str) -> None:
    """The text would be ruined without a word: requests are refused instead."""
    model = counting()
    fitting = replace(fake_info(model), tokenizer_sha256=Tokenizer.load(tokenizer).fingerprint)
    async with system(target_of(model, fitting), None, tokenizer) as services:
        port = await killed(services.target)
        other = target_of(counting(), replace(fitting, tokenizer_sha256="d" * 64), port=port)
        async with running(other):
            for _ in range(20):  # for longer than it takes to connect again
                with pytest.raises(TargetUnavailable) as failure:  # not the caller's fault, nor its business
                    await services.client.complete(greedy(3))
                assert "127.0.0.1" not in failure.value.message
                await asyncio.sleep(0.05)


@pytest.mark.parametrize(("schedule", "fallback"), [(Schedule.SEQUENTIAL, "ngram"), (Schedule.PIPELINED, "suffix")])
async def test_absent_drafter_is_replaced_by_lookup(tokenizer: str, schedule: Schedule, fallback: str) -> None:
    """The start does not fail, no answer waits for the drafter, and the text is the target's own."""
    with silent_port() as port:
        async with running(target_of(counting())) as target:
            nobody = f"127.0.0.1:{port}"
            async with (
                running(
                    orchestrator_of(target.address, nobody, tokenizer, drafter_timeout_s=0.3, fallback=fallback)
                ) as orchestrator,
                GenerationClient(orchestrator.address) as client,
            ):
                answer = await client.complete(greedy(60, schedule=schedule))
                assert (await client.server_info()).drafter is None
    assert answer.token_ids == counted(60)
    assert answer.speculation.fallback_rounds > 0
    assert Origin.DRAFT in answer.origins


async def test_lost_target_ends_the_answer_with_a_typed_error_within_two_seconds(tokenizer: str) -> None:
    """TARGET_UNAVAILABLE in mid-answer and for requests behind it; started again on the same port, it is used again."""
    async with system(target_of(patient()), model_drafter_of(counting()), tokenizer) as services:
        async with in_mid_answer(services.client, greedy(LONG)) as events:
            port = await killed(services.target)  # which takes its own time within one process
            killed_s = time.monotonic()
            with pytest.raises(TargetUnavailable) as failure:
                async for _ in events:
                    pass
            assert time.monotonic() - killed_s < 2.0
        assert_is_sentence(failure.value.message)
        async with open_channel(services.orchestrator.address) as channel:
            refusal = await refusal_of(channel, message())
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "TARGET_UNAVAILABLE")
        async with running(target_of(counting(), port=port)):
            answer = await until_answered(services.client, greedy(20))
            assert answer.token_ids == counted(20)
            assert answer.speculation.num_accepted_tokens > 0


async def test_request_without_a_target_is_told_when_to_ask_again(tokenizer: str) -> None:
    """UNAVAILABLE carries a time to wait, as RESOURCE_EXHAUSTED does."""
    async with system(target_of(counting()), None, tokenizer) as services:
        await killed(services.target)
        async with open_channel(services.orchestrator.address) as channel:
            refusal = await refusal_of(channel, message(stopping=generation_pb.StopConditions(max_tokens=LONG)))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "TARGET_UNAVAILABLE")
    assert refusal.retry_after_s is not None


async def test_drafter_that_comes_back_is_used_again(tokenizer: str) -> None:
    """Killed in mid-answer and started again on the same port: the same text throughout, and drafts are accepted."""
    asked = request(PROMPT, max_tokens=40, rule=VerificationRule.COUPLED, seed=11)
    async with system(target_of(patient()), None, tokenizer) as services:
        expected = (await services.client.complete(asked)).token_ids
    async with system(target_of(patient()), model_drafter_of(counting()), tokenizer, fallback="none") as services:
        assert services.drafter is not None
        ids: list[int] = []
        async with aclosing(services.client.generate(asked)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    ids += event.token_ids
                    if services.drafter.task.done() is False:
                        port = await killed(services.drafter)
        assert tuple(ids) == expected
        alone = await services.client.complete(asked)
        assert (alone.token_ids, alone.speculation.num_draft_tokens) == (expected, 0)
        async with running(model_drafter_of(counting(), port=port)):
            together = await until_answered(
                services.client, asked, accept=lambda answer: answer.speculation.num_accepted_tokens > 0
            )
            assert together.token_ids == expected


async def test_running_answer_takes_up_a_drafter_that_comes_back(tokenizer: str) -> None:
    """The session opens again at the new drafter, from its committed tokens, without having to end first."""
    async with system(target_of(patient()), model_drafter_of(counting()), tokenizer, fallback="none") as services:
        assert services.drafter is not None
        async with in_mid_answer(services.client, greedy(LONG)) as events:
            port = await killed(services.drafter)
            async for event in events:
                if isinstance(event, Delta) and event.origins == (Origin.PLAIN,):
                    break
            async with running(model_drafter_of(counting(), port=port)), asyncio.timeout(LIMIT_S):
                async for event in events:
                    if isinstance(event, Delta) and Origin.DRAFT in event.origins:
                        return
    pytest.fail("the answer ended without another draft")


@pytest.mark.parametrize(("target_size", "drafter_size"), [(VOCAB, VOCAB + 4), (VOCAB + 4, VOCAB)])
@pytest.mark.parametrize("rule", [VerificationRule.COUPLED, VerificationRule.REJECTION])
async def test_padded_vocabularies_of_different_size_work_together(
    tokenizer: str, target_size: int, drafter_size: int, rule: VerificationRule
) -> None:
    """Rows behind the tokenizer's last id may be more or fewer: drafts are accepted, under coupled the text is the same."""
    asked = request(PROMPT, max_tokens=40, rule=rule)
    async with system(target_of(counting(vocab_size=target_size)), None, tokenizer) as services:
        plain = await services.client.complete(asked)
    # Untrained rows may score anything: the drafter must look at none that the target does not have.
    drafter = model_drafter_of(counting(vocab_size=drafter_size, padding_logit=20.0))
    async with system(target_of(counting(vocab_size=target_size)), drafter, tokenizer) as services:
        answer = await services.client.complete(asked)
    assert answer.speculation.num_accepted_tokens > 0
    if rule is VerificationRule.COUPLED:
        assert answer.token_ids == plain.token_ids


# ---------------------------------------------------------------------------------------------------------------------
# Life


async def test_server_info_names_both_models(tokenizer: str) -> None:
    """Target, drafter and the deployment's defaults; without its target the orchestrator says that it is gone."""
    async with system(target_of(counting()), ngram_drafter(), tokenizer, rule="rejection", draft_length=3) as services:
        info = await services.client.server_info()
        assert info.target.model_id == "fake"
        assert info.drafter is not None
        assert info.drafter.method == "ngram"
        assert (info.speculation.rule, info.speculation.draft_length) == (VerificationRule.REJECTION, 3)
        await killed(services.target)
        with pytest.raises(TargetUnavailable):
            await info_for_ever(services.client)


async def info_for_ever(client: GenerationClient) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            await client.server_info()


async def test_health_says_serving_then_not_serving(tokenizer: str) -> None:
    """Healthy until asked to stop; a running answer is given its time."""
    async with system(target_of(patient()), None, tokenizer, drain_s=60) as services:
        for name in ("", SERVICE_NAME):
            assert await health_of(services.orchestrator.address, name) == "SERVING"
        async with in_mid_answer(services.client, greedy(LONG)) as events:
            services.orchestrator.lifetime.stop()
            async with asyncio.timeout(LIMIT_S):
                while await health_of(services.orchestrator.address, SERVICE_NAME) != "NOT_SERVING":
                    pass
            assert isinstance(await anext(events), Delta)
        async with asyncio.timeout(LIMIT_S):
            await services.orchestrator.task


async def test_orchestrator_stops_soon_though_answers_run(tokenizer: str) -> None:
    """Without time to drain, running answers end with a typed error, and the process does not wait for them."""
    async with system(target_of(patient()), model_drafter_of(counting()), tokenizer) as services:
        async with in_mid_answer(services.client, greedy(LONG)) as events:
            async with asyncio.timeout(LIMIT_S / 2):
                await services.orchestrator.stop()
            with pytest.raises(PacelineError) as failure:
                async for _ in events:
                    pass
        assert_is_sentence(failure.value.message)
