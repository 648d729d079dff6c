"""How what a handler raises ends its call (`rpc.mapped_errors`)."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from paceline.errors import QueueFull
from paceline.rpc import mapped_errors


class FakeContext:
    """Ends the call, unless its caller has gone, as gRPC does either."""

    def __init__(self, *, is_gone: bool = False) -> None:
        self._is_gone = is_gone
        self.statuses: list[grpc.Status] = []

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        if self._is_gone:
            raise grpc.aio.InternalError('Failed "execute_batch"')
        self.statuses.append(status)
        raise grpc.aio.AbortError("Locally aborted.")


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (QueueFull("No room."), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (ValueError("the secret of the handler"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_what_is_raised_becomes_a_status(raised: Exception, code: grpc.StatusCode) -> None:
    """Ours under its own code; a fault is logged, and the caller is not told what it was."""
    context = FakeContext()
    with capture_logs() as logs, pytest.raises(grpc.aio.AbortError):
        async with mapped_errors(context, rpc="Generate"):
            raise raised
    (status,) = context.statuses
    assert status.code is code
    assert "secret" not in status.details
    assert [line["rpc"] for line in logs] == (["Generate"] if code is grpc.StatusCode.INTERNAL else [])


async def test_a_caller_that_is_gone_has_cancelled() -> None:
    """There is nobody to be told of the error, and it is no fault of ours that would be logged with a traceback."""
    with pytest.raises(asyncio.CancelledError):
        async with mapped_errors(FakeContext(is_gone=True), rpc="Generate"):
            raise QueueFull("No room.")


@pytest.mark.parametrize("raised", [grpc.aio.InternalError("gone"), asyncio.CancelledError(), GeneratorExit()])
async def test_what_has_ended_the_call_already_goes_on(raised: BaseException) -> None:
    context = FakeContext()
    with pytest.raises(type(raised)):
        async with mapped_errors(context):
            raise raised
    assert context.statuses == []
