"""The HTTP API at its URL, and what its metrics say of drafters. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.doctor.connection_checks import distrusted
from paceline.doctor.findings import Finding, failed, ok, skipped, warning
from paceline.doctor.looks import HttpLook

HTTP, ACCEPTANCE = "http", "acceptance"

_UNUSED = "paceline_drafter_unused"
_BELOW_EXPECTED = "paceline_drafter_acceptance_below_expected"


def check_http(look: HttpLook, *, served: Sequence[str]) -> Iterator[Finding]:
    """Whether OpenAI's clients find there what gRPC's do; `served` are the models over gRPC, if that was asked."""
    if look.distrust is not None:
        yield distrusted(HTTP, look.distrust, None)
    elif look.trouble:
        yield failed(
            HTTP,
            f"Nobody answers at {look.url} ({look.trouble}).",
            "Start the orchestrator with --http-port, or correct --http, its port and whether it is http or https.",
        )
    elif look.models_status == 401:
        yield failed(
            HTTP,
            f"{look.url} does not take the token, or needs one.",
            "Give it by --token or PACELINE_TOKEN; `paceline token new` makes one.",
        )
    elif look.model_names is None:
        yield failed(
            HTTP,
            f"What answers at {look.url} is not Paceline's HTTP API (/v1/models gives {look.models_status}).",
            "Correct --http, without /v1 at its end; behind a proxy, let it pass /v1, /health and /metrics on.",
        )
    elif look.health_status != 200:
        yield failed(
            HTTP,
            f"{look.url}/health gives {look.health_status}: {look.health_words or 'no word why'}.",
            "Start a target, or wait for the orchestrator that takes this one's place.",
        )
    elif served and not set(served) & set(look.model_names):
        yield failed(
            HTTP,
            f"{look.url} serves {', '.join(look.model_names)}, and the gRPC port {', '.join(served)}.",
            "Name the two ports of one deployment by --endpoint and --http.",
        )
    else:
        yield ok(HTTP, f"{look.url} serves {', '.join(look.model_names)}.")


def check_acceptance(look: HttpLook) -> Iterator[Finding]:
    """What the orchestrator itself holds of its drafters, by its metrics."""
    if not look.metrics:
        yield skipped(ACCEPTANCE, f"There are no metrics at {look.url}/metrics.")
        return
    raised = {
        line.partition(" ")[0].partition("{")[0]
        for line in look.metrics.splitlines()
        if line.startswith((_UNUSED, _BELOW_EXPECTED)) and line.rpartition(" ")[2] in ("1", "1.0")
    }
    if _UNUSED in raised:
        yield warning(
            ACCEPTANCE,
            "Drafters are connected, and no answer uses a draft of theirs.",
            "Look into the orchestrator's log, which names the likely causes: drafts that come too late, sessions that "
            "the drafter refuses, prompts beyond its context.",
        )
    if _BELOW_EXPECTED in raised:
        yield warning(
            ACCEPTANCE,
            "A drafter is accepted far less than its training recorded.",
            "Look into the orchestrator's log, which names the drafter and the likely causes, and start it with the "
            "revision, number format and target that it was trained for.",
        )
    if not raised:
        yield ok(ACCEPTANCE, "No drafter is unused, or accepted far less than its training recorded.")
