"""gRPC, in one place: channels, servers, the writer of a stream, and the table from our errors to status codes."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Generic, NoReturn, Protocol, TypeVar, cast

import grpc
import grpc.aio
import structlog
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from paceline.errors import (
    AnswerCancelled,
    ContextTooLong,
    DeadlineExceeded,
    DrafterUnavailable,
    Draining,
    InvalidRequest,
    LengthMismatch,
    MemoryFull,
    MethodNotFound,
    ModelMismatch,
    ModelNotFound,
    ModelUnavailable,
    PacelineError,
    PayloadInvalid,
    PeerRefused,
    QueueFull,
    RateLimited,
    ReaderStalled,
    RequestIdTaken,
    SessionNotFound,
    StaleEpoch,
    StartupFailed,
    TargetUnavailable,
    Unauthenticated,
    internal_error,
)
from paceline.tls import ClientTls, ServerTls
from paceline.watched import Watched

logger = structlog.get_logger(__name__)

ERROR_DOMAIN = "paceline"
MAX_MESSAGE_BYTES = 8 * 1024 * 1024
SPLIT_BYTES = 256 * 1024  # one long prompt must not hold up other sessions' verdicts

AUTHORIZATION_METADATA_KEY = "authorization"
"""The caller's token, as in HTTP: `Bearer ...`."""
DEADLINE_METADATA_KEY = "deadline-unix-ms"
"""When the caller stops waiting, in milliseconds since 1970, in ASCII digits: an ingress may hide gRPC's own deadline."""
TRACEPARENT_METADATA_KEY = "traceparent"
"""The caller's trace context, as W3C writes it."""
APPLICATION_METADATA = ("application", "paceline")
"""What Ray Serve's ingress routes by, where it serves more than one application; others ignore it."""

STATUS_CODES: dict[type[PacelineError], grpc.StatusCode] = {
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    PeerRefused: grpc.StatusCode.PERMISSION_DENIED,
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    PayloadInvalid: grpc.StatusCode.INVALID_ARGUMENT,
    ContextTooLong: grpc.StatusCode.OUT_OF_RANGE,
    ModelNotFound: grpc.StatusCode.NOT_FOUND,
    MethodNotFound: grpc.StatusCode.UNIMPLEMENTED,
    RequestIdTaken: grpc.StatusCode.ALREADY_EXISTS,
    AnswerCancelled: grpc.StatusCode.CANCELLED,
    SessionNotFound: grpc.StatusCode.NOT_FOUND,
    StaleEpoch: grpc.StatusCode.ABORTED,
    ReaderStalled: grpc.StatusCode.ABORTED,
    LengthMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    ModelMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    ModelUnavailable: grpc.StatusCode.FAILED_PRECONDITION,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RateLimited: grpc.StatusCode.RESOURCE_EXHAUSTED,
    MemoryFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Draining: grpc.StatusCode.UNAVAILABLE,
    TargetUnavailable: grpc.StatusCode.UNAVAILABLE,
    DrafterUnavailable: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    StartupFailed: grpc.StatusCode.UNAVAILABLE,
    PacelineError: grpc.StatusCode.INTERNAL,
}

Context = grpc.aio.ServicerContext[Any, Any]

CallCheck = Callable[[str, Context], None]
"""Asked with the method's full name and the context of a call; raises `PacelineError` for one that must not be made."""

_ALTERNATIVE_NAMES = "x509_subject_alternative_name"  # in a context's `auth_context`

_CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.enable_retries", 0),
    # Services find one another by address; a proxy meant for the web must not come between.
    ("grpc.enable_http_proxy", 0),
    # A restarted replica is found again within a second, not after the default of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name, how long one attempt to connect may take; a refused one ends at once.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
_SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.bdp_probe", 0),
    # By default two servers bind one port without a word.
    ("grpc.so_reuseport", 0),
    # Of one connection; a pair of services has one stream.
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
]


def open_channel(address: str, tls: ClientTls | None = None) -> grpc.aio.Channel:
    """A channel, plaintext without `tls`; made on the event loop that uses it, closed by the caller.

    The files of `tls` are read here, so a channel opened later knows what was renewed; raises `StartupFailed` for what
    cannot be used.
    """
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    material = tls.read()
    name = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
    return grpc.aio.secure_channel(
        address,
        grpc.ssl_channel_credentials(material.ca, material.key, material.cert),
        options=[*_CHANNEL_OPTIONS, *name],
    )


# ---------------------------------------------------------------------------------------------------------------------
# Servers


class Server:
    """One gRPC server on one port, with the standard health service. Started once, stopped once."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        tls: ServerTls | None = None,
        check: CallCheck | None = None,
        is_reflective: bool = False,
        connection_age_s: float | None = None,
    ) -> None:
        """`check` is asked before every call, whatever its service; without `tls` the port is plaintext.

        With `is_reflective` the server describes its protocol to whoever may call it. Connections older than
        `connection_age_s` take no further calls, so that callers connect anew; what runs on them goes on.
        """
        self._host, self._port, self._tls, self._is_reflective = host, port, tls, is_reflective
        checks = [_names_checked(tls.client_names)] if tls is not None and tls.client_names else []
        guards = [_Guard(each) for each in (*checks, *([check] if check else []))]
        age = [("grpc.max_connection_age_ms", int(connection_age_s * 1000))] if connection_age_s else []
        self._server = grpc.aio.server(options=[*_SERVER_OPTIONS, *age], interceptors=[*guards, _ReadableRequests()])
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.address = ""

    @property
    def registrar(self) -> grpc.aio.Server:
        """What generated `add_..._to_server` functions take."""
        return self._server

    async def start(self, service_name: str) -> None:
        """Listen and report SERVING for `service_name`.

        Raises `StartupFailed` if the port is taken, or the certificate cannot be used.
        """
        _refuse_taken_port(self._host, self._port)
        address = f"{_bracketed(self._host)}:{self._port}"
        try:
            if self._tls is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, _server_credentials(self._tls))
        except RuntimeError as error:
            raise StartupFailed(_port_sentence(self._host, self._port)) from error
        self.address = f"{_bracketed(self._host)}:{port}"
        if self._is_reflective:
            reflection.enable_server_reflection(
                (service_name, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
            )
        self._server.add_generic_rpc_handlers((_UnknownMethods(),))  # the last one to be asked
        await self._server.start()
        for name in ("", service_name):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def begin_draining(self) -> None:
        """Report NOT_SERVING; running calls go on."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _port_sentence(host: str, port: int) -> str:
    return f"Port {port} on {host} cannot be opened; choose another with --port, or 0 for any free one."


def _refuse_taken_port(host: str, port: int) -> None:
    """Try the port first: gRPC prints its own lines on standard error when a bind fails."""
    if port == 0:
        return
    if not 0 < port < 65536:
        raise StartupFailed(f"Port {port} does not exist; choose one from 1 to 65535, or 0 for any free one.")
    try:
        family = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), port))
    except OSError as error:
        reason = error.strerror or str(error)
        raise StartupFailed(f"{_port_sentence(host, port)} ({reason})") from error


# ---------------------------------------------------------------------------------------------------------------------
# Who is let in


def _server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Credentials that follow their files: each new connection is met with what was read last."""
    watched = Watched(tls.paths, tls.read)

    def configuration() -> Any:
        material = watched.value()
        assert material.key is not None, "a server has a key"
        assert material.cert is not None, "and its certificate"
        return grpc.ssl_server_certificate_configuration([(material.key, material.cert)], root_certificates=material.ca)

    return grpc.dynamic_ssl_server_credentials(
        configuration(), configuration, require_client_authentication=tls.is_mutual
    )


def _names_checked(names: frozenset[str]) -> CallCheck:
    """That the caller's certificate, which the handshake has verified, bears one of the names."""

    def check(method: str, context: Context) -> None:
        borne = {name.decode("utf-8", "replace") for name in context.auth_context().get(_ALTERNATIVE_NAMES, ())}
        if borne.isdisjoint(names):
            raise PeerRefused(
                f"The certificate of the caller bears {', '.join(sorted(borne)) or 'no name'}, and "
                f"{' or '.join(sorted(names))} alone is let in here; --tls-clients names who may call."
            )

    return check


class _Guard(grpc.aio.ServerInterceptor):
    """Puts a check before every call: what the check raises ends the call, and its handler never runs."""

    def __init__(self, check: CallCheck) -> None:
        self._check = check

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method

        def admit(request: Any, context: Context) -> Any:
            self._check(method, context)
            return request

        return _guarded(handler, method, admit)


def _guarded(handler: Any, method: str, admit: Callable[[Any, Context], Any]) -> Any:
    """The same handler for what `admit` makes of a request, or a stream of them; whatever is raised ends the call as our
    errors do."""
    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    inner = getattr(handler, kind)

    async def respond(request: Any, context: Context) -> Any:
        async with mapped_errors(context, rpc=method):
            return await inner(admit(request, context), context)

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        async with mapped_errors(context, rpc=method), aclosing(inner(admit(request, context), context)) as responses:
            async for response in responses:
                yield response

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    behavior = stream if inspect.isasyncgenfunction(inner) else respond
    return make(behavior, handler.request_deserializer, handler.response_serializer)


# ---------------------------------------------------------------------------------------------------------------------
# Calls that no handler can take


class _ReadableRequests(grpc.aio.ServerInterceptor):
    """Refuses a request whose bytes are no message of its type in our words; on a stream that ends the call."""

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        method = handler_call_details.method

        def read(data: bytes) -> Message | None:
            try:
                return cast(Message, handler.request_deserializer(data))
            except DecodeError:
                return None

        def readable(request: Message | None) -> Message:
            if request is None:
                raise PayloadInvalid(f"These bytes are no request of {method}; send what the protocol says.")
            return request

        async def all_readable(requests: AsyncIterable[Message | None]) -> AsyncIterator[Message]:
            async for request in requests:
                yield readable(request)

        def admit(request: Any, _context: Context) -> Any:
            return all_readable(request) if handler.request_streaming else readable(request)

        return _guarded(handler._replace(request_deserializer=read), method, admit)


class _UnknownMethods(grpc.GenericRpcHandler):
    """Whatever no other handler knows."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method

        async def refuse(_requests: Any, context: Context) -> None:
            async with mapped_errors(context, rpc=method):
                raise MethodNotFound(
                    f"There is no method {method} here; it is another service's, or newer than this one."
                )

        return grpc.stream_stream_rpc_method_handler(refuse)


# ---------------------------------------------------------------------------------------------------------------------
# Streams

Item = TypeVar("Item", bound=Message)


class Outbox(Generic[Item]):
    """The only writer of one stream: whatever is ready when a write ends leaves as one message.

    Coalescing costs no timer: an idle stream writes at once, a busy one writes batches. Closed by a flag, never by
    cancelling a write, which would lose the stream's status.
    """

    def __init__(
        self, write: Callable[[list[Item]], Awaitable[object]], *, max_items: int = 65_536, max_bytes: int = SPLIT_BYTES
    ) -> None:
        self._write, self._max_items, self._max_bytes = write, max_items, max_bytes
        self._items: deque[Item] = deque()
        self._ready = asyncio.Event()
        self._closing = False

    def put(self, item: Item) -> None:
        """Queue one item; raises `QueueFull` when the peer has stopped reading."""
        if len(self._items) >= self._max_items:
            raise QueueFull("The peer does not read its stream; the queue to it is full.")
        self._items.append(item)
        self._ready.set()

    def close(self) -> None:
        """Write out what is queued, then let `run` return."""
        self._closing = True
        self._ready.set()

    async def run(self) -> None:
        while True:
            await self._ready.wait()
            batch = self._take_batch()
            if batch:
                await self._write(batch)
            elif self._closing:
                return
            else:
                self._ready.clear()

    def _take_batch(self) -> list[Item]:
        batch: list[Item] = []
        size = 0
        while self._items:
            # As dear as to serialise it, so only once an item.
            size += self._items[0].ByteSize()
            if batch and size > self._max_bytes:
                break
            batch.append(self._items.popleft())
        return batch


class Abortable(Protocol):
    """The part of a servicer context that errors need."""

    async def abort_with_status(self, status: grpc.Status) -> NoReturn: ...


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def status_code(error: PacelineError) -> grpc.StatusCode:
    return next(STATUS_CODES[kind] for kind in type(error).__mro__ if kind in STATUS_CODES)


def to_status(error: PacelineError) -> status_pb2.Status:
    """The rich status of an error: code, sentence, `ErrorInfo`, and where it helps `BadRequest` or `RetryInfo`."""
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=error.details)
    ]
    if status_code(error) is grpc.StatusCode.INVALID_ARGUMENT:
        field = error.details.get("parameter", "")
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=error.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        wrapper = any_pb2.Any()
        wrapper.Pack(detail)
        packed.append(wrapper)
    return status_pb2.Status(code=status_code(error).value[0], message=error.message, details=packed)


class mapped_errors:  # noqa: N801 - as those of contextlib are named
    """Turn what a handler raises into a gRPC status, which ends the call; the unexpected is logged and hidden from the peer."""

    def __init__(self, context: Abortable, **log_fields: str) -> None:
        self._context, self._log_fields = context, log_fields

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        match error:
            case PacelineError():
                await self._abort(error)
            case grpc.aio.BaseError():
                pass  # the call has been ended, here or by whoever made it
            case Exception():
                logger.error("a handler failed", exc_info=error, **self._log_fields)
                await self._abort(internal_error())

    async def _abort(self, error: PacelineError) -> None:
        try:
            await self._context.abort_with_status(rpc_status.to_status(to_status(error)))
        except grpc.aio.AbortError:
            raise
        except grpc.aio.BaseError:
            # Its caller is gone, which gRPC is about to hear: else it would take this for a fault of ours.
            raise asyncio.CancelledError from None
