"""Is anybody there, and is the way to them as it should be: port, TLS, certificates. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator

from paceline.doctor.findings import Finding, failed, ok, warning
from paceline.doctor.looks import Certificate, Distrust, Greeting, PortLook, Trouble
from paceline.exposure import is_loopback

PORT, TLS = "port", "tls"

RENEWAL = dt.timedelta(days=14)
"""A certificate, or a token, that ends sooner is to be renewed now."""

_START = "Start it (`paceline up`, `paceline serve` or `python -m orchestrator`)"
_OTHER_PORT = "or name another port by --endpoint"


def check_port(look: PortLook) -> Finding:
    """Whether a gRPC server listens there, or somebody who may be one behind TLS."""
    match look.trouble:
        case Trouble.UNKNOWN_HOST:
            return failed(
                PORT,
                f"There is no host of the name in {look.address}.",
                "Correct --endpoint, or see to it that the name can be resolved here.",
            )
        case Trouble.REFUSED:
            return failed(PORT, f"Nothing listens at {look.address}.", f"{_START}, {_OTHER_PORT}.")
        case Trouble.SILENT:
            return failed(
                PORT,
                f"Nobody answers at {look.address}, and nobody refuses either.",
                f"Open the port in the firewalls on the way, {_OTHER_PORT}.",
            )
        case Trouble.UNREACHABLE:
            return failed(PORT, f"There is no way to {look.address}.", f"See to this machine's network, {_OTHER_PORT}.")
    match look.greeting:
        case Greeting.HTTP1:
            return failed(
                PORT,
                f"What listens at {look.address} speaks HTTP/1, and no gRPC.",
                "Name the gRPC port by --endpoint; a URL of the HTTP API goes to --http.",
            )
        case Greeting.OTHER:
            return failed(
                PORT,
                f"Something else than Paceline listens at {look.address}.",
                "Name Paceline's port by --endpoint; if that should be this one, stop the other program and start it.",
            )
        case Greeting.NOTHING if not look.is_tls:
            return failed(
                PORT,
                f"What listens at {look.address} says nothing: it is not Paceline, or it hangs.",
                f"Look at the program that has the port, {_OTHER_PORT}.",
            )
    return ok(PORT, f"A server listens at {look.address}.")


def check_tls(look: PortLook, *, is_asked_for: bool, is_trusted: bool, now: dt.datetime) -> Iterator[Finding]:
    """Whether both sides agree on TLS, and whether the server's certificate is believed, and for how long.

    `is_trusted`: whoever asks says that nobody listens on the way.
    """
    if look.is_tls != is_asked_for:
        yield _disagreement(look)
    elif not look.is_tls:
        yield _plaintext(look, is_trusted=is_trusted)
    elif look.distrust is not None:
        yield distrusted(TLS, look.distrust, look.certificate)
    elif look.wants_certificate:
        yield failed(
            TLS,
            f"The server at {look.address} ends the connection of a caller without a certificate that it believes.",
            "Show one that its authority (--public-tls-ca) has signed, by --tls-cert and --tls-key.",
        )
    elif look.certificate is not None and look.certificate.ends - now < RENEWAL:
        yield warning(
            TLS,
            f"The server's certificate expires on {_date(look.certificate)}.",
            "Renew it, and put the new one into the file of --public-tls-cert, which is followed without a restart.",
        )
    else:
        until = f", until {_date(look.certificate)}" if look.certificate else ""
        yield ok(TLS, f"The server's certificate is believed{until}.")


def check_own_certificate(ends: dt.datetime, *, now: dt.datetime) -> Finding:
    """The one that we show, which has not expired yet."""
    if ends - now < RENEWAL:
        return warning(
            TLS,
            f"The certificate in the file of --tls-cert expires on {ends:%Y-%m-%d}.",
            "Have its authority sign a new one.",
        )
    return ok(TLS, f"Our own certificate is good until {ends:%Y-%m-%d}.")


def distrusted(name: str, distrust: Distrust, certificate: Certificate | None) -> Finding:
    """A server whose certificate we do not believe."""
    ends = f" on {_date(certificate)}" if certificate else ""
    match distrust:
        case Distrust.EXPIRED:
            return failed(
                name,
                f"The server's certificate has expired{ends}.",
                "Renew it, and put the new one into the file of --public-tls-cert.",
            )
        case Distrust.NOT_YET_VALID:
            return failed(
                name,
                "The server's certificate is not valid yet.",
                "Set this machine's clock, or wait until the certificate begins.",
            )
        case Distrust.NAME:
            names = ", ".join(certificate.names) if certificate and certificate.names else "another name"
            return failed(
                name,
                f"The server's certificate is for {names}, not for the name that was asked for.",
                "Ask for a name that it bears, in --endpoint or by --tls-name, or have a certificate issued for this "
                "one.",
            )
        case Distrust.AUTHORITY:
            issuer = f", {certificate.issuer!r}," if certificate else ""
            return failed(
                name,
                f"The authority{issuer} that signed the server's certificate is not believed here.",
                "Name the file of that authority's certificate by --tls-ca, if it is yours.",
            )


def _disagreement(look: PortLook) -> Finding:
    if look.is_tls:
        return failed(
            TLS,
            f"The server at {look.address} speaks TLS, and was asked in plaintext.",
            "Add --tls, or --tls-ca FILE with the authority that signed its certificate.",
        )
    return failed(
        TLS,
        f"The server at {look.address} speaks plaintext, and was asked over TLS.",
        "Give the orchestrator --public-tls-cert and --public-tls-key, or leave out --tls and the options that mean "
        "it.",
    )


def _plaintext(look: PortLook, *, is_trusted: bool) -> Finding:
    host = look.address.rpartition(":")[0]
    if is_loopback(host):
        return ok(TLS, "Plaintext, within this machine.")
    if is_trusted:
        return ok(TLS, "Plaintext, over a network that --trust-network says nobody listens on.")
    return warning(
        TLS,
        f"Prompts and answers travel to {host} in plaintext: whoever is on the way can read them.",
        "Give the orchestrator --public-tls-cert and --public-tls-key, and add --tls; or say by --trust-network that "
        "nobody listens there.",
    )


def _date(certificate: Certificate) -> str:
    return f"{certificate.ends:%Y-%m-%d}"
