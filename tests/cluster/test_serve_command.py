"""`paceline serve` as a person runs it: it starts, answers, stops, and leaves nothing behind, however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.client import GenerationRequest, StopConditions
from tests.cluster.serving import Served, Serving, one_of_each


@pytest.fixture
def serving() -> Iterator[list[Serving]]:
    started: list[Serving] = []
    yield started
    for each in started:
        each.kill()


@pytest.mark.timeout(300)
async def test_it_answers_and_ctrl_c_leaves_nothing_behind(served: Served, serving: list[Serving]) -> None:
    """It answers; a second one on its port says so; after Ctrl-C no process is left, and the port is free again."""
    first = served.running()
    request = GenerationRequest(token_ids=(1, 2, 3), seed=1, stopping=StopConditions(max_tokens=8, ignore_eos=True))
    async with served.client() as client:
        assert len((await client.complete(request)).token_ids) == 8

    second = Serving("--config", str(served.config))
    serving.append(second)
    assert second.wait() == 1
    assert first.endpoint.rpartition(":")[2] in second.log
    assert "taken" in second.log
    assert "Traceback" not in second.log
    assert second.survivors() == []

    first.interrupt()
    assert first.wait() == 130
    assert first.survivors() == []
    assert not is_listening(first.endpoint)


@pytest.mark.timeout(300)
def test_ctrl_c_in_the_middle_of_the_start_leaves_nothing_behind(
    tiny_model: Path, tmp_path: Path, serving: list[Serving]
) -> None:
    """Interrupted while replicas load their models."""
    starting = Serving("--config", str(one_of_each(tiny_model, tmp_path)))
    serving.append(starting)
    starting.wait_family(9)
    starting.interrupt()
    assert starting.wait() == 130
    assert "Traceback" not in starting.log
    assert starting.survivors() == []


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_failed_start_is_a_sentence_and_leaves_nothing_behind(tmp_path: Path, serving: list[Serving]) -> None:
    """A model that is not there: the replica's own sentence reaches the person."""
    failing = Serving("--config", str(one_of_each(tmp_path / "no-such-model", tmp_path)))
    serving.append(failing)
    assert failing.wait() == 1
    assert "no-such-model" in failing.log
    assert "Traceback" not in failing.log
    assert failing.survivors() == []


def is_listening(endpoint: str) -> bool:
    port = int(endpoint.rpartition(":")[2])
    return any(
        connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN
        for connection in psutil.net_connections("tcp")
    )
