"""Certificates for tests: an authority of one's own, and files such as a deployment has."""

from __future__ import annotations

import datetime as dt
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme

TARGET, DRAFTER, ORCHESTRATOR = "target.paceline", "drafter.paceline", "orchestrator.paceline"


@dataclass(frozen=True)
class Identity:
    """The files of one certificate, with the authority that its holder believes."""

    cert: Path
    key: Path
    ca: Path

    @property
    def settings(self) -> dict[str, Any]:
        """As settings of a service."""
        return {"tls_cert": self.cert, "tls_key": self.key, "tls_ca": self.ca}

    @property
    def public_settings(self) -> dict[str, Any]:
        """As settings of an orchestrator's public port, which lets clients in by certificate."""
        return {"public_tls_cert": self.cert, "public_tls_key": self.key, "public_tls_ca": self.ca}


class Authority:
    """Signs certificates and writes them down below a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._authority = folder, trustme.CA()
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(self._authority.cert_pem.bytes())
        self._issued = 0

    def issue(self, name: str, *, expires_in_s: float = 3600.0, believes: Path | None = None) -> Identity:
        """A certificate for one name; with a negative time one that has expired."""
        self._issued += 1
        identity = Identity(
            cert=self._folder / f"{self._issued}.pem",
            key=self._folder / f"{self._issued}.key",
            ca=believes or self.ca,
        )
        self.reissue(identity, name, expires_in_s=expires_in_s)
        return identity

    def reissue(self, identity: Identity, name: str, *, expires_in_s: float = 3600.0) -> None:
        """Put a new certificate into the same files, each replaced as a whole."""
        issued = self._authority.issue_cert(
            name, not_after=dt.datetime.now(dt.UTC) + dt.timedelta(seconds=expires_in_s)
        )
        replace_file(identity.key, issued.private_key_pem.bytes())
        replace_file(identity.cert, b"".join(pem.bytes() for pem in issued.cert_chain_pems))


def replace_file(path: Path, content: bytes) -> None:
    """In one step, as deployments do."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(content)
    os.replace(fresh, path)
