"""`paceline bench`: what it refuses, before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import paceline, refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--draft-lengths", "4,long"), "--draft-lengths does not take '4,long'"),
        (("--schedules", "backwards"), "'backwards' is not a valid Schedule"),
        (("--temperatures", ","), "--temperatures needs at least one value"),
        (("--target-cores", "4096"), "target_cores must name cores of this process"),
        (("--emulated", "--peer", "transformers"), "--peer computes for real"),
        (("--prompts", "none.jsonl"), "none.jsonl cannot be read"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    """With the option's name, and without a trace in the folder."""
    sentence = refused(paceline("bench", "--output", str(tmp_path / "out"), *arguments), status=1)
    assert words in sentence
    assert not (tmp_path / "out").exists()
