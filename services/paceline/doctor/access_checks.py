"""Who is let in: the token that was shown, the file of tokens, and whether strangers are answered. Pure."""

from __future__ import annotations

import datetime as dt
import stat
from collections.abc import Iterator
from pathlib import Path

from paceline.doctor.connection_checks import RENEWAL
from paceline.doctor.findings import Finding, failed, ok, skipped, warning
from paceline.doctor.looks import OpenLook, ServiceLook
from paceline.tokens import TokenEntry, TokenFile, find_entry

TOKEN, TOKENS_FILE, EXPOSURE = "token", "tokens file", "exposure"

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def check_token(*, is_shown: bool, is_refused: bool) -> Finding:
    """What became of the token that came with the calls, or of the calls without one."""
    if not is_refused:
        return ok(TOKEN, "The token is taken." if is_shown else "No token is needed from here.")
    if is_shown:
        return failed(
            TOKEN,
            "The server does not know the token, or it has expired or been revoked.",
            "Look at the server's file with `paceline token list`, and have a new one made by `paceline token new`.",
        )
    return failed(
        TOKEN,
        "Callers need a token here, and none was shown.",
        "Give it by --token or PACELINE_TOKEN; `paceline token new` makes one.",
    )


def check_tokens_file(
    path: Path, file: TokenFile, *, mode: int, token: str | None, now: dt.datetime
) -> Iterator[Finding]:
    """The file on this machine: who may read it, and what it says of the token, without showing anything it holds."""
    if mode & _OTHERS:
        yield warning(
            TOKENS_FILE,
            f"Others than its owner have rights to {path} (mode {stat.S_IMODE(mode):04o}).",
            f"Take them away: chmod 600 {path}",
        )
    else:
        yield ok(TOKENS_FILE, f"{path} is its owner's alone, and holds {len(file.tokens)} tokens.")
    if token is None:
        return
    entry = find_entry(file.tokens, token)
    yield skipped(TOKEN, f"{path} does not hold the token that was shown.") if entry is None else _entry(entry, now)


def _entry(entry: TokenEntry, now: dt.datetime) -> Finding:
    renewed = f"Make another: `paceline token new {entry.name} --replace`."
    if entry.disabled:
        return failed(TOKEN, f"The token of {entry.name} is disabled.", f"Enable it in the file. {renewed}")
    if entry.has_expired(now):
        return failed(TOKEN, f"The token of {entry.name} has expired ({entry.expires}).", renewed)
    if entry.has_expired(now + RENEWAL):
        return warning(TOKEN, f"The token of {entry.name} expires soon ({entry.expires}).", renewed)
    until = f"is good until {entry.expires}" if entry.expires else "does not expire"
    return ok(TOKEN, f"The token of {entry.name} {until}.")


def check_exposure(look: OpenLook, *, is_trusted: bool) -> Finding:
    """Whether everybody who reaches the server is answered, and who that is."""
    if not look.address:
        return ok(EXPOSURE, "It is reached from this machine alone.")
    if not look.is_anonymous_answered:
        return ok(EXPOSURE, "Callers without a token or a certificate are refused.")
    if is_trusted:
        return ok(
            EXPOSURE,
            f"Everybody who reaches {look.address} is answered, and --trust-network says that this is nobody else.",
        )
    return warning(
        EXPOSURE,
        f"Everybody who reaches {look.address} is answered, without a token or a certificate.",
        "Give the orchestrator --tokens-file (`paceline token new`) or --public-tls-ca and start it without "
        "--trust-network, or let it listen on 127.0.0.1.",
    )


def check_service_exposure(look: ServiceLook, *, is_trusted: bool) -> Iterator[Finding]:
    """Whether a model service answers everybody."""
    if look.open_at and not is_trusted:
        yield warning(
            EXPOSURE,
            f"{look.title} answers everybody who reaches {look.open_at}.",
            "Give it --tls-cert, --tls-key and --tls-ca and start it without --trust-network, or let it listen on "
            "127.0.0.1.",
        )
