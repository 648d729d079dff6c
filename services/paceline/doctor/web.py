"""What an orchestrator says over HTTP: its health, its models, its metrics."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import ssl
from urllib.parse import SplitResult, urlsplit

from paceline.doctor.certificates import distrust_of, tls_context
from paceline.doctor.looks import HttpLook
from paceline.errors import InvalidRequest
from paceline.tls import ClientTls

_MAX_BODY_BYTES = 8 * 1024 * 1024


def checked_url(url: str) -> str:
    """Without a slash at its end; raises `InvalidRequest` for what is no URL of HTTP."""
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise InvalidRequest(f"An HTTP URL is such as http://127.0.0.1:8000, not {url!r}.", parameter="http")
    return url.rstrip("/")


async def look_at_url(url: str, *, token: str | None, tls: ClientTls | None, timeout_s: float) -> HttpLook:
    """Ask `url`, as `checked_url` gives it; over https as `tls` says, whose files can be used."""
    return await asyncio.to_thread(_look, url, token, tls or ClientTls(), timeout_s)


def _look(url: str, token: str | None, tls: ClientTls, timeout_s: float) -> HttpLook:
    parts = urlsplit(url)
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    try:
        health_status, health = _get(parts, "/health", {}, tls, timeout_s)
        models_status, models = _get(parts, "/v1/models", headers, tls, timeout_s)
        metrics_status, metrics = _get(parts, "/metrics", headers, tls, timeout_s)
    except ssl.SSLCertVerificationError as error:
        return HttpLook(url=url, trouble="its certificate is not believed", distrust=distrust_of(error))
    except (OSError, UnicodeError, http.client.HTTPException) as error:
        return HttpLook(url=url, trouble=str(error) or type(error).__name__)
    return HttpLook(
        url=url,
        health_status=health_status,
        health_words=_field(health, "status"),
        models_status=models_status,
        model_names=_model_names(models) if models_status == http.client.OK else None,
        metrics=metrics.decode("utf-8", "replace") if metrics_status == http.client.OK else "",
    )


def _get(parts: SplitResult, path: str, headers: dict[str, str], tls: ClientTls, timeout_s: float) -> tuple[int, bytes]:
    """Status and body. A connection for each: what one question does to it must not be the next one's trouble."""
    assert parts.hostname is not None, "the URL was checked"
    is_tls = parts.scheme == "https"
    port = parts.port or (http.client.HTTPS_PORT if is_tls else http.client.HTTP_PORT)
    connection = http.client.HTTPConnection(parts.hostname, port, timeout=timeout_s)
    try:
        if is_tls:
            plain = socket.create_connection((parts.hostname, port), timeout=timeout_s)
            context = tls_context(tls, believes_anybody=False, protocols=("http/1.1",))
            connection.sock = context.wrap_socket(plain, server_hostname=tls.server_name or parts.hostname)
        connection.request("GET", parts.path + path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read(_MAX_BODY_BYTES)
    finally:
        connection.close()


def _model_names(body: bytes) -> tuple[str, ...] | None:
    try:
        return tuple(str(model["id"]) for model in json.loads(body)["data"])
    except (ValueError, TypeError, KeyError):
        return None


def _field(body: bytes, name: str) -> str:
    try:
        return str(json.loads(body)[name])
    except (ValueError, TypeError, KeyError):
        return ""
