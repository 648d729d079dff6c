"""Paged KV memory: which session holds which blocks, and which blocks hold a prefix that other sessions may reuse.

Memory is cut into blocks of equally many tokens. A session's tokens lie in the blocks of its table, in order; whoever
owns the memory itself looks up there where to read and write. A table can be forked: the two share the blocks of the
tokens that both have. Used by one thread; the figures may be read from any other. Knows nothing of tensors, steps or
scheduling: blocks are numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

DEFAULT_BLOCK_SIZE = 16  # tokens

# What a shared block holds: the uid of the shared block before it, which stands for all tokens up to there, and the
# block's own token ids. Compared as a whole, so no collision of hashes can ever hand out another prefix's block.
_Key = tuple[int, tuple[int, ...]]
_NO_UID = 0  # of a block that is not shared, and of what lies before a first block


class BlockTable:
    """One cache: `length` tokens, which lie in `blocks` in order. Changed by its pool alone.

    There may be more blocks than the tokens need: room that was reserved.
    """

    __slots__ = ("__weakref__", "blocks", "is_fork", "length", "prefix_uids")

    def __init__(self) -> None:
        self.is_fork = False  # whether it was made by `fork` and not adopted since
        self.blocks: list[int] = []
        self.length = 0
        # For each leading full block that is known to the shared prefixes: the uid of the block shared there, which
        # is another session's if that one registered the same tokens first.
        self.prefix_uids: list[int] = []


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """What `destination` is to hold before anything is written again: the contents of `source`."""

    source: int
    destination: int


class BlockPool:
    """Blocks, their holders and the prefixes they share.

    A block is shared once it is registered, and among forks as long as two of them hold it. A shared block is never
    written. A registered one keeps its contents when nobody holds it any longer, and is then evictable: least recently
    held first, and only when no block is free.

    Invariant: each block is exactly one of free, evictable (registered, without holders) and held; its reference count
    is the number of tables that hold it, all of them in the same place. Its owners are those that are no forks, or are
    adopted ones. A key of the shared prefixes leads to the block that has it. No table has more tokens than its blocks
    can hold, and a block that holds none of a table's tokens yet is no other's and is not registered.
    """

    def __init__(self, num_blocks: int, *, block_size: int = DEFAULT_BLOCK_SIZE) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens holds nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size  # tokens
        self.reused_tokens = 0  # since the start: taken over by `reuse_prefix`
        self.evicted_blocks = 0  # since the start: shared blocks that had to make room
        self._free = list(range(num_blocks - 1, -1, -1))  # the last one is taken first
        self._evictable: OrderedDict[int, None] = OrderedDict()  # the first one is evicted first
        # Figures of their own, so that other threads never see a block between two states.
        self._held_blocks = self._owned_blocks = 0
        self._references = [0] * num_blocks
        self._owners = [0] * num_blocks
        self._keys: list[_Key | None] = [None] * num_blocks
        self._uids = [_NO_UID] * num_blocks
        self._registered: dict[_Key, int] = {}
        self._last_uid = _NO_UID  # uids are never used again: what was shared behind an evicted block is not found
        self._tables: WeakSet[BlockTable] = WeakSet()

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit in all."""
        return self.num_blocks * self.block_size

    @property
    def held_tokens(self) -> int:
        """Tokens' worth of blocks that have owners, shared ones counted once: not what forks alone hold."""
        return self._owned_blocks * self.block_size

    @property
    def free_tokens(self) -> int:
        """Tokens' worth of blocks to be had at once, as not even a fork holds them; evictable ones included."""
        return (self.num_blocks - self._held_blocks) * self.block_size

    def new_table(self) -> BlockTable:
        """An empty table; it holds no block."""
        table = BlockTable()
        self._tables.add(table)
        return table

    def fork(self, table: BlockTable, length: int) -> BlockTable:
        """A new table of the first `length` tokens, in the same blocks; what either does next is not seen by the other.

        It takes no memory until one of the two writes where the fork ends within a block: whoever is first to do so
        owes a copy. So what was reserved for `table` before is to be reserved again.
        """
        assert 0 <= length <= table.length
        fork = self.new_table()
        fork.is_fork = True
        fork.blocks = table.blocks[: -(-length // self.block_size)]
        for block in fork.blocks:
            self._hold(fork, block)
        fork.length = length
        fork.prefix_uids = table.prefix_uids[: length // self.block_size]
        return fork

    def adopt(self, table: BlockTable) -> None:
        """Make a fork an owner of its blocks, now and later; nothing changes for a table that is none."""
        if table.is_fork:
            table.is_fork = False
            for block in table.blocks:
                self._own(block)

    def reserve(self, table: BlockTable, length: int) -> list[BlockCopy] | None:
        """Make room for `length` tokens in all, in blocks that no other table reads where tokens will be written.

        Returns the copies that are owed from now on, whether tokens are written or not: in the order of the calls,
        and all before the next write to any block. None, and nothing has changed, if too few blocks are free. A table
        that is alone in the pool gets whatever fits.
        """
        missing = max(0, -(-length // self.block_size) - len(table.blocks))
        shared = self._shared_tail(table) if length > table.length else None
        if missing == 0 and shared is None:
            return []
        available = self.num_blocks - self._held_blocks
        needed = missing + (shared is not None)
        if needed > available:
            if shared is None or needed - 1 > available or self._references[shared] > 1:
                return None
            # Registered, but nobody else reads it: evicted where it is rather than copied, which would take a block.
            self._unregister(shared)
            shared = None
        table.blocks.extend([self._take(table) for _ in range(missing)])
        return [] if shared is None else [self._replace_tail(table, shared)]

    def extend(self, table: BlockTable, count: int) -> None:
        """`count` tokens were written behind the table's last one, where room was reserved."""
        assert count == 0 or self._shared_tail(table) is None
        table.length += count
        assert table.length <= len(table.blocks) * self.block_size

    def truncate(self, table: BlockTable, length: int) -> None:
        """Forget all tokens behind the first `length`, and give back the blocks that then hold none.

        The cost is that of the blocks given back, whatever is kept. Shared blocks stay shared.
        """
        assert 0 <= length <= table.length
        kept_blocks = -(-length // self.block_size)
        if len(table.blocks) > kept_blocks:
            # Last ones first: so long prefixes will lose their tails before their heads, without which no tail is found.
            for block in reversed(table.blocks[kept_blocks:]):
                self._drop(table, block)
            del table.blocks[kept_blocks:]
        del table.prefix_uids[length // self.block_size :]
        table.length = length

    def release(self, table: BlockTable) -> None:
        """Give back all blocks; the table is empty and can be used again."""
        self.truncate(table, 0)

    def reuse_prefix(self, table: BlockTable, ids: Sequence[int]) -> int:
        """Lengthen the table by the shared blocks that hold the next tokens of `ids`; returns its new length.

        `ids` are the session's tokens from its first on, those in the table included. Only full blocks are shared: a
        table that does not end with one stays as it is.
        """
        if table.length % self.block_size:
            return table.length
        while (block := self._registered.get(self._next_key(table, ids))) is not None:
            index = len(table.prefix_uids)
            table.prefix_uids.append(self._uids[block])
            if index * self.block_size < table.length:
                continue  # It computed these tokens itself.
            if index < len(table.blocks):
                self._drop(table, table.blocks[index])
                table.blocks[index] = block
            else:
                table.blocks.append(block)
            self._hold(table, block)
            table.length += self.block_size
            self.reused_tokens += self.block_size
        return table.length

    def share_prefix(self, table: BlockTable, ids: Sequence[int]) -> None:
        """Let other tables reuse the full blocks that hold nothing but `ids`, the session's first tokens.

        `ids` need not all be in the table. Blocks that this call has been through before cost nothing. Where another
        table was first with the same tokens, its block is the shared one and this table's stays private; what follows
        is shared behind the other's.
        """
        for index in range(len(table.prefix_uids), min(len(ids), table.length) // self.block_size):
            key = self._next_key(table, ids)
            shared = self._registered.get(key)
            if shared is None:
                shared = table.blocks[index]
                # A fork may have registered it, behind a block that was evicted since; its uid stands for the same tokens.
                if self._uids[shared] == _NO_UID:
                    self._register(shared, key)
            table.prefix_uids.append(self._uids[shared])

    def check(self) -> None:
        """Assert the invariant; the cost is linear in blocks and tables."""
        self._check_tables()
        free, evictable = set(self._free), set(self._evictable)
        held = {block for block, references in enumerate(self._references) if references > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + len(evictable) + len(held) == self.num_blocks == len(free | evictable | held)
        assert len(held) == self._held_blocks
        registered = {block for block, key in enumerate(self._keys) if key is not None}
        assert evictable <= registered <= evictable | held
        assert registered == {block for block, uid in enumerate(self._uids) if uid != _NO_UID}
        assert self._registered == {key: block for block, key in enumerate(self._keys) if key is not None}

    def _check_tables(self) -> None:
        """Assert the part of the invariant that the tables bear witness to."""
        references, owners = [0] * self.num_blocks, [0] * self.num_blocks
        places: dict[int, int] = {}
        for table in self._tables:
            assert 0 <= table.length <= len(table.blocks) * self.block_size
            assert len(table.prefix_uids) <= table.length // self.block_size
            unwritten = table.blocks[-(-table.length // self.block_size) :]
            assert not any(self._is_shared(block) for block in unwritten), "a block is shared before it is written"
            for place, block in enumerate(table.blocks):
                references[block] += 1
                owners[block] += not table.is_fork
                assert places.setdefault(block, place) == place, "a block is in two places"
        assert references == self._references, "reference counts differ from the holders"
        assert owners == self._owners, "the counts of owners differ from the tables that are no forks"
        assert self._owned_blocks == sum(count > 0 for count in owners)

    def _shared_tail(self, table: BlockTable) -> int | None:
        """The block that the next token would lie in, if that is shared and so must not be written.

        No other block matters: those before are full, and those behind were reserved for this table alone.
        """
        index, offset = divmod(table.length, self.block_size)
        if offset == 0:
            return None
        block = table.blocks[index]
        return block if self._is_shared(block) else None

    def _is_shared(self, block: int) -> bool:
        return self._uids[block] != _NO_UID or self._references[block] > 1

    def _replace_tail(self, table: BlockTable, shared: int) -> BlockCopy:
        """Put a private block where the table's next token would lie in a shared one."""
        private = self._take(table)
        table.blocks[table.length // self.block_size] = private
        self._drop(table, shared)
        return BlockCopy(shared, private)

    def _take(self, table: BlockTable) -> int:
        """A block for the table alone: a free one, else the evictable one that was held least recently."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            self._unregister(block)
        self._references[block] = 1
        self._held_blocks += 1
        if not table.is_fork:
            self._own(block)
        return block

    def _hold(self, table: BlockTable, block: int) -> None:
        """The table becomes a holder of a block that is held, or evictable."""
        if self._references[block] == 0:
            del self._evictable[block]
            self._held_blocks += 1
        self._references[block] += 1
        if not table.is_fork:
            self._own(block)

    def _own(self, block: int) -> None:
        """One owner more of a block that is held."""
        self._owners[block] += 1
        if self._owners[block] == 1:
            self._owned_blocks += 1

    def _drop(self, table: BlockTable, block: int) -> None:
        """The table is no longer a holder; the last one leaves a registered block evictable and any other free."""
        if not table.is_fork:
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._owned_blocks -= 1
        self._references[block] -= 1
        if self._references[block] > 0:
            return
        self._held_blocks -= 1
        if self._uids[block] == _NO_UID:
            self._free.append(block)
        else:
            self._evictable[block] = None

    def _next_key(self, table: BlockTable, ids: Sequence[int]) -> _Key:
        """The key of the block of `ids` behind the table's shared prefix."""
        uids = table.prefix_uids
        start = len(uids) * self.block_size
        return (uids[-1] if uids else _NO_UID, tuple(ids[start : start + self.block_size]))

    def _register(self, block: int, key: _Key) -> None:
        self._last_uid += 1
        self._uids[block] = self._last_uid
        self._keys[block] = key
        self._registered[key] = block

    def _unregister(self, block: int) -> None:
        """Evict a block: its contents can no longer be found."""
        key = self._keys[block]
        assert key is not None
        del self._registered[key]
        self._keys[block] = None
        self._uids[block] = _NO_UID
        self.evicted_blocks += 1
