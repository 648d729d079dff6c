"""HTTP itself: framing, errors, limits, hang-ups and the end of a server, with a generator that gives canned events."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest
import trustme
from prometheus_client import CollectorRegistry, Counter
from starlette.responses import PlainTextResponse

from orchestrator.access import TokenGate
from orchestrator.door import Door, Gate, OpenGate
from orchestrator.generator import Generator
from orchestrator.http_errors import HTTP_CODES
from orchestrator.http_server import HttpServer
from orchestrator.loop import RoundReport
from orchestrator.openai_api import OpenAIApi
from orchestrator.text import SpelledToken
from paceline.errors import (
    DeadlineExceeded,
    PacelineError,
    QueueFull,
    StartupFailed,
    TargetUnavailable,
    Unauthenticated,
)
from paceline.generation import (
    Delta,
    Event,
    Finished,
    GenerationRequest,
    ServedModel,
    SpeculationOptions,
    SpeculationUsage,
    Started,
    Usage,
)
from paceline.rpc import STATUS_CODES
from paceline.settings import OrchestratorSettings
from paceline.tls import ServerTls
from paceline.tokens import TokenEntry, TokenFile, hash_token, new_token, write_tokens
from paceline.types import FinishReason, ModelInfo, Origin
from tests.certificates import Authority, replace_file
from tests.watching import watch_alone

BODY: dict[str, Any] = {"model": "m", "prompt": "Why?"}
STREAM = BODY | {"stream": True}
LIMIT_S = 30.0


def delta(text: str) -> Delta:
    return Delta(text=text, token_ids=(1,), origins=(Origin.PLAIN,), pieces=())


STARTED = Started(request_id="r1", seeds=(7,), prompt_tokens=3)
FINISHED = Finished(
    finish_reason=FinishReason.STOP,
    text="!",
    usage=Usage(prompt_tokens=3, completion_tokens=2),
    speculation=SpeculationUsage(),
)
ANSWER: tuple[Event, ...] = (STARTED, delta("It"), delta(" is"), FINISHED)


class FakeGenerator:
    """Gives canned events; then fails if it has a failure, or goes on until it is closed if it is endless."""

    def __init__(
        self, events: Sequence[Event] = ANSWER, failure: Exception | None = None, *, endless: Delta | None = None
    ) -> None:
        self._events, self._failure, self._endless = events, failure, endless
        self.requests: list[GenerationRequest] = []
        self.timeouts_s: list[float | None] = []
        self.given = 0
        self.started, self.closed = asyncio.Event(), asyncio.Event()
        self.is_ready = True
        self.reader_timeout_s = 0.5
        self.max_choices = 16
        self.watch = watch_alone()

    async def generate(
        self,
        request: GenerationRequest,
        *,
        timeout_s: float | None,
        share: str,
        on_round: Callable[[str, RoundReport], None],
    ) -> AsyncGenerator[Event]:
        self.requests.append(request)
        self.timeouts_s.append(timeout_s)
        try:
            for event in self._events:
                yield event
                self.given += 1
                self.started.set()
            if self._failure is not None:
                raise self._failure
            while self._endless is not None:
                yield self._endless
                self.given += 1
                await asyncio.sleep(0)
        finally:
            self.closed.set()

    def models(self) -> tuple[ServedModel, ...]:
        target = ModelInfo(model_id="m", vocab_size=8, max_context=64, tokenizer_sha256="", incarnation="1")
        served = ServedModel(
            name="m",
            target=target,
            drafter=None,
            speculation=SpeculationOptions(),
            default_max_tokens=256,
            max_prompt_tokens=63,
            max_choices=self.max_choices,
        )
        return (served,)

    def spell(self, token_id: int) -> SpelledToken:
        return SpelledToken(f"t{token_id}", f"t{token_id}".encode())


@dataclass(frozen=True, slots=True)
class Front:
    api: OpenAIApi
    server: HttpServer
    client: httpx2.AsyncClient

    async def post(self, content: Any, **headers: str) -> httpx2.Response:
        return await self.client.post("/v1/completions", json=content, headers=headers)


@asynccontextmanager
async def serving(fake: FakeGenerator, *, gate: Gate | None = None, **settings: Any) -> AsyncIterator[Front]:
    registry = CollectorRegistry()
    Counter("paceline_canned", "For the test.", registry=registry)
    api = OpenAIApi(
        Door(cast(Generator, fake), gate or OpenGate()),
        OrchestratorSettings(target="nowhere:1", **settings),
        registry=registry,
    )
    server = HttpServer(api.application(), host="127.0.0.1", port=0)
    await server.start()
    try:
        async with httpx2.AsyncClient(base_url=server.url, timeout=LIMIT_S) as client:
            yield Front(api, server, client)
    finally:
        await server.stop()


def error_in(response: httpx2.Response) -> dict[str, Any]:
    content = response.json()
    assert content.keys() == {"error"}
    assert content["error"].keys() == {"message", "type", "param", "code"}
    error: dict[str, Any] = content["error"]
    assert error["message"].endswith((".", "?"))
    return error


# ---------------------------------------------------------------------------------------------------------------------
# Framing


async def test_stream_is_framed_as_server_sent_events() -> None:
    """One `data:` line and an empty one for each chunk, `[DONE]` behind the last, and nothing else."""
    async with serving(FakeGenerator()) as front:
        response = await front.post(STREAM)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["It", " is", "!"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_whole_answer_is_json() -> None:
    async with serving(FakeGenerator()) as front:
        response = await front.post(BODY)
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    assert (response.json()["id"], response.json()["choices"][0]["text"]) == ("cmpl-r1", "It is!")


async def test_requests_ids_are_told_back() -> None:
    """The caller's own, or that of the answer; one that is no plain word is not repeated."""
    async with serving(FakeGenerator()) as front:
        for content in (BODY, STREAM):
            assert (await front.post(content)).headers["x-request-id"] == "r1"
            assert (await front.post(content, **{"x-request-id": "mine"})).headers["x-request-id"] == "mine"
        assert (await front.post({}, **{"x-request-id": "mine"})).headers["x-request-id"] == "mine"
        assert (await front.post({}, **{"x-request-id": "a b"})).headers["x-request-id"] != "a b"


async def test_callers_patience_is_a_header() -> None:
    """In seconds; without one the answer may take its time."""
    fake = FakeGenerator()
    async with serving(fake) as front:
        await front.post(BODY)
        await front.post(BODY, **{"x-request-timeout": "2.5"})
        for stated in ("soon", "0", "-1", "nan", "inf"):
            response = await front.post(BODY, **{"x-request-timeout": stated})
            assert (response.status_code, error_in(response)["param"]) == (400, "x-request-timeout")
    unlimited, limited = fake.timeouts_s
    assert unlimited is None
    assert limited is not None
    assert 0.0 < limited <= 2.5, "less what the request itself took to arrive"


# ---------------------------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize("kind", STATUS_CODES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("content", [BODY, STREAM], ids=["whole", "stream"])
async def test_error_before_the_first_token_is_a_status(kind: type[PacelineError], content: dict[str, Any]) -> None:
    """Of every kind, whole or streamed, also behind the admission."""
    error = kind("No.", parameter="n") if "parameter" in kind.__init__.__annotations__ else kind("No.")  # type: ignore[call-arg]
    async with serving(FakeGenerator([STARTED], error)) as front:
        response = await front.post(content)
    assert response.status_code == HTTP_CODES[STATUS_CODES[kind].name]
    assert error_in(response)["message"] == "No."
    assert ("retry-after" in response.headers) is (error.retry_after_s is not None)


async def test_error_behind_the_first_token_is_the_last_event() -> None:
    """No `[DONE]`: the answer is not whole."""
    async with serving(FakeGenerator(ANSWER[:2], TargetUnavailable("Gone."))) as front:
        response = await front.post(STREAM)
        whole = await front.post(BODY)
    assert response.status_code == 200
    first, last, rest = response.text.split("\n\n")
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "It"
    assert json.loads(last.removeprefix("data: ")) == {
        "error": {"message": "Gone.", "type": "server_error", "param": None, "code": "target_unavailable"}
    }
    assert rest == ""
    assert (whole.status_code, error_in(whole)["code"]) == (503, "target_unavailable")


@pytest.mark.parametrize("count", [0, 2])
async def test_faults_of_ours_tell_nothing_of_themselves(count: int) -> None:
    async with serving(FakeGenerator(ANSWER[:count], RuntimeError("secret words"))) as front:
        response = await front.post(STREAM)
    assert "secret" not in response.text
    assert "Traceback" not in response.text
    assert '"code":"internal"' in response.text
    assert response.status_code == (200 if count else 500)


async def test_when_to_try_again_is_a_header() -> None:
    async with serving(FakeGenerator([], QueueFull("Full.", retry_after_s=1.5))) as front:
        response = await front.post(STREAM)
    assert (response.status_code, response.headers["retry-after"], response.headers["retry-after-ms"]) == (
        429,
        "2",
        "1500",
    )


class OneToken(OpenGate):
    def caller(self, authorization: str | None, *, peer: str = "") -> Any:
        assert peer == "127.0.0.1"
        if authorization != "Bearer good":
            raise Unauthenticated("Who?")
        return super().caller(authorization)


async def test_everything_but_health_needs_the_token() -> None:
    """Also metrics, which say much of a deployment; load balancers have no token."""
    async with serving(FakeGenerator(), gate=OneToken()) as front:
        for path in ("/v1/models", "/v1/models/m", "/metrics"):
            response = await front.client.get(path)
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
            assert error_in(response)["code"] == "unauthenticated"
            good = await front.client.get(path, headers={"authorization": "Bearer good"})
            assert good.status_code == 200
        assert (await front.post({})).status_code == 401, "before the body is looked at"
        assert (await front.post(BODY, authorization="Bearer good")).status_code == 200
        assert (await front.client.get("/health")).status_code == 200


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
async def test_other_content_than_json_is_refused(kind: str) -> None:
    async with serving(FakeGenerator()) as front:
        response = await front.client.post("/v1/completions", content=json.dumps(BODY), headers={"content-type": kind})
        assert (response.status_code, error_in(response)["code"]) == (415, "unsupported_media_type")
        right = await front.client.post(
            "/v1/completions", content=json.dumps(BODY), headers={"content-type": "Application/JSON; charset=utf-8"}
        )
        assert right.status_code == 200


async def test_malformed_json_is_refused() -> None:
    async with serving(FakeGenerator()) as front:
        headers = {"content-type": "application/json"}
        response = await front.client.post("/v1/completions", content=b'{"model": ', headers=headers)
    assert (response.status_code, error_in(response)["param"]) == (400, "body")


async def test_paths_and_methods_that_there_are_not() -> None:
    async with serving(FakeGenerator()) as front:
        for path in ("/", "/v1/nothing", "/v1/completions/", "/v1"):
            response = await front.client.post(path, json=BODY)
            assert (response.status_code, error_in(response)["code"]) == (404, "path_not_found")
        response = await front.client.get("/v1/completions")
        assert (response.status_code, error_in(response)["code"]) == (405, "method_not_allowed")
        assert response.headers["allow"] == "POST"
        assert "use POST" in error_in(response)["message"]


async def test_model_that_is_not_served_is_not_found() -> None:
    async with serving(FakeGenerator()) as front:
        asked = await front.post(BODY | {"model": "n"})
        looked_up = await front.client.get("/v1/models/n")
    for response in (asked, looked_up):
        assert (response.status_code, error_in(response)["code"]) == (404, "model_not_found")
        assert error_in(response)["param"] == "model"


# ---------------------------------------------------------------------------------------------------------------------
# Limits


async def chunked(size: int) -> AsyncIterator[bytes]:
    """A body that does not say how long it is."""
    yield b'{"model": "m", "prompt": "'
    for _ in range(size // 1024):
        yield b"x" * 1024
    yield b'"}'


async def test_body_is_bounded_while_it_is_read() -> None:
    """Whether it says its length or not; one within the limit passes."""
    fake = FakeGenerator()
    async with serving(fake, http_max_body_bytes=64 * 1024) as front:
        for content in (json.dumps(BODY | {"prompt": "x" * 100_000}), chunked(100_000)):
            response = await front.client.post(
                "/v1/completions", content=content, headers={"content-type": "application/json"}
            )
            assert (response.status_code, error_in(response)["code"]) == (413, "body_too_large")
        assert fake.requests == []
        passing = await front.client.post(
            "/v1/completions", content=chunked(50_000), headers={"content-type": "application/json"}
        )
        assert passing.status_code == 200


async def answer_to(front: Front, data: bytes) -> bytes:
    """What comes back on a connection of its own until the server closes it."""
    host, port = front.server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answer = b""
    async with asyncio.timeout(LIMIT_S):
        writer.write(data)
        with suppress(ConnectionError):
            answer = await reader.read(-1)
    writer.close()
    return answer


POST = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n"
HEAD = POST + b"transfer-encoding: chunked\r\n"


@pytest.mark.parametrize("beginning", [b"GET /", HEAD + b"x: ", HEAD + b"\r\n1\r\n{\r\n0\r\nx: "])
async def test_head_that_does_not_end_is_refused(beginning: bytes) -> None:
    """A target, a header or a trailer of a hundred thousand bytes, whose sender would go on; others are answered."""
    async with serving(FakeGenerator()) as front:
        answer = await answer_to(front, beginning + b"a" * 100_000)
        assert answer.startswith(b"HTTP/1.1 400 ") or answer == b""  # what is closed with bytes unread may be lost
        assert (await front.client.get("/health")).status_code == 200


async def test_small_chunks_are_no_head() -> None:
    """A body a byte at a time, whose frames are many times as long as itself, passes."""
    fake = FakeGenerator()
    body = json.dumps(BODY | {"prompt": "x" * 50_000}).encode()
    async with serving(fake) as front:
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        answer = await answer_to(front, HEAD + b"connection: close\r\n\r\n" + chunks)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert [request.text for request in fake.requests] == ["x" * 50_000]


async def ask_unread(
    front: Front, body: dict[str, Any], **headers: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask and leave the answer in the kernel until it is read."""
    host, port = front.server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = {"host": "x", "content-type": "application/json", "content-length": str(len(content))} | headers
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    writer.write(f"POST /v1/completions HTTP/1.1\r\n{lines}\r\n".encode() + content)
    await writer.drain()
    return reader, writer


async def test_slow_reader_holds_the_answer_up_and_is_left_in_the_end() -> None:
    """What fits into the buffers of a connection is made, and no more; behind the patience of the server it ends."""
    fake = FakeGenerator([STARTED], endless=delta("x" * 10_000))
    async with serving(fake) as front:
        _, writer = await ask_unread(front, STREAM)
        async with asyncio.timeout(LIMIT_S):
            await fake.closed.wait()
        writer.close()
    assert fake.given < 2000, "20 MB, while the kernel keeps a few"


class Punctual(FakeGenerator):
    """Ends in time, as the generator does: by a timeout of its own, wherever it strikes."""

    async def generate(
        self, request: GenerationRequest, *, timeout_s: float | None, **others: Any
    ) -> AsyncGenerator[Event]:
        try:
            async with (
                asyncio.timeout(timeout_s),
                aclosing(super().generate(request, timeout_s=timeout_s, **others)) as events,
            ):
                async for event in events:
                    yield event
        except TimeoutError:
            raise DeadlineExceeded("Late.") from None


@pytest.mark.parametrize("prompt", ["Why?", ["Why?", "How?"]], ids=["one", "two"])
async def test_time_that_is_up_while_nobody_reads_is_said_to_whoever_reads_on(prompt: str | list[str]) -> None:
    """As the last event: what ended the answer was neither the server's end nor the reader's patience."""
    fake = Punctual([STARTED], endless=delta("x" * 10_000))
    fake.reader_timeout_s = LIMIT_S
    async with serving(fake) as front, asyncio.timeout(LIMIT_S):
        headers = {"x-request-timeout": "0.5", "connection": "close"}
        reader, writer = await ask_unread(front, STREAM | {"prompt": prompt}, **headers)
        await fake.closed.wait()
        received = await reader.read(-1)
        writer.close()
    assert b'"code":"deadline_exceeded"' in received[-500:]


@pytest.mark.parametrize(
    "beginning",
    [b"", b"GET /v1/models HTTP/1.1\r\nhost:", POST + b"content-length: 9000000\r\n\r\n{", b"\r\n"],
    ids=["nothing", "half a head", "a body that was refused", "an empty line"],
)
async def test_what_no_answer_runs_for_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch, beginning: bytes
) -> None:
    """A connection that says nothing, a head without an end, and the rest of a body behind its refusal; an answer takes as
    long as it takes."""
    monkeypatch.setattr("orchestrator.http_server._PATIENCE_S", 0.2)
    fake = FakeGenerator(ANSWER[:2], endless=delta(""))
    fake.reader_timeout_s = LIMIT_S
    async with serving(fake) as front, front.client.stream("POST", "/v1/completions", json=STREAM) as response:
        lines = response.aiter_lines()
        await anext(lines)
        await answer_to(front, beginning)  # ends when the server closes
        assert not fake.closed.is_set()


async def test_connection_is_not_kept_for_bytes_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a body that was refused, also where it comes to its end."""
    monkeypatch.setattr("orchestrator.http_server._PATIENCE_S", 0.2)
    async with serving(FakeGenerator(), http_max_body_bytes=1024) as front, asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection(*front.server.url.removeprefix("http://").split(":"))
        writer.write(POST + b"content-length: 2000\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        writer.write(b" " * 2000)
        with suppress(ConnectionError):
            await reader.read(-1)
        writer.close()


async def test_request_before_the_last_one_is_answered_closes_the_connection() -> None:
    """Else nobody would notice that their caller has left, and the first would run to its end for nobody."""
    fake = FakeGenerator(ANSWER[:2], endless=delta(""))
    body = json.dumps(BODY).encode()
    one = POST + b"content-length: %d\r\n\r\n" % len(body) + body
    async with serving(fake) as front:
        host, port = front.server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(LIMIT_S):
            writer.write(one)
            await fake.started.wait()
            writer.write(one)
            with suppress(ConnectionError):
                assert await reader.read(-1) == b""
            await fake.closed.wait()
        writer.close()
    assert len(fake.requests) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Hang-ups


async def test_hanging_up_on_a_stream_ends_the_answer() -> None:
    fake = FakeGenerator(ANSWER[:2], endless=delta(""))
    async with serving(fake) as front:
        async with front.client.stream("POST", "/v1/completions", json=STREAM) as response:
            await anext(response.aiter_lines())
            assert not fake.closed.is_set()
        async with asyncio.timeout(LIMIT_S):
            await fake.closed.wait()


async def test_hanging_up_on_a_whole_answer_ends_it() -> None:
    fake = FakeGenerator(ANSWER[:2], endless=delta(""))
    async with serving(fake) as front:
        asking = asyncio.ensure_future(front.post(BODY))
        async with asyncio.timeout(LIMIT_S):
            await fake.started.wait()
        asking.cancel()
        async with asyncio.timeout(LIMIT_S):
            await fake.closed.wait()


async def test_many_requests_share_one_connection() -> None:
    """A watcher of hang-ups that outlives its request would swallow the next one."""
    async with serving(FakeGenerator()) as front:
        for content in (BODY, STREAM, {}, BODY, STREAM) * 4:
            assert (await front.post(content)).status_code in (200, 400)
        assert (await front.client.get("/health")).status_code == 200


# ---------------------------------------------------------------------------------------------------------------------
# Several prompts


async def test_several_prompts_run_side_by_side() -> None:
    """Each is an answer of its own; all have the caller's patience, and the first failure ends all."""
    fake = FakeGenerator()
    async with serving(fake) as front:
        response = await front.post(BODY | {"prompt": ["Why?", "How?"]}, **{"x-request-timeout": "9"})
    assert [request.text for request in fake.requests] == ["Why?", "How?"]
    assert all(timeout_s is not None and 0.0 < timeout_s <= 9.0 for timeout_s in fake.timeouts_s)
    assert [choice["index"] for choice in response.json()["choices"]] == [0, 1]
    assert response.json()["usage"]["completion_tokens"] == 4
    failing = FakeGenerator(ANSWER[:2], TargetUnavailable("Gone."))
    async with serving(failing) as front:
        assert (await front.post(BODY | {"prompt": ["Why?", "How?"]})).status_code == 503


async def test_several_prompts_are_one_request_of_so_many_answers(tmp_path: Path) -> None:
    """To the caller's limits: they run together or not at all, and more than may ever run are refused by name."""
    token, path = new_token(), tmp_path / "tokens.yaml"
    limited = TokenEntry(name="a", sha256=hash_token(token), concurrent_answers=2, requests_per_minute=1, burst=1)
    write_tokens(path, TokenFile(tokens=(limited,)))
    fake, authorization = FakeGenerator(), {"authorization": f"Bearer {token}"}
    async with serving(fake, gate=TokenGate(path)) as front:
        too_many = await front.post(BODY | {"prompt": ["Why?", "How?", "When?"]}, **authorization)
        assert (too_many.status_code, fake.requests) == (400, [])
        assert (await front.post(BODY | {"prompt": ["Why?", "How?"]}, **authorization)).status_code == 200
        assert (await front.post(BODY, **authorization)).status_code == 429
    assert len(fake.requests) == 2


async def test_more_prompts_than_run_at_once_are_refused_by_name() -> None:
    """For good, not for now."""
    fake = FakeGenerator()
    fake.max_choices = 2
    async with serving(fake) as front:
        response = await front.post(BODY | {"prompt": ["Why?", "How?", "When?"]})
        assert (response.status_code, error_in(response)["param"], fake.requests) == (400, "prompt", [])
        assert (await front.post(BODY | {"prompt": ["Why?", "How?"]})).status_code == 200


async def test_strangers_are_told_nothing_of_the_targets(tmp_path: Path) -> None:
    """Who has no token hears that alone, whatever else is wrong."""
    write_tokens(tmp_path / "tokens.yaml", TokenFile())

    class Refused(FakeGenerator):
        def models(self) -> tuple[ServedModel, ...]:
            raise TargetUnavailable("No target.")

    async with serving(Refused(), gate=TokenGate(tmp_path / "tokens.yaml")) as front:
        for path, content in (("completions", BODY), ("chat/completions", {"model": "m", "messages": []})):
            assert (await front.client.post(f"/v1/{path}", json=content)).status_code == 401


# ---------------------------------------------------------------------------------------------------------------------
# The server itself


async def test_health_follows_the_target_and_the_drain() -> None:
    fake = FakeGenerator()
    async with serving(fake) as front:
        assert (await front.client.get("/health")).status_code == 200
        fake.is_ready = False
        assert (await front.client.get("/health")).status_code == 503
        fake.is_ready, front.api.is_draining = True, True
        assert (await front.client.get("/health")).json() == {"status": "draining"}


async def test_metrics_are_those_of_the_registry() -> None:
    async with serving(FakeGenerator()) as front:
        response = await front.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "paceline_canned_total 0.0" in response.text


async def test_taken_port_is_a_sentence() -> None:
    async with serving(FakeGenerator()) as front:
        port = int(front.server.url.rpartition(":")[2])
        with pytest.raises(StartupFailed, match=rf"Port {port} on 127.0.0.1 cannot be opened for HTTP.*--http-port"):
            await HttpServer(front.api.application(), host="127.0.0.1", port=port).start()


async def test_certificates_are_those_of_the_public_port(tmp_path: Path) -> None:
    """With one the URL is https, whoever believes its authority is answered, and a caller without a certificate is not
    where callers need one."""
    authority = trustme.CA()
    own, callers = authority.issue_cert("127.0.0.1"), authority.issue_cert("caller.example")
    cert, key, ca = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem"
    own.cert_chain_pems[0].write_to_path(cert)
    own.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca)
    for client_ca in (None, ca):
        server = HttpServer(
            PlainTextResponse("hello"), host="127.0.0.1", port=0, tls=ServerTls(cert=cert, key=key, client_ca=client_ca)
        )
        await server.start()
        assert server.url.startswith("https://127.0.0.1:")
        known, unknown = ssl.create_default_context(cafile=ca), ssl.create_default_context(cafile=ca)
        callers.configure_cert(known)
        async with httpx2.AsyncClient(verify=known) as client:
            assert (await client.get(server.url)).text == "hello"
        async with httpx2.AsyncClient(verify=unknown) as client:
            if client_ca is None:
                assert (await client.get(server.url)).text == "hello"
            else:
                with pytest.raises(httpx2.TransportError):
                    await client.get(server.url)
        await server.stop()


async def test_certificate_that_is_renewed_is_shown_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To whoever connects from then on; a file that cannot be used changes nothing."""
    monkeypatch.setattr("orchestrator.http_server._FOLLOW_S", 0.02)
    monkeypatch.setattr("paceline.watched._PERIOD_S", 0.02)
    authority = Authority(tmp_path / "authority")
    identity = authority.issue("127.0.0.1")
    server = HttpServer(
        PlainTextResponse("hello"), host="127.0.0.1", port=0, tls=ServerTls(cert=identity.cert, key=identity.key)
    )
    await server.start()
    try:
        first = await shown_certificate(server, authority)
        replace_file(identity.cert, b"nonsense")
        await asyncio.sleep(0.2)
        assert await shown_certificate(server, authority) == first
        authority.reissue(identity, "127.0.0.1")
        async with asyncio.timeout(LIMIT_S):
            while await shown_certificate(server, authority) == first:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.05)
    finally:
        await server.stop()


async def shown_certificate(server: HttpServer, authority: Authority) -> bytes:
    port = int(server.url.rpartition(":")[2])
    context = ssl.create_default_context(cafile=authority.ca)
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return shown


async def test_stopped_server_ends_what_still_runs(caplog: pytest.LogCaptureFixture) -> None:
    """Within a second or so, with an event that says why, and no traceback in the log."""
    fake = FakeGenerator(ANSWER[:2], endless=delta(""))
    async with serving(fake) as front, asyncio.timeout(LIMIT_S):
        async with front.client.stream("POST", "/v1/completions", json=STREAM) as response:
            lines = response.aiter_lines()
            await anext(lines)
            await front.server.stop()
            *_, last = [line async for line in lines if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
        assert fake.closed.is_set()
    assert not any(record.exc_info for record in caplog.records)
