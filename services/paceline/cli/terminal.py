"""Where the command line writes: answers on standard output, everything about them on standard error."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from paceline.errors import PacelineError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

Arguments = ParamSpec("Arguments")

# What could move the cursor or change the title of a person's terminal; tab and newline stay.
_CONTROL_CHARACTERS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}")


@dataclass(frozen=True, slots=True)
class Terminal:
    """Both streams, as rich consoles: colours appear on a terminal only."""

    out: Console
    err: Console

    @classmethod
    def open(cls) -> Terminal:
        """Made when a command starts, because the streams may be replaced until then; later replacements do not count."""
        return cls(out=Console(file=sys.stdout, highlight=False), err=Console(file=sys.stderr, highlight=False))

    def write(self, text: str, style: str = "") -> None:
        """A piece of an answer, at once; on a terminal in its style and without control characters."""
        if self.out.is_terminal:
            self.out.out(text.translate(_CONTROL_CHARACTERS), style=style or None, end="", highlight=False)
        else:
            self.out.file.write(text)
        self.out.file.flush()

    def write_line(self, line: str) -> None:
        """One line for a program to read."""
        self.out.file.write(line + "\n")
        self.out.file.flush()

    def say(self, sentence: str, style: str = "") -> None:
        """Something for the person, beside the answer."""
        self.err.print(Text(sentence, style), soft_wrap=True)

    @contextmanager
    def spinner(self, sentence: str) -> Iterator[Callable[[str], None]]:
        """Shows that something takes time, and how long it has taken; call the result to change the sentence."""
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Progress(*columns, console=self.err, transient=True, disable=not self.err.is_terminal) as progress:
            task = progress.add_task(sentence, total=None)
            yield lambda text: progress.update(task, description=text)


def with_plain_errors(command: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """The command, ending with one sentence and an exit status instead of a traceback."""

    @functools.wraps(command)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except PacelineError as error:
            _show_failure(f"{error.message} [{error.reason}]")
            raise typer.Exit(EXIT_FAILED) from error
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
            raise
        except Exception as error:
            # The outermost door: what comes here is a mistake of ours, and says where in one line.
            _show_failure(_confession(error))
            raise typer.Exit(EXIT_FAILED) from error

    return run


def _show_failure(sentence: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text(sentence, "bold red"))


def _confession(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return f"Something went wrong inside Paceline: {type(error).__name__}: {error} (at {place}); please report it."
