"""The runbook names what exists."""

from __future__ import annotations

import re

from paceline.rpc import STATUS_CODES
from tests.deploy.files import DEPLOY, ROOT

TEXT = (DEPLOY / "README.md").read_text(encoding="utf-8")


def reasons() -> set[str]:
    """Of every error of ours, as the source names them: which classes are loaded depends on the other tests."""
    folders = ("services/paceline", "orchestrator", "drafter_service", "target_service")
    sources = [path.read_text(encoding="utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return {reason for source in sources for reason in re.findall(r'^    reason = "([A-Z_]+)"$', source, re.MULTILINE)}


def rows() -> dict[str, str]:
    """The gRPC code by reason, where the table names one."""
    found = re.findall(r"^\| `([A-Z_]+)` \| ([A-Z_]+) \|", TEXT, re.MULTILINE)
    return dict(found)


def test_every_reason_is_explained() -> None:
    """Whoever meets an error finds its reason here."""
    assert len(reasons()) > 10
    missing = {reason for reason in reasons() if f"`{reason}`" not in TEXT}
    assert not missing


def test_codes_are_those_that_are_sent() -> None:
    """The table says of no reason another gRPC code than the services send; what has none of its own is INTERNAL."""
    sent = {kind.reason: code.name for kind, code in STATUS_CODES.items()}
    assert len(rows()) > 5
    assert {reason: sent.get(reason, "INTERNAL") for reason in rows()} == rows()


def test_files_that_are_named_exist() -> None:
    """Paths from the project's root, and from this folder."""
    from_root = re.findall(r"\b(deploy/[\w./-]+\w)", TEXT)
    from_here = re.findall(
        r"`((?:serve|docker|compose|kuberay|envoy|observability|overlays|components)/[\w./-]*)`", TEXT
    )
    assert from_root
    assert from_here
    for path in from_root:
        assert (ROOT / path).exists(), path
    for path in from_here:
        assert (DEPLOY / path).exists() or (DEPLOY / "kuberay" / path).exists(), path
