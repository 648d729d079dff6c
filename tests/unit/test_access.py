"""Who is let in, and how much each caller may ask for; time is moved by hand."""

from __future__ import annotations

import datetime as dt
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from orchestrator.access import Account, Budget, LoopbackGate, TokenGate, gate_of, ingress_gate_of
from orchestrator.door import Caller, Gate, OpenGate
from paceline.errors import InvalidRequest, RateLimited, StartupFailed, Unauthenticated
from paceline.settings import OrchestratorSettings
from paceline.tokens import TokenEntry, TokenFile, hash_token, new_token, write_tokens

NOON = dt.datetime(2026, 11, 30, 12, tzinfo=dt.UTC)


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def entry(name: str = "a", token: str = "", **fields: Any) -> TokenEntry:
    return TokenEntry(name=name, sha256=hash_token(token or f"token of {name}"), **fields)


def gate_with(path: Path, *entries: TokenEntry, clock: Clock | None = None) -> TokenGate:
    write_tokens(path, TokenFile(tokens=entries))
    return TokenGate(path, clock=clock or Clock(), now=lambda: NOON)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.yaml"


# ---------------------------------------------------------------------------------------------------------------------
# Tokens


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer "])
def test_a_token_names_its_caller(path: Path, scheme: str) -> None:
    """In any spelling of the scheme that HTTP allows."""
    token = new_token()
    assert gate_with(path, entry("a"), entry("b", token)).caller(f"{scheme} {token}") == Caller("b")


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "token of a",
        "Basic token of a",
        "Bearer token of A",
        "Bearer token of a,",
        "Bearer token of",
        "Bearer " + hash_token("token of a"),
        "Bearer \udcff\udcfe",
        "Bearer " + "x" * 1_000_000,
    ],
)
def test_what_is_no_token_lets_nobody_in(path: Path, authorization: str | None) -> None:
    """Nor does the hash, which the file gives away, or what cannot be encoded; nothing that was sent is repeated."""
    with pytest.raises(Unauthenticated) as caught:
        gate_with(path, entry("a")).caller(authorization)
    assert "token of" not in caught.value.message


def test_a_file_without_tokens_lets_nobody_in(path: Path) -> None:
    """Empty is not the same as none."""
    with pytest.raises(Unauthenticated):
        gate_with(path).caller("Bearer token of a")


def test_disabled_tokens_look_unknown_and_expired_ones_say_so(path: Path) -> None:
    """Only who holds an expired token hears that it was one."""
    gate = gate_with(path, entry("a", disabled=True), entry("b", expires=dt.date(2026, 11, 29)))
    with pytest.raises(Unauthenticated, match="not known here"):
        gate.caller("Bearer token of a")
    with pytest.raises(Unauthenticated, match="has expired"):
        gate.caller("Bearer token of b")


def test_tokens_come_and_go_while_it_runs(path: Path) -> None:
    """Two names for one caller's old and new token, then the old one goes; within a second each time."""
    clock = Clock()
    gate = gate_with(path, entry("a-1"), clock=clock)
    write_tokens(path, TokenFile(tokens=(entry("a-1"), entry("a-2"))))
    clock.now_s += 1
    assert [gate.caller(f"Bearer token of {name}").name for name in ("a-1", "a-2")] == ["a-1", "a-2"]
    write_tokens(path, TokenFile(tokens=(entry("a-2"),)))
    clock.now_s += 1
    assert gate.caller("Bearer token of a-2").name == "a-2"
    with pytest.raises(Unauthenticated):
        gate.caller("Bearer token of a-1")


def test_a_file_that_breaks_keeps_the_tokens_that_were_there(path: Path) -> None:
    """A slip of the pen must lock nobody out, nor let anybody in."""
    clock = Clock()
    gate = gate_with(path, entry("a"), clock=clock)
    path.write_text("tokens: [")
    clock.now_s += 1
    assert gate.caller("Bearer token of a").name == "a"
    with pytest.raises(Unauthenticated):
        gate.caller("Bearer token of b")


# ---------------------------------------------------------------------------------------------------------------------
# Limits


def test_a_budget_refills_steadily_and_never_beyond_its_capacity() -> None:
    """60 a minute are one a second."""
    clock = Clock()
    budget = Budget(60, capacity=2, clock=clock)
    budget.spend(2)
    assert budget.wait_s(1) == pytest.approx(1)
    clock.now_s += 0.25
    assert budget.wait_s(1) == pytest.approx(0.75)
    clock.now_s += 3600
    assert budget.wait_s(2) == 0
    assert budget.wait_s(3) == pytest.approx(1)


def test_requests_beyond_the_rate_are_told_when_to_come_again() -> None:
    """And are taken then, and not a moment sooner; what was refused counts for nothing."""
    clock = Clock()
    account = Account(entry(requests_per_minute=30, burst=3), clock)
    for _ in range(3):
        with account.answers(1):
            pass
    for _ in range(5):
        with pytest.raises(RateLimited, match="requests") as caught, account.answers(1):
            pass
    retry_after_s = caught.value.retry_after_s
    assert retry_after_s == pytest.approx(2)
    assert retry_after_s is not None
    asked_s = clock.now_s
    clock.now_s = asked_s + retry_after_s - 0.01
    with pytest.raises(RateLimited), account.answers(1):
        pass
    clock.now_s = asked_s + retry_after_s
    with account.answers(1):
        pass


def test_without_a_burst_a_minutes_requests_may_come_at_once() -> None:
    """Then one for each share of the minute; a rate below one a minute allows one."""
    clock = Clock()
    account, slow = Account(entry(requests_per_minute=5), clock), Account(entry(requests_per_minute=0.5), clock)
    for _ in range(5):
        with account.answers(1):
            pass
    with pytest.raises(RateLimited) as caught, account.answers(1):
        pass
    assert caught.value.retry_after_s == pytest.approx(12)
    with slow.answers(1):
        pass
    with pytest.raises(RateLimited) as caught, slow.answers(1):
        pass
    assert caught.value.retry_after_s == pytest.approx(120)


def test_answers_at_once_are_counted_with_all_choices() -> None:
    """And counted down however they end."""
    account = Account(entry(concurrent_answers=3), Clock())
    with ExitStack() as running:
        running.enter_context(account.answers(2))
        with pytest.raises(RateLimited, match="at most 3"), account.answers(2):
            pass
        running.enter_context(account.answers(1))
        with pytest.raises(RateLimited), account.answers(1):
            pass
    assert account.answering == 0
    with pytest.raises(ZeroDivisionError), account.answers(3):
        raise ZeroDivisionError
    assert account.answering == 0


def test_more_answers_than_may_ever_run_are_no_matter_of_time() -> None:
    """The caller is told to ask for fewer, not to try again, whether or not others of its answers run."""
    account = Account(entry(concurrent_answers=3), Clock())
    with pytest.raises(InvalidRequest, match="asks for 4 answers, but at most 3"), account.answers(4):
        pass
    with account.answers(3), pytest.raises(InvalidRequest) as caught, account.answers(4):
        pass
    assert caught.value.parameter == "n"


def test_a_refused_request_costs_no_other_limit() -> None:
    """One that found no place among the answers takes nothing from the rate."""
    account = Account(entry(concurrent_answers=1, requests_per_minute=60, burst=2), Clock())
    with account.answers(1):
        for _ in range(10):
            with pytest.raises(RateLimited, match="at most 1"), account.answers(1):
                pass
    with account.answers(1):
        pass


def test_tokens_may_be_overdrawn_by_an_answer_and_are_paid_back() -> None:
    """How long an answer becomes is known when it ends; until its tokens are refilled nothing else is taken."""
    clock = Clock()
    account = Account(entry(tokens_per_minute=600), clock)
    with account.answers(1) as use_tokens:
        use_tokens(100)
        use_tokens(600)
    with pytest.raises(RateLimited, match="tokens") as caught, account.answers(1):
        pass
    assert caught.value.retry_after_s == pytest.approx(10)
    clock.now_s += 10
    with account.answers(1):
        pass


def test_callers_do_not_share_limits(path: Path) -> None:
    """Nor does what one has used up keep another waiting."""
    gate = gate_with(path, entry("a", requests_per_minute=1), entry("b", requests_per_minute=1))
    with gate.answers(Caller("a"), count=1):
        pass
    with gate.answers(Caller("b"), count=1):
        pass
    with pytest.raises(RateLimited), gate.answers(Caller("a"), count=1):
        pass


def test_a_limit_that_changes_holds_at_once(path: Path) -> None:
    """For new requests, answers that run included; a change of another caller's leaves it as it is."""
    clock = Clock()
    gate = gate_with(path, entry("a", concurrent_answers=2), entry("b", requests_per_minute=1), clock=clock)
    with gate.answers(Caller("b"), count=1), gate.answers(Caller("a"), count=1):
        write_tokens(path, TokenFile(tokens=(entry("a", concurrent_answers=1), entry("b", requests_per_minute=1))))
        clock.now_s += 1
        with pytest.raises(RateLimited, match="at most 1"), gate.answers(Caller("a"), count=1):
            pass
        with pytest.raises(RateLimited), gate.answers(Caller("b"), count=1):
            pass


def test_a_revoked_caller_begins_nothing_and_ends_what_runs(path: Path) -> None:
    """A call whose token is revoked between its check and its start is refused; counts of the gone are forgotten."""
    clock = Clock()
    gate = gate_with(path, entry("a", concurrent_answers=1), clock=clock)
    with gate.answers(Caller("a"), count=1):
        write_tokens(path, TokenFile())
        clock.now_s += 1
        with pytest.raises(Unauthenticated), gate.answers(Caller("a"), count=1):
            pass
        write_tokens(path, TokenFile(tokens=(entry("a", concurrent_answers=1),)))
        clock.now_s += 1
        with pytest.raises(RateLimited), gate.answers(Caller("a"), count=1):
            pass
    with gate.answers(Caller("a"), count=1):
        pass


# ---------------------------------------------------------------------------------------------------------------------
# Without tokens


@pytest.mark.parametrize(
    "peer", ["ipv4:127.0.0.1:40000", "ipv6:%5B::1%5D:40000", "ipv6:[::1]:40000", "127.0.0.1", "::1"]
)
def test_this_machine_is_let_in(peer: str) -> None:
    """As gRPC names it, and as HTTP does."""
    assert LoopbackGate().caller(None, peer=peer) == Caller()


@pytest.mark.parametrize(
    "peer",
    [
        "ipv4:10.0.0.9:40000",
        "ipv6:%5Bfd00::7%5D:40000",
        "ipv4:127.0.0.1.example.com:1",
        "unix:",
        "",
        "10.0.0.9",
        "ipv4:",
    ],
)
def test_other_machines_and_unknown_callers_are_not(peer: str) -> None:
    """The sentence says what whoever runs it can do."""
    with pytest.raises(Unauthenticated, match="tokens_file"):
        LoopbackGate().caller("Bearer x", peer=peer)


@pytest.mark.parametrize(
    ("settings", "own_port", "ingress"),
    [
        ({}, OpenGate, LoopbackGate),
        ({"trust_network": True}, OpenGate, OpenGate),
        ({"tokens_file": "FILE"}, TokenGate, TokenGate),
        ({"tokens_file": "FILE", "trust_network": True}, TokenGate, TokenGate),
    ],
)
def test_settings_choose_the_gate(path: Path, settings: dict[str, Any], own_port: type, ingress: type) -> None:
    """Behind an ingress, which listens everywhere, nothing lets everybody in unless it is said."""
    write_tokens(path, TokenFile())
    named: dict[str, Any] = {name: str(path) if value == "FILE" else value for name, value in settings.items()}
    chosen = OrchestratorSettings(target="127.0.0.1:1", **named)
    assert type(gate_of(chosen)) is own_port
    assert type(ingress_gate_of(chosen)) is ingress


def test_an_ingress_that_hides_its_callers_wants_tokens_or_a_trusted_network(tmp_path: Path) -> None:
    """All would look as if they came from this machine: nothing starts, and it says what to do."""
    path = tmp_path / "tokens.yaml"
    write_tokens(path, TokenFile(tokens=(entry(),)))

    def gate(**settings: Any) -> Gate:
        return ingress_gate_of(OrchestratorSettings(target="127.0.0.1:1", **settings), hides_peers=True)

    with pytest.raises(StartupFailed, match="tokens_file"):
        gate()
    assert type(gate(tokens_file=str(path))) is TokenGate
    assert type(gate(trust_network=True)) is OpenGate
