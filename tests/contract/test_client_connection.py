"""Tokens, certificates and full servers: what a client says of its caller, to whom it says it, and how it waits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from paceline.client import (
    ClientTls,
    GenerationClient,
    GenerationRequest,
    OutputOptions,
    ServerUnavailable,
    Started,
)
from paceline.client.failures import reported_error
from paceline.errors import (
    AnswerCancelled,
    InvalidRequest,
    ModelNotFound,
    PacelineError,
    PayloadInvalid,
    QueueFull,
    RateLimited,
    RequestIdTaken,
    StartupFailed,
    TargetUnavailable,
    Unauthenticated,
)
from paceline.rpc import STATUS_CODES
from paceline.v1 import generation_service_pb2 as pb
from tests.certificates import Authority, Identity
from tests.contract.test_client import broken_after, in_turn
from tests.fake_generation import MODELS, TEXT, FakeGenerationService, canned_answer, serving

REQUEST = GenerationRequest(text="Why?")
FULL = QueueFull("Full.", retry_after_s=0.001)
LIMITED = RateLimited("Too often.", retry_after_s=0.001)


@pytest.fixture
def service() -> FakeGenerationService:
    return FakeGenerationService()


def credentials_of(server: Identity) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials([(server.key.read_bytes(), server.cert.read_bytes())])


# ---------------------------------------------------------------------------------------------------------------------
# Who asks


async def test_every_call_shows_the_token(service: FakeGenerationService) -> None:
    """As HTTP does it; without a token there is no such header."""
    with serving(service) as endpoint:
        async with GenerationClient(endpoint, token="secret") as client:
            await client.complete(REQUEST)
            await client.server_info()
            await client.pool_status()
            await client.list_models()
            await client.cancel("r1")
        assert [metadata["authorization"] for metadata in service.metadata] == ["Bearer secret"] * 5
        async with GenerationClient(endpoint) as client:
            await client.server_info()
    assert "authorization" not in service.metadata[-1]


@pytest.mark.parametrize("endpoint", ["10.0.0.1:9000", "example.com:9000", "[2001:db8::1]:9000"])
def test_token_goes_to_no_stranger_in_the_clear(endpoint: str) -> None:
    """Beyond this machine it takes TLS, or the caller's word that nobody listens."""
    with pytest.raises(InvalidRequest, match="give tls") as refusal:
        GenerationClient(endpoint, token="secret")
    assert refusal.value.parameter == "token"
    assert "secret" not in str(refusal.value)
    GenerationClient(endpoint, token="secret", tls=ClientTls())
    GenerationClient(endpoint, token="secret", trust_network=True)
    GenerationClient(endpoint)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "localhost:9000", "[::1]:9000", "127.8.8.8:9000"])
def test_token_may_stay_on_this_machine(endpoint: str) -> None:
    """Nobody is on the way."""
    GenerationClient(endpoint, token="secret")


@pytest.mark.parametrize("token", ["", "two words", "line\nend", "naïve"])
def test_what_no_header_can_carry_is_no_token(token: str) -> None:
    """It is refused at once, and not shown."""
    with pytest.raises(InvalidRequest) as refusal:
        GenerationClient("127.0.0.1:9000", token=token)
    assert refusal.value.parameter == "token"
    assert not token or token not in str(refusal.value)


async def test_server_over_tls_must_be_who_it_should_be(service: FakeGenerationService, tmp_path: Path) -> None:
    """Its name and its authority are checked, a name may be given, and what is no certificate is refused at once."""
    authority, stranger = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    with serving(service, credentials=credentials_of(authority.issue("server.paceline"))) as endpoint:
        tls = ClientTls(ca=authority.ca, server_name="server.paceline")
        async with GenerationClient(endpoint, tls=tls, token="secret") as client:
            assert (await client.complete(REQUEST)).text == TEXT
        for wrong in (ClientTls(ca=authority.ca), replace(tls, ca=stranger.ca)):
            async with GenerationClient(endpoint, tls=wrong, max_resumptions=0) as client:
                with pytest.raises(ServerUnavailable):
                    await client.complete(REQUEST)
        with pytest.raises(StartupFailed):
            await GenerationClient(endpoint, tls=ClientTls(ca=tmp_path / "none.pem")).__aenter__()
    assert len(service.requests) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Errors as themselves


@pytest.mark.parametrize(
    "kind", [kind for kind in (*STATUS_CODES, RateLimited) if kind not in (InvalidRequest, PacelineError)]
)
async def test_every_error_arrives_as_itself(service: FakeGenerationService, kind: type[PacelineError]) -> None:
    """Type, reason, sentence and, where it has one, the time to wait."""
    failure = kind("As it is.")
    service.answer = broken_after(0, failure)
    with serving(service) as endpoint:
        async with GenerationClient(endpoint, max_resumptions=0) as client:
            with pytest.raises(PacelineError) as caught:
                await client.complete(REQUEST)
    assert type(caught.value) is kind
    assert (caught.value.reason, str(caught.value)) == (kind.reason, "As it is.")
    assert caught.value.retry_after_s == failure.retry_after_s


async def test_server_in_other_words_is_still_understood(service: FakeGenerationService) -> None:
    """A reason that this client does not know keeps its name."""
    service.answer = broken_after(0, PacelineError("Newer.", reason="NEWER_REASON"))
    with serving(service) as endpoint:
        async with GenerationClient(endpoint) as client:
            with pytest.raises(PacelineError, match="Newer") as caught:
                await client.complete(REQUEST)
    assert caught.value.reason == "NEWER_REASON"
    assert (
        reported_error(grpc.aio.AioRpcError(grpc.StatusCode.UNKNOWN, grpc.aio.Metadata(), grpc.aio.Metadata())) is None
    )


# ---------------------------------------------------------------------------------------------------------------------
# Full servers


@pytest.mark.parametrize("refusal", [FULL, LIMITED], ids=["queue", "rate"])
async def test_full_server_is_asked_again_as_often_as_the_caller_wants(
    service: FakeGenerationService, refusal: QueueFull
) -> None:
    """Twice here, which is enough; not at all by default."""
    with serving(service) as endpoint:
        service.answer = in_turn(broken_after(0, refusal), broken_after(0, refusal))
        async with GenerationClient(endpoint, max_queue_retries=2, first_pause_s=0.001) as client:
            assert (await client.complete(REQUEST)).text == TEXT
        assert len(service.requests) == 3
        for retries, asked in ((0, 1), (1, 2)):
            service.requests.clear()
            service.answer = broken_after(0, refusal)
            async with GenerationClient(endpoint, max_queue_retries=retries, first_pause_s=0.001) as client:
                with pytest.raises(type(refusal)):
                    await client.complete_choices(replace(REQUEST, n=2))
            assert len(service.requests) == asked


async def test_pause_is_no_longer_than_the_callers_patience(service: FakeGenerationService) -> None:
    """Where the server wants more time than is left, the refusal comes at once and not a deadline later."""
    service.answer = broken_after(0, QueueFull("Full.", retry_after_s=60.0))
    with serving(service) as endpoint:
        async with GenerationClient(endpoint, max_queue_retries=5) as client:
            with pytest.raises(QueueFull) as refusal:
                await client.complete(REQUEST, timeout_s=20.0)
    assert refusal.value.retry_after_s == 60.0
    assert len(service.requests) == 1


@pytest.mark.parametrize("failure", [Unauthenticated("Who?"), ModelNotFound("Which?"), TargetUnavailable("Gone.")])
async def test_nothing_else_is_asked_twice(service: FakeGenerationService, failure: PacelineError) -> None:
    """Before anything has begun, all but a full server is the caller's to judge."""
    service.answer = broken_after(0, failure)
    with serving(service) as endpoint:
        async with GenerationClient(endpoint, max_queue_retries=5, first_pause_s=0.001) as client:
            with pytest.raises(type(failure)):
                await client.complete(REQUEST)
    assert len(service.requests) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Ids, and what is sent


async def test_models_and_cancellation_are_a_call_each(service: FakeGenerationService) -> None:
    """The models come as values with their limits; a cancellation says whether there was anything to cancel."""
    with serving(service) as endpoint:
        async with GenerationClient(endpoint) as client:
            (model,) = await client.list_models()
            assert [await client.cancel(request_id) for request_id in ("r1", "r2")] == [True, False]
    sent = MODELS.models[0]
    assert (model.name, model.target.max_context, model.target.vocab_size, model.target.dtype) == (
        "fake-target", 2048, 1000, "float32",
    )  # fmt: skip
    assert model.drafter is not None
    assert (model.drafter.method, model.speculation.draft_length) == ("ngram", 4)
    assert (model.default_max_tokens, model.max_prompt_tokens, model.max_choices) == (
        sent.default_max_tokens, sent.max_prompt_tokens, sent.max_choices,
    )  # fmt: skip
    assert service.cancelled == ["r1", "r2"]


async def test_cancelled_answer_is_not_taken_up_again(service: FakeGenerationService) -> None:
    """Somebody wanted it to end."""
    service.answer = broken_after(3, AnswerCancelled("Cancelled."))
    with serving(service) as endpoint:
        async with GenerationClient(endpoint, first_pause_s=0.001) as client:
            with pytest.raises(AnswerCancelled):
                await client.complete(REQUEST)
    assert len(service.requests) == 1


async def test_resumed_answer_keeps_its_id(service: FakeGenerationService) -> None:
    """Each choice has its own by then; one that is still taken by the broken stream is asked for again."""
    with serving(service) as endpoint:
        async with GenerationClient(endpoint, first_pause_s=0.001) as client:
            service.answer = in_turn(broken_after(1, None), broken_after(0, RequestIdTaken("Taken.")))
            assert (await client.complete(replace(REQUEST, request_id="mine"))).request_id == "mine"
            assert [request.request_id for request in service.requests] == ["mine"] * 3
            service.requests.clear()
            service.answer = in_turn(broken_after(3, None))
            await client.complete_choices(replace(REQUEST, request_id="mine", n=2))
            assert sorted(request.request_id for request in service.requests) == ["mine", "mine", "mine-1"]
            service.answer = broken_after(0, RequestIdTaken("Taken."))
            with pytest.raises(RequestIdTaken):  # by another answer, before this one has begun
                await client.complete(replace(REQUEST, request_id="mine"))


async def test_server_that_takes_no_id_is_named_as_too_old(service: FakeGenerationService) -> None:
    """Otherwise a later cancellation would find nothing."""

    def old(request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        request.ClearField("request_id")
        yield from canned_answer(request)

    service.answer = old
    with serving(service) as endpoint:
        async with GenerationClient(endpoint) as client:
            with pytest.raises(PayloadInvalid, match="older than this client"):
                await client.complete(replace(REQUEST, request_id="mine"))


async def test_answer_without_ids_is_not_resumed_behind_its_beginning(service: FakeGenerationService) -> None:
    """Nobody could say from where on; before its first token it begins again, with the same seed."""
    text_only = replace(REQUEST, output=OutputOptions(token_ids=False, pieces=False))
    with serving(service) as endpoint:
        async with GenerationClient(endpoint, first_pause_s=0.001) as client:
            service.answer = in_turn(broken_after(1, None))
            events = [event async for event in client.generate(text_only)]
            assert sum(isinstance(event, Started) for event in events) == 1
            assert len(service.requests) == 2
            assert service.requests[1].HasField("seed")
            service.answer = broken_after(3, None)
            with pytest.raises(PacelineError, match="ask again"):
                await client.complete(text_only)
            assert len(service.requests) == 3


@pytest.mark.parametrize(
    ("parameter", "fields"),
    [
        ("request_id", {"request_id": "with space"}),
        ("request_id", {"request_id": "x" * 65}),
        ("request_id", {"request_id": "til~de"}),
        ("request_id", {"request_id": "x" * 62, "n": 2}),
        ("model", {"model": "\ud800"}),
        ("output", {"output": OutputOptions(text=False, token_ids=False, pieces=False)}),
        ("output", {"output": OutputOptions(token_ids=False), "logprobs": 1}),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(parameter: str, fields: dict[str, object]) -> None:
    """Before anything is sent."""
    with pytest.raises(InvalidRequest) as refusal:
        GenerationRequest(text="a", **fields)  # type: ignore[arg-type]
    assert refusal.value.parameter == parameter


@pytest.mark.parametrize("wanted", list(itertools.product([True, False], repeat=3))[:-1])
async def test_options_of_a_request_reach_the_server(
    service: FakeGenerationService, wanted: tuple[bool, bool, bool]
) -> None:
    """Model, id and what is wanted; everything is said by saying nothing."""
    text, token_ids, pieces = wanted
    output = OutputOptions(text=text, token_ids=token_ids, pieces=pieces)
    with serving(service) as endpoint:
        async with GenerationClient(endpoint) as client:
            await client.complete(replace(REQUEST, model="m", request_id="a.b_c-1", output=output))
    (sent,) = service.requests
    assert (sent.model, sent.request_id) == ("m", "a.b_c-1")
    assert sent.HasField("output") is (wanted != (True, True, True))
    if sent.HasField("output"):
        assert (sent.output.text, sent.output.token_ids, sent.output.pieces) == wanted
