"""A file of prompts: every line is checked before anything runs, then many run at once and are written in order."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from paceline.cli.request_fields import RequestFields
from paceline.client import Completion, GenerationClient, GenerationRequest
from paceline.errors import InvalidRequest, PacelineError

STANDARD_INPUT = Path("-")

Outcome = tuple[Completion, ...] | PacelineError
"""The answers to one request, mostly one, or why there are none."""


def read_requests(path: Path, defaults: RequestFields) -> list[GenerationRequest]:
    """One request a line, its fields over the defaults; empty lines are skipped.

    Raises `InvalidRequest`, which names line and field, for the first line that cannot be sent.
    """
    return [_request_of(line, defaults, place=place) for place, line in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        content = sys.stdin.buffer.read() if path == STANDARD_INPUT else path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}.", parameter="prompts") from error
    name = "standard input" if path == STANDARD_INPUT else path.name
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield f"{name}, line {number}", line


def _request_of(line: bytes, defaults: RequestFields, *, place: str) -> GenerationRequest:
    try:
        return defaults.overridden_by(RequestFields.from_json(line)).to_request()
    except InvalidRequest as error:
        raise InvalidRequest(f"{place}: {error.message}", parameter=error.parameter) from error


async def complete_all(
    client: GenerationClient,
    requests: Sequence[GenerationRequest],
    *,
    concurrency: int,
    timeout_s: float,
    report: Callable[[Outcome], None],
) -> int:
    """Report every outcome in the order of the requests, each as soon as those before it are there.

    At most `concurrency` requests run at once; one that fails leaves the others alone. Returns how many failed.
    """
    gate = asyncio.Semaphore(concurrency)

    async def outcome_of(request: GenerationRequest) -> Outcome:
        async with gate:
            try:
                return await client.complete_choices(request, timeout_s=timeout_s)
            except PacelineError as error:
                return error

    async with asyncio.TaskGroup() as running:
        outcomes = [running.create_task(outcome_of(request)) for request in requests]
        for outcome in outcomes:
            report(await outcome)
    return sum(isinstance(outcome.result(), PacelineError) for outcome in outcomes)
