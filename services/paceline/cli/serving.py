"""A stack on this machine, started under a spinner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from paceline.cli.terminal import Terminal
from paceline.local_stack import LocalStack, LocalStackSettings, LogReport


def ignore_log(service: str, line: str) -> None:
    """Keep the services' logs to themselves; a failed start still ends with its last line."""


@contextmanager
def running_stack(
    settings: LocalStackSettings, terminal: Terminal, *, on_log: LogReport = ignore_log
) -> Iterator[LocalStack]:
    """All services, from their start to their end; raises `StartupFailed` if one cannot start."""
    with ExitStack() as until_end:
        with terminal.spinner("Starting") as report:
            stack = until_end.enter_context(LocalStack(settings, on_progress=report, on_log=on_log))
        yield stack
