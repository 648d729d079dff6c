"""`paceline token`: the tokens that callers of an orchestrator need, in the file that it reads."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.table import Table

from paceline.cli.terminal import Terminal, with_plain_errors
from paceline.errors import InvalidRequest
from paceline.tokens import TokenEntry, TokenFile, hash_token, new_token, read_tokens, write_tokens

token = typer.Typer(
    name="token", help="Make, list and revoke the tokens that callers need.", no_args_is_help=True, add_completion=False
)

_FILE = typer.Option(
    "--file",
    metavar="FILE",
    envvar="PACELINE_ORCHESTRATOR_TOKENS_FILE",
    help="The file that orchestrators are given as --tokens-file.",
)
_DEFAULT_FILE = Path("tokens.yaml")


@token.command("new")
@with_plain_errors
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose token it is: letters, digits, dots and dashes.")],
    *,
    file: Annotated[Path, _FILE] = _DEFAULT_FILE,
    replace: Annotated[bool, typer.Option("--replace", help="In place of the token that NAME has.")] = False,
    requests_per_minute: Annotated[
        float | None, typer.Option("--requests-per-minute", help="Most requests in the long run.")
    ] = None,
    burst: Annotated[int | None, typer.Option("--burst", help="Most requests at once; a minute's if left out.")] = None,
    concurrent_answers: Annotated[
        int | None, typer.Option("--concurrent-answers", help="Most answers that run at once.")
    ] = None,
    tokens_per_minute: Annotated[
        float | None, typer.Option("--tokens-per-minute", help="Most tokens of prompts and answers in the long run.")
    ] = None,
    expires: Annotated[
        dt.datetime | None,
        typer.Option("--expires", formats=["%Y-%m-%d"], help="The last day on which it is taken, in UTC."),
    ] = None,
) -> None:
    """Make a token, print it this once, and add its hash to the file; orchestrators that run take it within a second."""
    terminal, made = Terminal.open(), new_token()
    with _named_faults():
        entry = TokenEntry(
            name=name,
            sha256=hash_token(made),
            requests_per_minute=requests_per_minute,
            burst=burst,
            concurrent_answers=concurrent_answers,
            tokens_per_minute=tokens_per_minute,
            expires=expires.date() if expires else None,
        )
    if entry.has_expired(dt.datetime.now(dt.UTC)):
        raise InvalidRequest(f"{entry.expires} is over already; choose a later day.", parameter="expires")
    known = read_tokens(file) if file.exists() else TokenFile()
    if not replace and any(other.name == name for other in known.tokens):
        raise InvalidRequest(
            f"{name} has a token already; choose another name, which both keep working with, or add --replace.",
            parameter="name",
        )
    _write(file, known.with_entry(entry))
    terminal.write_line(made)
    terminal.say(f"The token of {name}. It is not kept anywhere: {file} holds its hash alone.", "dim")


@token.command("list")
@with_plain_errors
def list_tokens(*, file: Annotated[Path, _FILE] = _DEFAULT_FILE) -> None:
    """Show whose tokens there are, and what each may use."""
    table = Table("name", "requests/min", "answers at once", "tokens/min", "expires", "", box=None, pad_edge=False)
    for entry in read_tokens(file).tokens:
        table.add_row(
            entry.name,
            _shown(entry.requests_per_minute),
            _shown(entry.concurrent_answers),
            _shown(entry.tokens_per_minute),
            str(entry.expires or "never"),
            _state(entry),
        )
    Terminal.open().out.print(table)


@token.command("revoke")
@with_plain_errors
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME")], *, file: Annotated[Path, _FILE] = _DEFAULT_FILE
) -> None:
    """Take a token away: no call with it is taken from a second later on; answers that run may end."""
    known = read_tokens(file)
    kept = known.without(name)
    if kept == known:
        raise InvalidRequest(
            f"{file} has no token of {name!r}; `paceline token list` shows whose it has.", parameter="name"
        )
    _write(file, kept)
    Terminal.open().say(f"The token of {name} is revoked.")


def _shown(limit: float | None) -> str:
    return "any" if limit is None else f"{limit:g}"


def _state(entry: TokenEntry) -> str:
    if entry.disabled:
        return "disabled"
    return "expired" if entry.has_expired(dt.datetime.now(dt.UTC)) else ""


@contextmanager
def _named_faults() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        fault = error.errors()[0]
        parameter = str(fault["loc"][0]) if fault["loc"] else "burst"
        raise InvalidRequest(
            f"{parameter}: {fault['msg'].removeprefix('Value error, ')}.", parameter=parameter
        ) from error


def _write(path: Path, content: TokenFile) -> None:
    try:
        write_tokens(path, content)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror or error}.", parameter="file") from error
