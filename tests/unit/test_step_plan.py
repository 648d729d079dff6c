"""What enters a step: all sessions within the token budget, prompts in chunks, equal prompts once, memory by age."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.step_plan import SHORT_LENGTH, Part, StepPlanner, Wish
from tests.fakes import FakeCache, FakeModel

BLOCK_SIZE = 16


@dataclass
class Session:
    """A session as the planner sees it (`step_plan.Feeder`)."""

    cache: FakeCache
    opened: int
    committed_ids: list[int]
    is_silent: bool = False


@dataclass
class Bench:
    """A planner over a fake model, and the sessions that share its memory."""

    budget: int = 256
    num_blocks: int = 512
    block_size: int = BLOCK_SIZE
    sessions: list[Session] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = FakeModel(
            lambda ids: [0.0], vocab_size=1, num_blocks=self.num_blocks, block_size=self.block_size, max_context=2**20
        )
        self.planner = StepPlanner[FakeCache](self.model, holders=lambda: self.sessions, max_batch_tokens=self.budget)

    def open(self, committed_ids: Sequence[int], *, cached: int = 0) -> Session:
        """A session opened after all before it, of whose tokens so many are cached."""
        session = Session(self.model.new_cache(), len(self.sessions), list(committed_ids))
        self.sessions.append(session)
        if cached:
            self.run([Part(Wish(session, (), cached, 0), cached)])
        return session

    def running(self, *, length: int = 20, first_id: int = 0) -> Session:
        """A session in mid-answer: all but its last token are cached."""
        return self.open(range(first_id, first_id + length), cached=length - 1)

    def run(self, parts: Sequence[Part[FakeCache]]) -> None:
        for part in parts:
            assert self.model.reserve(part.wish.feeder.cache, part.wish.feeder.cache.length + part.count)
        self.model.step([part.extension() for part in parts])
        self.planner.share_prefixes(parts)

    def step(self, *wishes: Wish[FakeCache]) -> dict[int, int]:
        """Run the next step; tokens fed for each session that takes part, by its age."""
        parts = self.planner.plan([wish for wish in wishes if wish.remaining > 0])
        if parts:
            self.run(parts)
        self.model.memory.check()
        return {part.wish.feeder.opened: part.count for part in parts}


def judging(session: Session, draft_ids: Sequence[int] = ()) -> Wish[FakeCache]:
    """What it takes to judge a draft: all tokens cached, and a row for each drafted one and the one before."""
    length = len(session.committed_ids) + len(draft_ids)
    return Wish(session, tuple(draft_ids), length, len(draft_ids) + 1)


def tokens(count: int, *, first: int = 0) -> range:
    """So many tokens, no two of them equal."""
    return range(first, first + count)


# ---- the token budget -----------------------------------------------------------------------------------------------


def test_every_session_that_wants_something_enters_the_step() -> None:
    """Rows, single tokens and whole prompts side by side, each with exactly the tokens that are missing."""
    bench = Bench()
    first, second, third = bench.running(), bench.running(first_id=100), bench.open(tokens(50, first=200))
    assert bench.step(judging(first, (7, 8, 9)), judging(second), judging(third, (1,))) == {0: 4, 1: 1, 2: 51}
    assert bench.model.ids_of(first.cache) == [*tokens(20), 7, 8, 9]
    assert bench.model.ids_of(third.cache) == [*tokens(50, first=200), 1]


def test_a_long_prompt_is_fed_in_chunks_beside_the_rows_of_others() -> None:
    """Each step takes the rows of the running session, and of the prompt what the budget leaves."""
    bench = Bench(budget=64)
    runs, prompt = bench.running(), bench.open(tokens(150, first=1000))
    wish = judging(prompt)
    counts = []
    while wish.remaining:
        runs.committed_ids.append(7)
        counts.append(bench.step(wish, judging(runs, ())))
    assert counts == [{0: 2, 1: 62}, {0: 1, 1: 63}, {0: 1, 1: 25}]
    assert bench.model.ids_of(prompt.cache) == list(prompt.committed_ids)


def test_prompts_get_a_quarter_of_the_budget_where_rows_would_fill_it() -> None:
    """And rows the rest, those first that are the most urgent."""
    bench = Bench(budget=32)
    running = [bench.running(first_id=100 * number) for number in range(10)]
    prompt = bench.open(tokens(500, first=5000))
    counts = bench.step(judging(prompt), *(judging(session, (1, 2, 3, 4)) for session in running))
    assert counts == {0: 5, 1: 5, 2: 5, 3: 5, 10: 12}
    assert bench.step(*(judging(session, (1, 2, 3, 4)) for session in running[4:])) == dict.fromkeys(range(4, 10), 5)


def test_rows_are_never_split_over_two_steps() -> None:
    """A chunk ends before the first of them at the latest."""
    bench = Bench(budget=10)
    session = bench.open(tokens(12))
    wish = judging(session, (1, 2, 3, 4))
    assert [bench.step(wish), bench.step(wish)] == [{0: 10}, {0: 6}]
    wish = judging(bench.open(tokens(13, first=100)), (1, 2, 3, 4, 5, 6))
    assert [bench.step(wish), bench.step(wish), bench.step(wish)] == [{1: 10}, {1: 9}, {}]


def test_a_draft_as_long_as_the_budget_is_not_put_off_by_prompts() -> None:
    """The share of the prompts gives way to the rows of the most urgent draft, which would never fit otherwise."""
    bench = Bench(budget=65)
    session, prompt = bench.running(), bench.open(tokens(500, first=1000))
    assert bench.step(judging(session, range(64)), judging(prompt)) == {0: 65}


wishes_drawn = st.lists(
    st.tuples(
        st.integers(1, 200),  # committed tokens
        st.floats(0, 1),  # share of them that is cached
        st.integers(0, 7),  # drafted tokens
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(drawn=wishes_drawn, budget=st.integers(8, 64), num_blocks=st.integers(14, 60))
def test_any_step_keeps_to_the_budget_and_has_room(
    drawn: list[tuple[int, float, int]], budget: int, num_blocks: int
) -> None:
    """60 drawn sets of sessions in little memory: no step feeds more than the budget, no session takes part twice or
    with rows that are split, and the oldest session is always served; so all are done within bounded time."""
    bench = Bench(budget=budget, num_blocks=num_blocks)
    for number, (length, share, _) in enumerate(drawn):
        session = bench.open(tokens(length, first=1000 * number))
        cached = int(share * (length - 1))
        if bench.model.reserve(session.cache, cached):
            bench.run([Part(Wish(session, (), cached, 0), cached)] if cached else [])
    waiting = {session.opened: judging(session, range(drawn[session.opened][2])) for session in bench.sessions}
    for _ in range(10_000):
        if not waiting:
            break
        parts = bench.planner.plan(list(waiting.values()))
        ages = [part.wish.feeder.opened for part in parts]
        assert len(set(ages)) == len(ages)
        assert sum(part.count for part in parts) <= budget
        assert min(waiting) in ages
        for part in parts:
            rows = part.wish.rows
            assert 0 < part.count <= part.wish.remaining
            assert part.count == part.wish.remaining or part.count <= part.wish.remaining - rows
        bench.run(parts)
        for age in [age for age, wish in waiting.items() if wish.remaining == 0]:
            session = bench.sessions[age]
            assert bench.model.ids_of(session.cache) == [*session.committed_ids, *waiting.pop(age).ids]
            bench.model.release(session.cache)
            bench.model.memory.check()
    assert not waiting


# ---- shared prefixes ------------------------------------------------------------------------------------------------


def fed_until_done(bench: Bench, *wishes: Wish[FakeCache]) -> dict[int, int]:
    """Tokens fed for each session until all have what they want."""
    fed: dict[int, int] = {}
    while any(wish.remaining for wish in wishes):
        counts = bench.step(*wishes)
        assert counts, "the step is empty"
        for age, count in counts.items():
            fed[age] = fed.get(age, 0) + count
    return fed


def test_a_prompt_that_another_session_has_computed_is_reused() -> None:
    """1,000 tokens in common: the second session feeds the rest alone."""
    bench = Bench()
    first = bench.open([*tokens(1000), 1, 2, 3])
    second = bench.open([*tokens(1000), *tokens(24, first=5000)])
    assert fed_until_done(bench, judging(first)) == {0: 1003}
    assert fed_until_done(bench, judging(second)) == {1: 24 + 1000 % BLOCK_SIZE}
    assert bench.model.ids_of(second.cache) == second.committed_ids


@pytest.mark.parametrize("budget", [4096, 256, 250, 100])
@pytest.mark.parametrize("length", [1000, 992])
@pytest.mark.parametrize("block_size", [1, BLOCK_SIZE])
def test_a_prompt_that_arrives_many_times_at_once_is_computed_once(budget: int, length: int, block_size: int) -> None:
    """Whatever the chunks; each other session feeds the last tokens, which give its rows or fill no block."""
    bench = Bench(budget=budget, block_size=block_size, num_blocks=8192 // block_size)
    sessions = [bench.open(tokens(length)) for _ in range(5)]
    fed = fed_until_done(bench, *(judging(session, (7, 7)) for session in sessions))
    rest = max(1, length % block_size) + 2
    assert fed == {0: length + 2, 1: rest, 2: rest, 3: rest, 4: rest}
    for session in sessions:
        assert bench.model.ids_of(session.cache) == [*tokens(length), 7, 7]


def test_a_chunk_of_few_tokens_does_not_part_a_session_from_those_it_can_reuse() -> None:
    """The budget leaves 5 tokens beside a session that computes the same prompt: they are not taken, for a session that
    ends within a block could reuse nothing behind it."""
    bench = Bench(budget=101)
    first, second = bench.open(tokens(96)), bench.open(tokens(96))
    assert bench.step(judging(first), judging(second)) == {0: 96}
    assert bench.step(judging(second)) == {1: 1}


def test_prompts_that_differ_within_the_first_tokens_do_not_wait_for_each_other() -> None:
    """Both are computed in one step."""
    bench = Bench()
    first, second = bench.open([0, *tokens(100)]), bench.open([1, *tokens(100)])
    assert bench.step(judging(first), judging(second)) == {0: 101, 1: 101}


def test_prompts_that_are_alike_by_chance_wait_one_step_at_most() -> None:
    """Here they differ before the tokens that are compared, so nothing can be reused."""
    bench = Bench()
    first = bench.open([*tokens(32), *tokens(60, first=500)], cached=32)
    second = bench.open([*tokens(32, first=100), *tokens(60, first=500)], cached=32)
    wishes = judging(first), judging(second)
    assert [bench.step(*wishes), bench.step(*wishes)] == [{0: 60}, {1: 60}]


def test_who_waited_is_forgotten_with_its_wish() -> None:
    """A hundred pairs of equal prompts, each computed once: nothing of them is left."""
    bench = Bench()
    for _ in range(100):
        first, second = bench.open(tokens(40)), bench.open(tokens(40))
        bench.step(judging(first), judging(second))
        for session in (first, second):
            bench.model.release(session.cache)
        bench.sessions.clear()
    bench.planner.plan([])
    assert not bench.planner._waited_at


def test_only_committed_tokens_are_shared() -> None:
    """Drafted ones are in the cache as well, but nobody knows yet whether they stay (C36)."""
    bench = Bench()
    first = bench.open(tokens(32))
    bench.step(judging(first, tokens(32, first=32)))
    assert bench.model.ids_of(first.cache) == list(tokens(64))
    second = bench.open(tokens(64))
    assert bench.step(judging(second)) == {1: 32}


def test_without_shared_prefixes_every_prompt_is_computed() -> None:
    """Sessions with equal prompts then wait one step for nothing, however many they are, and go on."""
    bench = Bench()

    class Unshared(FakeModel):
        def share_prefix(self, cache: FakeCache, ids: Sequence[int]) -> None: ...

    bench.model = Unshared(lambda ids: [0.0], vocab_size=1)
    bench.planner = StepPlanner[FakeCache](bench.model, holders=lambda: bench.sessions, max_batch_tokens=bench.budget)
    sessions = [bench.open(tokens(100)) for _ in range(3)]
    wishes = [judging(session) for session in sessions]
    assert [bench.step(*wishes), bench.step(*wishes)] == [{0: 100}, {1: 100, 2: 100}]


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_the_session_opened_last_gives_up_its_memory_first() -> None:
    """No more of them than it takes, though they are in mid-answer and would have been served."""
    bench = Bench(num_blocks=6)
    sessions = [bench.running(length=33, first_id=100 * number) for number in range(3)]
    # Each holds 2 blocks and needs a third one.
    counts = bench.step(*(judging(session, (1,)) for session in sessions))
    assert counts == {0: 2, 1: 2}
    assert [session.cache.length for session in sessions] == [34, 34, 0]
    assert bench.planner.preemptions == 1


def test_a_session_that_lost_its_memory_is_computed_again() -> None:
    """As soon as there is room, from its first token on, drafted ones included."""
    bench = Bench(num_blocks=6)
    sessions = [bench.running(length=33, first_id=100 * number) for number in range(3)]
    wishes = [judging(session, (1,)) for session in sessions]
    bench.step(*wishes)
    assert bench.step(wishes[2]) == {}
    bench.model.release(sessions[0].cache)
    assert bench.step(wishes[2]) == {2: 34}
    assert bench.model.ids_of(sessions[2].cache) == [*sessions[2].committed_ids, 1]


def test_a_session_never_waits_for_one_opened_later() -> None:
    """Not even for one that is more urgent, and for which room was made first in this very step."""
    bench = Bench(num_blocks=4)
    older, newer = bench.open(tokens(60)), bench.open(tokens(60, first=100))
    assert bench.step(judging(newer), judging(older)) == {0: 60}
    assert (newer.cache.length, bench.planner.preemptions) == (0, 1)


def test_a_newer_session_waits_for_older_ones() -> None:
    """They want nothing now, but will soon; the step is empty and nothing has changed."""
    bench = Bench(num_blocks=4)
    older, newer = bench.open(tokens(60), cached=59), bench.open(tokens(60, first=100))
    assert bench.step(judging(newer)) == {}
    assert (older.cache.length, bench.planner.preemptions) == (59, 0)


def test_an_older_session_that_is_silent_gives_way() -> None:
    """The newest of the silent ones, and no other."""
    bench = Bench(num_blocks=6)
    older = [bench.open(tokens(20, first=100 * number), cached=19) for number in range(3)]
    newer = bench.open(tokens(20, first=900))
    older[0].is_silent = older[1].is_silent = True
    assert bench.step(judging(newer)) == {3: 20}
    assert [session.cache.length for session in older] == [19, 0, 19]


def test_a_session_whose_turn_takes_long_is_not_silent() -> None:
    """It was heard long ago but has waited for this step: were its memory taken, the two would take it from each other
    for ever."""
    bench = Bench(num_blocks=12)
    older, newer = bench.open(tokens(150), cached=100), bench.open(tokens(100, first=1000))
    older.is_silent = True
    assert bench.step(judging(newer), judging(older)) == {0: 50}
    assert bench.step(judging(newer)) == {1: 100}


def test_a_session_without_room_does_not_hold_up_one_with_the_same_tokens() -> None:
    """The newer one may not take what it needs, the older one may."""
    bench = Bench(num_blocks=4)
    oldest = bench.open(tokens(20))
    middle = bench.open(tokens(40, first=100), cached=39)
    newest = bench.open(tokens(20))
    bench.open(tokens(16, first=300), cached=16)
    assert bench.step(judging(newest), judging(oldest)) == {0: 20}
    assert middle.cache.length == 0


def test_a_session_opened_last_does_not_compute_what_one_that_waits_would_take_back() -> None:
    """The one that waits has taken all from those opened later and still has no room: none of them is fed in vain."""
    bench = Bench(num_blocks=4)
    older = bench.open(tokens(30), cached=30)
    waits, newest = bench.open(tokens(60, first=100)), bench.open(tokens(30, first=200), cached=29)
    wishes = judging(newest), judging(waits)
    assert [bench.step(*wishes), bench.step(*reversed(wishes))] == [{}, {}]
    bench.model.release(older.cache)
    assert bench.step(*wishes) == {1: 60}


def test_one_session_may_use_all_of_the_memory() -> None:
    """Whoever else held any, and whatever is shared."""
    bench = Bench(num_blocks=4)
    oldest = bench.open(tokens(64))
    for number in range(1, 4):
        bench.open(tokens(16, first=100 * number), cached=16)
    assert bench.step(judging(oldest)) == {0: 64}
    again = judging(bench.open(tokens(64)))
    oldest.is_silent = True
    assert bench.step(again) == {4: 1}
    assert bench.model.ids_of(again.feeder.cache) == list(tokens(64))


def test_short_is_what_fits_beside_a_prompts_share() -> None:
    """A prompt that is as good as fed counts as an answer, whose rows are not put off."""
    bench = Bench(budget=100)
    prompts = [bench.open(tokens(SHORT_LENGTH + extra, first=1000 * extra)) for extra in (2, 1, 0)]
    assert bench.step(*map(judging, prompts)) == {0: 25, 2: 75}
