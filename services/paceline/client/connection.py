"""Where a server is, how it is reached, and who says to be asking."""

from __future__ import annotations

import grpc.aio

from paceline.errors import InvalidRequest
from paceline.exposure import is_loopback
from paceline.rpc import APPLICATION_METADATA, AUTHORIZATION_METADATA_KEY, open_channel
from paceline.tls import ClientTls

Metadata = tuple[tuple[str, str], ...]


class Connection:
    """One endpoint with what goes along with every call to it. Raises `InvalidRequest` for what cannot be used."""

    def __init__(
        self, endpoint: str, *, token: str | None = None, tls: ClientTls | None = None, trust_network: bool = False
    ) -> None:
        self.endpoint = endpoint
        host = _checked_host(endpoint)
        if token is not None:
            _check_token(token)
            if tls is None:
                require_private(host, trust_network=trust_network)
        self._tls = tls
        authorization = () if token is None else ((AUTHORIZATION_METADATA_KEY, f"Bearer {token}"),)
        self.metadata: Metadata = (APPLICATION_METADATA, *authorization)

    def open(self) -> grpc.aio.Channel:
        """A channel on the running event loop, closed by the caller; raises `StartupFailed` for unusable certificates."""
        return open_channel(self.endpoint, tls=self._tls)


def require_private(host: str, *, trust_network: bool) -> None:
    """Raises `InvalidRequest` where a token that travels in plaintext could be read on its way to `host`."""
    if not is_loopback(host) and not trust_network:
        raise InvalidRequest(
            f"The token would travel to {host} for everybody on the way to read; give tls, or say by trust_network that "
            "nobody listens there.",
            parameter="token",
        )


def _checked_host(endpoint: str) -> str:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidRequest(
            f"An endpoint is HOST:PORT, such as 127.0.0.1:50051, not {endpoint!r}.", parameter="endpoint"
        )
    return host


def _check_token(token: str) -> None:
    """The sentence must not show it."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidRequest("A token is made of visible ASCII characters; this one is not.", parameter="token")
