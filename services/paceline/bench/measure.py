"""Answers as their reader and the orchestrator saw them: when tokens came, what each round was, what was spent."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from paceline.bench.meters import bytes_to_port, cpu_seconds
from paceline.bench.stack import Deployment
from paceline.client import GenerationClient
from paceline.generation import Delta, Finished, GenerationRequest, SpeculationUsage, Started
from paceline.rounds import RoundRecord

CLIENT = "client"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer, from the request's way out to its last token; moments are seconds of one clock."""

    sent_s: float
    arrivals_s: tuple[float, ...]  # one a delivery
    token_counts: tuple[int, ...]  # tokens of each
    token_ids: tuple[int, ...]
    usage: SpeculationUsage
    rounds: tuple[RoundRecord, ...]

    @property
    def first_token_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s

    @property
    def delivery_gaps_s(self) -> list[float]:
        """What a reader of the stream waits between two deliveries."""
        return [later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Answers that ran at the same time, and what all of it has cost."""

    answers: tuple[Answer, ...]
    cpu_s: Mapping[str, float]  # service -> processor time; absent where the system does not say
    link_bytes: Mapping[str, int]  # "target", "drafter" -> bytes to and from it; absent likewise

    @property
    def tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)


async def run_wave(client: GenerationClient, deployment: Deployment, requests: Sequence[GenerationRequest]) -> Wave:
    """Send all requests at once and wait for the last token of all. Raises `PacelineError` if one fails."""
    before = _Spent.so_far(deployment)
    async with asyncio.TaskGroup() as running:
        tasks = [running.create_task(_watched(client, request)) for request in requests]
    after = _Spent.so_far(deployment)
    answers = [await _with_rounds(client, task.result()) for task in tasks]
    return Wave(
        answers=tuple(answers),
        cpu_s=_differences(before.cpu_s, after.cpu_s),
        link_bytes={name: int(count) for name, count in _differences(before.link_bytes, after.link_bytes).items()},
    )


@dataclass(frozen=True, slots=True)
class _Watched:
    request_id: str
    sent_s: float
    deliveries: list[tuple[float, Delta]]
    usage: SpeculationUsage


async def _watched(client: GenerationClient, request: GenerationRequest) -> _Watched:
    """The answer with its times; nothing else is done while it comes."""
    deliveries: list[tuple[float, Delta]] = []
    request_id, usage = "", SpeculationUsage()
    sent_s = time.perf_counter()
    async with aclosing(client.generate(request)) as events:
        async for event in events:
            match event:
                case Started():
                    request_id = event.request_id
                case Delta():
                    deliveries.append((time.perf_counter(), event))
                case Finished():
                    usage = event.speculation
    return _Watched(request_id, sent_s, [each for each in deliveries if each[1].token_ids], usage)


async def _with_rounds(client: GenerationClient, watched: _Watched) -> Answer:
    traced = await client.round_trace(request_id=watched.request_id)
    return Answer(
        sent_s=watched.sent_s,
        arrivals_s=tuple(at_s for at_s, _ in watched.deliveries),
        token_counts=tuple(len(delta.token_ids) for _, delta in watched.deliveries),
        token_ids=tuple(token_id for _, delta in watched.deliveries for token_id in delta.token_ids),
        usage=watched.usage,
        rounds=traced.records,
    )


@dataclass(frozen=True, slots=True)
class _Spent:
    cpu_s: Mapping[str, float | None]
    link_bytes: Mapping[str, int | None]

    @classmethod
    def so_far(cls, deployment: Deployment) -> _Spent:
        processes = {**deployment.processes, CLIENT: os.getpid()}
        return cls(
            {name: cpu_seconds(pid) for name, pid in processes.items()},
            {name: bytes_to_port(port) for name, port in deployment.ports.items()},
        )


def _differences(before: Mapping[str, float | None], after: Mapping[str, float | None]) -> dict[str, float]:
    """What can be told of both."""
    pairs = {name: (before[name], after[name]) for name in before}
    return {name: last - first for name, (first, last) in pairs.items() if first is not None and last is not None}
