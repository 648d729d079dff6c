"""Stand-ins of a few lines: models without weights, so that services are tested without any."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from drafter_service.drafter import Drafter, DrafterEvent, Entry
from drafter_service.method import DraftMethod
from drafter_service.servicer import proposal_of
from drafter_service.session import Commit
from orchestrator.loop import DraftOrder, OfferedDraft, RoundPlan, Target, TimedRows
from orchestrator.proposals import ProposalStore
from paceline.engine.block_pool import BlockPool, BlockTable
from paceline.engine.interface import Extension
from paceline.engine.step_plan import Part
from paceline.errors import PacelineError
from paceline.packing import unpack_distribution
from paceline.prefix import TokenPrefix
from paceline.rejection import judge_draft
from paceline.sampling import DraftedToken, TokenHistory
from paceline.sessions import Address, Open, SessionTable
from paceline.types import (
    Draft,
    DraftOrigin,
    FinishReason,
    ModelInfo,
    SamplingParams,
    SessionSpec,
    VerdictRows,
)
from paceline.types import VerificationRule as Rule
from target_service.verifier import DraftToJudge, TargetSession, Verifier


class FakeCache:
    """Remembers the tokens themselves, so that a wrong rollback or a wrongly shared block shows as a wrong next token."""

    def __init__(self, table: BlockTable) -> None:
        self.table = table

    @property
    def length(self) -> int:
        return self.table.length


Logits = Callable[[Sequence[int]], Sequence[float]]
"""From all tokens so far to the logits of the next one."""


class FakeModel:
    """A model whose logits are any function of the tokens in its cache; counts its steps.

    Its memory is a real block pool, over token ids instead of keys and values.
    """

    def __init__(
        self,
        logits: Logits,
        *,
        vocab_size: int,
        max_context: int = 4096,
        num_blocks: int = 4096,
        block_size: int = 16,
    ) -> None:
        self._logits = logits
        self.vocab_size = vocab_size
        self.memory = BlockPool(num_blocks, block_size=block_size)
        self.max_context = min(max_context, self.memory.capacity_tokens)
        self._slots = [-1] * self.memory.capacity_tokens
        self.steps = 0
        self.lengths_before_step: list[int] = []
        self.batches: list[list[int]] = []  # tokens of each extension, by step

    def new_cache(self) -> FakeCache:
        return FakeCache(self.memory.new_table())

    def fork(self, cache: FakeCache, length: int) -> FakeCache:
        return FakeCache(self.memory.fork(cache.table, length))

    def adopt(self, cache: FakeCache) -> None:
        self.memory.adopt(cache.table)

    def reserve(self, cache: FakeCache, length: int) -> bool:
        copies = self.memory.reserve(cache.table, length)
        size = self.memory.block_size
        for copy in copies or ():
            source = slice(copy.source * size, (copy.source + 1) * size)
            self._slots[copy.destination * size : (copy.destination + 1) * size] = self._slots[source]
        return copies is not None

    def truncate(self, cache: FakeCache, length: int) -> None:
        self.memory.truncate(cache.table, length)

    def release(self, cache: FakeCache) -> None:
        self.memory.release(cache.table)

    def reuse_prefix(self, cache: FakeCache, ids: Sequence[int]) -> int:
        return self.memory.reuse_prefix(cache.table, ids)

    def share_prefix(self, cache: FakeCache, ids: Sequence[int]) -> None:
        self.memory.share_prefix(cache.table, ids)

    def step(self, batch: Sequence[Extension[FakeCache]]) -> list[Tensor]:
        self.steps += 1
        self.batches.append([len(extension.ids) for extension in batch])
        lengths = [extension.cache.length for extension in batch]
        try:
            return [self._extend(extension) for extension in batch]
        except Exception:
            for extension, length in zip(batch, lengths, strict=True):
                self.truncate(extension.cache, length)
            raise

    def ids_of(self, cache: FakeCache) -> list[int]:
        """What the cache holds, as the model sees it."""
        size = self.memory.block_size
        held = (self._slots[block * size : (block + 1) * size] for block in cache.table.blocks)
        return list(chain.from_iterable(held))[: cache.length]

    def _extend(self, extension: Extension[FakeCache]) -> Tensor:
        cache, ids = extension.cache, list(extension.ids)
        assert ids, "a step feeds at least one token"
        assert cache.length + len(ids) <= self.max_context
        assert self.reserve(cache, cache.length + len(ids)), "room was reserved"
        self.lengths_before_step.append(cache.length)
        first_row = cache.length + len(ids) - extension.rows
        size = self.memory.block_size
        for position, token_id in enumerate(ids, start=cache.length):
            self._slots[cache.table.blocks[position // size] * size + position % size] = token_id
        self.memory.extend(cache.table, len(ids))
        seen = self.ids_of(cache)
        rows = [self._logits(seen[: length + 1]) for length in range(first_row, cache.length)]
        return torch.tensor(rows).reshape(extension.rows, self.vocab_size)


def counting_logits(vocab_size: int) -> Logits:
    """The next token is the last one plus one, around the vocabulary."""
    rows = [
        [8.0 if token_id == (last + 1) % vocab_size else 0.0 for token_id in range(vocab_size)]
        for last in range(vocab_size)
    ]
    return lambda ids: rows[ids[-1]]


def hashed_logits(vocab_size: int, *, scale: float = 3.0, salt: int = 0) -> Logits:
    """Logits that depend on every token so far: any slip in cache, position or rollback changes what follows."""

    def logits(ids: Sequence[int]) -> list[float]:
        state = hash((salt, *ids)) & 0xFFFF_FFFF
        generator = torch.Generator().manual_seed(state)
        return [scale * float(value) for value in torch.randn(vocab_size, generator=generator)]

    return logits


def fake_info(model: FakeModel, *, model_id: str = "fake", method: str = "", eos: tuple[int, ...] = ()) -> ModelInfo:
    return ModelInfo(
        model_id=model_id,
        vocab_size=model.vocab_size,
        max_context=model.max_context,
        tokenizer_sha256="",
        incarnation="1",
        method=method,
        dtype="float32",
        eos_token_ids=eos,
    )


def markov_logits(rows: Sequence[Sequence[float]]) -> Logits:
    """The next token depends on the last one alone: `rows[last]` are its probabilities."""
    log_rows = [[math.log(prob) if prob > 0.0 else -math.inf for prob in row] for row in rows]
    return lambda ids: log_rows[ids[-1]]


def spec_of(
    *,
    prompt_length: int,
    vocab_size: int,
    rule: Rule = Rule.COUPLED,
    seed: int = 7,
    sampling: SamplingParams | None = None,
    session_id: str = "session",
) -> SessionSpec:
    """A session with the defaults of tests; `rule` greedy comes with temperature 0."""
    if sampling is None:
        sampling = SamplingParams(temperature=0.0) if rule is Rule.GREEDY else SamplingParams()
    return SessionSpec(
        session_id=session_id,
        prompt_length=prompt_length,
        sampling=sampling,
        seed=seed,
        rule=rule,
        vocab_size=vocab_size,
    )


def target_alone(logits: Logits, spec: SessionSpec, prompt_ids: Sequence[int], count: int) -> list[int]:
    """What the target emits without any draft, each token from scratch: no cache, no history that could be wrong."""
    ids = list(prompt_ids)
    for _ in range(count):
        (row,) = judge_draft(
            torch.tensor([logits(ids)]),
            rule=spec.effective_rule,
            params=spec.sampling,
            history=TokenHistory(ids[: spec.prompt_length], ids[spec.prompt_length :]),
            draft_ids=(),
            draft_distributions=None,
            seed=spec.seed,
            base_length=len(ids),
        )
        ids.append(row.token_id)
    return ids[len(prompt_ids) :]


@dataclass(frozen=True)
class Delivered:
    """What `CountingOutput` made of a run of tokens (`loop.Delivery`)."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


class CountingOutput:
    """An answer that ends after `max_tokens`, or with the token `stop` (`loop.Output`)."""

    def __init__(self, max_tokens: int, *, stop: int | None = None) -> None:
        self.remaining = max_tokens
        self._stop = stop

    def accept(self, token_ids: Sequence[int]) -> Delivered:
        taken: list[int] = []
        for token_id in token_ids:
            if self.remaining == 0:
                break
            taken.append(token_id)
            self.remaining -= 1
            if token_id == self._stop:
                return Delivered(tuple(taken), FinishReason.STOP)
        return Delivered(tuple(taken), FinishReason.LENGTH if self.remaining == 0 else None)


class SoloVerifier:
    """A target's verifier and its model, with one draft of one session a step."""

    def __init__(self, model: FakeModel) -> None:
        self._model = model
        self.verifier = Verifier(model)

    def open(
        self, spec: SessionSpec, committed_ids: Sequence[int], previous: TargetSession[FakeCache] | None = None
    ) -> TargetSession[FakeCache]:
        return self.verifier.open(spec, committed_ids, previous)

    def judge(self, session: TargetSession[FakeCache], draft: DraftToJudge) -> VerdictRows:
        part = Part(wish := self.verifier.begin(session, draft), wish.remaining)
        (logits,) = self._model.step([part.extension()])
        return VerdictRows(base_length=draft.base_length, rows=self.verifier.judge(session, draft, logits))


def timed(rows: VerdictRows) -> TimedRows:
    """Rows that were asked for and came now."""
    now_s = time.perf_counter()
    return TimedRows(rows, now_s, now_s)


class UnhurriedTarget:
    """The part of a target (`loop.Target`) that begins with nothing before it is waited for."""

    def ask(self, prefix: TokenPrefix, draft: Draft) -> None:
        """It could not be sent at once."""


class EagerTarget:
    """A target that judges what it is asked ahead at once (`loop.Target`); any other, that never waits, does the work."""

    def __init__(self, inner: Target) -> None:
        self._inner = inner
        self._ahead: TimedRows | None = None
        self.asked_lengths: list[int] = []  # committed tokens under each draft that came ahead

    def ask(self, prefix: TokenPrefix, draft: Draft) -> None:
        assert self._ahead is None, "one round ahead, not two"
        self.asked_lengths.append(len(prefix))
        verifying = self._inner.verify(prefix, draft)
        try:
            verifying.send(None)
        except StopIteration as done:
            self._ahead = done.value
        else:
            raise AssertionError("the other one never waits")

    async def verify(self, prefix: TokenPrefix, draft: Draft) -> TimedRows:
        ahead, self._ahead = self._ahead, None
        return ahead if ahead is not None else await self._inner.verify(prefix, draft)


class LocalTarget(UnhurriedTarget):
    """A target in this process (`loop.Target`); `meanwhile` is what happens elsewhere while it judges a draft."""

    def __init__(self, model: FakeModel, spec: SessionSpec, *, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._verifier, self._spec, self._meanwhile = SoloVerifier(model), spec, meanwhile
        self._session: TargetSession[FakeCache] | None = None
        self._sent_length = 0

    async def verify(self, prefix: TokenPrefix, draft: Draft) -> TimedRows:
        if self._session is None:
            self._session = self._verifier.open(self._spec, prefix.ids)
            self._sent_length = len(prefix)
        rows = tuple(unpack_distribution(row, vocab_size=self._spec.vocab_size) for row in draft.distributions)
        verdict = self._verifier.judge(
            self._session,
            DraftToJudge(
                base_length=len(prefix),
                committed_ids=tuple(prefix.ids[self._sent_length :]),
                draft_ids=draft.ids,
                distributions=rows or None,
            ),
        )
        self._sent_length = len(prefix)
        self._meanwhile()
        return timed(verdict)


class View:
    """What a drafting method sees of a session (`method.DraftView`), its tokens kept by hand."""

    def __init__(self, spec: SessionSpec, committed_ids: Iterable[int]) -> None:
        self.spec = spec
        self.committed_ids = list(committed_ids)
        self.drafted_ids: list[int] = []

    @property
    def ids(self) -> list[int]:
        return [*self.committed_ids, *self.drafted_ids]

    def draft(self, tokens: Iterable[DraftedToken]) -> None:
        self.drafted_ids += [token.token_id for token in tokens]

    def commit(self, kept_length: int, next_token: int) -> int:
        """Keep some of the drafted tokens; returns how many ids are unchanged."""
        kept = self.drafted_ids[:kept_length]
        unchanged = len(self.committed_ids) + len(kept)
        self.committed_ids += [*kept, next_token]
        self.drafted_ids.clear()
        return unchanged


class LocalDrafts:
    """A drafter in this process (`loop.DraftSource`).

    It takes a step only in `work`, and in `draft` until the draft asked for is there. `stalls` counts the drafts that
    were asked for and can never come, `failures` what the drafter answered instead of drafts.
    """

    def __init__(self, method: DraftMethod[Any], spec: SessionSpec, *, epoch: int = 1) -> None:
        self._spec = spec
        self._address = Address(0, spec.session_id, epoch)
        self.drafter = Drafter(method, SessionTable[Entry[Any]](max_sessions=1, idle_ttl_s=math.inf))
        self.store = ProposalStore()
        self.stalls = 0
        self.failures: list[PacelineError] = []
        self._sent_length = 0

    def commit(self, prefix: TokenPrefix, order: DraftOrder) -> None:
        self.store.prune(len(prefix), prefix.digest())
        if self._sent_length == 0:
            self._receive(self.drafter.accept(Open(self._address, self._spec, tuple(prefix.ids))))
            self._sent_length = len(prefix)
        command = Commit(
            address=self._address,
            base_length=len(prefix),
            committed_ids=tuple(prefix.ids[self._sent_length :]),
            draft_length=order.draft_length,
            credit=order.credit,
            branches=order.branches,
            fan_out=order.fan_out,
            acceptance=order.acceptance,
        )
        self._receive(self.drafter.accept(command))
        self._sent_length = len(prefix)

    def work(self, steps: int) -> None:
        """Let the drafter take up to so many steps."""
        for _ in range(steps):
            if self.drafter.has_work():
                self._receive(self.drafter.step())

    def available(self, prefix: TokenPrefix, max_length: int) -> int:
        return self.store.available(prefix.digest(), max_length)

    def is_ready(self, prefix: TokenPrefix, plan: RoundPlan) -> bool:
        digest = prefix.digest()
        draft = self.store.find(digest, plan.draft_length)
        return draft is not None and self._is_enough(draft, digest, plan)

    async def draft(self, prefix: TokenPrefix, plan: RoundPlan) -> OfferedDraft:
        digest = prefix.digest()
        while (draft := self.store.find(digest, plan.draft_length)) is None or not self._is_enough(draft, digest, plan):
            if not self.drafter.has_work():
                self.stalls += draft is None
                break
            self.work(1)
        return OfferedDraft(draft, DraftOrigin.AHEAD) if draft is not None else OfferedDraft()

    def _is_enough(self, draft: Draft, digest: int, plan: RoundPlan) -> bool:
        return len(draft) >= plan.enough_length or self.store.is_complete(digest)

    def continues(self, digest: int) -> bool:
        return self.store.continues(digest)

    def distrust(self) -> None:
        raise AssertionError("what this drafter drafts can be judged")

    def _receive(self, events: Sequence[DrafterEvent]) -> None:
        for event in events:
            assert event.address == self._address
            if isinstance(event.outcome, PacelineError):
                self.failures.append(event.outcome)
            else:
                self.store.add(proposal_of(event.outcome))
