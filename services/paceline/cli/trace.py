"""`paceline trace`: how the last rounds of a running server went, in a table and as a file for Perfetto."""

from __future__ import annotations

import asyncio
import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.connecting import Connecting
from paceline.cli.status import DEFAULT_ENDPOINT
from paceline.cli.terminal import Terminal, with_plain_errors
from paceline.cli.trace_view import trace_view
from paceline.client import GenerationClient, TracedRounds
from paceline.errors import InvalidRequest
from paceline.trace_events import as_json, as_trace_events

_TIMEOUT_S = 30.0


class TraceFormat(StrEnum):
    """What is written."""

    PERFETTO = "perfetto"  # a timeline, also for chrome://tracing
    JSON = "json"  # the records


_EXPORTS = {TraceFormat.PERFETTO: as_trace_events, TraceFormat.JSON: as_json}
_ADVICE = {TraceFormat.PERFETTO: " Open it at https://ui.perfetto.dev or in chrome://tracing.", TraceFormat.JSON: ""}


@with_plain_errors
def trace(
    endpoint: Annotated[
        str, typer.Argument(metavar="[HOST:PORT]", help="The running server.", show_default=True)
    ] = DEFAULT_ENDPOINT,
    *,
    token: options.Token = None,
    tls: options.Tls = False,
    tls_ca: options.TlsCa = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    tls_name: options.TlsName = None,
    trust_network: options.TrustNetwork = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Write the rounds there.", rich_help_panel=options.OUTPUT),
    ] = None,
    trace_format: Annotated[
        TraceFormat,
        typer.Option(
            "--format", help="A timeline for Perfetto, or the records as JSON.", rich_help_panel=options.OUTPUT
        ),
    ] = TraceFormat.PERFETTO,
    request_id: Annotated[
        str, typer.Option("--request", metavar="ID", help="Rounds of this request alone, all its choices.")
    ] = "",
    limit: Annotated[
        int,
        typer.Option("--limit", min=0, metavar="COUNT", help="Most rounds, the newest; 0: all that are remembered."),
    ] = 0,
) -> None:
    """Show where the time of the last rounds went, and write them as a timeline."""
    terminal = Terminal.open()
    connecting = Connecting.of(
        token=token, tls=tls, ca=tls_ca, cert=tls_cert, key=tls_key, name=tls_name, trust_network=trust_network
    )
    traced = asyncio.run(_fetch(connecting.client(endpoint), request_id=request_id, limit=limit))
    if request_id and not traced.records:
        raise InvalidRequest(
            f"The orchestrator that answers at {endpoint} remembers no round of request {request_id}.",
            parameter="request",
        )
    terminal.out.print(trace_view(traced))
    if output is not None:
        _write(output, json.dumps(_EXPORTS[trace_format](traced)))
        terminal.say(f"Wrote {output}.{_ADVICE[trace_format]}", "dim")


async def _fetch(server: GenerationClient, *, request_id: str, limit: int) -> TracedRounds:
    async with server as client:
        return await client.round_trace(request_id=request_id, limit=limit, timeout_s=_TIMEOUT_S)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror or error}.", parameter="output") from error
