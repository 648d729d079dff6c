"""The command line `paceline`; every command is a thin layer over `paceline.client`, `paceline.local_stack` and Ray."""

from __future__ import annotations

import signal
from types import FrameType

import typer

from paceline.cli.bench import bench
from paceline.cli.demo import demo
from paceline.cli.doctor import doctor
from paceline.cli.generate import generate
from paceline.cli.serve import serve
from paceline.cli.status import status
from paceline.cli.token import token
from paceline.cli.trace import trace
from paceline.cli.train import train
from paceline.cli.up import up

_EXIT_TERMINATED = 128 + signal.SIGTERM

app = typer.Typer(
    name="paceline",
    help="Distributed speculative decoding: a drafter rides ahead, the target checks, the text stays the target's.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(generate)
app.command()(demo)
app.command()(up)
app.command()(serve)
app.command()(status)
app.command()(doctor)
app.command()(trace)
app.command()(train)
app.command()(bench)
app.add_typer(token)


def main() -> None:
    """Run one command; a polite request to terminate stops what the command has started, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _leave)
    app()


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(_EXIT_TERMINATED)
