"""What the services ask of a model: feed tokens of many sessions in one step, and keep the memory behind them in order.

A cache is one session's share of the model's memory. Its tokens are those that steps have fed, in order; whoever holds
a cache also knows its token ids. Knows nothing of tensors beyond the rows of logits that a step gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor


class Cache(Protocol):
    """Keys and values of one session's tokens; opaque to all but the model that made it."""

    @property
    def length(self) -> int:
        """How many tokens are cached."""


CacheT = TypeVar("CacheT", bound=Cache)


class Extension(NamedTuple, Generic[CacheT]):
    """Work for one session in a step: feed `ids` behind `cache`, and give the logits of the last `rows` of them.

    `rows` may be 0, to ingest and no more.
    """

    cache: CacheT
    ids: Sequence[int]
    rows: int


class Memory(Protocol):
    """How full a model's memory is (`engine.block_pool.BlockPool`); figures in tokens may be read from any thread."""

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose keys and values fit in all."""

    @property
    def held_tokens(self) -> int:
        """Tokens' worth of memory that sessions hold now, shared blocks counted once; the rest can be had by others.

        What only forks hold is not counted: a fork gives up its memory for any session, until it is adopted as one.
        """

    @property
    def reused_tokens(self) -> int:
        """Tokens that were not computed since the start, because a shared prefix held them."""


class Model(Protocol[CacheT]):
    """A causal model with its memory (`engine.model.CausalModel`)."""

    vocab_size: int
    max_context: int  # tokens of the longest session; never more than the memory can hold

    @property
    def memory(self) -> Memory: ...

    def new_cache(self) -> CacheT:
        """An empty cache; it holds no memory."""

    def fork(self, cache: CacheT, length: int) -> CacheT:
        """A new cache of the first `length` tokens; neither sees what the other is fed or forgets afterwards.

        They share their memory until one of them is fed: where that takes a copy, `reserve` counts the room for it. So
        what was reserved for `cache` before is to be reserved again.
        """

    def adopt(self, cache: CacheT) -> None:
        """A fork is from now on what its session holds (`Memory.held_tokens`); any other cache is so from the start."""

    def reserve(self, cache: CacheT, length: int) -> bool:
        """Make room for `length` tokens in all; False, and all is as it was, if there is too little free memory."""

    def truncate(self, cache: CacheT, length: int) -> None:
        """Forget everything behind the first `length` tokens, in time that does not depend on how many there are."""

    def release(self, cache: CacheT) -> None:
        """Give back all memory of the cache, which is then empty and may be fed again."""

    def reuse_prefix(self, cache: CacheT, ids: Sequence[int]) -> int:
        """Lengthen the cache by what `share_prefix` left of the same tokens; returns its new length.

        `ids` are the session's tokens from its first on, those in the cache included; the cache never gets longer.
        """

    def share_prefix(self, cache: CacheT, ids: Sequence[int]) -> None:
        """Let sessions that begin with the same tokens reuse what the cache holds of `ids`, its first tokens.

        They must all have been given to the client, and need not all be cached.
        """

    def step(self, batch: Sequence[Extension[CacheT]]) -> list[Tensor]:
        """For each extension its rows of logits, `[rows, vocab_size]` in the model's dtype, on the host; the caches grow.

        One cache enters a batch once, with room reserved. A step that raises leaves every cache as it was.
        """
