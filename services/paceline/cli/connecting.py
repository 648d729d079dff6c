"""How a command reaches a running server: as whom, and over what."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from paceline.client import ClientTls, GenerationClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Connecting:
    """What goes with every connection of a command."""

    token: str | None = field(default=None, repr=False)
    tls: ClientTls | None = None  # None: in the clear
    trust_network: bool = False

    @classmethod
    def of(
        cls,
        *,
        token: str | None,
        tls: bool,
        ca: Path | None,
        cert: Path | None,
        key: Path | None,
        name: str | None,
        trust_network: bool,
    ) -> Connecting:
        """From the options; any one about certificates means TLS."""
        given = ClientTls(ca=ca, cert=cert, key=key, server_name=name)
        return cls(token=token, tls=given if tls or given != ClientTls() else None, trust_network=trust_network)

    def client(self, endpoint: str) -> GenerationClient:
        """Raises `InvalidRequest` for a token that would be shown to strangers."""
        return GenerationClient(endpoint, token=self.token, tls=self.tls, trust_network=self.trust_network)
