"""Who a service is and whom it believes: certificates, keys and authorities as PEM files, checked when they are read.

Knows nothing of gRPC; `rpc.py` makes channels and servers of what is read here.
"""

from __future__ import annotations

import datetime as dt
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import StartupFailed

if TYPE_CHECKING:
    from cryptography.x509 import Certificate


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """How a server is reached over TLS: whom to believe, and who we are if it asks."""

    ca: Path | None = None  # authorities whose servers are believed; None: those that gRPC comes with
    cert: Path | None = None  # our certificate and what stands between it and the authority; None: we show none
    key: Path | None = None  # of our certificate
    server_name: str | None = None  # the name that the server's certificate must bear; None: the host of its address

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.ca, self.cert, self.key) if path is not None)

    def read(self) -> TlsMaterial:
        """Raises `StartupFailed` for what is missing, is no PEM, does not fit together, or has expired."""
        return _material(cert=self.cert, key=self.key, ca=self.ca)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """How a server shows who it is, and which clients it takes."""

    cert: Path
    key: Path
    client_ca: Path | None = None  # authorities that must have signed a client's certificate; None: no client is asked
    client_names: frozenset[str] = frozenset()  # of which a client's certificate must bear one; empty: any name

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.cert, self.key, self.client_ca) if path is not None)

    @property
    def is_mutual(self) -> bool:
        """Whether clients are let in by their certificates alone."""
        return self.client_ca is not None

    def read(self) -> TlsMaterial:
        """Raises `StartupFailed` for what is missing, is no PEM, does not fit together, or has expired."""
        return _material(cert=self.cert, key=self.key, ca=self.client_ca)


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """What the files held, as PEM; whoever shows this may show the key, so it is never printed."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None

    def __repr__(self) -> str:
        return "TlsMaterial(...)"


def expires_unix_s(path: Path) -> float:
    """When the certificate in that file ends, in seconds since 1970; raises `StartupFailed` if there is none."""
    return _certificates(path, "certificate")[0].not_valid_after_utc.timestamp()


def _material(*, cert: Path | None, key: Path | None, ca: Path | None) -> TlsMaterial:
    if (cert is None) != (key is None):
        raise StartupFailed("A certificate and its key go together; name both, or neither.")
    if ca is not None:
        _require_valid(_certificates(ca, "authority's certificate"), ca)
    if cert is not None and key is not None:
        _require_valid(_certificates(cert, "certificate")[:1], cert)
        _require_fit(cert, key)
    return TlsMaterial(*(None if path is None else _content(path) for path in (cert, key, ca)))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupFailed(f"{path} cannot be read ({error.strerror}); name a PEM file that is there.") from error


def _certificates(path: Path, what: str) -> list[Certificate]:
    from cryptography.x509 import load_pem_x509_certificates  # noqa: PLC0415 - a client without TLS needs none of it

    try:
        return load_pem_x509_certificates(_content(path))
    except ValueError as error:
        raise StartupFailed(
            f"{path} holds no {what} in PEM; its lines begin with -----BEGIN CERTIFICATE-----."
        ) from error


def _require_valid(certificates: list[Certificate], path: Path) -> None:
    now = dt.datetime.now(dt.UTC)
    for certificate in certificates:
        if certificate.not_valid_after_utc <= now:
            raise StartupFailed(
                f"The certificate in {path} has expired at {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; renew it."
            )
        if certificate.not_valid_before_utc > now:
            raise StartupFailed(
                f"The certificate in {path} is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC only; look "
                "at this machine's clock."
            )


def _require_fit(cert: Path, key: Path) -> None:
    """Whether the key is the certificate's, by loading both the way a server does."""
    _content(key)
    try:
        # An encrypted key would ask for its password on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise StartupFailed(f"The key in {key} is not that of the certificate in {cert}; name its own.") from error
        raise StartupFailed(
            f"{key} holds no private key in PEM that can be used; its first line is -----BEGIN PRIVATE KEY-----, and it "
            "must not be encrypted."
        ) from error


def _refuse_password() -> str:
    return ""
