"""Cancellation with several orchestrators behind one endpoint: it finds the answer wherever that runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest

from orchestrator.cluster import deployed
from paceline.client import Event, GenerationClient, GenerationRequest, Started, StopConditions
from paceline.errors import AnswerCancelled
from tests.cluster.applications import tiny_application

# A deployment of its own, which takes a minute to start; `tests/contract/test_ingress.py` has the same with one orchestrator
# and a stand-in for the others.
pytestmark = pytest.mark.slow

ANSWERS = 8


@pytest.fixture(scope="module")
def endpoint(tiny_model: Path) -> Iterator[str]:
    one, two = {"replicas": {"min": 1, "max": 1}}, {"replicas": {"min": 2, "max": 2}}
    application = tiny_application(tiny_model, target=one, drafter=one, orchestrator=two)
    with deployed(application, is_simulated=True) as running:
        yield running.grpc_endpoint


async def read_all(events: AsyncGenerator[Event]) -> None:
    async for _ in events:
        pass


async def test_answer_is_cancelled_wherever_it_runs(endpoint: str) -> None:
    """Eight answers over two orchestrators, each cancelled by a call that may reach the other one.

    If the one that is asked looked at its own answers alone, all eight would be found with a chance of 2^-8.
    """
    request = GenerationRequest(token_ids=(1, 2, 3), stopping=StopConditions(max_tokens=1500, ignore_eos=True))
    async with GenerationClient(endpoint) as client, AsyncExitStack() as open_answers:
        answers = [await open_answers.enter_async_context(aclosing(client.generate(request))) for _ in range(ANSWERS)]
        ids = []
        for answer in answers:
            started = await anext(answer)
            assert isinstance(started, Started)
            ids.append(started.request_id)
        assert await asyncio.gather(*map(client.cancel, ids)) == [True] * ANSWERS
        for answer in answers:
            with pytest.raises(AnswerCancelled):
                await read_all(answer)
        assert await client.cancel("nobody") is False
        assert await client.list_models()
