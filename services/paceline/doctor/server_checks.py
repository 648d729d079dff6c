"""Is it Paceline, does it fit, and how far away is it: server, health, version, clock, round trip. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paceline.doctor.findings import Finding, failed, ok, skipped, warning
from paceline.doctor.looks import ClockLook, Health, ServerLook

SERVER, HEALTH, VERSION, CLOCK, ROUND_TRIP = "server", "health", "version", "clock", "round trip"

CLOCK_WARNING_S, CLOCK_FAILURE_S = 1.0, 30.0
"""An orchestrator's clock that is off by more ends answers noticeably, or far, too early or too late."""

FAR_S = 0.25
"""A round trip that every answer waits for once, and people notice."""


def check_server(look: ServerLook, *, endpoint: str) -> Iterator[Finding]:
    """Whether it is an orchestrator, and takes requests."""
    if look.answers_as:
        yield failed(
            SERVER,
            f"What answers at {endpoint} is a {look.answers_as} service, which is for orchestrators alone.",
            "Name the orchestrator's port by --endpoint.",
        )
    elif look.health is Health.UNKNOWN_SERVICE:
        yield failed(
            SERVER,
            f"A gRPC server answers at {endpoint}, but it is no Paceline orchestrator.",
            "Name the orchestrator's port by --endpoint; behind a proxy, let it pass paceline.v1.GenerationService and "
            "grpc.health.v1.Health on.",
        )
    elif look.health is Health.NO_ANSWER:
        yield failed(
            SERVER,
            f"The server at {endpoint} does not answer a call ({look.trouble}).",
            "Look into the orchestrator's log; if it has none of this, something on the way ends the calls.",
        )
    else:
        yield ok(SERVER, f"A Paceline orchestrator answers at {endpoint}.")
        yield _health(look.health)


def _health(health: Health) -> Finding:
    if health is Health.SERVING:
        return ok(HEALTH, "It takes requests.")
    return failed(
        HEALTH,
        "It takes no requests: it is about to stop, or has no target.",
        "Wait for the one that takes its place, or start it again; `paceline status` shows its targets.",
    )


def check_version(client: str, server: str, services: Mapping[str, str]) -> Iterator[Finding]:
    """Whether our version can talk to the server's, and whether all services run the same one.

    `services` are the versions by who runs them; empty where one does not say.
    """
    install = f"Install one version everywhere: pip install 'paceline=={client or server}'"
    if not client:
        yield skipped(VERSION, "This client does not know its own version, for it is not installed as a package.")
    elif not server:
        yield warning(VERSION, f"The orchestrator does not say its version; this client is {client}.", install)
    elif not fits(client, server):
        yield failed(
            VERSION,
            f"This client is of version {client}, the orchestrator of {server}: they may not understand one another.",
            install,
        )
    else:
        yield from _alike({"the orchestrator": server, **services}, install)


def _alike(versions: Mapping[str, str], install: str) -> Iterator[Finding]:
    by_version: dict[str, list[str]] = {}
    for who, version in versions.items():
        by_version.setdefault(version or "unknown", []).append(who)
    if len(by_version) == 1:
        yield ok(VERSION, f"All that answer run version {next(iter(by_version))}.")
        return
    words = "; ".join(f"{version}: {', '.join(who)}" for version, who in by_version.items())
    yield warning(VERSION, f"Services of one deployment run several versions ({words}).", install)


def fits(client: str, server: str) -> bool:
    """Whether the two can talk: by Semantic Versioning the first number, and before 1.0 the second one too, says so."""
    ours, theirs = client.split("."), server.split(".")
    if ours[0] == theirs[0] == "0":
        return ours[:2] == theirs[:2]
    return ours[0] == theirs[0]


def check_clock(who: str, look: ClockLook | None, *, has_deadlines: bool) -> Finding:
    """How far that one's clock is from this machine's, as far as the way there lets one tell.

    `has_deadlines`: it is told moments to be done by, and not only writes logs and spans.
    """
    if look is None:
        return skipped(CLOCK, f"{who} does not say what its clock says.")
    off_s = max(0.0, abs(look.ahead_s) - look.uncertain_s)
    if off_s <= CLOCK_WARNING_S:
        return ok(CLOCK, f"{who} has the same time as this machine.")
    where, when = ("ahead of", "early") if look.ahead_s > 0 else ("behind", "late")
    sentence = f"{who} has a clock that is {off_s:.0f} s {where} this machine's."
    remedy = "Let both machines follow a time server (NTP)"
    if not has_deadlines:
        return warning(CLOCK, sentence, f"{remedy}: logs and spans of several machines do not fit together otherwise.")
    remedy += f": deadlines travel as moments, so behind an ingress answers end by so much too {when}."
    return failed(CLOCK, sentence, remedy) if off_s > CLOCK_FAILURE_S else warning(CLOCK, sentence, remedy)


def check_round_trip(round_trip_s: float) -> Finding:
    """From this machine to the orchestrator and back."""
    sentence = f"A question to the orchestrator takes {round_trip_s * 1000:.0f} ms from here."
    if round_trip_s <= FAR_S:
        return ok(ROUND_TRIP, sentence)
    return warning(
        ROUND_TRIP, sentence, "Ask from a machine that is nearer, or see what keeps the network or the server so busy."
    )
