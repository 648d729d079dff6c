"""Drafting with a small language model, one forward pass a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from drafter_service.drafter import DraftedToken, DraftView
from paceline.engine.model import Extension
from paceline.sampling import TokenHistory, draw_draft_token


class Cache(Protocol):
    @property
    def length(self) -> int: ...


CacheT = TypeVar("CacheT", bound=Cache)


class Model(Protocol[CacheT]):
    """The narrow interface to a causal model (`engine.model.CausalModel`)."""

    vocab_size: int
    max_context: int

    def new_cache(self) -> CacheT: ...
    def truncate(self, cache: CacheT, length: int) -> None: ...
    def step(self, batch: Sequence[Extension[CacheT]]) -> list[Tensor]: ...


class DraftState(Generic[CacheT]):
    """Invariant: the cache holds the first `cache.length` of the session's ids, always fewer than all of them."""

    def __init__(self, cache: CacheT, history: TokenHistory, known_length: int) -> None:
        self.cache = cache
        self.history = history  # of the first `known_length` committed tokens
        self.known_length = known_length


class DraftModelMethod(Generic[CacheT]):
    """Draws each token from the draft model's own distribution, shaped by the same parameters as the target's."""

    def __init__(self, model: Model[CacheT], *, distribution_entries: int) -> None:
        self._model, self._entries = model, distribution_entries

    @property
    def max_context(self) -> int:
        return self._model.max_context

    def open(self, session: DraftView) -> DraftState[CacheT]:
        prompt_length = session.spec.prompt_length
        ids = session.ids
        history = TokenHistory(ids[:prompt_length], ids[prompt_length:])
        return DraftState(self._model.new_cache(), history, len(ids))

    def ingest(self, state: DraftState[CacheT], session: DraftView) -> None:
        unfed = session.ids[state.cache.length : session.committed_length - 1]
        if unfed:
            self._model.step([Extension(state.cache, unfed, 0)])

    def draft(self, state: DraftState[CacheT], session: DraftView, max_tokens: int) -> Sequence[DraftedToken]:
        """One token. After a draft that was kept whole, its last token and the bonus are fed in the same pass."""
        ids = session.ids
        state.history.extend(ids[state.known_length : session.committed_length])
        state.known_length = session.committed_length
        (logits,) = self._model.step([Extension(state.cache, ids[state.cache.length :], 1)])
        token_id, distribution = draw_draft_token(
            fit_vocabulary(logits[0], session.spec.vocab_size),
            params=session.spec.sampling,
            rule=session.spec.effective_rule,
            history=state.history,
            drafted=ids[session.committed_length :],
            seed=session.spec.seed,
            position=len(ids),
            max_entries=self._entries,
        )
        return [DraftedToken(token_id, distribution)]

    def rewind(self, state: DraftState[CacheT], length: int) -> None:
        self._model.truncate(state.cache, min(state.cache.length, length))

    def kv_tokens(self, state: DraftState[CacheT], session: DraftView) -> int:
        return max(state.cache.length, session.committed_length)


def fit_vocabulary(
    logits: Tensor,  # [draft_vocab_size]
    vocab_size: int,
) -> Tensor:  # [vocab_size]
    """Cut or pad a row to the target's vocabulary: models of one tokenizer differ in unused rows at the end."""
    if len(logits) >= vocab_size:
        return logits[:vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - len(logits)), value=float("-inf"))
