"""What answers requests, started under a spinner and stopped at the end: processes on this machine, or Ray."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import TYPE_CHECKING

from paceline.cli.held_signals import HeldSignals
from paceline.cli.terminal import Terminal
from paceline.local_stack import LocalStack, LocalStackSettings, LogReport

if TYPE_CHECKING:
    from orchestrator.config import ServeFile

_STOPPING = "Stopping, which takes Ray a few seconds"


def _ignore(service: str, line: str) -> None:
    return None


@contextmanager
def running_stack(
    settings: LocalStackSettings, terminal: Terminal, *, on_log: LogReport = _ignore
) -> Iterator[LocalStack]:
    """All services, from their start to their end; raises `StartupFailed` if one cannot start."""
    with ExitStack() as until_end:
        with terminal.spinner("Starting") as show:

            def show_and_pass_on(service: str, line: str) -> None:
                # Sentences are for people (a model is being unpacked, say); structured lines are not.
                if not line.startswith("{"):
                    show(f"{service}: {line}")
                on_log(service, line)

            stack = until_end.enter_context(LocalStack(settings, on_progress=show, on_log=show_and_pass_on))
        yield stack


@contextmanager
def running_application(
    file: ServeFile, terminal: Terminal, *, address: str | None = None, is_simulated: bool = False
) -> Iterator[str]:
    """The endpoint of an application on Ray (`orchestrator.cluster.deployed`), from its start to its end.

    Ctrl-C and SIGTERM take effect between two steps of the start, at once within the block, and not at all while
    things are being stopped: Ray that is cut in half leaves processes behind. What Ray has to say goes to standard
    error.
    """
    with HeldSignals() as signals, redirect_stdout(sys.stderr), ExitStack() as until_end:
        with terminal.spinner("Loading Ray") as show:
            signals.on_held = lambda: show(_STOPPING)

            def go_on(sentence: str) -> None:
                signals.hold()  # Ray has a handler of its own for SIGTERM, which it installs when it starts
                signals.act()
                show(sentence)

            from orchestrator.cluster import deployed  # noqa: PLC0415 - loads Ray, which no other command needs

            logging.getLogger("ray.serve").setLevel(logging.WARNING)
            application = until_end.enter_context(
                deployed(file, address=address, is_simulated=is_simulated, on_progress=go_on)
            )
        try:
            with signals.released():
                yield application.grpc_endpoint
        finally:
            # Ray reports the death of the controller that it kills itself.
            with (
                terminal.spinner(_STOPPING),
                open(os.devnull, "w", encoding="utf-8") as nowhere,
                redirect_stdout(nowhere),
            ):
                until_end.close()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has just now; for software that cannot be told to take any."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
