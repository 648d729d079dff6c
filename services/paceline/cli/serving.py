"""A stack on this machine, started under a spinner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from paceline.cli.terminal import Terminal
from paceline.local_stack import LocalStack, LocalStackSettings, LogReport


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
