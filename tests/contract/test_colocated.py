"""A target in the orchestrator's process: the answers, failures and ends of one that is reached over gRPC.

The models count: behind token t comes t + 1, around a vocabulary of 8.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.colocated import ADDRESS
from orchestrator.service import serve_colocated
from paceline.client import GenerationClient
from paceline.errors import PacelineError
from paceline.generation import Delta
from paceline.process import Serve
from paceline.settings import OrchestratorSettings, TargetSettings
from target_service.service import assemble
from tests.checkpoints import save_markov_checkpoint
from tests.fakes import FakeModel, Logits, counting_logits, fake_info, hashed_logits
from tests.harness import Running, complete_all, ngram_drafter, request, running, start, system, target_of

VOCAB = 8
PROMPT = (0, 1, 2)
THREAD = "target-model"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One word a token: t0, t1, ..."""
    uniform = [[1 / VOCAB] * VOCAB] * VOCAB
    return str(save_markov_checkpoint(tmp_path_factory.mktemp("models") / "words", uniform))


def colocated(model: Any, tokenizer: str, *, metrics_port: int = 0, **settings: Any) -> Serve:
    """An orchestrator with its target beside it, over any model behind the narrow interface."""
    own: dict[str, Any] = {"metrics_port": metrics_port}
    target = assemble(TargetSettings(**own), model, fake_info(model))
    options = OrchestratorSettings(
        tokenizer=tokenizer, **{"colocated_target": own, "drain_s": 0, "connect_timeout_s": 5, **settings}
    )
    return lambda lifetime: serve_colocated(lifetime, options, target)


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[tuple[Running, GenerationClient]]:
    async with running(serve) as service, GenerationClient(service.address, max_resumptions=0) as client:
        yield service, client


def model_threads() -> set[threading.Thread]:
    """Those of other tests as well, whose services were killed."""
    return {thread for thread in threading.enumerate() if thread.name == THREAD}


async def test_answers_are_those_of_a_target_over_grpc(tokenizer: str) -> None:
    """Token by token, at temperature 0 and 1, eight at a time, whatever the drafts."""
    asked = [
        request(PROMPT[:length], temperature=temperature, seed=seed, draft_length=3)
        for length in (1, 3)
        for temperature in (0.0, 1.0)
        for seed in (1, 2)
    ]

    def model() -> FakeModel:
        return FakeModel(hashed_logits(VOCAB), vocab_size=VOCAB)

    async with system(target_of(model()), ngram_drafter(), tokenizer) as over_grpc:
        expected = await complete_all(over_grpc.client, asked)
    async with (
        running(ngram_drafter()) as drafter,
        serving(colocated(model(), tokenizer, drafter=drafter.address)) as (_, client),
    ):
        answers = await complete_all(client, asked)
    assert sum(answer.speculation.num_accepted_tokens for answer in answers) > 0
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]


async def test_fault_of_the_model_fails_its_session_alone(tokenizer: str) -> None:
    """Its client hears that something went wrong, not what; the answer beside it goes on."""

    def faulty(ids: Sequence[int]) -> Sequence[float]:
        if ids[0] == 7:
            raise RuntimeError("the secret of token 7")
        return counting_logits(VOCAB)(ids)

    async with serving(colocated(FakeModel(faulty, vocab_size=VOCAB), tokenizer)) as (_, client):
        good = asyncio.ensure_future(client.complete(request(PROMPT, temperature=0.0, max_tokens=64)))
        with pytest.raises(PacelineError, match=r"^[^7]*$"):
            await client.complete(request((7,), temperature=0.0))
        assert (await good).token_ids == tuple((3 + index) % VOCAB for index in range(64))


async def test_status_and_metrics_show_the_target_here(tokenizer: str) -> None:
    """Among the pools of the orchestrator, and on a port of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    model = FakeModel(counting_logits(VOCAB), vocab_size=VOCAB)
    async with serving(colocated(model, tokenizer, metrics_port=port)) as (_, client):
        await client.complete(request(PROMPT, temperature=0.0))
        (pool,) = (pool for pool in (await client.pool_status()).pools if pool.name == "target")
        assert [(replica.address, replica.model_id) for replica in pool.replicas] == [(ADDRESS, "fake")]
        assert pool.replicas[0].is_connected
        scraped = await asyncio.to_thread(_scrape, port)
    assert "paceline_step_seconds_count" in scraped


def _scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        return str(response.read(), "utf-8")


async def test_answers_that_run_may_end_before_it_stops(tokenizer: str) -> None:
    """Within the time for draining; then the model's thread is gone."""
    others = model_threads()
    service = await start(colocated(FakeModel(counting_logits(VOCAB), vocab_size=VOCAB), tokenizer, drain_s=30))
    async with GenerationClient(service.address, max_resumptions=0) as client:
        tokens = 0
        async for event in client.generate(request(PROMPT, temperature=0.0, max_tokens=40)):
            service.lifetime.stop()  # with the first event; the others change nothing
            tokens += len(event.token_ids) if isinstance(event, Delta) else 0
    assert tokens == 40
    await service.task
    assert model_threads() <= others


async def test_a_model_thread_that_breaks_ends_the_service(tokenizer: str) -> None:
    """With an error that says so: whoever runs it starts it again."""
    others = model_threads()

    class Broken(FakeModel):
        def reserve(self, cache: Any, length: int) -> bool:
            raise RuntimeError("broken on purpose")

    logits: Logits = counting_logits(VOCAB)
    service = await start(colocated(Broken(logits, vocab_size=VOCAB), tokenizer))
    async with GenerationClient(service.address, max_resumptions=0) as client:
        with pytest.raises(PacelineError):
            await client.complete(request(PROMPT, temperature=0.0), timeout_s=20)
    with pytest.raises(PacelineError, match="model thread broke"):
        await asyncio.wait_for(service.task, 20)
    assert model_threads() <= others


def test_a_target_is_here_or_elsewhere() -> None:
    """Its settings are as those of a target service; both kinds at once are refused."""
    here: dict[str, Any] = {"colocated_target": {"model": "some/model"}}
    settings = OrchestratorSettings(**here)
    assert settings.colocated_target == TargetSettings(**here["colocated_target"])
    with pytest.raises(ValidationError, match="give one of the two"):
        OrchestratorSettings(**here, target="localhost:1")
    nothing: dict[str, Any] = {}
    with pytest.raises(ValidationError, match="required"):
        OrchestratorSettings(**nothing)
