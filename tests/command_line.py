"""The command line as tests run it: within the test for its words, as a process of its own for its signals."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from typer.testing import CliRunner, Result

from paceline.cli import app

PLAIN_TERMINAL = {"COLUMNS": "100", "NO_COLOR": None, "FORCE_COLOR": None, "TERM": "xterm-256color"}
ESCAPE = "\x1b"


def paceline(*arguments: str, standard_input: str | bytes = "", **environment: str) -> Result:
    """Run one command; whatever it does, it shows no traceback and confesses no mistake of ours."""
    result = CliRunner(env={**PLAIN_TERMINAL, **environment}).invoke(app, list(arguments), input=standard_input)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    assert "inside Paceline" not in result.output
    return result


def uncoloured(text: str) -> str:
    return re.sub(rf"{ESCAPE}\[[0-9;]*m", "", text)


def refused(result: Result, status: int = 2) -> str:
    """The words of a refusal, without the frame they may stand in and its line breaks."""
    assert result.exit_code == status
    assert result.stdout == ""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", uncoloured(result.stderr)).split())


@contextmanager
def started(
    *arguments: str, module: str = "paceline", environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """The command as a process of its own, for what only signals can show; killed if a test leaves it running."""
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and what else was written, on both streams."""
    output, errors = process.communicate(timeout=60)
    return process.returncode, output + errors
