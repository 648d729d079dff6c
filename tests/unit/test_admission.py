"""Who is answered, who waits and who is refused: the laws of the line in front of the places."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.admission import Admission, Claim
from paceline.errors import DeadlineExceeded, InvalidRequest, QueueFull

FOREVER_S = 1e9


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def admission(
    *, max_places: int = 2, max_waiting: int = 4, longest_wait_s: float = FOREVER_S, clock: Clock | None = None
) -> Admission:
    return Admission(
        max_places=max_places, max_waiting=max_waiting, longest_wait_s=longest_wait_s, clock=clock or Clock()
    )


def is_waiting(claim: Claim) -> bool:
    return claim.turn is not None and not claim.turn.done()


# ---------------------------------------------------------------------------------------------------------------------
# Places


async def test_places_are_held_while_the_block_runs() -> None:
    """Also where it raises."""
    line = admission()

    async def fail() -> None:
        async with line.places(2, share="", deadline_s=None):
            assert (line.running, line.waiting) == (2, 0)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await fail()
    assert (line.running, line.waiting) == (0, 0)


async def test_more_places_than_there_are_is_an_invalid_request() -> None:
    """Waiting would not help."""
    with pytest.raises(InvalidRequest, match="at most 2") as refusal:
        admission().ask(3, share="")
    assert refusal.value.parameter == "n"


async def test_request_waits_for_all_its_places() -> None:
    """One that comes free is kept for it, though a later request would fit."""
    line = admission(max_places=3)
    first, second, third = (line.ask(1, share="a") for _ in range(3))
    large, small = line.ask(2, share="b"), line.ask(1, share="b")
    line.leave(first)
    assert (is_waiting(large), is_waiting(small), line.running) == (True, True, 2)
    line.leave(second)
    assert (large.holds, is_waiting(small), line.running) == (True, True, 3)
    line.leave(third)
    assert small.holds


async def test_line_without_room_refuses_at_once() -> None:
    """With no line at all, whatever does not fit."""
    line = admission(max_places=2, max_waiting=0)
    line.ask(1, share="a")
    with pytest.raises(QueueFull, match="1 answers are running, at most 2 may"):
        line.ask(2, share="a")
    line.ask(1, share="b")
    with pytest.raises(QueueFull, match="the line is full"):
        line.ask(1, share="c")
    assert (line.running, line.waiting) == (2, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Fairness


async def test_share_that_holds_least_goes_next() -> None:
    """Whoever came first."""
    line = admission(max_places=3, max_waiting=10)
    running = [line.ask(1, share="greedy") for _ in range(2)] + [line.ask(1, share="modest")]
    greedy, modest = line.ask(1, share="greedy"), line.ask(1, share="modest")
    newcomer = line.ask(1, share="newcomer")
    line.leave(running[0])
    assert (greedy.holds, modest.holds, newcomer.holds) == (False, False, True)
    line.leave(running[1])
    # Now each of the three holds as many, but the modest one came before the newcomer's next.
    assert (greedy.holds, modest.holds) == (True, False)
    line.leave(running[2])
    assert modest.holds


async def test_flood_leaves_room_in_the_line() -> None:
    """Alone a share gets half of it, the next half of the rest; the last place is left for whoever comes."""
    line = admission(max_places=1, max_waiting=8)
    line.ask(1, share="a")
    taken = Counter[str]()
    for name in ("a", "b", "c", "d"):
        for _ in range(8):
            try:
                line.ask(1, share=name)
            except QueueFull:
                break
            taken[name] += 1
    assert taken == {"a": 4, "b": 2, "c": 1, "d": 1}


async def test_modest_share_waits_for_one_place_under_a_flood() -> None:
    """Sixteen places, all taken by one share, whose line is full: another's request is the next all the same."""
    line = admission(max_places=16, max_waiting=8)
    flood = [line.ask(1, share="flood") for _ in range(16)]
    for _ in range(4):
        line.ask(1, share="flood")
    modest = line.ask(1, share="modest")
    line.leave(flood[0])
    assert modest.holds


# ---------------------------------------------------------------------------------------------------------------------
# Shedding


async def turned_over(line: Admission, clock: Clock, *, each_s: float, times: int = 4) -> None:
    """Let answers of a set length end, one after another."""
    for _ in range(times):
        claim = line.ask(1, share="past")
        clock.now_s += each_s
        line.leave(claim)


async def test_request_that_would_wait_longer_than_allowed_is_refused_with_that_time() -> None:
    """Answers take ten seconds, on two places: whoever would be second in the line waits for ten."""
    clock = Clock()
    line = admission(longest_wait_s=9.0, clock=clock)
    await turned_over(line, clock, each_s=10.0)
    for _ in range(2):
        line.ask(1, share="a")
    line.ask(1, share="a")
    with pytest.raises(QueueFull, match="wait for about 10 s") as refusal:
        line.ask(1, share="a")
    assert refusal.value.retry_after_s == pytest.approx(10.0)
    assert is_waiting(line.ask(1, share="b")), "another share is next"


async def test_request_that_would_wait_longer_than_its_caller_is_refused() -> None:
    """The same line, from callers with five seconds less and more."""
    clock = Clock()
    line = admission(clock=clock)
    await turned_over(line, clock, each_s=10.0)
    for _ in range(3):
        line.ask(1, share="a")
    with pytest.raises(QueueFull):
        line.ask(1, share="a", deadline_s=clock.now_s + 9.9)
    assert is_waiting(line.ask(1, share="a", deadline_s=clock.now_s + 10.1))


async def test_expectation_grows_while_nothing_comes_free() -> None:
    """Answers that hang free no places, whatever the past ones did."""
    clock = Clock()
    line = admission(longest_wait_s=9.0, clock=clock)
    await turned_over(line, clock, each_s=1.0)
    for _ in range(2):
        line.ask(1, share="a")
    assert is_waiting(line.ask(1, share="a"))
    clock.now_s += 1000.0
    with pytest.raises(QueueFull):
        line.ask(1, share="b")


async def test_idle_time_says_nothing_of_how_fast_places_come_free() -> None:
    """A burst behind a quiet hour is not refused for the quiet hour."""
    clock = Clock()
    line = admission(longest_wait_s=9.0, clock=clock)
    for _ in range(4):
        clock.now_s += 900.0
        await turned_over(line, clock, each_s=10.0, times=1)
    for _ in range(2):
        line.ask(1, share="a")
    assert is_waiting(line.ask(1, share="a"))


@given(held_s=st.floats(0.0, 1e4), longest_wait_s=st.floats(0.1, 100.0))
def test_time_to_wait_is_within_reason(held_s: float, longest_wait_s: float) -> None:
    """From a tenth of a second to a minute, whatever was measured."""

    async def scenario() -> None:
        clock = Clock()
        line = admission(max_places=1, max_waiting=0, longest_wait_s=longest_wait_s, clock=clock)
        await turned_over(line, clock, each_s=held_s)
        line.ask(1, share="a")
        with pytest.raises(QueueFull) as refusal:
            line.ask(1, share="a")
        assert refusal.value.retry_after_s is not None
        assert 0.1 <= refusal.value.retry_after_s <= 60.0

    asyncio.run(scenario())


# ---------------------------------------------------------------------------------------------------------------------
# Deadlines and callers that leave


async def test_request_whose_time_is_over_begins_nothing() -> None:
    """Not even where there is room."""
    clock = Clock()
    line = admission(clock=clock)
    with pytest.raises(DeadlineExceeded):
        async with line.places(1, share="", deadline_s=clock.now_s):
            pytest.fail("the block runs")
    assert (line.running, line.waiting) == (0, 0)


async def test_request_whose_time_is_over_when_its_turn_comes_begins_nothing() -> None:
    """And gives its place to the next at once."""
    clock = Clock()
    line = admission(max_places=1, clock=clock)
    first = line.ask(1, share="a")

    async def late() -> None:
        async with line.places(1, share="a", deadline_s=clock.now_s + 1000.0):
            pytest.fail("the block runs")

    waits = asyncio.ensure_future(late())
    await asyncio.sleep(0)
    next_one = line.ask(1, share="a")
    clock.now_s += 1001.0
    line.leave(first)
    with pytest.raises(DeadlineExceeded):
        await waits
    assert next_one.holds


async def test_request_stops_waiting_when_its_time_is_over() -> None:
    """Real time, on the loop's own clock: 20 ms pass in any case."""
    line = Admission(max_places=1, max_waiting=1, longest_wait_s=60.0, clock=asyncio.get_running_loop().time)
    line.ask(1, share="a")
    with pytest.raises(DeadlineExceeded):
        async with line.places(1, share="b", deadline_s=asyncio.get_running_loop().time() + 0.02):
            pytest.fail("the block runs")
    assert (line.running, line.waiting) == (1, 0)


async def test_request_waits_no_longer_than_allowed() -> None:
    """Where the measured rate promised too much, it is refused late rather than never."""
    line = Admission(max_places=1, max_waiting=1, longest_wait_s=0.02, clock=asyncio.get_running_loop().time)
    line.ask(1, share="a")
    with pytest.raises(QueueFull, match=r"within 0\.02 s"):
        async with line.places(1, share="b", deadline_s=None):
            pytest.fail("the block runs")
    assert (line.running, line.waiting) == (1, 0)


async def test_caller_that_leaves_the_line_is_not_waited_for() -> None:
    """A large request that places were being kept for: the one behind it gets them."""
    line = admission(max_places=2)
    first, _ = line.ask(1, share="a"), line.ask(1, share="a")
    large, small = line.ask(2, share="b"), line.ask(1, share="c")
    line.leave(first)
    assert (is_waiting(large), is_waiting(small)) == (True, True)
    line.leave(large)
    assert small.holds
    assert (line.running, line.waiting) == (2, 0)


@pytest.mark.parametrize("is_freed_first", [True, False])
async def test_place_that_comes_free_while_its_taker_is_cancelled_is_not_lost(is_freed_first: bool) -> None:
    """Both happen before either has run."""
    line = admission(max_places=1)
    first = line.ask(1, share="a")

    async def wait() -> None:
        async with line.places(1, share="a", deadline_s=None):
            await asyncio.sleep(0)

    taker = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    both: list[Callable[[], object]] = [lambda: line.leave(first), taker.cancel]
    for act in both if is_freed_first else reversed(both):
        act()
    with pytest.raises(asyncio.CancelledError):
        await taker
    assert (line.running, line.waiting) == (0, 0)
    assert line.ask(1, share="b").holds


# ---------------------------------------------------------------------------------------------------------------------
# Laws, over drawn histories


@dataclass
class History:
    """A line that is driven by drawn acts, and what must be true of it after each."""

    max_places: int
    max_waiting: int
    line: Admission = field(init=False)
    held: list[Claim] = field(default_factory=list)
    waiting: list[Claim] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.line = admission(max_places=self.max_places, max_waiting=self.max_waiting)

    def ask(self, share: str, places: int) -> None:
        before = (self.line.running, self.line.waiting)
        try:
            claim = self.line.ask(min(places, self.max_places), share=share)
        except QueueFull:
            assert (self.line.running, self.line.waiting) == before
            own = sum(other.share == share for other in self.waiting)
            assert own >= self.max_waiting - len(self.waiting), "refused though its share had room in the line"
            return
        (self.held if claim.holds else self.waiting).append(claim)

    def leave(self, claim: Claim) -> None:
        (self.held if claim in self.held else self.waiting).remove(claim)
        levels = self.levels()
        self.line.leave(claim)
        self.follow(levels)

    def levels(self) -> Counter[str]:
        levels = Counter[str]()
        for claim in self.held:
            levels[claim.share] += claim.places
        return levels

    def follow(self, levels: Counter[str]) -> None:
        """Whoever was let in was, one after another, the first of the share that held least."""
        admitted = [claim for claim in self.waiting if claim.holds]
        while admitted:
            heads: dict[str, Claim] = {}
            for claim in self.waiting:
                heads.setdefault(claim.share, claim)
            due = min(heads.values(), key=lambda claim: (levels[claim.share], claim.number))
            assert due in admitted, "somebody passed the request whose turn it was"
            admitted.remove(due)
            self.waiting.remove(due)
            self.held.append(due)
            levels[due.share] += due.places

    def check(self) -> None:
        assert self.line.running == sum(claim.places for claim in self.held) <= self.max_places
        assert self.line.waiting == len(self.waiting) <= self.max_waiting
        assert all(claim.holds for claim in self.held)
        assert not any(claim.holds for claim in self.waiting)
        free = self.max_places - self.line.running
        if self.waiting:
            levels = self.levels()
            heads: dict[str, Claim] = {}
            for claim in self.waiting:
                heads.setdefault(claim.share, claim)
            due = min(heads.values(), key=lambda claim: (levels[claim.share], claim.number))
            assert due.places > free, "places are free that somebody waits for"


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from("abcd"), st.integers(1, 5)),
        st.tuples(st.just("end"), st.just(""), st.integers(0, 30)),
        st.tuples(st.just("give up"), st.just(""), st.integers(0, 30)),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(max_places=st.integers(1, 8), max_waiting=st.integers(0, 8), acts=ACTS)
def test_laws_hold_whatever_happens(max_places: int, max_waiting: int, acts: list[tuple[str, str, int]]) -> None:
    """Bounds, all or none, turns, no idle place; and in the end everybody who waited is served and nothing is left."""

    async def scenario() -> None:
        history = History(max_places, max_waiting)
        for act, share, number in acts:
            if act == "ask":
                history.ask(share, number)
            else:
                claims = history.held if act == "end" else history.waiting
                if claims:
                    history.leave(claims[number % len(claims)])
            history.check()
        still_waiting = sum(claim.places for claim in history.waiting)
        ended = 0
        while history.waiting:
            ended += history.held[0].places
            history.leave(history.held[0])
            history.check()
        assert ended <= max_places + still_waiting, "nobody starves"
        for claim in list(history.held):
            history.leave(claim)
        assert (history.line.running, history.line.waiting) == (0, 0)
        history.ask("e", max_places)
        assert history.line.running == max_places, "a line that was left by all has all its places"

    asyncio.run(scenario())


async def test_large_request_is_not_starved_by_small_ones() -> None:
    """A share of small requests that always has one waiting; another share wants all eight places."""
    line = admission(max_places=8, max_waiting=8)
    small = [line.ask(1, share="small") for _ in range(8)]
    large = line.ask(8, share="large")
    for ended in range(8):
        assert is_waiting(large)
        if line.waiting < 4:
            small.append(line.ask(1, share="small"))
        line.leave(small[ended])
    assert large.holds


@settings(max_examples=100)
@given(floods=st.integers(1, 6), places=st.integers(2, 16))
def test_floods_share_the_places_evenly(floods: int, places: int) -> None:
    """Shares that always want more hold the same number of places in the end, to one."""

    async def scenario() -> None:
        line = admission(max_places=places, max_waiting=8 * floods)
        held: list[Claim] = [line.ask(1, share="0") for _ in range(places)]
        waiting: list[Claim] = []
        for _ in range(4 * places * floods):
            for name in range(floods):
                if not any(claim.share == str(name) for claim in waiting):
                    waiting.append(line.ask(1, share=str(name)))
            line.leave(held.pop(0))
            held += [claim for claim in waiting if claim.holds]
            waiting = [claim for claim in waiting if not claim.holds]
        levels = Counter(claim.share for claim in held)
        assert max(levels.values()) - min(levels[str(name)] for name in range(floods)) <= 1

    asyncio.run(scenario())


async def test_tasks_that_come_and_go_leave_nothing_behind() -> None:
    """A hundred callers, a third of whom leave, on a real event loop: none is answered twice, no place is lost."""
    line = admission(max_places=4, max_waiting=200)
    most = served = 0

    async def caller(number: int) -> None:
        nonlocal most, served
        async with line.places(1 + number % 3, share=str(number % 5), deadline_s=None):
            most = max(most, line.running)
            for _ in range(number % 4):
                await asyncio.sleep(0)
            served += 1

    callers = [asyncio.ensure_future(caller(number)) for number in range(100)]
    for number in range(0, 100, 3):
        await asyncio.sleep(0)
        callers[number].cancel()
    outcomes = await asyncio.gather(*callers, return_exceptions=True)
    assert most <= 4
    refused = sum(isinstance(outcome, QueueFull) for outcome in outcomes)
    cancelled = sum(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    assert served + refused + cancelled == 100
    assert (line.running, line.waiting) == (0, 0)
