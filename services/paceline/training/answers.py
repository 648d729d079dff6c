"""Answers of the target to many prompts: what a drafter learns from, since it will be judged on the target's own text.

Continuous batches through the engine: a prompt takes the place of an answer that has ended. A token depends on the
request alone (`Request.seed`), and the steps on the requests and `max_sessions`, so the same call gives the same answers.
Knows nothing of where prompts come from, of files, or of how a drafter learns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic

import torch
from torch import Tensor

from paceline.engine.interface import CacheT, Extension, Model
from paceline.sampling import TokenHistory, argmax_token, coupled_sample, target_log_probs
from paceline.types import SamplingParams

_NO_HISTORY = TokenHistory(())
_STEP_TOKENS = 1024  # of prompts that begin in one step: enough to fill the machine, and little beside the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt to be continued for up to `max_tokens` tokens, or to one of the `stop_ids`."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class TargetRows:
    """What the target thought at the rows that the tokens of an answer were drawn from."""

    top_ids: Tensor  # [answer_length, entries] int32, most probable first
    top_log_probs: Tensor  # [answer_length, entries] float16, at temperature 1, of the whole vocabulary


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens that the target gave (a stop id included), and the rows they came from."""

    ids: tuple[int, ...]
    rows: TargetRows


@dataclass(slots=True)
class _Running(Generic[CacheT]):
    """One request on its way. Invariant: the cache holds all tokens of prompt and answer but the last."""

    index: int
    request: Request
    cache: CacheT
    ids: list[int] = field(default_factory=list)
    rows: list[TargetRows] = field(default_factory=list)

    def extension(self) -> Extension[CacheT]:
        return Extension(self.cache, self.ids[-1:] or self.request.prompt_ids, 1)

    def extend(self, logits: Tensor) -> bool:  # [vocab_size]
        """Append the next token; whether the answer goes on."""
        request = self.request
        if request.sampling.is_greedy:
            token_id = argmax_token(logits, request.sampling, _NO_HISTORY, ())
        else:
            log_probs = target_log_probs(logits, request.sampling, _NO_HISTORY, ())
            token_id = coupled_sample(log_probs, request.seed, len(request.prompt_ids) + len(self.ids))
        self.ids.append(token_id)
        return len(self.ids) < request.max_tokens and token_id not in request.stop_ids

    def answer(self) -> Answer:
        rows = TargetRows(
            torch.stack([row.top_ids for row in self.rows]),
            torch.stack([row.top_log_probs for row in self.rows]),
        )
        return Answer(tuple(self.ids), rows)


def answer(
    model: Model[CacheT], requests: Sequence[Request], *, max_sessions: int, entries: int = 64
) -> Iterator[tuple[int, Answer]]:
    """Each request's place and its answer, as the answers end; up to `max_sessions` at a time, and no more than memory
    holds.

    The rows keep the `entries` most probable tokens. An answer ends where the model's context does; every prompt must
    be shorter than that.
    """
    waiting = deque(enumerate(requests))
    running: list[_Running[CacheT]] = []
    while waiting or running:
        running += _begin(model, waiting, max_sessions - len(running))
        logits = model.step([one.extension() for one in running])
        rows = _rows(torch.cat(logits), entries)
        going_on = []
        for number, (one, row) in enumerate(zip(running, logits, strict=True)):
            one.rows.append(TargetRows(rows.top_ids[number], rows.top_log_probs[number]))
            if one.extend(row[0]) and one.cache.length < model.max_context:
                going_on.append(one)
            else:
                model.release(one.cache)
                yield one.index, one.answer()
        running = going_on


def _begin(model: Model[CacheT], waiting: deque[tuple[int, Request]], most: int) -> Iterator[_Running[CacheT]]:
    """Take up to `most` requests from `waiting`, as far as a step and the memory hold them to their ends."""
    fresh_tokens = 0
    while waiting and most > 0 and fresh_tokens < _STEP_TOKENS:
        index, request = waiting[0]
        assert len(request.prompt_ids) < model.max_context, "a prompt that leaves no room for an answer"
        cache = model.new_cache()
        if not model.reserve(cache, min(model.max_context, len(request.prompt_ids) + request.max_tokens)):
            return
        waiting.popleft()
        yield _Running(index, request, cache)
        most, fresh_tokens = most - 1, fresh_tokens + len(request.prompt_ids)


def _rows(
    logits: Tensor,  # [rows, vocab_size]
    entries: int,
) -> TargetRows:
    top_logits, top_ids = logits.topk(min(entries, logits.shape[1]))
    log_totals = logits.float().logsumexp(-1, keepdim=True)
    return TargetRows(top_ids.int(), (top_logits.float() - log_totals).half())
