"""Whether a service may listen where its settings say: beyond this machine only for those whom it can tell apart."""

from __future__ import annotations

import ipaddress
from typing import Protocol

import structlog

from paceline.errors import StartupFailed

logger = structlog.get_logger(__name__)


class Listening(Protocol):
    """What is asked of a service's settings (`settings.ServiceSettings`)."""

    @property
    def host(self) -> str: ...
    @property
    def trust_network(self) -> bool: ...
    @property
    def is_protected(self) -> bool:
        """Whether whoever may not call is refused by certificate or token."""

    @property
    def protection_options(self) -> str:
        """How it would be protected, in words for a person."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there; a name other than localhost may mean anything."""
    bare = host.strip("[]")
    if bare.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def refuse_exposure(settings: Listening) -> None:
    """Raises `StartupFailed` where strangers could reach a service that lets everybody in."""
    if is_loopback(settings.host) or settings.is_protected or settings.trust_network:
        return
    raise StartupFailed(
        f"{settings.host} can be reached from other machines, and nothing here tells who calls; listen on 127.0.0.1 by "
        f"--host, or give {settings.protection_options}, or say by --trust-network that strangers cannot reach this "
        "network."
    )


def warn_of_trust(settings: Listening) -> None:
    """Say so where the network is all that keeps strangers out."""
    if not (is_loopback(settings.host) or settings.is_protected):
        logger.warning("everybody who can reach this address is let in, as --trust-network says", host=settings.host)
