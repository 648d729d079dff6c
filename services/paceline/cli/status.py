"""`paceline status`: the pools of a running server and how busy they are, once or for as long as one watches."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.styled import Styled
from rich.text import Text

from paceline.cli import options
from paceline.cli.answers import error_as_json
from paceline.cli.connecting import Connecting
from paceline.cli.pools import in_one_line, status_view
from paceline.cli.terminal import Terminal, with_plain_errors
from paceline.client import DeploymentStatus, GenerationClient
from paceline.errors import PacelineError

DEFAULT_ENDPOINT = "127.0.0.1:9000"
_TIMEOUT_S = 5.0

Look = DeploymentStatus | PacelineError
"""What came of asking once."""

ShowLook = Callable[[Look], None]


@with_plain_errors
def status(
    *,
    endpoint: Annotated[
        str, typer.Option("--endpoint", metavar="HOST:PORT", help="The running server.")
    ] = DEFAULT_ENDPOINT,
    token: options.Token = None,
    tls: options.Tls = False,
    tls_ca: options.TlsCa = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    tls_name: options.TlsName = None,
    trust_network: options.TrustNetwork = False,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Go on until Ctrl-C, also while nothing answers; in a pipe a line each time."),
    ] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, metavar="SECONDS", help="Between two looks of --watch.")
    ] = 1.0,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Write one JSON object instead of tables.", rich_help_panel=options.OUTPUT),
    ] = False,
) -> None:
    """Show pools, replicas, sessions, KV memory and acceptance of a running server."""
    terminal = Terminal.open()
    connecting = Connecting.of(
        token=token, tls=tls, ca=tls_ca, cert=tls_cert, key=tls_key, name=tls_name, trust_network=trust_network
    )
    server = connecting.client(endpoint)
    if watch:
        asyncio.run(_watch(server, terminal, as_json=as_json, interval_s=interval_s))
    else:
        asyncio.run(_look_once(server, terminal, as_json=as_json))


async def _look_once(server: GenerationClient, terminal: Terminal, *, as_json: bool) -> None:
    async with server as client:
        seen = await client.pool_status(timeout_s=_TIMEOUT_S)
    if as_json:
        terminal.write_line(look_as_json(seen))
    else:
        terminal.out.print(status_view(seen, width=terminal.out.width))


async def _watch(server: GenerationClient, terminal: Terminal, *, as_json: bool, interval_s: float) -> None:
    with _viewer(server.endpoint, terminal, as_json=as_json) as show:
        async with server as client:
            while True:
                next_s = time.monotonic() + interval_s
                show(await _look(client))
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))


async def _look(client: GenerationClient) -> Look:
    try:
        return await client.pool_status(timeout_s=_TIMEOUT_S)
    except PacelineError as error:
        return error


def look_as_json(look: Look) -> str:
    """One JSON object on one line, with the field names of the protocol."""
    return error_as_json(look) if isinstance(look, PacelineError) else json.dumps(asdict(look))


# ---------------------------------------------------------------------------------------------------------------------
# Views of one look after the other


def _viewer(endpoint: str, terminal: Terminal, *, as_json: bool) -> AbstractContextManager[ShowLook]:
    if as_json or not terminal.out.is_terminal:
        return _lines(terminal, look_as_json if as_json else _look_in_words)
    return _live_tables(endpoint, terminal)


def _look_in_words(look: Look) -> str:
    return f"{_clock()}  {look.message if isinstance(look, PacelineError) else in_one_line(look)}"


@contextmanager
def _lines(terminal: Terminal, in_words: Callable[[Look], str]) -> Iterator[ShowLook]:
    yield lambda look: terminal.write_line(in_words(look))


@contextmanager
def _live_tables(endpoint: str, terminal: Terminal) -> Iterator[ShowLook]:
    """The tables in place; what was seen last stays, dimmed, while nothing answers."""
    with Live(console=terminal.out, auto_refresh=False) as live:
        last: tuple[DeploymentStatus, str] | None = None

        def show(look: Look) -> None:
            nonlocal last
            if not isinstance(look, PacelineError):
                last = (look, _clock())
            live.update(live_view(endpoint, look, last, width=terminal.out.width), refresh=True)

        yield show


def live_view(endpoint: str, look: Look, last: tuple[DeploymentStatus, str] | None, *, width: int) -> RenderableType:
    """What is known now; `last` is what was seen last, and when."""
    footer = Text("Ctrl-C ends this view and nothing else.", "dim")
    title = Text.assemble((f"{endpoint}  {last[1] if last else _clock()}", "dim"), "\n")
    if not isinstance(look, PacelineError):
        return Group(title, status_view(look, width=width), "", footer)
    trouble = Text(f"{look.message} Looking again.", "yellow")
    tables: list[RenderableType] = [Styled(status_view(last[0], width=width), "dim"), ""] if last is not None else []
    return Group(title, *tables, trouble, footer)


def _clock() -> str:
    return time.strftime("%H:%M:%S")
