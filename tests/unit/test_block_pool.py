"""The block pool: who holds which block, what is shared, and what makes room for what.

Token ids are the bytes of a text. Blocks hold four tokens, but for the random test, where they hold two.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from paceline.engine.block_pool import BlockCopy, BlockPool, BlockTable
from paceline.engine.interface import Cache, Memory

BLOCK = 4  # tokens
PROMPT = b"aaaabbbbcccc"


class Pool(BlockPool):
    """A pool of small blocks that sees to it that no table is lost, as one that still holds blocks must not be."""

    def __init__(self, num_blocks: int = 8) -> None:
        super().__init__(num_blocks, block_size=BLOCK)
        self._kept: list[BlockTable] = []

    def new_table(self) -> BlockTable:
        self._kept.append(super().new_table())
        return self._kept[-1]


def grow(pool: BlockPool, table: BlockTable, length: int) -> list[BlockCopy] | None:
    """Reserve and, if there was room, write up to `length` tokens in all; gives what `reserve` gave."""
    copies = pool.reserve(table, length)
    if copies is not None:
        pool.extend(table, length - table.length)
    pool.check()
    return copies


def a_table(pool: BlockPool, length: int, *, shared: bytes = b"") -> BlockTable:
    """A table of `length` tokens, of which the first are `shared`."""
    table = pool.new_table()
    assert grow(pool, table, length) == []
    pool.share_prefix(table, shared)
    pool.check()
    return table


def reuse(pool: BlockPool, ids: bytes) -> BlockTable:
    """A new table that took over what it could of `ids`."""
    table = pool.new_table()
    pool.reuse_prefix(table, ids)
    pool.check()
    return table


def test_pool_and_table_are_what_services_ask_for() -> None:
    """A pool is a model's memory, and a table one session's cache."""
    memory: Memory = Pool()
    cache: Cache = BlockTable()
    assert (memory.capacity_tokens, memory.held_tokens, memory.reused_tokens, cache.length) == (32, 0, 0, 0)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_pool_that_holds_nothing_is_refused(num_blocks: int, block_size: int) -> None:
    """A pool without a block, or with blocks without a token, is an error from the start."""
    with pytest.raises(ValueError, match="holds nothing"):
        BlockPool(num_blocks, block_size=block_size)


def test_reserve_takes_only_the_blocks_that_are_missing() -> None:
    """A token more needs a block more only at a block's border; what is reserved twice is held once."""
    pool = Pool()
    table = a_table(pool, 3)
    held = []
    for length in (4, 5, 5, 8, 9):
        assert pool.reserve(table, length) == []
        held.append(len(table.blocks))
    assert held == [1, 2, 2, 2, 3]
    assert (table.length, pool.held_tokens, pool.free_tokens) == (3, 12, 20)


def test_reserve_in_a_full_pool_changes_nothing() -> None:
    """Too few free blocks give None, and not even the free ones are taken."""
    pool = Pool(4)
    a_table(pool, 2 * BLOCK)
    table = a_table(pool, BLOCK)
    assert pool.reserve(table, 3 * BLOCK) is None
    assert (len(table.blocks), table.length, pool.free_tokens) == (1, BLOCK, BLOCK)
    assert pool.reserve(table, 2 * BLOCK) == []


def test_tokens_are_not_written_without_room() -> None:
    """To extend a table beyond what was reserved is our own mistake."""
    pool = Pool()
    table = a_table(pool, 3)
    with pytest.raises(AssertionError):
        pool.extend(table, 2)


def test_lost_table_is_a_leak() -> None:
    """The check tells when a table that held blocks went away without giving them back."""
    pool = BlockPool(2)
    pool.reserve(pool.new_table(), 1)
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check()


def test_truncate_gives_back_blocks_wholly_behind_the_new_length() -> None:
    """The block that the last token lies in is kept; those behind it, reserved ones too, are free at once."""
    pool = Pool()
    table = a_table(pool, 10)
    assert pool.reserve(table, 20) == []
    held = []
    for length in (10, 9, 8, 5, 4, 1, 0):
        pool.truncate(table, length)
        pool.check()
        held.append(len(table.blocks))
    assert held == [3, 3, 2, 2, 1, 1, 0]
    with pytest.raises(AssertionError):
        pool.truncate(table, 1)


def test_released_table_is_empty_and_usable_again() -> None:
    """All blocks of a released table can be had by others, or by itself; a second release changes nothing."""
    pool = Pool(2)
    table = a_table(pool, 5)
    pool.release(table)
    pool.release(table)
    assert (table.blocks, table.length, pool.held_tokens) == ([], 0, 0)
    assert grow(pool, table, 2 * BLOCK) == []


def test_shared_prefix_is_reused_in_full_blocks() -> None:
    """A second session takes over the blocks that hold the same tokens, which are then held once for both."""
    pool = Pool()
    first = a_table(pool, 11, shared=PROMPT)
    second = reuse(pool, PROMPT[:9])
    assert second.blocks == first.blocks[:2]
    assert (second.length, pool.reused_tokens, pool.held_tokens) == (8, 8, 12)


@pytest.mark.parametrize(
    ("ids", "reused"),
    [(b"aaaabbbbcccc", 12), (b"aaaabbbbcccx", 8), (b"aaaaxbbbcccc", 4), (b"bbbbcccc", 0), (b"aaa", 0)],
)
def test_reuse_ends_with_the_first_block_that_differs(ids: bytes, reused: int) -> None:
    """A block is found by its own tokens and all tokens before them."""
    pool = Pool()
    a_table(pool, 12, shared=PROMPT)
    assert reuse(pool, ids).length == reused


def test_only_full_written_blocks_of_the_given_ids_are_shared() -> None:
    """Neither tokens that were not given, nor such as are not written yet, nor half a block can be reused."""
    pool = Pool()
    a_table(pool, 12, shared=PROMPT[:7])
    assert reuse(pool, PROMPT).length == 4
    a_table(pool, 7, shared=b"xxxxyyyyzzzz")
    assert reuse(pool, b"xxxxyyyyzzzz").length == 4


def test_prefix_is_shared_as_it_grows() -> None:
    """What was written since the last call is added behind what was shared then."""
    pool = Pool()
    table = a_table(pool, 5, shared=PROMPT)
    grow(pool, table, 12)
    pool.share_prefix(table, PROMPT)
    assert reuse(pool, PROMPT).blocks == table.blocks


def test_reuse_waits_for_a_border_between_blocks() -> None:
    """A table that ends within a block takes nothing over, one at a border goes on from there."""
    pool = Pool()
    first = a_table(pool, 12, shared=PROMPT)
    second = a_table(pool, 3)
    assert pool.reuse_prefix(second, PROMPT) == 3
    grow(pool, second, 4)
    assert pool.reuse_prefix(second, PROMPT) == 12
    assert second.blocks[0] != first.blocks[0]
    assert second.blocks[1:] == first.blocks[1:]
    assert pool.reused_tokens == 8


def test_reuse_takes_the_place_of_reserved_blocks() -> None:
    """Room that was reserved is given back where a shared block takes its place."""
    pool = Pool()
    first = a_table(pool, 8, shared=PROMPT)
    second = pool.new_table()
    assert pool.reserve(second, 12) == []
    assert pool.reuse_prefix(second, PROMPT) == 8
    pool.check()
    assert (second.blocks[:2], len(second.blocks), pool.held_tokens) == (first.blocks, 3, 12)


def test_shared_block_is_copied_before_it_is_written() -> None:
    """A table cut within a shared block goes on in a copy of it; the other holder and the prefix keep the original."""
    pool = Pool()
    first = a_table(pool, 8, shared=PROMPT)
    second = reuse(pool, PROMPT[:8])
    pool.truncate(second, 6)
    assert pool.reserve(second, 6) == []
    copies = grow(pool, second, 7)
    assert copies == [BlockCopy(first.blocks[1], second.blocks[1])]
    assert second.blocks[1] not in first.blocks
    assert reuse(pool, PROMPT[:8]).blocks == first.blocks
    assert grow(pool, second, 8) == []


def test_shared_block_is_not_written_without_a_copy() -> None:
    """To extend a table that ends within a shared block, without a reservation, is our own mistake."""
    pool = Pool()
    table = a_table(pool, 8, shared=PROMPT)
    pool.truncate(table, 6)
    with pytest.raises(AssertionError):
        pool.extend(table, 1)


def test_own_shared_block_stays_shared_when_its_table_goes_another_way() -> None:
    """Truncation leaves registered contents alone, so the tokens that were cut can be reused."""
    pool = Pool()
    table = a_table(pool, 12, shared=PROMPT)
    blocks = list(table.blocks)
    pool.truncate(table, 6)
    assert grow(pool, table, 12) == [BlockCopy(blocks[1], table.blocks[1])]
    pool.share_prefix(table, b"aaaabbxxyyyy")
    pool.check()
    assert reuse(pool, PROMPT).blocks == blocks
    assert reuse(pool, b"aaaabbxxyyyy").blocks == table.blocks


def test_copy_needs_a_free_block() -> None:
    """A table that would have to copy a block which another one reads waits for room like any other."""
    pool = Pool(2)
    first = a_table(pool, 8, shared=PROMPT)
    second = reuse(pool, PROMPT[:8])
    pool.truncate(second, 6)
    assert grow(pool, second, 7) is None
    assert second.blocks == first.blocks
    pool.truncate(first, 4)
    assert grow(pool, second, 7) == []


def test_table_alone_gets_whatever_fits() -> None:
    """Without room for a copy, a shared block that nobody else reads is no longer shared and written where it is."""
    pool = Pool(2)
    table = a_table(pool, 8, shared=PROMPT)
    blocks = list(table.blocks)
    pool.truncate(table, 7)
    assert grow(pool, table, 8) == []
    assert (table.blocks, pool.evicted_blocks) == (blocks, 1)
    assert reuse(pool, PROMPT).length == 4


def test_prefix_survives_its_session() -> None:
    """Shared blocks without holders count as free, and are still found."""
    pool = Pool()
    table = a_table(pool, 12, shared=PROMPT)
    blocks = list(table.blocks)
    pool.release(table)
    assert (pool.held_tokens, pool.free_tokens) == (0, 32)
    assert reuse(pool, PROMPT).blocks == blocks
    assert pool.held_tokens == 12


def test_free_blocks_are_taken_before_shared_ones() -> None:
    """Nothing is evicted while there is a block that holds nothing."""
    pool = Pool(4)
    pool.release(a_table(pool, 8, shared=PROMPT))
    other = a_table(pool, 8)
    assert (reuse(pool, PROMPT).length, pool.evicted_blocks) == (8, 0)
    assert grow(pool, other, 9) is None


def test_least_recently_held_prefix_is_evicted_first() -> None:
    """A prefix that was reused since outlives one that was not, though it was shared first."""
    pool = Pool(4)
    pool.release(a_table(pool, 4, shared=b"aaaa"))
    pool.release(a_table(pool, 4, shared=b"bbbb"))
    pool.release(reuse(pool, b"aaaa"))
    a_table(pool, 12)
    assert pool.evicted_blocks == 1
    assert (reuse(pool, b"bbbb").length, reuse(pool, b"aaaa").length) == (0, 4)


def test_long_prefix_loses_its_tail_first() -> None:
    """Each block that must make room takes the last block of a released prefix."""
    pool = Pool(3)
    pool.release(a_table(pool, 12, shared=PROMPT))
    lengths = []
    for length in (4, 8, 12):
        table = a_table(pool, length)
        left = reuse(pool, PROMPT)
        lengths.append(left.length)
        pool.release(left)
        pool.release(table)
    assert lengths == [8, 4, 0]


def test_second_to_compute_a_block_keeps_its_own_and_continues_the_shared_prefix() -> None:
    """The first session's block is the shared one; a third session finds both sessions' blocks in one prefix."""
    pool = Pool()
    first = a_table(pool, 4, shared=PROMPT)
    second = a_table(pool, 12, shared=PROMPT)
    assert second.blocks[0] != first.blocks[0]
    assert reuse(pool, PROMPT).blocks == [first.blocks[0], *second.blocks[1:]]


def test_what_was_shared_behind_an_evicted_block_is_neither_found_nor_kept_for_ever() -> None:
    """Not even the same tokens in the same block bring back what followed, which makes room in its turn."""
    pool = Pool(3)
    first = a_table(pool, 4, shared=PROMPT)
    evicted = list(first.blocks)
    second = a_table(pool, 8, shared=PROMPT)  # Its second block is shared behind the first table's.
    pool.release(first)
    assert grow(pool, second, 12) == []
    assert pool.evicted_blocks == 1
    pool.truncate(second, 8)
    again = a_table(pool, 4, shared=PROMPT)
    assert again.blocks == evicted
    assert reuse(pool, PROMPT).length == 4
    pool.release(second)
    assert grow(pool, again, 12) == []
    assert pool.evicted_blocks == 2


def fork(pool: BlockPool, table: BlockTable, length: int) -> BlockTable:
    forked = pool.fork(table, length)
    pool.check()
    return forked


@pytest.mark.parametrize(("length", "held"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (10, 3)])
def test_fork_holds_the_blocks_of_its_tokens_and_takes_no_memory(length: int, held: int) -> None:
    """It has the first tokens in the very same blocks, without those behind them or the room reserved there."""
    pool = Pool()
    table = a_table(pool, 10)
    assert pool.reserve(table, 20) == []
    before = pool.held_tokens
    forked = fork(pool, table, length)
    assert (forked.length, forked.blocks, pool.held_tokens) == (length, table.blocks[:held], before)
    with pytest.raises(AssertionError):
        pool.fork(table, 11)


def test_first_of_two_forks_to_write_into_their_block_copies_it() -> None:
    """The other is then alone with it and writes it in place, whichever of the two it is."""
    pool = Pool()
    tables = [table := a_table(pool, 6), fork(pool, table, 6), fork(pool, table, 5)]
    shared = table.blocks[1]
    assert grow(pool, tables[2], 7) == [BlockCopy(shared, tables[2].blocks[1])]
    assert grow(pool, tables[0], 7) == [BlockCopy(shared, tables[0].blocks[1])]
    assert grow(pool, tables[1], 7) == []
    assert tables[1].blocks[1] == shared
    assert len({table.blocks[0] for table in tables}) == 1


def test_fork_at_a_border_between_blocks_owes_no_copy() -> None:
    """What the two write lies in blocks that each has for itself."""
    pool = Pool()
    table = a_table(pool, 8)
    forked = fork(pool, table, 8)
    assert (grow(pool, table, 9), grow(pool, forked, 9)) == ([], [])
    assert table.blocks[:2] == forked.blocks[:2]
    assert table.blocks[2] != forked.blocks[2]


def test_room_for_the_copy_is_counted() -> None:
    """A fork that would have to copy waits for room like any other, until the other has gone."""
    pool = Pool(3)
    table = a_table(pool, 6)
    forked = fork(pool, table, 6)
    assert grow(pool, table, 9) is None
    assert pool.reserve(forked, 12) is None
    assert forked.blocks == table.blocks
    pool.release(table)
    assert grow(pool, forked, 12) == []


def test_room_reserved_before_a_fork_is_not_written_without_a_copy() -> None:
    """To extend either side in the block they share, without a new reservation, is our own mistake."""
    pool = Pool()
    table = a_table(pool, 6)
    assert pool.reserve(table, 8) == []
    forked = fork(pool, table, 6)
    for either in (table, forked):
        with pytest.raises(AssertionError):
            pool.extend(either, 1)


def test_truncation_and_release_leave_forks_alone() -> None:
    """A block is given back with its last holder, and one cut within a full block copies it before it goes on."""
    pool = Pool()
    table = a_table(pool, 8)
    first, second = fork(pool, table, 8), fork(pool, table, 8)
    pool.truncate(table, 6)
    assert grow(pool, table, 8) == [BlockCopy(first.blocks[1], table.blocks[1])]
    pool.release(table)
    pool.release(first)
    pool.check()
    assert pool.free_tokens == 32 - 8
    pool.truncate(second, 6)
    assert grow(pool, second, 8) == []
    pool.release(second)
    assert pool.free_tokens == 32


def test_what_forks_alone_hold_counts_as_held_once_they_are_adopted() -> None:
    """It is not free before that either. Forks of an adopted one are forks like any other."""
    pool = Pool()
    table = a_table(pool, 8)
    first, second = fork(pool, table, 6), fork(pool, table, 8)
    operations: list[Callable[[], object]] = [
        lambda: grow(pool, first, 9),  # two blocks of its own, one of them a copy
        lambda: grow(pool, second, 9),
        lambda: pool.adopt(first),
        lambda: pool.release(table),
        lambda: pool.adopt(first),  # changes nothing
        lambda: grow(pool, fork(pool, first, 8), 12),
        lambda: pool.release(second),
        lambda: pool.truncate(first, 8),
        lambda: grow(pool, first, 12),
    ]
    figures = []
    for operation in operations:
        operation()
        pool.check()
        figures.append((pool.held_tokens // BLOCK, pool.free_tokens // BLOCK))
    assert figures == [(2, 4), (2, 3), (4, 3), (3, 3), (3, 3), (3, 2), (3, 4), (2, 5), (3, 4)]


def test_adopted_fork_stays_adopted_when_it_gives_up_its_memory() -> None:
    """What it takes later counts as well, shared prefixes included; what a fork takes over does not."""
    pool = Pool()
    table = a_table(pool, 8, shared=PROMPT)
    adopted, other = fork(pool, table, 8), fork(pool, table, 8)
    pool.adopt(adopted)
    for each in (table, adopted, other):
        pool.release(each)
    assert pool.reuse_prefix(other, PROMPT) == 8
    pool.check()
    assert (pool.held_tokens, pool.free_tokens) == (0, 24)
    assert pool.reuse_prefix(adopted, PROMPT) == 8
    assert grow(pool, adopted, 12) == []
    assert (pool.held_tokens, pool.free_tokens) == (12, 20)


def test_fork_of_a_shared_prefix_goes_on_with_it() -> None:
    """What its table had shared it need not look up again, and it shares what it writes behind that."""
    pool = Pool()
    table = a_table(pool, 6, shared=PROMPT[:6])
    forked = fork(pool, table, 5)
    assert forked.prefix_uids == table.prefix_uids
    assert fork(pool, table, 3).prefix_uids == []
    grow(pool, forked, 12)
    pool.share_prefix(forked, PROMPT)
    assert reuse(pool, PROMPT).blocks == forked.blocks


def test_block_that_one_fork_shares_may_be_held_by_another() -> None:
    """The other may know only part of its tokens: then it goes on in a copy, and later shares those under its own."""
    pool = Pool()
    table = a_table(pool, 8)
    forked = fork(pool, table, 6)
    pool.share_prefix(table, PROMPT[:8])
    pool.check()
    assert grow(pool, forked, 8) == [BlockCopy(table.blocks[1], forked.blocks[1])]
    pool.share_prefix(forked, b"aaaabbxx")
    pool.check()
    assert reuse(pool, b"aaaabbxx").blocks == forked.blocks
    assert reuse(pool, PROMPT[:8]).blocks == table.blocks


def test_fork_shares_a_prefix_whose_head_was_evicted() -> None:
    """Its own block becomes the new head, and a block that its twin has shared already stays what it is."""
    pool = Pool(4)
    other = a_table(pool, 4, shared=PROMPT)
    table = a_table(pool, 8)
    forked = fork(pool, table, 8)
    pool.share_prefix(table, PROMPT[:8])  # Its second block is shared behind the other table's first.
    pool.release(other)
    assert grow(pool, forked, 16) == []
    assert pool.evicted_blocks == 1
    pool.share_prefix(forked, PROMPT)
    pool.check()
    assert forked.prefix_uids[1] == table.prefix_uids[1]
    assert reuse(pool, PROMPT).blocks == forked.blocks[:1]


@dataclass
class Written:
    """A session of the random test: its known tokens, of which the first are written."""

    table: BlockTable
    text: bytes
    is_fork: bool = False


@dataclass
class Simulation:
    """Sessions over one pool, at random, and what their writes and copies leave in memory.

    What a token leaves in memory is all tokens up to it, as keys and values depend on them all. So a table reads back
    its own only if neither a block nor anything before it was mixed up.
    """

    random: random.Random
    pool: BlockPool
    longest: int = field(init=False)  # tokens; longer sessions are refused at admission
    memory: list[list[bytes]] = field(init=False)
    sessions: list[Written] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.longest = min(24, self.pool.capacity_tokens)
        self.memory = [[b""] * self.pool.block_size for _ in range(self.pool.num_blocks)]

    def act(self) -> None:
        """One operation; then everything is looked over."""
        session = self.random.choice(self.sessions) if self.sessions else None
        if session is None or (len(self.sessions) < 6 and self.random.random() < 0.2):
            self._open(session)
        else:
            self.random.choices(
                [
                    self._step,
                    self._truncate,
                    self._share,
                    self._reuse,
                    self._preempt,
                    self._close,
                    self._fork,
                    self._adopt,
                ],
                weights=[6, 4, 6, 3, 1, 4, 3, 1],
            )[0](session)
        self.look_over()

    def look_over(self) -> None:
        """Each table reads back its own tokens, and the pool is as its invariant says."""
        self.pool.check()
        owned = {block for session in self.sessions if not session.is_fork for block in session.table.blocks}
        assert self.pool.held_tokens == len(owned) * self.pool.block_size
        for session in self.sessions:
            table, size = session.table, self.pool.block_size
            read = [self.memory[table.blocks[position // size]][position % size] for position in range(table.length)]
            assert read == [session.text[: position + 1] for position in range(table.length)]

    def _tokens(self, at_most: int) -> bytes:
        """Tokens of an alphabet so small that sessions often agree."""
        return bytes(self.random.choices(b"ab", k=self.random.randint(0, at_most)))

    def _open(self, other: Written | None) -> None:
        """Begin with tokens of its own or with another session's, and feed at least the last of them."""
        text = self._tokens(self.longest)
        if other is not None and self.random.random() < 0.7:
            text = other.text
            self.pool.share_prefix(other.table, text)
        session = Written(self.pool.new_table(), text)
        self.sessions.append(session)
        self._reuse(session)
        self.pool.truncate(session.table, min(session.table.length, max(0, len(text) - 1)))

    def _step(self, session: Written) -> None:
        """Reserve for some sessions, copy what is owed, write; who finds no room may preempt one of the others."""
        others = self.random.sample(self.sessions, k=self.random.randint(0, min(2, len(self.sessions))))
        batch: dict[int, tuple[Written, int]] = {}
        copies: list[BlockCopy] = []
        for member in [session, *(other for other in others if other is not session)]:
            if member.table.length == len(member.text) or self.random.random() < 0.3:
                member.text = (member.text + self._tokens(4))[: self.longest]
            length = self.random.choice([len(member.text), self.random.randint(member.table.length, len(member.text))])
            owed = self._reserve(member, length)
            while owed is None and self.random.random() < 0.8:
                victim = self.random.choice(self.sessions)
                batch.pop(id(victim), None)
                self._preempt(victim)
                length = max(length, member.table.length)
                owed = self._reserve(member, length)
            if owed is not None:
                copies += owed
                batch[id(member)] = (member, length)
        for copy in copies:
            self.memory[copy.destination] = list(self.memory[copy.source])
        self.seen["copies"] += len(copies)
        if self.random.random() < 0.9:  # else the step failed, after its copies
            for member, length in batch.values():
                self._write(member, length)

    def _reserve(self, session: Written, length: int) -> list[BlockCopy] | None:
        before = self._figures()
        copies = self.pool.reserve(session.table, length)
        self.pool.check()
        if copies is None:
            self.seen["full"] += 1
            assert self._figures() == before
            assert any(other.table.blocks for other in self.sessions if other is not session), "it was alone"
        return copies

    def _write(self, session: Written, length: int) -> None:
        table, size = session.table, self.pool.block_size
        for position in range(table.length, length):
            block = table.blocks[position // size]
            assert [block in other.table.blocks for other in self.sessions].count(True) == 1
            self.memory[block][position % size] = session.text[: position + 1]
        self.pool.extend(table, length - table.length)

    def _truncate(self, session: Written) -> None:
        """Most often a rejection, where other tokens will follow."""
        self.pool.truncate(session.table, max(0, session.table.length - self.random.randint(0, 4)))
        if self.random.random() < 0.7:
            session.text = session.text[: session.table.length]

    def _share(self, session: Written) -> None:
        given = self.random.choice([len(session.text), self.random.randint(0, len(session.text))])
        self.pool.share_prefix(session.table, session.text[:given])

    def _reuse(self, session: Written) -> None:
        before, reused = session.table.length, self.pool.reused_tokens
        length = self.pool.reuse_prefix(session.table, session.text)
        assert length - before == self.pool.reused_tokens - reused

    def _preempt(self, session: Written) -> None:
        """Its tokens will be written again."""
        self.pool.release(session.table)

    def _fork(self, session: Written) -> None:
        """At its end or anywhere before; other tokens follow, or the same."""
        length = self.random.choice([session.table.length, self.random.randint(0, session.table.length)])
        text = session.text if self.random.random() < 0.3 else session.text[:length]
        self.sessions.append(Written(self.pool.fork(session.table, length), text, is_fork=True))
        self.seen["forks"] += length > 0

    def _adopt(self, session: Written) -> None:
        """A fork, or one that is none."""
        self.seen["adoptions"] += session.is_fork and session.table.length > 0
        self.pool.adopt(session.table)
        session.is_fork = False

    def _close(self, session: Written) -> None:
        """Whatever it was at, and whatever it had reserved."""
        self.pool.release(session.table)
        self.sessions.remove(session)

    def _figures(self) -> object:
        pool = self.pool
        tables = [(list(session.table.blocks), session.table.length) for session in self.sessions]
        return tables, pool.held_tokens, pool.free_tokens, pool.evicted_blocks, pool.reused_tokens


def test_random_sessions_read_back_their_own_tokens() -> None:
    """In 20,000 random operations none mixes up tokens, leaks a block, frees one twice or writes to a shared one.

    Seeds are fixed, so no false alarms. Each event that matters must have come up at least 100 times.
    """
    seen = Counter[str]()
    for seed in range(80):
        num_blocks = 4 + seed % 24
        simulation = Simulation(random.Random(seed), BlockPool(num_blocks, block_size=2))
        for _ in range(250):
            simulation.act()
        for session in simulation.sessions:
            simulation.pool.release(session.table)
        simulation.pool.check()
        assert (simulation.pool.held_tokens, simulation.pool.free_tokens) == (0, num_blocks * 2)
        seen += simulation.seen
        seen.update(reused=simulation.pool.reused_tokens, evicted=simulation.pool.evicted_blocks)
    assert all(seen[event] >= 100 for event in ("full", "copies", "forks", "adoptions", "reused", "evicted")), seen
