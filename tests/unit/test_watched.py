"""Files that are read again when they change: at once for whoever asks, and never half."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from paceline.errors import StartupFailed
from paceline.watched import Watched
from tests.certificates import replace_file


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def number_in(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError) as error:
        raise StartupFailed(f"{path} holds no number.") from error


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "number"
    path.write_text("1")
    return path


def test_a_file_that_was_replaced_is_read_again(path: Path) -> None:
    """Also by one of the same size; no sooner than a second after it was looked at last."""
    clock = Clock()
    watched = Watched([path], lambda: number_in(path), clock=clock)
    replace_file(path, b"2")
    clock.now_s += 0.9
    assert watched.value() == 1
    clock.now_s += 0.2
    assert watched.value() == 2


def test_a_file_that_did_not_change_is_not_read_again(path: Path) -> None:
    """However often it is asked for."""
    reads: list[None] = []
    clock = Clock()

    def read() -> int:
        reads.append(None)
        return number_in(path)

    watched = Watched([path], read, clock=clock)
    for _ in range(5):
        clock.now_s += 2
        watched.value()
    assert len(reads) == 1


@pytest.mark.parametrize("spoil", [lambda path: replace_file(path, b"none"), lambda path: path.unlink()])
def test_a_broken_file_changes_nothing_and_is_logged_once(path: Path, spoil: object) -> None:
    """What it said before holds until it can be read again."""
    clock = Clock()
    watched = Watched([path], lambda: number_in(path), clock=clock)
    assert callable(spoil)
    spoil(path)
    with capture_logs() as logs:
        for _ in range(3):
            clock.now_s += 2
            assert watched.value() == 1
    assert [entry["log_level"] for entry in logs] == ["error"]
    replace_file(path, b"3")
    clock.now_s += 2
    assert watched.value() == 3


def test_what_fails_for_another_file_is_tried_again(path: Path, tmp_path: Path) -> None:
    """A certificate may be there before its key is: the second attempt needs no further change of the first file."""
    fits: list[None] = []
    clock, other = Clock(), tmp_path / "other"
    other.write_text("1")

    def read() -> int:
        if path.read_text() != "1" and not fits:
            raise StartupFailed("They do not fit.")
        return number_in(path)

    watched = Watched([path, other], read, clock=clock)
    replace_file(path, b"2")
    clock.now_s += 2
    assert watched.value() == 1
    fits.append(None)
    clock.now_s += 2
    assert watched.value() == 2


def test_a_file_that_is_broken_at_the_start_is_refused(path: Path) -> None:
    """There is nothing from before to go on with."""
    path.write_text("none")
    with pytest.raises(StartupFailed, match="no number"):
        Watched([path], lambda: number_in(path))
