"""Signals held back: when they take effect, and that nothing of the holding remains."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from paceline.cli import held_signals
from paceline.cli.held_signals import HeldSignals


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Whatever came before and whatever a test does, each begins with the handlers that Python starts with."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signal_waits_for_a_good_moment() -> None:
    """Ctrl-C is heard at once and acted on when the holder says so, once."""
    heard: list[str] = []
    with HeldSignals(on_held=lambda: heard.append("heard")) as signals:
        signal.raise_signal(signal.SIGINT)
        assert heard == ["heard"]
        with pytest.raises(KeyboardInterrupt):
            signals.act()
        signals.act()


def test_terminate_ends_as_the_shell_expects() -> None:
    """SIGTERM, for which nobody has a handler, becomes the exit status 128 + 15."""
    with HeldSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit) as ending:
            signals.act()
    assert ending.value.code == 143


def test_nothing_is_held_where_released() -> None:
    """Within the released block a signal does what it always did; behind it, it is held again."""
    with HeldSignals() as signals:
        with pytest.raises(KeyboardInterrupt), signals.released():
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_signal_from_before_the_release_ends_the_block_before_it_begins() -> None:
    """What was remembered is not forgotten when the holding ends well."""
    has_begun = False
    with HeldSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), signals.released():
            has_begun = True
    assert not has_begun


def test_handlers_of_before_are_back_at_the_end() -> None:
    """Also where a library has put in its own meanwhile."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with HeldSignals():
        signal.signal(signal.SIGTERM, lambda *_: None)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_handler_of_a_library_is_replaced_by_holding_again() -> None:
    """A SIGTERM handler that was installed on the way gets no say."""
    taken: list[int] = []
    with HeldSignals() as signals:
        signal.signal(signal.SIGTERM, lambda number, _: taken.append(number))
        signals.hold()
        signal.raise_signal(signal.SIGTERM)
    assert taken == []


def test_ignored_signal_stays_ignored() -> None:
    """A job that a shell started in the background does not listen to Ctrl-C, and is not made to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with HeldSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        signals.act()


def test_whoever_has_waited_long_enough_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that hangs can still be interrupted, by asking again."""
    with HeldSignals():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(held_signals, "PATIENCE_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
