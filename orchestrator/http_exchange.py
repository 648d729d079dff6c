"""One HTTP request with its response: a bounded body, JSON or server-sent events, and an end when the caller hangs up.

Over plain ASGI, so that it is the same under any server. Knows nothing of what is asked and answered.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from orchestrator.http_errors import Problem, RequestRefused

_BODY_TIMEOUT_S = 60.0
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class CallerLeft(Exception):
    """The caller has hung up; nobody hears an answer."""


class Exchange:
    """One request and its response. Headers go out with the first part of a response, once."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, names_itself: bool) -> None:
        """`names_itself`: the response says the request's id, which otherwise whoever is in front does."""
        self.headers = Headers(scope=scope)
        self.peer: str = (scope.get("client") or ("",))[0]  # the host that calls; empty: unknown
        self.path_parameters: Mapping[str, str] = scope.get("path_params", {})
        self._receive, self._send = receive, send
        self._names_itself = names_itself
        stated = self.headers.get("x-request-id", "")
        self.request_id = stated if _REQUEST_ID.fullmatch(stated) else ""  # the caller's own; "": it has none
        self.is_streaming = False

    async def body(self, max_bytes: int) -> bytes:
        """The whole body. Raises `RequestRefused` for one that is too large, too slow, or not JSON, and `CallerLeft`."""
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestRefused(
                415, "Send JSON, with the header Content-Type: application/json.", code="unsupported_media_type"
            )
        stated = self.headers.get("content-length", "0")
        if len(stated) > 18 or (stated.isdigit() and int(stated) > max_bytes):
            raise _too_large(max_bytes)
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                return await self._read(max_bytes)
        except TimeoutError:
            raise RequestRefused(
                408, f"The body did not arrive within {_BODY_TIMEOUT_S:g} seconds; send it again.", code="body_timeout"
            ) from None

    @asynccontextmanager
    async def while_connected(self) -> AsyncIterator[None]:
        """Cancel the block when the caller hangs up, and raise `CallerLeft`. For behind the body, before the response's end."""
        try:
            async with asyncio.timeout(None) as connection:
                watcher = asyncio.create_task(self._watch(connection))
                try:
                    yield
                finally:
                    watcher.cancel()
        except TimeoutError:
            if connection.expired():
                raise CallerLeft from None
            raise

    async def send_json(
        self, status: int, content: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        await self.send_bytes(status, as_json(content), {"content-type": "application/json", **(headers or {})})

    async def send_bytes(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        await self._send_headers(status, {"content-length": str(len(content)), **headers})
        await self._send({"type": "http.response.body", "body": content})

    async def send_event(self, content: Mapping[str, Any]) -> None:
        """One event of a stream; waits while the caller does not read."""
        if not self.is_streaming:
            self.is_streaming = True
            await self._send_headers(200, _EVENT_HEADERS)
        await self._send(
            {"type": "http.response.body", "body": b"data: " + as_json(content) + b"\n\n", "more_body": True}
        )

    async def end_events(self, *, is_whole: bool) -> None:
        """Only an answer that is whole ends with `[DONE]`."""
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n" if is_whole else b""})

    async def fail(self, problem: Problem) -> None:
        """Say what went wrong, as a status, or within a stream as its last event."""
        if self.is_streaming:
            await self.send_event(problem.body)
            await self.end_events(is_whole=False)
        else:
            await self.send_json(problem.status, problem.body, problem.headers)

    async def _read(self, max_bytes: int) -> bytes:
        parts: list[bytes] = []
        size, is_more = 0, True
        while is_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise CallerLeft
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > max_bytes:
                raise _too_large(max_bytes)
            is_more = message.get("more_body", False)
        return b"".join(parts)

    async def _watch(self, connection: asyncio.Timeout) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        connection.reschedule(asyncio.get_running_loop().time())

    async def _send_headers(self, status: int, headers: Mapping[str, str]) -> None:
        named = {"x-request-id": self.request_id or uuid.uuid4().hex} if self._names_itself else {}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in {**headers, **named}.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


def as_json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _too_large(max_bytes: int) -> RequestRefused:
    return RequestRefused(413, f"The body is larger than {max_bytes} bytes; send less.", code="body_too_large")
