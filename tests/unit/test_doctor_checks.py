"""The checks of `paceline doctor`: what they make of what was seen."""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.client import DeploymentStatus, OrchestratorStatus, PoolStatus, ReplicaStatus, ServedModel
from paceline.doctor import access_checks, answer_checks, connection_checks, http_checks, pool_checks, server_checks
from paceline.doctor.access_checks import check_exposure, check_service_exposure
from paceline.doctor.answer_checks import check_answers, check_distance, check_model, check_refusal
from paceline.doctor.connection_checks import check_own_certificate, check_port, check_tls
from paceline.doctor.findings import Finding, Outcome, ok, warning
from paceline.doctor.http_checks import check_acceptance, check_http
from paceline.doctor.looks import (
    AnswerLook,
    ClockLook,
    Distrust,
    Greeting,
    Health,
    HttpLook,
    OpenLook,
    PortLook,
    ServerLook,
    ServiceLook,
    Trouble,
)
from paceline.doctor.pool_checks import check_drafters, check_memory, check_services, check_targets
from paceline.doctor.server_checks import check_clock, check_round_trip, check_server, check_version, fits
from paceline.doctor.web import checked_url
from paceline.errors import InvalidRequest, PacelineError, QueueFull
from paceline.generation import SpeculationOptions, SpeculationUsage
from paceline.rounds import RoundRecord
from paceline.types import DraftOrigin, ModelInfo

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
NOW = dt.datetime(2026, 5, 1, tzinfo=dt.UTC)
REPLICA = ReplicaStatus(
    replica_id="a",
    address="10.0.0.1:7001",
    model_id="big",
    sessions=3,
    max_sessions=16,
    kv_used_tokens=100,
    kv_capacity_tokens=1000,
    is_connected=True,
)
INFO = ModelInfo(
    model_id="big", vocab_size=100, max_context=2048, tokenizer_sha256="", incarnation="1", dtype="float32"
)
SERVED = ServedModel(
    name="big",
    target=INFO,
    drafter=replace(INFO, model_id="small", method="draft_model"),
    speculation=SpeculationOptions(),
    default_max_tokens=256,
    max_prompt_tokens=2047,
    max_choices=16,
)
ANSWER = AnswerLook(
    request_id="r", token_ids=(1, 2), first_token_s=0.1, usage=SpeculationUsage(num_drafts=3, fallback_rounds=1)
)
ROUND = RoundRecord(
    session_id="r",
    number=1,
    committed_length=4,
    began_s=10.0,
    draft_s=10.03,
    verdict_s=10.1,
    ended_s=10.1,
    step_time_s=0.02,
    draft_origin=DraftOrigin.REDRAFT,
    draft_arrived_s=10.03,
    draft_time_s=0.01,
)


def status_of(*replicas: ReplicaStatus, pool: str = "target", desired: int | None = None) -> DeploymentStatus:
    return DeploymentStatus(
        pools=(PoolStatus(name=pool, replicas=replicas, desired_replicas=desired),),
        orchestrator=OrchestratorStatus(running_answers=0, max_answers=256),
    )


def outcomes(*findings: Finding) -> list[Outcome]:
    return [finding.outcome for finding in findings]


def test_every_check_is_in_the_documentation() -> None:
    """By its name, in the table of docs/doctor.md, and no other is."""
    modules = (access_checks, answer_checks, connection_checks, http_checks, pool_checks, server_checks)
    names = {
        value
        for module in modules
        for constant, value in vars(module).items()
        if constant.isupper() and not constant.startswith("_") and isinstance(value, str)
    }
    assert set(re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)) == names


def test_a_fault_comes_with_what_to_do() -> None:
    """And nothing is to be done where there is none."""
    with pytest.raises(AssertionError):
        warning("port", "It is slow.", "")
    assert ok("port", "All is well.").remedy == ""


# ---------------------------------------------------------------------------------------------------------------------
# The way there


@pytest.mark.parametrize("trouble", Trouble)
def test_every_trouble_is_a_failure_of_the_port(trouble: Trouble) -> None:
    """With its own words."""
    finding = check_port(PortLook(address="a:1", trouble=trouble))
    assert (finding.name, finding.outcome) == ("port", Outcome.FAILED)
    assert "--endpoint" in finding.remedy


def test_plaintext_beyond_this_machine_is_warned_of() -> None:
    """Unless it is said that nobody listens there."""
    look = PortLook(address="10.0.0.1:9000", greeting=Greeting.HTTP2)
    (seen,) = check_tls(look, is_asked_for=False, is_trusted=False, now=NOW)
    (trusted,) = check_tls(look, is_asked_for=False, is_trusted=True, now=NOW)
    (here,) = check_tls(replace(look, address="[::1]:9000"), is_asked_for=False, is_trusted=False, now=NOW)
    assert outcomes(seen, trusted, here) == [Outcome.WARNING, Outcome.OK, Outcome.OK]
    assert "--public-tls-cert" in seen.remedy


@pytest.mark.parametrize("distrust", Distrust)
def test_every_distrust_is_a_failure(distrust: Distrust) -> None:
    """Also where the certificate itself could not be read."""
    look = PortLook(address="a:1", greeting=Greeting.HTTP2, is_tls=True, distrust=distrust)
    (finding,) = check_tls(look, is_asked_for=True, is_trusted=False, now=NOW)
    assert (finding.name, finding.outcome) == ("tls", Outcome.FAILED)


def test_own_certificate_is_renewed_in_time() -> None:
    """A fortnight before its end."""
    found = [check_own_certificate(NOW + dt.timedelta(days=days), now=NOW) for days in (13, 15)]
    assert outcomes(*found) == [Outcome.WARNING, Outcome.OK]


def test_exposure_is_what_a_stranger_reaches() -> None:
    """Nobody beyond this machine, nobody without a token, everybody."""
    looks = [
        OpenLook(is_anonymous_answered=True),
        OpenLook(is_anonymous_answered=False, address="10.0.0.1:9000"),
        OpenLook(is_anonymous_answered=True, address="10.0.0.1:9000"),
    ]
    found = [check_exposure(look, is_trusted=False) for look in looks]
    assert outcomes(*found) == [Outcome.OK, Outcome.OK, Outcome.WARNING]
    service = ServiceLook(kind="target", address="10.0.0.2:7001", is_named=False, open_at="10.0.0.2:7001")
    (open_service,) = check_service_exposure(service, is_trusted=False)
    assert "--tls-cert" in open_service.remedy
    assert not list(check_service_exposure(service, is_trusted=True))


# ---------------------------------------------------------------------------------------------------------------------
# The server


def test_an_orchestrator_that_takes_no_requests() -> None:
    """It is one, and its health has failed."""
    found = list(check_server(ServerLook(health=Health.NOT_SERVING), endpoint="a:1"))
    assert [(finding.name, finding.outcome) for finding in found] == [
        ("server", Outcome.OK),
        ("health", Outcome.FAILED),
    ]


@pytest.mark.parametrize(
    ("client", "server", "do_fit"),
    [
        ("0.1.0", "0.1.7", True),
        ("0.1.0", "0.2.0", False),
        ("1.0.0", "1.9.3", True),
        ("1.9.0", "2.0.0", False),
        ("0.9.0", "1.0.0", False),
    ],
)
def test_versions_fit_as_semantic_versioning_says(client: str, server: str, do_fit: bool) -> None:
    """Before 1.0 the second number counts too."""
    assert fits(client, server) is do_fit
    assert fits(server, client) is do_fit


def test_versions_that_are_not_said() -> None:
    """A server's silence is a warning, our own makes the check impossible, and a replica's shows among the others."""
    (silent,) = check_version("0.1.0", "", {})
    (unknown,) = check_version("", "0.1.0", {})
    (mixed,) = check_version("0.1.0", "0.1.0", {"the target at a:1": ""})
    assert outcomes(silent, unknown, mixed) == [Outcome.WARNING, Outcome.SKIPPED, Outcome.WARNING]
    assert "unknown: the target at a:1" in mixed.sentence


def test_a_long_way_is_no_wrong_clock() -> None:
    """What the way may hide is not held against the clock."""
    found = [check_clock("It", ClockLook(2.0, uncertain_s), has_deadlines=True) for uncertain_s in (0.1, 1.5)]
    assert outcomes(*found) == [Outcome.WARNING, Outcome.OK]
    assert check_clock("It", None, has_deadlines=True).outcome is Outcome.SKIPPED


def test_a_slow_round_trip_is_warned_of() -> None:
    """People notice it with every answer."""
    assert outcomes(check_round_trip(0.002), check_round_trip(0.4)) == [Outcome.OK, Outcome.WARNING]


# ---------------------------------------------------------------------------------------------------------------------
# Pools


@pytest.mark.parametrize(
    ("changes", "words", "remedy"),
    [
        ({"is_draining": True}, "about to stop", "takes its place"),
        ({"is_connected": False}, "not connected", "out of --target"),
        ({"sessions": 16}, "16 sessions of 16", "--max-sessions"),
    ],
)
def test_one_replica_of_two_is_in_trouble(changes: dict[str, object], words: str, remedy: str) -> None:
    """It is named, as a warning: the other one answers."""
    other = replace(REPLICA, replica_id="b", address="10.0.0.2:7001", **changes)  # type: ignore[arg-type]
    (finding,) = check_targets(status_of(REPLICA, other))
    assert finding.outcome is Outcome.WARNING
    assert "10.0.0.2:7001" in finding.sentence
    assert words in finding.sentence
    assert remedy in finding.remedy


def test_a_pool_that_is_not_what_is_wanted() -> None:
    """Replicas that were ordered and have not come; drafters of which none is wanted are no fault."""
    (few,) = check_targets(status_of(REPLICA, desired=3))
    (none_wanted,) = check_drafters(status_of(pool="drafter", desired=0))
    (none_configured,) = check_drafters(status_of(REPLICA))
    assert outcomes(few, none_wanted, none_configured) == [Outcome.WARNING, Outcome.OK, Outcome.OK]
    assert "1 of 3 targets" in few.sentence


def test_memory_is_pressed_by_what_is_held_and_by_what_was_given_up() -> None:
    """Sessions that gave up their memory long ago are no fault of now."""
    calm = replace(REPLICA, preemptions=7)
    (quiet,) = check_memory(status_of(calm), status_of(calm))
    (pressed,) = check_memory(status_of(calm), status_of(replace(calm, preemptions=9)))
    (full,) = check_memory(status_of(calm), status_of(replace(calm, kv_used_tokens=950)))
    assert outcomes(quiet, pressed, full) == [Outcome.OK, Outcome.WARNING, Outcome.WARNING]
    assert "2 sessions" in pressed.sentence
    assert "95 %" in full.sentence


def test_services_must_answer_only_where_they_were_named() -> None:
    """The orchestrator's way to them is its own."""
    unknown = ServiceLook(kind="target", address="10.0.0.1:7001", is_named=False, trouble="refused")
    (skipped,) = check_services([unknown, replace(unknown, address="10.0.0.2:7001")])
    (named,) = check_services([replace(unknown, is_named=True)])
    (secured,) = check_services([replace(unknown, is_named=True, wants_certificate=True)])
    assert outcomes(skipped, named, secured) == [Outcome.SKIPPED, Outcome.FAILED, Outcome.FAILED]
    assert "2 that" in skipped.sentence
    assert "--services-tls-cert" in secured.remedy


# ---------------------------------------------------------------------------------------------------------------------
# Answers


def test_a_model_whose_figures_mean_little() -> None:
    """Steps that are held to a set time, and a drafter that stops before the target does."""
    (emulated,) = check_model([replace(SERVED, target=replace(INFO, emulated=True))], wanted="")
    assert emulated.outcome is Outcome.WARNING
    assert "--emulated-step-ms" in emulated.remedy
    short, fine = check_model([replace(SERVED, drafter=replace(INFO, model_id="small", max_context=512))], wanted="big")
    assert outcomes(short, fine) == [Outcome.WARNING, Outcome.OK]
    assert "512" in short.sentence


def test_another_text_with_drafts_is_excused_by_rounding_alone() -> None:
    """In float32 it is a failure."""
    other = replace(ANSWER, token_ids=(1, 3))
    (exact,) = check_answers(ANSWER, other, SERVED)
    (rounded,) = check_answers(ANSWER, other, replace(SERVED, target=replace(INFO, dtype="bfloat16")))
    (slow,) = check_answers(replace(ANSWER, first_token_s=9.0), ANSWER, SERVED)
    assert outcomes(exact, rounded, slow) == [Outcome.FAILED, Outcome.WARNING, Outcome.WARNING]
    assert "--dtype float32" in rounded.remedy


def test_a_refused_answer_says_what_helps() -> None:
    """By its reason; one that nobody knows is to be looked up."""
    full, odd = check_refusal(QueueFull("All places are taken.")), check_refusal(PacelineError("Odd.", reason="ODD"))
    assert outcomes(full, odd) == [Outcome.FAILED, Outcome.FAILED]
    assert "--max-sessions" in full.remedy
    assert "ODD in docs/errors.md" in odd.remedy


@pytest.mark.parametrize(("way_s", "outcome"), [(0.02, Outcome.OK), (0.07, Outcome.OK), (0.09, Outcome.WARNING)])
def test_a_drafter_is_far_by_the_steps_it_costs(way_s: float, outcome: Outcome) -> None:
    """Four steps of 20 ms are what a draft of four can save; the nearest of several rounds counts."""
    rounds = [replace(ROUND, draft_arrived_s=ROUND.began_s + way_s + ROUND.draft_time_s + more_s) for more_s in (0, 1)]
    assert check_distance(ANSWER, rounds, SERVED.drafter).outcome is outcome


def test_a_short_way_is_never_too_far() -> None:
    """However short the target's steps are."""
    fast = replace(ROUND, step_time_s=0.0001, draft_arrived_s=ROUND.began_s + 0.015)
    assert check_distance(ANSWER, [fast], SERVED.drafter).outcome is Outcome.OK


def test_drafts_that_never_come() -> None:
    """Of a model they were to come; a method that finds nothing to repeat is in its rights."""
    unused = replace(ANSWER, usage=SpeculationUsage(num_drafts=1, fallback_rounds=1))
    repeating = replace(INFO, model_id="ngram", vocab_size=0)
    found = [check_distance(unused, [], drafter) for drafter in (SERVED.drafter, repeating, None)]
    assert outcomes(*found) == [Outcome.WARNING, Outcome.SKIPPED, Outcome.SKIPPED]
    assert "--draft-deadline-s" in found[0].remedy


# ---------------------------------------------------------------------------------------------------------------------
# HTTP

SEEN = HttpLook(url="http://a", health_status=200, models_status=200, model_names=("big",))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"models_status": 401, "model_names": None}, "token"),
        ({"health_status": 503, "health_words": "draining"}, "draining"),
        ({"model_names": ("other",)}, "and the gRPC port big"),
        ({"distrust": Distrust.EXPIRED}, "expired"),
    ],
)
def test_an_http_port_that_is_not_well(changes: dict[str, object], words: str) -> None:
    """A token that is missing, a server that stops, another deployment, a certificate."""
    (finding,) = check_http(replace(SEEN, **changes), served=["big"])  # type: ignore[arg-type]
    assert (finding.name, finding.outcome) == ("http", Outcome.FAILED)
    assert words in finding.sentence


def test_acceptance_is_what_the_metrics_say() -> None:
    """Gauges that are raised, of whichever drafter; comments and other metrics are none of them."""
    calm = "# HELP paceline_drafter_unused 1\npaceline_drafter_unused 0.0\npaceline_requests_total 1.0\n"
    raised = calm.replace(" 0.0", " 1.0")
    raised += 'paceline_drafter_acceptance_below_expected{drafter="x",temperature="0"} 1.0\n'
    (fine,) = check_acceptance(replace(SEEN, metrics=calm))
    unused, below = check_acceptance(replace(SEEN, metrics=raised))
    (unknown,) = check_acceptance(SEEN)
    assert outcomes(fine, unused, below, unknown) == [
        Outcome.OK,
        Outcome.WARNING,
        Outcome.WARNING,
        Outcome.SKIPPED,
    ]


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a:99999", "http://[::1"])
def test_what_is_no_url_is_refused(url: str) -> None:
    """By name, before anything is asked."""
    with pytest.raises(InvalidRequest, match="HTTP URL"):
        checked_url(url)
    assert checked_url("https://a.example:8443/api/") == "https://a.example:8443/api"
