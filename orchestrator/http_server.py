"""An HTTP server on one port of this process, within the running event loop. Knows nothing of what it serves."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.errors import StartupFailed
from paceline.tls import ServerTls

_IDLE_CONNECTION_S = 65  # longer than a load balancer's 60, so that it is never we who close what it just uses
_LAST_WORDS_S = 1  # for what still runs when the server is stopped
_MAX_HEAD_BYTES = 64 * 1024
_FRAME_BYTES = 16  # for each byte of a body, however small its chunks are


class HttpServer:
    """Started once, stopped once."""

    def __init__(self, application: ASGIApp, *, host: str, port: int, tls: ServerTls | None = None) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._server = _Server(
            uvicorn.Config(
                _ended_quietly(application),
                http=_BoundedHead,
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_IDLE_CONNECTION_S,
                timeout_graceful_shutdown=_LAST_WORDS_S,
                ssl_certfile=tls.cert if tls else None,
                ssl_keyfile=tls.key if tls else None,
                ssl_ca_certs=tls.client_ca if tls else None,
                ssl_cert_reqs=ssl.CERT_REQUIRED if tls and tls.client_ca else ssl.CERT_NONE,
            )
        )
        self._task: asyncio.Task[None] | None = None
        self.url = ""

    async def start(self) -> None:
        """Listen; raises `StartupFailed` if the port is taken, or a certificate cannot be used."""
        if self._tls is not None:
            self._tls.read()
        self._server.config.load()
        listener = self._listen()
        host, port = listener.getsockname()[:2]
        scheme = "http" if self._tls is None else "https"
        self.url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def stop(self) -> None:
        """Take no more requests, and end what still runs within a second."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task

    def _listen(self) -> socket.socket:
        host = self._host.strip("[]")
        try:
            family = socket.getaddrinfo(host, self._port, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((host, self._port), family=family, backlog=1024)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise StartupFailed(
                f"Port {self._port} on {self._host} cannot be opened for HTTP; choose another with --http-port, or 0 for any "
                f"free one. ({reason})"
            ) from error


def _ended_quietly(application: ASGIApp) -> ASGIApp:
    """The same; that a request is cancelled when the server stops is no fault to be logged."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):
            await application(scope, receive, send)

    return run


class _BoundedHead(HttpToolsProtocol):
    """Refuses a request with an endless head, or endless trailers, which uvicorn would gather without a bound.

    Counts what comes of a request besides its body, give or take what was read at once.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes, self._body_bytes = 0, 0

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        is_too_much = self._head_bytes > _MAX_HEAD_BYTES + _FRAME_BYTES * self._body_bytes
        if is_too_much and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def on_body(self, body: bytes) -> None:
        self._head_bytes -= len(body)
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes, self._body_bytes = 0, 0
        super().on_message_complete()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's business (`paceline.process`)."""
        yield
