"""The client against a servicer over real gRPC: what it sends, what it makes of the answer, how it fails."""

from __future__ import annotations

import asyncio
import itertools
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace

import grpc
import pytest

from paceline import client as client_module
from paceline.client import (
    ChatMessage,
    Delta,
    Finished,
    FinishReason,
    GenerationClient,
    GenerationRequest,
    IncompleteAnswer,
    OrchestratorStatus,
    Origin,
    PoolStatus,
    ReplicaStatus,
    SamplingParams,
    Schedule,
    ServerUnavailable,
    SpeculationOptions,
    Started,
    StopConditions,
    TokenLogprobs,
    Usage,
    VerificationRule,
)
from paceline.client.failures import ClientClosed
from paceline.errors import (
    ContextTooLong,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    ModelMismatch,
    PacelineError,
    PayloadInvalid,
    QueueFull,
    TargetUnavailable,
)
from paceline.generation_wire import deployment_status_to_proto, request_to_proto
from paceline.v1 import generation_service_pb2 as pb
from paceline.v1 import session_pb2 as session_pb
from paceline.v1.generation_service_pb2_grpc import GenerationServiceServicer
from tests.fake_generation import (
    POOL_STATUS,
    SEED,
    TEXT,
    Answer,
    BareStatus,
    FakeGenerationService,
    canned_answer,
    serving,
)

REQUEST = GenerationRequest(text="Why?")


@pytest.fixture
def service() -> FakeGenerationService:
    return FakeGenerationService()


@pytest.fixture
async def client(service: FakeGenerationService) -> AsyncIterator[GenerationClient]:
    with serving(service) as endpoint:
        async with GenerationClient(endpoint, first_pause_s=0.001) as client:
            yield client


@pytest.fixture
async def plain_client(service: FakeGenerationService) -> AsyncIterator[GenerationClient]:
    """One that resumes nothing."""
    with serving(service) as endpoint:
        async with GenerationClient(endpoint, max_resumptions=0) as client:
            yield client


# ---------------------------------------------------------------------------------------------------------------------
# What arrives


async def test_events_come_in_order_and_typed(client: GenerationClient) -> None:
    """One `Started`, the deltas with one origin and one piece a token, one `Finished`."""
    events = [event async for event in client.generate(REQUEST)]
    assert [type(event) for event in events] == [Started, Delta, Delta, Delta, Finished]
    assert events[0] == Started(request_id="r1", seeds=(SEED,), prompt_tokens=3)
    assert events[2] == Delta(
        text=" sky is blue",
        token_ids=(101, 102, 103),
        origins=(Origin.DRAFT, Origin.DRAFT, Origin.BONUS),
        pieces=(" sky", " is", " blue"),
    )


async def test_completion_joins_all_events(client: GenerationClient) -> None:
    """Text held back until the end belongs to the answer; ids and origins keep their order; the speed is tokens over time."""
    completion = await client.complete(REQUEST)
    assert completion.text == TEXT
    assert completion.token_ids == (100, 101, 102, 103, 104, 105)
    assert completion.origins == (
        Origin.PLAIN, Origin.DRAFT, Origin.DRAFT, Origin.BONUS, Origin.DRAFT, Origin.CORRECTION,
    )  # fmt: skip
    assert (completion.finish_reason, completion.seed) == (FinishReason.STOP, SEED)
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens, completion.usage.total_tokens) == (
        3,
        6,
        9,
    )
    assert completion.tokens_per_second == pytest.approx(6 / 0.5)
    assert completion.speculation.num_accepted_tokens_per_pos == (2, 1)
    assert completion.speculation.rule is VerificationRule.COUPLED
    assert completion.speculation.schedule is Schedule.PIPELINED
    assert completion.speculation.target_busy_share == pytest.approx(0.8)


async def test_choices_come_mixed_and_are_told_apart(client: GenerationClient) -> None:
    """One `Started` with the seed of each, then the events of both; the completions are in the order of their numbers."""
    request = replace(REQUEST, n=2, seed=7)
    events = [event async for event in client.generate(request)]
    assert events[0] == Started(request_id="r1", seeds=(7, 8), prompt_tokens=3)
    assert [event.choice for event in events if not isinstance(event, Started)] == [0, 1] * 4
    first, second = await client.complete_choices(request)
    assert (first.choice, first.seed, first.text) == (0, 7, TEXT)
    assert second == replace(first, choice=1, seed=8)


async def test_log_probabilities_come_with_their_tokens(client: GenerationClient) -> None:
    """One for each, with the most probable tokens; without being asked for there are none."""
    completion = await client.complete(replace(REQUEST, logprobs=2))
    expected = [TokenLogprobs(token_id, -0.25, ((0, -0.5), (1, -1.0)), (" t0", " t1")) for token_id in range(100, 106)]
    assert completion.logprobs == tuple(expected)
    assert (await client.complete(REQUEST)).logprobs == ()


async def test_one_completion_is_not_made_of_several(client: GenerationClient) -> None:
    """`complete` refuses by name what only `complete_choices` can give, which gives one as well."""
    with pytest.raises(InvalidRequest) as refusal:
        await client.complete(replace(REQUEST, n=2))
    assert refusal.value.parameter == "n"
    assert await client.complete_choices(REQUEST) == (await client.complete(REQUEST),)


@pytest.mark.parametrize(
    "asked", [replace(REQUEST, n=2), replace(REQUEST, logprobs=0)], ids=["several answers", "log-probabilities"]
)
async def test_server_too_old_for_the_request_is_named_as_such(
    client: GenerationClient, service: FakeGenerationService, asked: GenerationRequest
) -> None:
    """A server that ignores what it does not know must not pass for one that has done it."""

    def old(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        request.ClearField("n")
        request.ClearField("logprobs")
        for event in canned_answer(request):
            event.started.ClearField("seeds") if event.HasField("started") else None
            yield event

    service.answer = old
    assert (await client.complete(REQUEST)).seed == SEED
    with pytest.raises(PayloadInvalid, match="older than this client"):
        await client.complete_choices(asked)


async def test_server_info_names_models_and_defaults(client: GenerationClient) -> None:
    """Target, drafter and the deployment's defaults come back as values."""
    info = await client.server_info()
    assert (info.target.model_id, info.target.dtype, info.target.eos_token_ids) == ("fake-target", "float32", (2,))
    assert info.drafter is not None
    assert info.drafter.method == "ngram"
    assert info.speculation == SpeculationOptions(
        rule=VerificationRule.COUPLED, draft_length=4, schedule=Schedule.PIPELINED
    )


async def test_pool_status_tells_unknown_from_zero(client: GenerationClient) -> None:
    """Every figure of every replica comes back; what nobody knows is None, which is not 0."""
    status = await client.pool_status()
    target, drafter = status.pools
    assert (target.name, target.desired_replicas, drafter) == (
        "target", 2, PoolStatus(name="drafter", replicas=(), desired_replicas=None),
    )  # fmt: skip
    assert target.replicas == (
        ReplicaStatus(
            replica_id="target#1",
            address="10.0.0.1:7001",
            node_id="node-a",
            model_id="fake-target",
            sessions=3,
            max_sessions=32,
            queued=1,
            kv_used_tokens=1200,
            kv_capacity_tokens=40_000,
            acceptance_rate=0.75,
            is_connected=True,
        ),
        ReplicaStatus(replica_id="target#2", address="10.0.0.2:7001", is_draining=True),
    )
    assert status.orchestrator == OrchestratorStatus(running_answers=3, max_answers=256, stall_fraction=0.0)
    assert deployment_status_to_proto(status) == POOL_STATUS


def test_blocking_form_gives_the_same_answer(service: FakeGenerationService) -> None:
    """A script without an event loop gets the whole answer from one call."""
    with serving(service) as endpoint:
        assert client_module.complete(endpoint, REQUEST).text == TEXT


async def test_events_of_a_newer_protocol_are_skipped(client: GenerationClient, service: FakeGenerationService) -> None:
    """An event that this client does not know disturbs nothing."""

    def answer(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        for event in canned_answer(request):
            yield event
            yield pb.GenerateResponse()

    service.answer = answer
    assert (await client.complete(REQUEST)).text == TEXT


async def test_values_of_a_newer_protocol_are_refused(client: GenerationClient, service: FakeGenerationService) -> None:
    """An origin that this client cannot name is an error, not a wrong colour."""

    def answer(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(delta=pb.Delta(token_ids=[1], pieces=["a"], origins=[pb.TOKEN_ORIGIN_UNSPECIFIED]))

    service.answer = answer
    with pytest.raises(PayloadInvalid, match="newer protocol"):
        await client.complete(REQUEST)


# ---------------------------------------------------------------------------------------------------------------------
# What is sent


async def test_every_field_reaches_the_server(client: GenerationClient, service: FakeGenerationService) -> None:
    """Nothing of a request is lost or renamed on the way."""
    request = GenerationRequest(
        messages=(ChatMessage("system", "Be brief."), ChatMessage("user", "Hi")),
        sampling=SamplingParams(
            temperature=0.5,
            top_k=7,
            top_p=0.9,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            logit_bias=((5, -2.0),),
            banned_token_ids=(8, 9),
            allowed_token_ids=(1, 2, 3),
            min_tokens=2,
            stop_token_ids=(3,),
        ),
        stopping=StopConditions(max_tokens=11, stop=("END", "\n"), stop_token_ids=(4,), ignore_eos=True),
        speculation=SpeculationOptions(rule=VerificationRule.REJECTION, draft_length=0, schedule=Schedule.SEQUENTIAL),
        seed=0,
        output_ids=(100, 101),
        logprobs=0,
        tenant="acme",
    )
    await client.complete(request)
    assert service.requests == [
        pb.GenerateRequest(
            chat=pb.ChatMessages(
                messages=[
                    pb.ChatMessage(role="system", content="Be brief."),
                    pb.ChatMessage(role="user", content="Hi"),
                ]
            ),
            sampling=session_pb.SamplingParams(
                temperature=0.5,
                top_k=7,
                top_p=0.9,
                min_p=0.05,
                repetition_penalty=1.1,
                presence_penalty=0.2,
                frequency_penalty=0.3,
                logit_bias=[session_pb.LogitBias(token_id=5, bias=-2.0)],
                banned_token_ids=[8, 9],
                allowed_token_ids=session_pb.TokenIds(ids=[1, 2, 3]),
                min_tokens=2,
                stop_token_ids=[3],
            ),
            stopping=pb.StopConditions(max_tokens=11, stop=["END", "\n"], stop_token_ids=[4], ignore_eos=True),
            speculation=pb.SpeculationOptions(
                rule=session_pb.VERIFICATION_RULE_REJECTION, draft_length=0, schedule=pb.SCHEDULE_SEQUENTIAL
            ),
            seed=0,
            output_ids=[100, 101],
            logprobs=0,
            tenant="acme",
        )
    ]


async def test_every_call_says_what_an_ingress_must_know(
    client: GenerationClient, service: FakeGenerationService
) -> None:
    """The application that it routes by, and the deadline, which it would not pass on."""
    before_s = time.time()
    await client.complete(REQUEST, timeout_s=50.0)
    await client.server_info()
    await client.pool_status()
    assert [metadata["application"] for metadata in service.metadata] == ["paceline"] * 3
    assert before_s + 49.9 <= int(service.metadata[0]["deadline-unix-ms"]) / 1000 <= time.time() + 50.0


async def test_what_is_left_out_is_absent(client: GenerationClient, service: FakeGenerationService) -> None:
    """Seed, max_tokens, draft length, rule, schedule and allowed tokens stay the server's to choose."""
    await client.complete(GenerationRequest(token_ids=(1, 2)))
    (sent,) = service.requests
    assert list(sent.token_ids.ids) == [1, 2]
    assert not sent.HasField("seed")
    assert not sent.stopping.HasField("max_tokens")
    assert not sent.speculation.HasField("draft_length")
    assert not sent.sampling.HasField("allowed_token_ids")
    assert not sent.output_ids
    assert not sent.HasField("logprobs")
    assert not sent.HasField("n")
    assert not sent.tenant
    assert sent.speculation.rule == session_pb.VERIFICATION_RULE_UNSPECIFIED
    assert sent.speculation.schedule == pb.SCHEDULE_UNSPECIFIED


@pytest.mark.parametrize(
    ("kind", "prompt"), [("text", {"text": ""}), ("token_ids", {"token_ids": ()}), ("chat", {"messages": ()})]
)
def test_empty_prompt_is_still_a_prompt(kind: str, prompt: dict[str, object]) -> None:
    """An empty text, list or conversation is sent as such; whether it makes sense is for the server to say."""
    message = request_to_proto(GenerationRequest(**prompt))  # type: ignore[arg-type]
    assert message.WhichOneof("prompt") == kind


@pytest.mark.parametrize(
    ("parameter", "fields"),
    [
        ("prompt", {}),
        ("prompt", {"text": "a", "token_ids": (1,)}),
        ("prompt", {"text": "\ud800"}),
        ("messages", {"messages": (ChatMessage("user", "\udfff"),)}),
        ("messages", {"messages": (ChatMessage("robot", "Hi"),)}),
        ("token_ids", {"token_ids": (1, -1)}),
        ("token_ids", {"token_ids": (2**32,)}),
        ("seed", {"text": "a", "seed": -1}),
        ("seed", {"text": "a", "seed": 2**64}),
        ("max_tokens", {"text": "a", "stopping": StopConditions(max_tokens=-1)}),
        ("stop", {"text": "a", "stopping": StopConditions(stop=("",))}),
        ("stop", {"text": "a", "stopping": StopConditions(stop=tuple("abcdefghijklmnopq"))}),
        ("stop", {"text": "a", "stopping": StopConditions(stop=("\ud800",))}),
        ("stop_token_ids", {"text": "a", "stopping": StopConditions(stop_token_ids=(-1,))}),
        ("draft_length", {"text": "a", "speculation": SpeculationOptions(draft_length=65)}),
        ("top_k", {"text": "a", "sampling": SamplingParams(top_k=2**32)}),
        ("min_tokens", {"text": "a", "sampling": SamplingParams(min_tokens=2**32)}),
        ("banned_token_ids", {"text": "a", "sampling": SamplingParams(banned_token_ids=(-1,))}),
        ("allowed_token_ids", {"text": "a", "sampling": SamplingParams(allowed_token_ids=(2**32,))}),
        ("logit_bias", {"text": "a", "sampling": SamplingParams(logit_bias=((2**32, 1.0),))}),
        ("output_ids", {"text": "a", "seed": 1, "output_ids": (1, 2**32)}),
        ("seed", {"text": "a", "output_ids": (1,)}),
        ("logprobs", {"text": "a", "logprobs": -1}),
        ("logprobs", {"text": "a", "logprobs": 21}),
        ("n", {"text": "a", "n": 0}),
        ("n", {"text": "a", "n": 17}),
        ("n", {"text": "a", "n": 2, "seed": 1, "output_ids": (1,)}),
        ("tenant", {"text": "a", "tenant": "x" * 257}),
        ("tenant", {"text": "a", "tenant": "\ud800"}),
    ],
)
def test_what_the_protocol_cannot_carry_is_refused_by_name(parameter: str, fields: dict[str, object]) -> None:
    """A request out of range names its parameter before anything is sent."""
    with pytest.raises(InvalidRequest) as refusal:
        GenerationRequest(**fields)  # type: ignore[arg-type]
    assert refusal.value.parameter == parameter


# ---------------------------------------------------------------------------------------------------------------------
# Resumption

EVENTS_BEFORE_THE_END = 4  # of the canned answer: `Started` and three rounds
DRAINING = Draining("The orchestrator stops.")
DRAINING.retry_after_s = 0.001
FULL = QueueFull("The orchestrator is full.", retry_after_s=0.001)


def broken_after(count: int, ending: Exception | None) -> Answer:
    """An answer that ends after so many events, by an error or (None) without a word."""

    def answer(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        yield from itertools.islice(canned_answer(request), count)
        if ending is not None:
            raise ending

    return answer


def in_turn(*answers: Answer) -> Answer:
    """One answer for each call; the calls after them get the canned one."""
    left = list(reversed(answers))

    def answer(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        yield from (left.pop() if left else canned_answer)(request)

    return answer


@pytest.mark.parametrize(
    "ending",
    [
        BareStatus(grpc.StatusCode.UNAVAILABLE),
        BareStatus(grpc.StatusCode.INTERNAL),
        BareStatus(grpc.StatusCode.UNKNOWN),
        BareStatus(grpc.StatusCode.CANCELLED),
        None,
    ],
    ids=lambda ending: type(ending).__name__ + str(ending or ""),
)
@pytest.mark.parametrize("count", range(1, EVENTS_BEFORE_THE_END + 1))
async def test_answer_goes_on_wherever_its_stream_breaks(
    client: GenerationClient, service: FakeGenerationService, count: int, ending: Exception | None
) -> None:
    """After every event and for every way to end, the caller sees one whole answer: no token lost, none twice."""
    undisturbed = [event async for event in client.generate(REQUEST)]
    service.answer = in_turn(broken_after(count, ending))
    events = [event async for event in client.generate(REQUEST)]
    assert events[:-1] == undisturbed[:-1]
    assert isinstance(events[-1], Finished)
    had_before = sum(len(event.token_ids) for event in events[:count] if isinstance(event, Delta))
    assert events[-1].usage == Usage(prompt_tokens=3, completion_tokens=6)
    assert (events[-1].text, events[-1].resumptions, events[-1].resumed_tokens) == (".", 1, had_before)


@pytest.mark.parametrize("ending", [DRAINING, FULL], ids=lambda ending: type(ending).__name__)
async def test_answer_goes_on_when_its_orchestrator_cannot(
    client: GenerationClient, service: FakeGenerationService, ending: PacelineError
) -> None:
    """An orchestrator that gives up in mid-answer leaves it to another."""
    service.answer = in_turn(broken_after(2, ending))
    completion = await client.complete(REQUEST)
    assert (completion.text, completion.resumptions) == (TEXT, 1)


async def test_resumed_call_brings_seed_and_tokens_along(
    client: GenerationClient, service: FakeGenerationService
) -> None:
    """The second request is the first one, with the seed that was reported and the ids that came; all else as it was."""
    service.answer = in_turn(broken_after(3, None))
    request = replace(REQUEST, stopping=StopConditions(max_tokens=9, stop=("x",)))
    completion = await client.complete(request)
    assert (completion.text, completion.resumptions) == (TEXT, 1)
    assert service.requests == [
        request_to_proto(request),
        request_to_proto(replace(request, seed=SEED, output_ids=(100, 101, 102, 103))),
    ]


async def test_tokens_of_the_callers_own_are_kept_in_front(
    client: GenerationClient, service: FakeGenerationService
) -> None:
    """A caller that resumes an answer itself is resumed behind its own tokens; the speed counts the last call alone."""
    service.answer = in_turn(broken_after(2, None))
    completion = await client.complete(replace(REQUEST, seed=5, output_ids=(100, 101)))
    assert [list(sent.output_ids) for sent in service.requests] == [[100, 101], [100, 101, 102, 103]]
    assert (completion.token_ids, completion.seed) == ((102, 103, 104, 105), 5)
    assert completion.tokens_per_second == pytest.approx(2 / 0.5)


async def test_resumptions_are_counted_from_the_last_new_token(
    service: FakeGenerationService,
) -> None:
    """Three rounds that each end in a break are all resumed though only one break in a row is allowed."""
    service.answer = lambda request: broken_after(2 if len(request.output_ids) < 6 else 9, DRAINING)(request)
    with serving(service) as endpoint:
        async with GenerationClient(endpoint, max_resumptions=1, first_pause_s=0.001) as client:
            completion = await client.complete(REQUEST)
    assert (completion.text, completion.resumptions) == (TEXT, 3)


@pytest.mark.parametrize("most", [0, 1, 3])
async def test_fruitless_resumptions_are_bounded(service: FakeGenerationService, most: int) -> None:
    """An answer that gets nowhere ends with the last error, after so many further calls as are allowed."""
    service.answer = lambda request: broken_after(1 if request.output_ids else 2, DRAINING)(request)
    with serving(service) as endpoint:
        async with GenerationClient(endpoint, max_resumptions=most, first_pause_s=0.001) as client:
            with pytest.raises(Draining):
                await client.complete(REQUEST)
    assert len(service.requests) == 1 + most


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("No.", parameter="seed"),
        ContextTooLong("No."),
        ModelMismatch("No."),
        DeadlineExceeded("No."),
        TargetUnavailable("No."),
        PacelineError("No."),
        BareStatus(grpc.StatusCode.RESOURCE_EXHAUSTED),
        BareStatus(grpc.StatusCode.DEADLINE_EXCEEDED),
        BareStatus(grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=lambda error: type(error).__name__ + str(error),
)
async def test_error_that_another_call_cannot_mend_is_raised_at_once(
    client: GenerationClient, service: FakeGenerationService, error: Exception
) -> None:
    """In mid-answer too: one call, one error."""
    service.answer = broken_after(2, error)
    with pytest.raises(PacelineError):
        await client.complete(REQUEST)
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    ("count", "error"),
    [
        *itertools.product([0, 1], [DRAINING, FULL]),
        (0, BareStatus(grpc.StatusCode.INTERNAL)),
        (0, None),
    ],
    ids=str,
)
async def test_answer_without_a_token_is_not_asked_for_again(
    client: GenerationClient, service: FakeGenerationService, count: int, error: Exception | None
) -> None:
    """Whether a request that was not served should wait or go elsewhere is for the caller to say."""
    service.answer = broken_after(count, error)
    with pytest.raises(PacelineError):
        await client.complete(REQUEST)
    assert len(service.requests) == 1


async def test_full_server_is_waited_for_in_mid_answer(
    client: GenerationClient, service: FakeGenerationService
) -> None:
    """A place that is full where the answer was to go on, an ingress or an orchestrator, is asked again as it says."""
    service.answer = in_turn(
        broken_after(2, None),
        broken_after(0, QueueFull("Full.", retry_after_s=0.2)),
        broken_after(0, BareStatus(grpc.StatusCode.RESOURCE_EXHAUSTED)),
    )
    started_s = time.monotonic()
    completion = await client.complete(REQUEST)
    assert time.monotonic() - started_s >= 0.2
    assert (completion.text, completion.resumptions, len(service.requests)) == (TEXT, 1, 4)


async def test_server_that_just_restarts_is_found_before_the_answer_begins(
    client: GenerationClient, service: FakeGenerationService
) -> None:
    """Two calls that reach nobody are made up for by a third."""
    service.answer = in_turn(*[broken_after(0, BareStatus(grpc.StatusCode.UNAVAILABLE))] * 2)
    completion = await client.complete(REQUEST)
    assert (completion.text, completion.resumptions, len(service.requests)) == (TEXT, 0, 3)


async def test_break_behind_the_end_is_no_break(client: GenerationClient, service: FakeGenerationService) -> None:
    """Once `finished` has come the answer is whole, whatever the status says; it does not come twice."""
    service.answer = broken_after(9, BareStatus(grpc.StatusCode.UNAVAILABLE))
    assert (await client.complete(REQUEST)).text == TEXT
    assert len(service.requests) == 1


async def test_another_model_does_not_go_on_with_the_answer(
    client: GenerationClient, service: FakeGenerationService
) -> None:
    """Where the prompt has another length than it had, the text would be a mixture of two models'."""

    def answer(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(started=pb.Started(seed=1, prompt_tokens=3 + len(request.output_ids)))
        yield pb.GenerateResponse(delta=pb.Delta(token_ids=[7], pieces=["a"], origins=[pb.TOKEN_ORIGIN_PLAIN]))

    service.answer = answer
    with pytest.raises(ModelMismatch, match="another model"):
        await client.complete(REQUEST)


async def test_time_of_the_caller_bounds_all_calls_together(
    client: GenerationClient, service: FakeGenerationService
) -> None:
    """A pause that would outlast the caller's time is not begun, and each call is told the same end."""
    service.answer = in_turn(broken_after(2, None), broken_after(0, QueueFull("Full.", retry_after_s=30.0)))
    with pytest.raises(QueueFull):
        await client.complete(REQUEST, timeout_s=20.0)
    first, second = (int(metadata["deadline-unix-ms"]) for metadata in service.metadata)
    assert first == second
    assert abs(first / 1000 - time.time() - 20.0) < 15.0


CHOICES = replace(REQUEST, n=2, seed=7, logprobs=1)
EVENTS_OF_CHOICES = 9  # `Started`, and of each choice three rounds and `Finished`


@pytest.mark.parametrize("count", range(1, EVENTS_OF_CHOICES))
async def test_each_choice_goes_on_by_itself_where_their_stream_breaks(
    client: GenerationClient, service: FakeGenerationService, count: int
) -> None:
    """Those that are not whole are asked for one by one, with their own seeds and tokens; the caller sees no seam."""
    whole = await client.complete_choices(CHOICES)
    service.requests.clear()
    service.answer = in_turn(broken_after(count, BareStatus(grpc.StatusCode.UNAVAILABLE)))
    choices = await client.complete_choices(CHOICES)
    for answer, expected in zip(choices, whole, strict=True):
        assert (answer.text, answer.token_ids, answer.pieces) == (expected.text, expected.token_ids, expected.pieces)
        assert (answer.choice, answer.seed, answer.logprobs) == (expected.choice, expected.seed, expected.logprobs)
    resumed = {request.seed: request for request in service.requests[1:]}
    assert sorted(resumed) == ([7, 8] if count < EVENTS_OF_CHOICES - 1 else [8])
    assert not any(request.HasField("n") for request in resumed.values())
    assert sum(len(request.output_ids) for request in resumed.values()) == sum(
        answer.resumed_tokens for answer in choices
    )
    assert [answer.resumptions for answer in choices] == [int(seed in resumed) for seed in (7, 8)]


async def test_choices_that_have_not_begun_are_asked_for_together(
    client: GenerationClient, service: FakeGenerationService
) -> None:
    """A server that restarts is asked for all of them again."""
    service.answer = in_turn(broken_after(0, BareStatus(grpc.StatusCode.UNAVAILABLE)))
    assert [answer.text for answer in await client.complete_choices(CHOICES)] == [TEXT, TEXT]
    assert [request.n for request in service.requests] == [2, 2]


async def test_one_choice_that_cannot_go_on_ends_all(client: GenerationClient, service: FakeGenerationService) -> None:
    """The error of one reaches the caller, and the call for the other is ended."""
    is_waiting, release = threading.Event(), threading.Event()

    def resumed(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        if request.seed == 8:
            assert is_waiting.wait(30)
            raise TargetUnavailable("The target is gone.")
        yield from itertools.islice(canned_answer(request), 1)
        is_waiting.set()
        assert release.wait(30)

    service.answer = in_turn(broken_after(3, BareStatus(grpc.StatusCode.UNAVAILABLE)), resumed, resumed)
    with pytest.raises(TargetUnavailable):
        await client.complete_choices(CHOICES)
    release.set()


# ---------------------------------------------------------------------------------------------------------------------
# How it fails


@pytest.mark.parametrize(
    "error",
    [
        ContextTooLong("The prompt has 9000 tokens, the model takes 8192."),
        ModelMismatch("The tokenizers differ.", details={"target": "a", "drafter": "b"}),
        TargetUnavailable("The target is gone."),
        PacelineError("Something else.", reason="NEW_REASON"),
    ],
)
async def test_reported_errors_keep_type_reason_and_sentence(
    client: GenerationClient, service: FakeGenerationService, error: PacelineError
) -> None:
    """What the server described arrives as the same error; an unknown reason as the root with that reason."""

    def answer(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        raise error
        yield

    service.answer = answer
    with pytest.raises(PacelineError) as failure:
        await client.complete(REQUEST)
    assert type(failure.value) is type(error)
    assert (failure.value.reason, failure.value.message) == (error.reason, error.message)
    assert failure.value.details == error.details


async def test_invalid_request_keeps_its_parameter(client: GenerationClient, service: FakeGenerationService) -> None:
    """The parameter that a server refuses is named on this side too."""

    def answer(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        raise InvalidRequest("max_tokens is too large.", parameter="max_tokens")
        yield

    service.answer = answer
    with pytest.raises(InvalidRequest) as refusal:
        await client.complete(REQUEST)
    assert refusal.value.parameter == "max_tokens"


async def test_full_queue_says_when_to_try_again(client: GenerationClient, service: FakeGenerationService) -> None:
    """The retry hint survives the wire."""

    def answer(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        raise QueueFull("Too many sessions.", retry_after_s=2.5)
        yield

    service.answer = answer
    with pytest.raises(QueueFull) as refusal:
        await client.complete(REQUEST)
    assert refusal.value.retry_after_s == pytest.approx(2.5)


async def test_error_in_mid_answer_comes_after_the_tokens(
    plain_client: GenerationClient, service: FakeGenerationService
) -> None:
    """What was streamed before a failure has been delivered."""

    def answer(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        events = canned_answer(request)
        yield next(events)
        yield next(events)
        raise TargetUnavailable("The target is gone.")

    service.answer = answer
    events = plain_client.generate(REQUEST)
    assert isinstance(await anext(events), Started)
    assert isinstance(await anext(events), Delta)
    with pytest.raises(TargetUnavailable):
        await anext(events)


async def test_stream_without_an_end_is_an_error(
    plain_client: GenerationClient, service: FakeGenerationService
) -> None:
    """A stream that ends with status OK but without `finished` is no whole answer."""

    def answer(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        yield from list(canned_answer(request))[:-1]

    service.answer = answer
    events = plain_client.generate(REQUEST)
    for _ in range(4):
        await anext(events)
    with pytest.raises(IncompleteAnswer):
        await anext(events)


async def test_answer_without_a_beginning_is_an_error(client: GenerationClient, service: FakeGenerationService) -> None:
    """Without `started` there is no seed to report."""

    def answer(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        yield from list(canned_answer(request))[1:]

    service.answer = answer
    with pytest.raises(IncompleteAnswer):
        await client.complete(REQUEST)


async def test_nobody_listening_is_said_with_a_remedy() -> None:
    """A refused connection names the address and the command that helps."""
    with serving(FakeGenerationService()) as endpoint:
        pass
    async with GenerationClient(endpoint) as client:
        remedy = f"Nothing answers at {endpoint}; start it with `paceline up` or `paceline serve`, or ask"
        with pytest.raises(ServerUnavailable, match=re.escape(remedy)):
            await client.complete(REQUEST)
        with pytest.raises(ServerUnavailable):
            await client.server_info()


async def test_another_service_at_the_endpoint_is_named_as_such() -> None:
    """A gRPC server that does not generate is not mistaken for a silent one."""
    with serving(GenerationServiceServicer()) as endpoint:
        async with GenerationClient(endpoint) as client:
            with pytest.raises(ServerUnavailable, match="not a Paceline orchestrator"):
                await client.complete(REQUEST)


async def test_closing_the_client_ends_its_streams_with_an_error(
    client: GenerationClient, service: FakeGenerationService
) -> None:
    """A stream whose channel is closed under it raises our error; the task that reads it is not cancelled."""
    released = threading.Event()

    def answer(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        yield next(canned_answer(request))
        released.wait(30)

    service.answer = answer
    events = client.generate(REQUEST)
    await anext(events)
    following = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    await client.__aexit__(None, None, None)
    with pytest.raises(IncompleteAnswer):
        await following
    released.set()


async def test_closing_the_client_ends_its_questions_with_an_error() -> None:
    """As it does its streams: whoever asked is told, and has not been cancelled."""
    released, is_asked = threading.Event(), threading.Event()

    class Silent(FakeGenerationService):
        def ListModels(  # noqa: N802
            self, request: pb.ListModelsRequest, context: grpc.ServicerContext
        ) -> pb.ListModelsResponse:
            is_asked.set()
            released.wait(30)
            return super().ListModels(request, context)

    with serving(Silent()) as endpoint:
        client = await GenerationClient(endpoint).__aenter__()
        asking = asyncio.ensure_future(client.list_models())
        await asyncio.to_thread(is_asked.wait, 30)
        await client.__aexit__(None, None, None)
        with pytest.raises(ClientClosed):
            await asking
        released.set()


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (grpc.StatusCode.CANCELLED, IncompleteAnswer, "cancelled"),
        (grpc.StatusCode.UNAVAILABLE, ServerUnavailable, "went away in mid-answer"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, PacelineError, "bare words"),
    ],
)
async def test_bare_statuses_become_our_errors(
    plain_client: GenerationClient,
    service: FakeGenerationService,
    code: grpc.StatusCode,
    kind: type[PacelineError],
    words: str,
) -> None:
    """A status without our details is told by its code; CANCELLED from the server does not cancel the caller's task."""
    service.answer = broken_after(1, BareStatus(code))
    with pytest.raises(kind, match=words):
        await plain_client.complete(REQUEST)


async def test_deadline_travels_and_ends_the_wait(client: GenerationClient, service: FakeGenerationService) -> None:
    """The server is told how long the caller waits, and after that the caller waits no longer."""
    released = threading.Event()

    def answer(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        released.wait(30)
        yield from canned_answer(request)

    service.answer = answer
    with pytest.raises(DeadlineExceeded, match=r"within 1 s"):
        await client.complete(REQUEST, timeout_s=1.0)
    released.set()
    assert 0 < service.deadlines_s[0] < 60


@pytest.mark.parametrize("question", ["server_info", "pool_status"])
async def test_question_about_a_hanging_server_says_what_to_do(question: str) -> None:
    """In other words than a late answer: there are no tokens to ask fewer of."""
    with serving(HangingService()) as endpoint:
        async with GenerationClient(endpoint) as client:
            sentence = f"No reply from {endpoint} within 0.2 s; allow more time, or see how busy it is."
            with pytest.raises(DeadlineExceeded, match=f"^{re.escape(sentence)}$"):
                await getattr(client, question)(timeout_s=0.2)


class HangingService(GenerationServiceServicer):
    """Replies to no question before the caller is gone."""

    def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: grpc.ServicerContext
    ) -> pb.GetServerInfoResponse:
        self._wait_for_the_end(context)
        return pb.GetServerInfoResponse()

    def GetPoolStatus(  # noqa: N802
        self, request: pb.GetPoolStatusRequest, context: grpc.ServicerContext
    ) -> pb.GetPoolStatusResponse:
        self._wait_for_the_end(context)
        return pb.GetPoolStatusResponse()

    @staticmethod
    def _wait_for_the_end(context: grpc.ServicerContext) -> None:
        is_over = threading.Event()
        if context.add_callback(is_over.set):
            is_over.wait(30)


async def test_leaving_the_stream_cancels_the_request(client: GenerationClient, service: FakeGenerationService) -> None:
    """A caller that has read enough does not keep the models busy."""

    def answer(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        while not service.ended.is_set():
            yield next(canned_answer(request))

    service.answer = answer
    async with aclosing(client.generate(REQUEST)) as events:
        await anext(events)
    assert await asyncio.to_thread(service.ended.wait, 30)


@pytest.mark.parametrize(
    "endpoint", ["", "localhost", "localhost:", ":50051", "localhost:0", "host:70000", "host:http"]
)
def test_malformed_endpoint_is_refused(endpoint: str) -> None:
    """An endpoint is HOST:PORT; anything else is refused before a connection is tried."""
    with pytest.raises(InvalidRequest) as refusal:
        GenerationClient(endpoint)
    assert refusal.value.parameter == "endpoint"


def test_importing_the_client_loads_no_engine() -> None:
    """A backend pays for gRPC alone: neither torch nor transformers nor Ray is imported."""
    script = (
        "import sys, paceline.client; print([m for m in ('torch', 'transformers', 'ray', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
