"""The progress bar that appears only when the wait gets long, and only on a terminal."""

from __future__ import annotations

import io
from itertools import islice

from rich.console import Console

from paceline.engine.progress import PatientBar

NEVER_S = 3600.0


def console(*, is_terminal: bool) -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(file=output, force_terminal=is_terminal, force_interactive=is_terminal, width=80), output


def test_a_long_wait_on_a_terminal_shows_a_bar_that_moves() -> None:
    """Two of four items are half of the bar; a name with brackets is shown as it is."""
    screen, output = console(is_terminal=True)
    with PatientBar("Loading [b]model", console=screen, shown_after_s=NEVER_S) as bar:
        bar.show()
        assert list(islice(bar.track("abcd"), 3)) == ["a", "b", "c"]
    assert "Loading [b]model" in output.getvalue()
    assert "50%" in output.getvalue()


def test_a_short_wait_leaves_no_trace() -> None:
    """The usual load: nothing was shown, so nothing needs to be wiped away."""
    screen, output = console(is_terminal=True)
    with PatientBar("Loading", console=screen, shown_after_s=NEVER_S) as bar:
        assert list(bar.track("abcd")) == list("abcd")
    assert output.getvalue() == ""


def test_without_a_terminal_nothing_is_written() -> None:
    """However long it takes: the log of a service is read by machines."""
    screen, output = console(is_terminal=False)
    with PatientBar("Loading", console=screen, shown_after_s=0.0) as bar:
        assert not bar.is_possible
        assert list(bar.track("abcd")) == list("abcd")
    assert output.getvalue() == ""
