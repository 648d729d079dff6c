"""Tokens that let callers in, and the file that says whose they are and what each may use.

A token is 256 random bits behind a prefix that secret scanners can look for, so its plain SHA-256 is what the file
holds: slow, salted hashes are for passwords, which can be guessed; of 2^256 tokens none can, and no two are equal.
Whoever reads the file gains nothing. A token that comes with a call is hashed and compared with every entry in constant
time, so how long a refusal takes says nothing of what is there.

The file is YAML, which JSON is too. Knows nothing of calls.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import os
import re
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from paceline.errors import StartupFailed
from paceline.redaction import TOKEN_PREFIX

_TOKEN_BYTES = 32
_DATE = re.compile(r"\d{4}-\d\d-\d\d")


class TokenEntry(BaseModel):
    """One token: who its holder is, and what that one may use."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # Of the caller; no "/", which parts it from its tenants.
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")  # of the token
    requests_per_minute: float | None = Field(default=None, gt=0)
    burst: int | None = Field(default=None, ge=1)  # requests at once; None: as many as in a minute
    concurrent_answers: int | None = Field(default=None, ge=1)
    tokens_per_minute: float | None = Field(default=None, gt=0)  # of prompts and answers together
    expires: dt.datetime | dt.date | None = None  # UTC unless it says otherwise; a date ends with its last second
    disabled: bool = False

    @field_validator("expires", mode="before")
    @classmethod
    def _date_is_no_midnight(cls, value: object) -> object:
        """A text that is a date alone means that day, not its first moment, which pydantic would make of it."""
        if isinstance(value, str) and _DATE.fullmatch(value):
            return dt.date.fromisoformat(value)
        return value

    @model_validator(mode="after")
    def _burst_goes_with_a_rate(self) -> Self:
        if self.burst is not None and self.requests_per_minute is None:
            raise ValueError("burst goes together with requests_per_minute")
        return self

    def has_expired(self, now: dt.datetime) -> bool:
        if self.expires is None:
            return False
        if not isinstance(self.expires, dt.datetime):
            return now.astimezone(dt.UTC).date() > self.expires
        return now >= (self.expires if self.expires.tzinfo else self.expires.replace(tzinfo=dt.UTC))


class TokenFile(BaseModel):
    """All tokens of one deployment. Invariant: no two entries have one name, nor one token."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: tuple[TokenEntry, ...] = ()

    @model_validator(mode="after")
    def _all_differ(self) -> Self:
        for what, values in (
            ("name", [entry.name for entry in self.tokens]),
            ("sha256", [entry.sha256 for entry in self.tokens]),
        ):
            if len(set(values)) < len(values):
                raise ValueError(f"two tokens have the same {what}")
        return self

    def with_entry(self, entry: TokenEntry) -> TokenFile:
        """With that entry behind the others, in place of one of the same name."""
        return TokenFile(tokens=(*self.without(entry.name).tokens, entry))

    def without(self, name: str) -> TokenFile:
        return TokenFile(tokens=tuple(entry for entry in self.tokens if entry.name != name))


def read_tokens(path: Path) -> TokenFile:
    """Raises `StartupFailed` with a sentence that says what is wrong with the file, and shows nothing of what it holds."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupFailed(
            f"The token file {path} cannot be read ({error.strerror}); make one with `paceline token new`."
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: bytes that are no text, and days that there are not.
        raise StartupFailed(f"The token file {path} is not valid YAML.") from error
    try:
        return TokenFile.model_validate({} if content is None else content)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'tokens'}: {fault['msg']}" for fault in error.errors()
        )
        raise StartupFailed(f"The token file {path} cannot be used: {faults}.") from error


def write_tokens(path: Path, file: TokenFile) -> None:
    """Replace the file in one step, or what a link leads to; only its owner may read it. Raises `OSError`."""
    path = path.resolve()
    entries = [entry.model_dump(mode="json", exclude_defaults=True) for entry in file.tokens]
    text = "# Made by `paceline token`: hashes of tokens, never tokens.\n" + yaml.safe_dump(
        {"tokens": entries}, sort_keys=False
    )
    handle, fresh = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(fresh, path)
    except BaseException:
        Path(fresh).unlink(missing_ok=True)
        raise


def new_token() -> str:
    """256 bits from the system's own source."""
    return TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)


def hash_token(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def find_entry(entries: Sequence[TokenEntry], token: str) -> TokenEntry | None:
    """Whose token that is; takes the same time whether and where it is found."""
    given, found = hash_token(token), None
    for entry in entries:
        if hmac.compare_digest(entry.sha256, given):
            found = entry
    return found
