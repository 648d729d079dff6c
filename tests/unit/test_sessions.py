"""The session table: one holder a session, fenced by epoch, bounded, and rid of what nobody uses.

The state of a session in these tests is a text, of which every letter is a token that is yet to be fed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import sessions
from paceline.errors import Draining, QueueFull, SessionNotFound, StaleEpoch
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
    kv_capacity_tokens: int = 1000
    held_tokens: int = 0

    def __post_init__(self) -> None:
        self.table = SessionTable[str](
            max_sessions=self.max_sessions,
            idle_ttl_s=IDLE_TTL_S,
            pending_tokens_of=len,
            held_tokens=lambda: self.held_tokens,
            kv_capacity_tokens=self.kv_capacity_tokens,
            clock=self.clock,
        )

    def open(self, address: Address, state: str = "state") -> list[Event[str]] | None:
        """The events, or None if the opening was stale."""
        held, events = self.table.open(address, lambda _: state)
        return None if held is None else events

    def grow(self, session_id: str, state: str) -> None:
        """Something changes what a session has yet to feed."""
        held = self.table.find(session_id)
        assert held is not None
        held.state = state
        self.table.recount(held)


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


@pytest.mark.parametrize("is_held", [True, False], ids=["held", "never opened"])
@pytest.mark.parametrize("epoch", [1, 2])
def test_an_opening_that_arrives_after_its_close_is_stale(is_held: bool, epoch: int) -> None:
    """Late or for a second time: nothing would ever close that session again. A newer epoch opens as ever."""
    table = Table()
    if is_held:
        table.open(Address(1, "a", 2))
    table.table.close(Address(1, "a", 2))
    assert table.open(Address(1, "a", epoch)) is None
    assert table.table.stale_items == 1
    assert table.open(Address(1, "a", 3)) == []


def test_an_opening_that_arrives_after_its_session_expired_is_stale() -> None:
    """As behind a close."""
    table = Table()
    table.open(Address(1, "a", 1))
    table.clock.now_s = IDLE_TTL_S + 1
    table.table.pop_idle()
    assert table.open(Address(1, "a", 1)) is None
    assert table.open(Address(1, "a", 2)) == []


def test_an_older_close_takes_nothing_back() -> None:
    """Closes that arrive in the wrong order leave the newest one in force."""
    table = Table()
    table.table.close(Address(1, "a", 5))
    table.table.close(Address(1, "a", 2))
    assert table.open(Address(1, "a", 5)) is None


def test_only_so_many_endings_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten first, so no flood of closes fills the memory."""
    monkeypatch.setattr(sessions, "REMEMBERED_ENDINGS", 2)
    table = Table()
    for name in "abca":
        table.table.close(Address(1, name, 1))
    assert table.open(Address(1, "b", 1)) == []
    assert table.open(Address(1, "a", 1)) is None
    assert table.open(Address(1, "c", 1)) is None


def test_a_draining_table_takes_no_new_sessions() -> None:
    """Those that are held may still be taken over, for whoever takes them wants to close them."""
    table = Table()
    table.open(Address(1, "a", 1))
    table.table.is_draining = True
    with pytest.raises(Draining):
        table.open(Address(1, "b", 1))
    assert table.open(Address(1, "a", 2)) == []


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


def test_a_session_beyond_the_budget_of_tokens_is_refused() -> None:
    """With a sentence that says how much is free; those held are not disturbed, and room that is given back counts."""
    table = Table(kv_capacity_tokens=10)
    table.open(Address(1, "a", 1), "four")
    table.open(Address(1, "b", 1), "4444")
    with pytest.raises(QueueFull, match=r"3 tokens .* the 2 that are free of this replica's 10.* --kv-budget-tokens"):
        table.open(Address(1, "c", 1), "333")
    assert table.open(Address(1, "d", 1), "22") == []
    assert (len(table.table), table.table.kv_used_tokens) == (3, 10)
    table.table.close(Address(1, "a", 1))
    assert table.open(Address(1, "c", 1), "333") == []


def test_a_session_that_is_held_may_grow_beyond_the_budget() -> None:
    """Whoever was let in is never cut off, nor when it is opened again; new sessions wait until there is room."""
    table = Table(kv_capacity_tokens=5)
    table.open(Address(1, "a", 1), "four")
    table.grow("a", "seven 7")
    assert table.table.kv_used_tokens == 7
    with pytest.raises(QueueFull, match="the 0 that are free"):
        table.open(Address(1, "b", 1), "1")
    assert table.open(Address(1, "a", 2), "eight  8") == []
    assert table.table.kv_used_tokens == 8


def test_tokens_in_memory_take_room_like_those_yet_to_be_fed() -> None:
    """A session that has fed its tokens leaves no more room than before; memory that is given back counts at once."""
    table = Table(kv_capacity_tokens=10)
    table.open(Address(1, "a", 1), "four")
    table.grow("a", "")
    table.held_tokens = 4
    assert table.table.kv_used_tokens == 4
    with pytest.raises(QueueFull, match=r"7 tokens .* the 6 that are free"):
        table.open(Address(1, "b", 1), "seven 7")
    table.held_tokens = 3
    assert table.open(Address(1, "b", 1), "seven 7") == []
    assert table.table.kv_used_tokens == 10


def test_memory_beyond_the_budget_leaves_no_room() -> None:
    """Blocks are held whole, so more may be held than was asked for; a session without tokens still fits."""
    table = Table(kv_capacity_tokens=10, held_tokens=16)
    with pytest.raises(QueueFull, match="the 0 that are free"):
        table.open(Address(1, "a", 1), "1")
    assert table.open(Address(1, "a", 1), "") == []


def test_a_table_without_a_bound_takes_any_number_of_tokens() -> None:
    """Which is what a capacity of 0 says."""
    table = Table(kv_capacity_tokens=0)
    assert table.open(Address(1, "a", 1), "four") == []
    assert table.open(Address(1, "b", 1), "four") == []
    assert table.table.kv_used_tokens == 8


def test_a_session_that_is_gone_counts_no_more() -> None:
    """Also if its last step ends after it was closed or taken over."""
    table = Table()
    table.open(Address(1, "a", 1), "four")
    held = table.table.close(Address(1, "a", 1))
    assert held is not None
    held.state = "grown since"
    table.table.recount(held)
    assert table.table.kv_used_tokens == 0


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
        st.sampled_from(["open", "open", "use", "grow", "feed", "close", "wait"]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.integers(1, 2),
    ),
    max_size=30,
)


@dataclass
class Expected:
    """What is held of one session, written down once more."""

    epoch: int
    peer: int
    used_s: float
    tokens: int


@settings(max_examples=400, deadline=None, derandomize=True)
@given(commands=COMMANDS)
def test_any_history_agrees_with_a_plain_dictionary(commands: list[Command]) -> None:  # noqa: PLR0912, PLR0915 - one branch a rule
    """400 drawn histories against the rules written down once more; the tokens counted are always those in memory and
    those yet to be fed."""
    table = Table(max_sessions=2, kv_capacity_tokens=9)
    expected: dict[str, Expected] = {}
    ended: dict[str, int] = {}
    stale = 0
    for verb, session, epoch, peer in commands:
        name, address, tokens = str(session), Address(peer, str(session), epoch), 2 + epoch
        held = expected.get(name)
        used_tokens = table.held_tokens + sum(each.tokens for each in expected.values())
        if verb == "open":
            if epoch <= (held.epoch if held else ended.get(name, -1)):
                assert table.open(address, "x" * tokens) is None
                stale += 1
            elif not held and (len(expected) == 2 or used_tokens + tokens > 9):
                with pytest.raises(QueueFull):
                    table.open(address, "x" * tokens)
            else:
                taken_from = [Address(held.peer, name, held.epoch)] if held and held.peer != peer else []
                assert [event.address for event in table.open(address, "x" * tokens) or ()] == taken_from
                expected[name] = Expected(epoch, peer, table.clock.now_s, tokens)
        elif verb == "use":
            if not held or epoch > held.epoch:
                with pytest.raises(SessionNotFound):
                    table.table.use(address)
            elif (epoch, peer) != (held.epoch, held.peer):
                assert table.table.use(address) is None
                stale += 1
            else:
                assert table.table.use(address) is not None
                held.used_s = table.clock.now_s
        elif verb == "grow" and held:
            table.grow(name, "x" * 3 * epoch)
            held.tokens = 3 * epoch
        elif verb == "feed" and held:
            table.grow(name, "")
            held.tokens, table.held_tokens = 0, epoch
        elif verb == "close":
            is_owner = not held or epoch > held.epoch or (epoch, peer) == (held.epoch, held.peer)
            assert (table.table.close(address) is not None) is (held is not None and is_owner)
            if is_owner:
                expected.pop(name, None)
                ended[name] = max(epoch, ended.get(name, -1))
            else:
                stale += 1
        elif verb == "wait":
            table.clock.now_s += 4.0 * epoch
            idle = {name for name, each in expected.items() if each.used_s < table.clock.now_s - IDLE_TTL_S}
            assert {each.address.session_id for each in table.table.pop_idle()} == idle
            ended |= {name: expected.pop(name).epoch for name in idle}
        assert {each.address.session_id: each.address.epoch for each in table.table} == {
            name: each.epoch for name, each in expected.items()
        }
        assert table.table.stale_items == stale
        assert table.table.kv_used_tokens == table.held_tokens + sum(each.tokens for each in expected.values())
    for each in list(table.table):
        table.table.close(each.address)
    assert table.table.kv_used_tokens == table.held_tokens
