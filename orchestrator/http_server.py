"""An HTTP server on one port of this process, within the running event loop. Knows nothing of what it serves."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.errors import StartupFailed
from paceline.tls import ServerTls, TlsMaterial
from paceline.watched import Watched

_IDLE_CONNECTION_S = 65  # longer than a load balancer's 60, so that it is never we who close what it just uses
_LAST_WORDS_S = 1  # for what still runs when the server is stopped
_MAX_HEAD_BYTES = 64 * 1024
_FOLLOW_S = 1.0
_PATIENCE_S = _IDLE_CONNECTION_S  # with what no answer runs for
_FRAME_BYTES = 16  # for each byte of a body, however small its chunks are


class HttpServer:
    """Started once, stopped once."""

    def __init__(self, application: ASGIApp, *, host: str, port: int, tls: ServerTls | None = None) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._server = _Server(
            uvicorn.Config(
                _ended_quietly(application),
                http=_Bounded,
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
        self._serving: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None  # of the certificate
        self.url = ""

    async def start(self) -> None:
        """Listen; raises `StartupFailed` if the port is taken, or a certificate cannot be used."""
        watched = Watched([self._tls.cert, self._tls.key], self._tls.read) if self._tls is not None else None
        self._server.config.load()
        listener = self._listen()
        host, port = listener.getsockname()[:2]
        scheme = "http" if self._tls is None else "https"
        self.url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        logging.getLogger("uvicorn.error").addFilter(_is_news)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        if self._tls is not None and watched is not None and self._server.config.ssl is not None:
            self._following = asyncio.create_task(_follow(self._tls, watched, self._server.config.ssl))

    async def stop(self) -> None:
        """Take no more requests, and end what still runs within a second."""
        if self._following is not None:
            self._following.cancel()
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving

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


async def _follow(tls: ServerTls, watched: Watched[TlsMaterial], context: ssl.SSLContext) -> None:
    """Show a certificate that was renewed to whoever connects from then on."""
    shown: TlsMaterial | None = None
    while True:
        await asyncio.sleep(_FOLLOW_S)
        renewed = watched.value()
        if renewed is not shown:
            with suppress(OSError, ssl.SSLError):  # they change again this very moment, and are looked at again
                context.load_cert_chain(tls.cert, tls.key)
                shown = renewed


def _is_news(record: logging.LogRecord) -> bool:
    """That what still runs is ended when the server stops is no error."""
    return "timeout graceful shutdown exceeded" not in record.getMessage()


def _ended_quietly(application: ASGIApp) -> ASGIApp:
    """The same; that a request is cancelled when the server stops is no fault to be logged."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):
            await application(scope, receive, send)

    return run


class _Bounded(HttpToolsProtocol):
    """Bounds what uvicorn does not: a request's head and trailers in size, and in time all that no answer runs for.

    Counts what comes of a request besides its body, give or take what was read at once. That no answer runs for is a
    connection that says nothing, a head, and the rest of a body that was answered before its end. And a request that
    comes before the last one's answer closes the connection: uvicorn would hear no more of whether the caller is there.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes, self._body_bytes = 0, 0
        self._patience: asyncio.TimerHandle | None = None
        self._is_whole = True  # the last request that has begun

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        self._begin_patience()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_patience()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._is_whole = False
        self._begin_patience()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._end_patience()
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_whole:
            self._begin_patience()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self._patience is None and not self.transport.is_closing():
            self._begin_patience()  # bytes that begin no request end uvicorn's own
        is_too_much = self._head_bytes > _MAX_HEAD_BYTES + _FRAME_BYTES * self._body_bytes
        if is_too_much and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def on_body(self, body: bytes) -> None:
        self._head_bytes -= len(body)
        self._body_bytes += len(body)
        if not self.transport.is_closing():  # else it is that of a request which came too early
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes, self._body_bytes = 0, 0
        self._is_whole = True
        self._end_patience()
        if not self.transport.is_closing():
            super().on_message_complete()

    def _begin_patience(self) -> None:
        self._end_patience()
        self._patience = self.loop.call_later(_PATIENCE_S, self.transport.abort)

    def _end_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's business (`paceline.process`)."""
        yield
