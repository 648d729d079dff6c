"""`paceline doctor`: what is wrong with a deployment, and what to do about it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from paceline.cli import options
from paceline.cli.connecting import Connecting
from paceline.cli.status import DEFAULT_ENDPOINT
from paceline.cli.terminal import EXIT_FAILED, Terminal, with_plain_errors
from paceline.client import ClientTls
from paceline.client.connection import Connection
from paceline.doctor.examination import Deployment, Examination
from paceline.doctor.findings import Finding, Outcome, has_failed
from paceline.doctor.web import checked_url

_SERVICES = "Model services"

# Told apart without colours too.
_MARKS = {
    Outcome.OK: ("✓", "green"),
    Outcome.WARNING: ("!", "yellow"),
    Outcome.FAILED: ("✗", "bold red"),
    Outcome.SKIPPED: ("-", "dim"),
}


@with_plain_errors
def doctor(
    *,
    endpoint: Annotated[
        str, typer.Option("--endpoint", metavar="HOST:PORT", help="The orchestrator's gRPC port.")
    ] = DEFAULT_ENDPOINT,
    http: Annotated[
        str | None, typer.Option("--http", metavar="URL", help="Its HTTP API, such as http://127.0.0.1:8000.")
    ] = None,
    model: options.ModelName = None,
    token: options.Token = None,
    tokens_file: Annotated[
        Path | None,
        typer.Option(
            "--tokens-file",
            metavar="FILE",
            help="The orchestrator's file of tokens, if it is on this machine.",
            rich_help_panel=options.SERVER,
        ),
    ] = None,
    tls: options.Tls = False,
    tls_ca: options.TlsCa = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    tls_name: options.TlsName = None,
    trust_network: options.TrustNetwork = False,
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            metavar="HOST:PORT",
            help="A target, also where the orchestrator does not know it; repeatable.",
            rich_help_panel=_SERVICES,
        ),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option("--drafter", metavar="HOST:PORT", help="A drafter likewise.", rich_help_panel=_SERVICES),
    ] = None,
    services_tls_ca: Annotated[
        Path | None,
        typer.Option(
            "--services-tls-ca",
            metavar="FILE",
            help="The authority of targets and drafters (PEM), as the orchestrator's --tls-ca.",
            rich_help_panel=_SERVICES,
        ),
    ] = None,
    services_tls_cert: Annotated[
        Path | None,
        typer.Option(
            "--services-tls-cert",
            metavar="FILE",
            help="A certificate that they let in (PEM).",
            rich_help_panel=_SERVICES,
        ),
    ] = None,
    services_tls_key: Annotated[
        Path | None,
        typer.Option("--services-tls-key", metavar="FILE", help="Its key (PEM).", rich_help_panel=_SERVICES),
    ] = None,
    answers: Annotated[
        bool, typer.Option("--answers/--no-answers", help="Ask for two answers of a few tokens.")
    ] = True,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, metavar="SECONDS", help="Longest wait for one reply.")
    ] = 5.0,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Write one JSON object instead of a table.", rich_help_panel=options.OUTPUT),
    ] = False,
) -> None:
    """Examine a running deployment, and say what is wrong and what to do; exit status 1 if something has failed."""
    connecting = Connecting.of(
        token=token, tls=tls, ca=tls_ca, cert=tls_cert, key=tls_key, name=tls_name, trust_network=trust_network
    )
    services_tls = ClientTls(ca=services_tls_ca, cert=services_tls_cert, key=services_tls_key)
    deployment = Deployment(
        endpoint=endpoint,
        http_url=None if http is None else checked_url(http),
        targets=tuple(map(_checked, target or ())),
        drafters=tuple(map(_checked, drafter or ())),
        model=model or "",
        token=connecting.token,
        tokens_file=tokens_file,
        tls=connecting.tls,
        services_tls=services_tls if services_tls != ClientTls() else None,
        trust_network=trust_network,
    )
    terminal = Terminal.open()
    is_listed = not as_json and not terminal.out.is_terminal
    with terminal.spinner("Looking") as show:

        def on_finding(finding: Finding) -> None:
            show(f"Looking: {finding.name}")
            if is_listed:
                terminal.write_line(in_one_line(finding))

        examination = Examination(deployment, on_finding=on_finding, timeout_s=timeout_s, asks_for_answers=answers)
        findings = asyncio.run(examination.run())
    if as_json:
        terminal.write_line(findings_as_json(findings))
    elif terminal.out.is_terminal:
        terminal.out.print(findings_table(findings))
        terminal.say(in_short(findings), "bold")
    if has_failed(findings):
        raise typer.Exit(EXIT_FAILED)


def _checked(address: str) -> str:
    """Raises `InvalidRequest` for what is no HOST:PORT."""
    return Connection(address).endpoint


def in_one_line(finding: Finding) -> str:
    """For a file or a pipe."""
    to_do = f" To do: {finding.remedy}" if finding.remedy else ""
    return f"{finding.outcome:<8} {finding.name}: {finding.sentence}{to_do}"


def in_short(findings: Sequence[Finding]) -> str:
    """How many came out how, the worst first."""
    counts = Counter(finding.outcome for finding in findings)
    order = (Outcome.FAILED, Outcome.WARNING, Outcome.OK, Outcome.SKIPPED)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in order if counts[outcome])


def findings_table(findings: Sequence[Finding]) -> Table:
    """A row a finding; what to do stands below what was seen."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1, 0, 0))
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for finding in findings:
        mark, style = _MARKS[finding.outcome]
        words = Text(finding.sentence, "dim" if finding.outcome is Outcome.SKIPPED else "")
        if finding.remedy:
            words.append(f"\n{finding.remedy}", "bold")
        table.add_row(Text(mark, style), Text(finding.name, style), words)
    return table


def findings_as_json(findings: Sequence[Finding]) -> str:
    """One JSON object on one line."""
    return json.dumps({"failed": has_failed(findings), "checks": [asdict(finding) for finding in findings]})
