"""What an examination comes to: a finding for each check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a check came out."""

    OK = "ok"
    WARNING = "warning"  # answers are given, but not as well, as fast or as safely as they could be, or not for long
    FAILED = "failed"  # somebody who asks gets no answer, or a wrong one
    SKIPPED = "skipped"  # it could not be looked at from here, or there is nothing to be looked at


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. Invariant: there is a remedy exactly where something is wrong."""

    name: str  # of the check; docs/doctor.md lists them
    outcome: Outcome
    sentence: str  # what was seen
    remedy: str = ""  # what to do

    def __post_init__(self) -> None:
        assert bool(self.remedy) == (self.outcome in (Outcome.WARNING, Outcome.FAILED)), "a fault, and what to do"


def ok(name: str, sentence: str) -> Finding:
    return Finding(name, Outcome.OK, sentence)


def skipped(name: str, sentence: str) -> Finding:
    return Finding(name, Outcome.SKIPPED, sentence)


def warning(name: str, sentence: str, remedy: str) -> Finding:
    return Finding(name, Outcome.WARNING, sentence, remedy)


def failed(name: str, sentence: str, remedy: str) -> Finding:
    return Finding(name, Outcome.FAILED, sentence, remedy)


def has_failed(findings: Iterable[Finding]) -> bool:
    return any(finding.outcome is Outcome.FAILED for finding in findings)
