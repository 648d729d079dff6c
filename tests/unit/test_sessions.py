"""The session table: one holder a session, fenced by epoch, bounded, and rid of what nobody uses."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import QueueFull, SessionNotFound, StaleEpoch
from paceline.sessions import Address, Event, Held, SessionTable

IDLE_TTL_S = 10.0


@dataclass
class Clock:
    """Time that passes when told to."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Table:
    """A table of strings, with its clock."""

    clock: Clock = field(default_factory=Clock)
    max_sessions: int = 3

    def __post_init__(self) -> None:
        self.table = SessionTable[str](max_sessions=self.max_sessions, idle_ttl_s=IDLE_TTL_S, clock=self.clock)

    def open(self, address: Address, state: str = "state") -> list[Event[str]] | None:
        """The events, or None if the opening was stale."""
        held, events = self.table.open(address, lambda _: state)
        return None if held is None else events


def test_an_opened_session_is_found_until_it_is_closed() -> None:
    """`use` gives what `open` made; closing gives it back once."""
    table, address = Table(), Address(1, "a", 1)
    assert table.open(address, "made") == []
    held = table.table.use(address)
    assert held is not None
    assert (held.state, len(table.table)) == ("made", 1)
    assert table.table.close(address) is held
    assert table.table.close(address) is None
    assert len(table.table) == 0
    with pytest.raises(SessionNotFound, match="open it again"):
        table.table.use(address)


@pytest.mark.parametrize("epoch", [4, 5])
def test_an_opening_that_is_not_newer_is_stale(epoch: int) -> None:
    """The same or an older epoch changes nothing, makes no state and is counted."""
    table = Table()
    table.open(Address(1, "a", 5), "first")

    def fail(_: object) -> str:
        raise AssertionError("nothing is made for a stale opening")

    assert table.table.open(Address(2, "a", epoch), fail) == (None, [])
    assert table.table.stale_items == 1
    held = table.table.find("a")
    assert held is not None
    assert (held.state, held.address) == ("first", Address(1, "a", 5))


def test_a_newer_epoch_takes_the_session_over() -> None:
    """The new state is made from the old one; the old holder hears of it, unless it is the new one itself."""
    table = Table()
    table.open(Address(1, "a", 1), "first")
    seen: list[Held[str] | None] = []

    def make(previous: Held[str] | None) -> str:
        seen.append(previous)
        return "second"

    _, events = table.table.open(Address(2, "a", 2), make)
    assert [held.state for held in seen if held] == ["first"]
    assert [(event.address, type(event.outcome)) for event in events] == [(Address(1, "a", 1), StaleEpoch)]
    assert table.open(Address(2, "a", 3)) == []
    assert len(table.table) == 1


def test_items_of_an_older_epoch_are_dropped_and_counted() -> None:
    """They are no error: whoever sent them will learn of the newer holder by itself (C33)."""
    table = Table()
    table.open(Address(1, "a", 5))
    assert table.table.use(Address(1, "a", 4)) is None
    assert table.table.close(Address(1, "a", 4)) is None
    assert table.table.stale_items == 2
    assert len(table.table) == 1


def test_items_of_a_stream_that_does_not_hold_the_session_are_dropped_and_counted() -> None:
    """Under the same epoch they can only be somebody else's, who chose the same name."""
    table = Table()
    table.open(Address(1, "a", 5))
    assert table.table.use(Address(2, "a", 5)) is None
    assert table.table.close(Address(2, "a", 5)) is None
    assert table.table.stale_items == 2
    assert table.table.use(Address(1, "a", 5)) is not None


def test_an_item_of_a_newer_epoch_finds_no_session() -> None:
    """Its opening was lost on the way, so the sender must open the session again."""
    table = Table()
    table.open(Address(1, "a", 1))
    with pytest.raises(SessionNotFound, match="epoch 2"):
        table.table.use(Address(1, "a", 2))
    assert table.table.stale_items == 0


def test_a_close_of_a_newer_epoch_closes() -> None:
    """Its opening may have been lost, but that the session is over is certain."""
    table = Table()
    table.open(Address(1, "a", 1))
    assert table.table.close(Address(1, "a", 2)) is not None
    assert len(table.table) == 0


def test_there_is_room_for_so_many_sessions_and_no_more() -> None:
    """Beyond it a clear refusal with a hint when to come back; a session that is held can still be taken over."""
    table = Table(max_sessions=2)
    table.open(Address(1, "a", 1))
    table.open(Address(1, "b", 1))
    with pytest.raises(QueueFull) as refusal:
        table.open(Address(1, "c", 1))
    assert refusal.value.retry_after_s
    assert table.open(Address(1, "a", 2)) == []
    assert {held.address.session_id for held in table.table} == {"a", "b"}
    table.table.close(Address(1, "b", 1))
    assert table.open(Address(1, "c", 1)) == []


def test_a_session_that_cannot_be_made_leaves_the_table_as_it_was() -> None:
    """The one held before stays, under its epoch."""
    table = Table()
    table.open(Address(1, "a", 1), "first")

    def fail(_: object) -> str:
        raise QueueFull("no memory")

    with pytest.raises(QueueFull):
        table.table.open(Address(1, "a", 2), fail)
    held = table.table.use(Address(1, "a", 1))
    assert held is not None
    assert held.state == "first"


def test_only_sessions_that_nobody_used_for_long_expire() -> None:
    """Using one keeps it; looking at it, or a stale item for it, does not."""
    table = Table()
    for name in "abc":
        table.open(Address(1, name, 2))
    table.clock.now_s = IDLE_TTL_S - 1
    table.table.use(Address(1, "a", 2))
    table.table.use(Address(1, "b", 1))
    table.table.find("c")
    assert table.table.pop_idle() == []
    table.clock.now_s = IDLE_TTL_S + 0.5
    assert [held.address.session_id for held in table.table.pop_idle()] == ["b", "c"]
    assert [held.address.session_id for held in table.table] == ["a"]
    table.clock.now_s = 3 * IDLE_TTL_S
    assert [held.address.session_id for held in table.table.pop_idle()] == ["a"]


Command = tuple[str, int, int, int]
COMMANDS = st.lists(
    st.tuples(
        st.sampled_from(["open", "use", "close", "wait"]), st.integers(0, 3), st.integers(0, 3), st.integers(1, 2)
    ),
    max_size=30,
)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(commands=COMMANDS)
def test_any_history_agrees_with_a_plain_dictionary(commands: list[Command]) -> None:  # noqa: PLR0912 - one branch a rule
    """250 drawn histories against the rules written down once more, over a dictionary of epoch, peer and last use."""
    table = Table(max_sessions=2)
    expected: dict[str, tuple[int, int, float]] = {}
    stale = 0
    for verb, session, epoch, peer in commands:
        name, address = str(session), Address(peer, str(session), epoch)
        held_epoch, held_peer, _ = expected.get(name, (-1, -1, 0.0))
        if verb == "open":
            if name in expected and epoch <= held_epoch:
                assert table.open(address) is None
                stale += 1
            elif name not in expected and len(expected) == 2:
                with pytest.raises(QueueFull):
                    table.open(address)
            else:
                taken_from = [] if name not in expected or held_peer == peer else [Address(held_peer, name, held_epoch)]
                assert [event.address for event in table.open(address) or ()] == taken_from
                expected[name] = (epoch, peer, table.clock.now_s)
        elif verb == "use":
            if name not in expected or epoch > held_epoch:
                with pytest.raises(SessionNotFound):
                    table.table.use(address)
            elif (epoch, peer) != (held_epoch, held_peer):
                assert table.table.use(address) is None
                stale += 1
            else:
                assert table.table.use(address) is not None
                expected[name] = (held_epoch, held_peer, table.clock.now_s)
        elif verb == "close":
            is_owner = epoch > held_epoch or (epoch, peer) == (held_epoch, held_peer)
            assert (table.table.close(address) is not None) is (name in expected and is_owner)
            if name in expected and is_owner:
                del expected[name]
            elif name in expected:
                stale += 1
        else:
            table.clock.now_s += 4.0 * epoch
            idle = {name for name, (*_, used_s) in expected.items() if used_s < table.clock.now_s - IDLE_TTL_S}
            assert {held.address.session_id for held in table.table.pop_idle()} == idle
            expected = {name: entry for name, entry in expected.items() if name not in idle}
        assert {held.address.session_id: held.address.epoch for held in table.table} == {
            name: epoch for name, (epoch, *_) in expected.items()
        }
        assert table.table.stale_items == stale
