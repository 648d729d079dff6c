"""The application on a simulated cluster: placement, leases, faults and drains, over the real ingress.

Tiny models whose steps are held stand for GPUs. The tests share one cluster; each leaves it serving.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from benchmarks.chaos import run_chaos
from orchestrator.cluster import Deployed, deployed
from orchestrator.config import DRAFTER_LABELS, TARGET_LABELS
from paceline.client import (
    GenerationClient,
    GenerationRequest,
    Schedule,
    SpeculationOptions,
    StopConditions,
)
from paceline.errors import InvalidRequest
from paceline.generation import Completion, CompletionBuilder, Delta, PoolStatus
from paceline.types import VerificationRule
from tests.cluster.applications import kill_process_at, tiny_application

CHAOS_S = 60.0
ANSWER_LIMIT_S = 120.0


@pytest.fixture(scope="module")
def application(tiny_model: Path) -> Iterator[Deployed]:
    spread = {"max_replicas_per_node": 1}
    with deployed(tiny_application(tiny_model, drafter=spread), is_simulated=True) as running:
        yield running


@pytest.fixture(scope="module")
def endpoint(application: Deployed) -> str:
    return application.grpc_endpoint


@pytest.fixture
async def client(endpoint: str) -> AsyncIterator[GenerationClient]:
    async with GenerationClient(endpoint) as connected:
        yield connected


def request_of(seed: int, *, max_tokens: int = 120, **speculation: Any) -> GenerationRequest:
    return GenerationRequest(
        token_ids=(seed + 1, 2, 3),
        stopping=StopConditions(max_tokens=max_tokens, ignore_eos=True),
        speculation=SpeculationOptions(rule=VerificationRule.COUPLED, **speculation),
        seed=seed,
    )


async def pool_of(client: GenerationClient, name: str) -> PoolStatus:
    return next(pool for pool in (await client.pool_status()).pools if pool.name == name)


async def until(condition: Callable[[], Any], what: str, *, limit_s: float = 60.0) -> Any:
    """Wait for `await condition()` to be true; the limit is far above what it takes."""
    deadline_s = time.monotonic() + limit_s
    while True:
        found = await condition()
        if found:
            return found
        assert time.monotonic() < deadline_s, f"within {limit_s:g} s not seen: {what}"
        await asyncio.sleep(0.2)


async def until_whole(client: GenerationClient) -> None:
    """Both pools have two replicas that are connected."""

    async def is_whole() -> bool:
        pools = (await client.pool_status()).pools
        return all(sum(replica.is_connected for replica in pool.replicas) == 2 for pool in pools)

    await until(is_whole, "two connected replicas in each pool")


async def answers_with(
    client: GenerationClient, requests: list[GenerationRequest], strike: Callable[[], Any], *, behind_tokens: int = 20
) -> list[Completion]:
    """All answers at once; `strike` is awaited when every one of them is in its middle."""
    in_the_middle = [asyncio.Event() for _ in requests]

    async def watched(request: GenerationRequest, reached: asyncio.Event) -> Completion:
        builder, received = CompletionBuilder(), 0
        async for event in client.generate(request, timeout_s=ANSWER_LIMIT_S):
            builder.add(event)
            received += len(event.token_ids) if isinstance(event, Delta) else 0
            if received >= behind_tokens:
                reached.set()
        return builder.build()

    answers = [asyncio.ensure_future(watched(*pair)) for pair in zip(requests, in_the_middle, strict=True)]
    for reached in in_the_middle:
        await asyncio.wait_for(reached.wait(), ANSWER_LIMIT_S)
    await strike()
    return await asyncio.gather(*answers)


async def undisturbed(client: GenerationClient, requests: list[GenerationRequest]) -> list[tuple[Any, str]]:
    completions = await asyncio.gather(*(client.complete(request, timeout_s=ANSWER_LIMIT_S) for request in requests))
    return texts(completions)


def texts(completions: list[Completion]) -> list[tuple[Any, str]]:
    return [(completion.token_ids, completion.text) for completion in completions]


def labels_by_node() -> dict[str, dict[str, str]]:
    return {node["NodeID"]: node["Labels"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------------------------------------------------------------


async def test_replicas_land_where_their_pool_belongs(client: GenerationClient) -> None:
    """Targets on the target's node, drafters spread over those of drafters, the orchestrator with the targets."""
    labels = labels_by_node()
    status = await client.pool_status()
    for pool, wanted in (("target", TARGET_LABELS), ("drafter", DRAFTER_LABELS)):
        replicas = next(entry.replicas for entry in status.pools if entry.name == pool)
        assert len(replicas) == 2
        assert len({replica.node_id for replica in replicas}) == (2 if pool == "drafter" else 1)
        for replica in replicas:
            assert wanted.items() <= labels[replica.node_id].items(), (pool, replica)
    assert TARGET_LABELS.items() <= labels[status.orchestrator.node_id].items()


async def test_answers_over_the_ingress_equal_plain_decoding(client: GenerationClient) -> None:
    """The whole way through Serve changes no token; drafts are accepted on the way."""
    plain = await undisturbed(client, [request_of(seed, schedule=Schedule.PLAIN) for seed in range(4)])
    drafted = await asyncio.gather(*(client.complete(request_of(seed)) for seed in range(4)))
    assert texts(list(drafted)) == plain
    assert sum(completion.speculation.num_accepted_tokens for completion in drafted) > 0


async def test_bad_input_is_refused_by_name_over_the_ingress(client: GenerationClient) -> None:
    """The typed error with its parameter arrives through Serve's proxy."""
    with pytest.raises(InvalidRequest, match="9999") as refused:
        await client.complete(GenerationRequest(token_ids=(1, 9999)))
    assert refused.value.parameter == "token_ids"


async def test_http_over_the_ingress_gives_the_same_answers(application: Deployed, client: GenerationClient) -> None:
    """Serve's HTTP proxy hands a whole answer and a stream through, errors with their status, and a hang-up at once."""
    asked = request_of(6, max_tokens=40)
    expected = await client.complete(asked, timeout_s=ANSWER_LIMIT_S)
    async with openai.AsyncOpenAI(base_url=f"{application.http_url}/v1", api_key="none", max_retries=0) as http:
        (model,) = (await http.models.list()).data
        ask: dict[str, Any] = {
            "model": model.id,
            "prompt": list(asked.token_ids or ()),
            "seed": 6,
            "extra_body": {"ignore_eos": True},
        }
        whole = await http.completions.create(**ask, max_tokens=40)
        assert (whole.choices[0].text, whole.usage and whole.usage.completion_tokens) == (expected.text, 40)
        chunks = [chunk async for chunk in await http.completions.create(**ask, max_tokens=40, stream=True)]
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
        assert len(chunks) > 2, "as they come, not all at the end"
        with pytest.raises(openai.BadRequestError) as refusal:
            await http.completions.create(**ask, suffix="x")
        assert refusal.value.param == "suffix"
        for is_stream in (True, False):
            await hang_up_on(http, {**ask, "max_tokens": 1500, "stream": is_stream})
            await until(lambda: running_answers(client, 0), "the answer of a caller who hung up has ended", limit_s=10)


async def hang_up_on(http: openai.AsyncOpenAI, ask: dict[str, Any]) -> None:
    """Leave in the middle of an answer."""
    if ask["stream"]:
        async with await http.completions.create(**ask) as stream:
            await anext(aiter(stream))
        return
    with pytest.raises(openai.APITimeoutError):
        await http.completions.create(**ask, timeout=1.0)


async def running_answers(client: GenerationClient, count: int) -> bool:
    return (await client.pool_status()).orchestrator.running_answers == count


async def test_sessions_spread_over_the_targets_and_are_leased(client: GenerationClient) -> None:
    """Eight sessions at once: each target has some, and Serve counts each as an ongoing request of its replica."""

    async def are_idle() -> bool:
        return sum(replica.kv_used_tokens for replica in (await pool_of(client, "target")).replicas) == 0

    async def both_have_sessions() -> bool:
        return min(replica.sessions for replica in (await pool_of(client, "target")).replicas) >= 3

    await until(are_idle, "targets without sessions")
    await answers_with(
        client,
        [request_of(seed) for seed in range(8)],
        lambda: until(both_have_sessions, "three sessions at each target"),
        behind_tokens=1,
    )


async def test_a_killed_target_costs_a_pause_and_no_token(client: GenerationClient) -> None:
    """Eight answers under way, one target killed: all complete, with the text of the undisturbed run."""
    requests = [request_of(seed) for seed in range(8)]
    expected = await undisturbed(client, requests)
    victim = (await pool_of(client, "target")).replicas[0].address

    async def strike() -> None:
        await asyncio.to_thread(kill_process_at, victim)

    assert texts(await answers_with(client, requests, strike)) == expected
    await until_whole(client)


async def test_answers_go_on_when_the_serve_controller_is_killed(client: GenerationClient) -> None:
    """The controller dies in mid-answer: nothing of an answer passes through it."""
    requests = [request_of(seed) for seed in range(8)]
    expected = await undisturbed(client, requests)

    async def strike() -> None:
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        await asyncio.to_thread(ray.kill, controller, no_restart=False)

    assert texts(await answers_with(client, requests, strike)) == expected
    await asyncio.to_thread(until_controller_is_back)
    await until_whole(client)


def until_controller_is_back() -> None:
    deadline_s = time.monotonic() + 60
    while serve.status().applications["paceline"].status != "RUNNING":
        assert time.monotonic() < deadline_s, "the application is not running again"
        time.sleep(0.2)


async def test_a_killed_orchestrator_is_resumed_by_the_client(client: GenerationClient) -> None:
    """The ingress replica dies in mid-answer: the client calls again with what it has, and the text is the same."""
    requests = [request_of(seed) for seed in range(4)]
    expected = await undisturbed(client, requests)

    async def strike() -> None:
        os.kill(orchestrator_process(), signal.SIGKILL)

    completions = await answers_with(client, requests, strike)
    assert texts(completions) == expected
    assert sum(completion.resumptions for completion in completions) >= len(requests)
    await until_whole(client)
    # The dead one's leases are let go of, although nobody cancels them: Serve sees the sessions that there are.
    await until(no_leases_are_left, "replicas without leases")


async def no_leases_are_left() -> bool:
    handles = [serve.get_deployment_handle(deployment, "paceline") for deployment in ("Target", "Drafter")]
    figures = [await handle.broadcast("record_autoscaling_stats").results_async() for handle in handles]
    return bool(sum(replica["leases"] for pool in figures for replica in pool) == 0)


def orchestrator_process() -> int:
    """The id of the process of the one orchestrator."""
    actors = ray._private.state.actors().values()
    running = [actor for actor in actors if actor["State"] == "ALIVE" and "Orchestrator" in actor["Name"]]
    assert len(running) == 1
    return int(running[0]["Pid"])


async def test_ray_exports_what_every_replica_counts(client: GenerationClient) -> None:
    """Each node those of its replicas, told apart though they share it; under Ray's prefix, with the service's name."""
    await client.complete(request_of(0))

    async def are_exported() -> bool:
        replicas = await asyncio.to_thread(exporting_replicas)
        return (
            len(replicas.get(("ray_paceline_max_sessions", "target"), ())) >= 2
            and len(replicas.get(("ray_paceline_step_seconds_bucket", "drafter"), ())) >= 2
            and len(replicas.get(("ray_paceline_spec_decode_num_drafts_total", "orchestrator"), ())) >= 1
        )

    await until(are_exported, "metrics of all services")


def exporting_replicas() -> dict[tuple[str, str], set[str]]:
    """By name of a series and service: the replicas that have it, over all nodes."""
    found: dict[tuple[str, str], set[str]] = {}
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(address, timeout=10) as reply:
            text = reply.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if "service" in sample.labels:
                    key = (sample.name, sample.labels["service"])
                    found.setdefault(key, set()).add(sample.labels["replica"])
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_chaos_fails_no_request_and_changes_no_text(endpoint: str) -> None:
    """A minute of eight steady sessions; a random drafter killed every 10 s and a random target every 30 s.

    What it is made of, one killed replica at a time, has tests of its own above.
    """
    async with GenerationClient(endpoint) as client:
        await until_whole(client)
    outcome = await run_chaos(endpoint, seconds=CHAOS_S, seed=7)
    assert outcome.failed == []
    assert outcome.changed_texts == 0
    assert outcome.drafters_killed >= 3
    assert outcome.targets_killed >= 1
    assert outcome.answers >= 8
    assert outcome.accepted_draft_tokens > 0
