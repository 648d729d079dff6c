"""The blocking client: the asynchronous one's answers, for threads, for callers who stop early, and for interpreters that
end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from paceline.client import (
    ClientClosed,
    ClientTls,
    Delta,
    Finished,
    GenerationClient,
    GenerationRequest,
    ServerUnavailable,
    Started,
    SyncGenerationClient,
)
from paceline.errors import ContextTooLong, DeadlineExceeded, InvalidRequest
from paceline.v1 import generation_service_pb2 as pb
from tests.certificates import Authority
from tests.contract.test_client import EVENTS_BEFORE_THE_END, broken_after, in_turn
from tests.fake_generation import TEXT, FakeGenerationService, canned_answer, serving

REQUEST = GenerationRequest(text="Why?")
LIMIT_S = 30.0


class Held:
    """An answer that stops behind its first token until it is let go, or its call has ended."""

    def __init__(self, service: FakeGenerationService) -> None:
        self._service = service
        self.go_on = threading.Event()

    def __call__(self, request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        events = canned_answer(request)
        yield next(events)
        yield next(events)
        while not self.go_on.wait(0.01) and not self._service.ended.is_set():
            pass
        yield from events


@pytest.fixture
def service() -> FakeGenerationService:
    return FakeGenerationService()


@pytest.fixture
def endpoint(service: FakeGenerationService) -> Iterator[str]:
    with serving(service) as endpoint:
        yield endpoint


@pytest.fixture
def client(endpoint: str) -> Iterator[SyncGenerationClient]:
    with SyncGenerationClient(endpoint, first_pause_s=0.001) as client:
        yield client


async def test_every_method_gives_what_its_asynchronous_namesake_gives(
    endpoint: str, client: SyncGenerationClient
) -> None:
    """Not one answer differs between the two, and no method is missing in either."""
    choices = replace(REQUEST, n=2)
    async with GenerationClient(endpoint) as other:
        assert client.complete(REQUEST) == await other.complete(REQUEST)
        assert client.complete_choices(choices) == await other.complete_choices(choices)
        assert list(client.generate(REQUEST)) == [event async for event in other.generate(REQUEST)]
        assert client.server_info() == await other.server_info()
        assert client.pool_status() == await other.pool_status()
        assert client.list_models() == await other.list_models()
        assert client.cancel("r1") is await other.cancel("r1") is True
        assert client.cancel("r2") is await other.cancel("r2") is False
    blocking, asynchronous = (
        {name for name in dir(kind) if not name.startswith("_")} for kind in (SyncGenerationClient, GenerationClient)
    )
    assert blocking == asynchronous


def test_events_come_while_the_answer_is_made(service: FakeGenerationService, client: SyncGenerationClient) -> None:
    """The first token is there while the server holds back the second."""
    service.answer = held = Held(service)
    events = client.generate(REQUEST)
    assert isinstance(next(events), Started)
    first = next(events)
    assert isinstance(first, Delta)
    assert first.text == "The"
    held.go_on.set()
    rest = list(events)
    assert isinstance(rest[-1], Finished)
    assert "The" + "".join(event.text for event in rest if not isinstance(event, Started)) == TEXT


@pytest.mark.parametrize("way", ["close", "forget", "error"])
def test_leaving_an_answer_cancels_it_at_the_server(
    service: FakeGenerationService, client: SyncGenerationClient, way: str
) -> None:
    """Whether the iterator is closed, forgotten, or left by an exception in the caller's own loop."""
    service.answer = Held(service)
    events = client.generate(REQUEST)
    next(events)
    match way:
        case "close":
            events.close()
            assert list(events) == []
        case "forget":
            del events
        case "error":
            with pytest.raises(ZeroDivisionError):
                _divide_by_zero_within(events)
            del events
    assert service.ended.wait(LIMIT_S)


def _divide_by_zero_within(events: Iterator[object]) -> None:
    for _ in events:
        raise ZeroDivisionError


def test_threads_share_one_client(client: SyncGenerationClient) -> None:
    """Streams and whole answers of eight threads over one connection do not mix."""

    def ask(number: int) -> str:
        if number % 2:
            return client.complete(replace(REQUEST, seed=number)).text
        events = list(client.generate(replace(REQUEST, seed=number)))
        assert isinstance(events[0], Started)
        assert events[0].seed == number
        return "".join(event.text for event in events if not isinstance(event, Started))

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(ask, range(64))) == {TEXT}


@pytest.mark.parametrize("count", range(1, EVENTS_BEFORE_THE_END + 1))
def test_answer_goes_on_wherever_its_stream_breaks(
    service: FakeGenerationService, client: SyncGenerationClient, count: int
) -> None:
    """There is one logic of resumption: no token lost, none twice."""
    service.answer = in_turn(broken_after(count, None))
    completion = client.complete(REQUEST)
    assert (completion.text, completion.token_ids, completion.resumptions) == (TEXT, tuple(range(100, 106)), 1)


def test_errors_arrive_as_themselves(service: FakeGenerationService, client: SyncGenerationClient) -> None:
    """In both forms; the iterator is then at its end."""
    service.answer = broken_after(0, ContextTooLong("Too long."))
    with pytest.raises(ContextTooLong, match="Too long"):
        client.complete(REQUEST)
    events = client.generate(REQUEST)
    with pytest.raises(ContextTooLong, match="Too long"):
        next(events)
    assert list(events) == []


def test_deadline_ends_the_wait(service: FakeGenerationService, client: SyncGenerationClient) -> None:
    """What the server holds back for ever ends with the caller's time."""
    service.answer = Held(service)
    with pytest.raises(DeadlineExceeded):
        client.complete(REQUEST, timeout_s=0.3)


def test_nothing_is_asked_outside_of_with(endpoint: str) -> None:
    """Neither before nor after; an answer that was left open has ended with the client."""
    client = SyncGenerationClient(endpoint)
    with pytest.raises(ClientClosed):
        client.complete(REQUEST)
    with client:
        events = client.generate(REQUEST)
        next(events)
    with pytest.raises(ClientClosed):
        client.complete(REQUEST)
    with pytest.raises(ClientClosed):
        next(events)
    with client:  # and opened again
        assert client.complete(REQUEST).text == TEXT


def test_closing_ends_the_waits_of_other_threads(service: FakeGenerationService, endpoint: str) -> None:
    """A thread that waits for a token gets an error, not a wait for ever."""
    service.answer = Held(service)
    got_first = threading.Event()

    def ask(client: SyncGenerationClient) -> None:
        for event in client.generate(REQUEST):
            if isinstance(event, Delta):
                got_first.set()

    with ThreadPoolExecutor(1) as threads:
        with SyncGenerationClient(endpoint, max_resumptions=0) as client:
            answer = threads.submit(ask, client)
            assert got_first.wait(LIMIT_S)
        assert answer.exception(LIMIT_S) is not None
    assert service.ended.wait(LIMIT_S)


def test_what_cannot_be_opened_says_so(tmp_path: Path) -> None:
    """Errors of opening come out of `with`, and leave no thread behind."""
    missing = ClientTls(ca=tmp_path / "none.pem")
    with pytest.raises(Exception, match=r"none\.pem"), SyncGenerationClient("127.0.0.1:1", tls=missing):
        pass
    assert "paceline-client" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(InvalidRequest):
        SyncGenerationClient("nowhere")
    with SyncGenerationClient("127.0.0.1:1", first_pause_s=0.001) as client, pytest.raises(ServerUnavailable):
        client.complete(REQUEST)
    assert "paceline-client" not in {thread.name for thread in threading.enumerate()}


def test_broken_stream_over_tls_is_resumed(service: FakeGenerationService, tmp_path: Path) -> None:
    """With the token in each call, and the server's name checked."""
    server = Authority(tmp_path).issue("localhost")
    credentials = grpc.ssl_server_credentials([(server.key.read_bytes(), server.cert.read_bytes())])
    service.answer = in_turn(broken_after(3, None))
    with serving(service, credentials=credentials) as endpoint:
        port = endpoint.rpartition(":")[2]
        tls = ClientTls(ca=server.ca)
        with SyncGenerationClient(f"localhost:{port}", tls=tls, token="secret", first_pause_s=0.001) as client:
            completion = client.complete(REQUEST)
    assert (completion.text, completion.resumptions) == (TEXT, 1)
    assert [metadata["authorization"] for metadata in service.metadata] == ["Bearer secret"] * 2


# ---------------------------------------------------------------------------------------------------------------------
# Interpreters

PROGRAM = """
import os, signal, sys, threading, time
from paceline.client import ClientClosed, GenerationRequest, SyncGenerationClient
request = GenerationRequest(text="Why?")
client = SyncGenerationClient(sys.argv[1])
client.__enter__()
events = client.generate(request)
next(events)
next(events)
print("first", flush=True)
"""


READ_ON = """
def read():
    try:
        list(events)
    except ClientClosed:
        pass

threading.Thread(target=read, daemon=True).start()
"""

# Once the wait for the token has begun, and not on the way there.
INTERRUPT = """
def is_waiting(frame):
    return (frame.f_code.co_name, frame.f_back.f_code.co_name) == ("wait", "result")

def interrupt():
    while not is_waiting(sys._current_frames()[threading.main_thread().ident]):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    next(events)
except KeyboardInterrupt:
    print("interrupted", list(events))
print(client.complete(request).text)
"""


def run_program(endpoint: str, rest: str) -> tuple[int, str, str]:
    """Exit status, standard output and errors of an interpreter that begins an answer and goes on with `rest`."""
    program = [sys.executable, "-c", PROGRAM + rest, endpoint]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("rest", ["", "sys.exit(3)", READ_ON], ids=["end", "exit", "thread"])
def test_interpreter_ends_although_nothing_was_closed(service: FakeGenerationService, endpoint: str, rest: str) -> None:
    """An open client with an answer in the middle keeps no process alive, and says nothing at its end."""
    service.answer = Held(service)
    assert run_program(endpoint, rest) == (3 if "exit" in rest else 0, "first\n", "")
    assert service.ended.wait(LIMIT_S)


def test_interrupt_reaches_a_caller_who_waits(service: FakeGenerationService, endpoint: str) -> None:
    """Ctrl-C ends the wait for a token at once and cancels the answer; the client is good for the next one."""
    service.answer = Held(service)
    assert run_program(endpoint, INTERRUPT) == (0, f"first\ninterrupted []\n{TEXT}\n", "")
    assert service.ended.is_set()
