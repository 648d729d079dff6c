"""The file of tokens: what it may say, how it is written, and that it tells nobody a token."""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import StartupFailed
from paceline.tokens import TokenEntry, TokenFile, find_entry, hash_token, new_token, read_tokens, write_tokens
from tests.command_line import paceline, refused

NOON = dt.datetime(2026, 11, 30, 12, tzinfo=dt.UTC)


def entry(name: str = "a", **fields: Any) -> TokenEntry:
    return TokenEntry(**{"name": name, "sha256": hash_token(f"token of {name}"), **fields})


def test_a_token_is_random_and_recognisable() -> None:
    """256 bits behind a prefix: two are never equal."""
    made = {new_token() for _ in range(100)}
    assert len(made) == 100
    for token in made:
        assert token.startswith("paceline_")
        assert len(token.removeprefix("paceline_")) == 43  # 256 bits, 6 in each character


def test_the_hash_is_sha256() -> None:
    """So that other tools can make entries."""
    assert hash_token("paceline_x") == hashlib.sha256(b"paceline_x").hexdigest()


def test_every_entry_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hmac.compare_digest, and behind a match too: time tells nobody whether, or where, a token was found."""
    compared: list[tuple[str, str]] = []

    def compare(left: str, right: str) -> bool:
        compared.append((left, right))
        return hmac_compare(left, right)

    hmac_compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    entries = [entry("a"), entry("b"), entry("c")]
    for token, name in (("token of a", "a"), ("token of c", "c"), ("none", None)):
        compared.clear()
        found = find_entry(entries, token)
        assert (found.name if found else None) == name
        assert compared == [(each.sha256, hash_token(token)) for each in entries]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    """Every field; only the owner may read the file, and nothing is left beside it."""
    path = tmp_path / "tokens.yaml"
    file = TokenFile(
        tokens=(
            entry("a", requests_per_minute=30, burst=3, concurrent_answers=2, tokens_per_minute=1e5),
            entry("b", expires=dt.date(2026, 11, 30), disabled=True),
            entry("c", expires=NOON),
        )
    )
    write_tokens(path, file)
    assert read_tokens(path) == file
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["tokens.yaml"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    """What it leads to is replaced, not the link."""
    real, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    write_tokens(real, TokenFile())
    link.symlink_to(real)
    write_tokens(link, TokenFile(tokens=(entry(),)))
    assert link.is_symlink()
    assert read_tokens(real).tokens == (entry(),)


def test_json_and_an_empty_file_are_taken(tmp_path: Path) -> None:
    """YAML contains JSON; nothing in it lets nobody in."""
    path = tmp_path / "tokens"
    path.write_text(json.dumps({"tokens": [{"name": "a", "sha256": hash_token("token of a")}]}))
    assert read_tokens(path).tokens == (entry(),)
    path.write_text("")
    assert read_tokens(path).tokens == ()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("tokens: [", "not valid YAML"),
        ("tokens: [{name: a, sha256: HASH, expires: 2027-06-31}]", "not valid YAML"),  # no such day
        ("- a", "valid dictionary"),
        ("token: []", "Extra inputs"),
        ("tokens: [{name: a}]", "sha256: Field required"),
        ("tokens: [{name: a, sha256: HASH, rate: 1}]", "rate: Extra inputs"),
        ("tokens: [{name: a, sha256: short}]", "should match pattern"),
        ("tokens: [{name: a/b, sha256: HASH}]", "should match pattern"),
        ("tokens: [{name: a, sha256: HASH, requests_per_minute: 0}]", "greater than 0"),
        ("tokens: [{name: a, sha256: HASH, requests_per_minute: .inf}]", "finite"),
        ("tokens: [{name: a, sha256: HASH, concurrent_answers: 0}]", "greater than or equal to 1"),
        ("tokens: [{name: a, sha256: HASH, burst: 2}]", "goes together with requests_per_minute"),
        ("tokens: [{name: a, sha256: HASH, expires: soon}]", "expires"),
        ("tokens: [{name: a, sha256: HASH}, {name: a, sha256: OTHER}]", "the same name"),
        ("tokens: [{name: a, sha256: HASH}, {name: b, sha256: HASH}]", "the same sha256"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, content: str, why: str) -> None:
    """And shows nothing of what it holds."""
    path = tmp_path / "tokens.yaml"
    path.write_text(content.replace("HASH", "ab" * 32).replace("OTHER", "cd" * 32))
    with pytest.raises(StartupFailed, match=why) as caught:
        read_tokens(path)
    assert str(path) in caught.value.message
    assert "ab" * 32 not in caught.value.message


def test_a_file_that_is_not_there_says_how_to_make_one(tmp_path: Path) -> None:
    """By the command."""
    with pytest.raises(StartupFailed, match="paceline token new"):
        read_tokens(tmp_path / "tokens.yaml")


@pytest.mark.parametrize(
    ("expires", "moment", "is_over"),
    [
        ("2026-11-30", NOON, False),
        ("2026-11-30", NOON + dt.timedelta(hours=12), True),
        (dt.date(2026, 11, 29), NOON, True),
        ("2026-11-30T12:00:00", NOON, True),
        ("2026-11-30T12:00:01", NOON, False),
        ("2026-11-30T12:00:00+02:00", NOON, True),
        ("2026-11-30T12:00:00-02:00", NOON, False),
        ("9999-12-31", NOON, False),
        (None, NOON, False),
    ],
)
def test_a_token_is_taken_until_its_last_moment(expires: Any, moment: dt.datetime, is_over: bool) -> None:
    """A day ends with its last second, in UTC unless the entry says otherwise."""
    assert entry(expires=expires).has_expired(moment) is is_over


def test_a_token_that_is_over_already_is_not_made(tmp_path: Path) -> None:
    """The command says so, and leaves the file as it was."""
    path = tmp_path / "tokens.yaml"
    words = refused(paceline("token", "new", "a", "--file", str(path), "--expires", "2020-01-01"), status=1)
    assert "2020-01-01 is over already" in words
    assert not path.exists()
