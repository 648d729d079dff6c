"""Sessions in mixed batches over a real network: each gets exactly the tokens that it gets alone.

Tiny random networks in float32 behind the workers that serve requests. The sums of a batch differ from those of one
session in their last bits, so two scores that nearly tie could change places; with the histories drawn here none do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_service.drafter import Drafter, Entry
from drafter_service.method import DraftMethod
from drafter_service.methods.draft_model import DraftModelMethod
from drafter_service.methods.hybrid import HybridMethod
from drafter_service.session import Commit, Drafted
from paceline.engine.block_pool import BlockPool, BlockTable
from paceline.engine.memory import MemoryLimits
from paceline.engine.model import CausalModel
from paceline.engine.vocabulary_bridge import IntersectedModel, VocabularyMap
from paceline.errors import SessionNotFound
from paceline.lookup.suffix import SuffixCache
from paceline.noise import Purpose, uniform
from paceline.rejection import walk
from paceline.sampling import SparseDistribution
from paceline.sessions import Address, Close, Open, SessionTable
from paceline.types import SamplingParams, SessionSpec, VerdictRows, VerificationRule
from target_service.scheduler import Judge, Scheduler
from target_service.verifier import SILENT_S, DraftToJudge, TargetSession
from tests.checkpoints import TINY_VOCAB_SIZE, save_tiny_checkpoint

PROMPT_LENGTH, OUTPUT_LENGTH, DRAFT_LENGTH = 80, 12, 5  # tokens, at most
# One session of the longest kind fits into the smallest memory.
SMALLEST_POOL, LARGEST_POOL = PROMPT_LENGTH + OUTPUT_LENGTH + DRAFT_LENGTH + 15, 1024
BLOCK_SIZES = (1, 16)

Models = dict[int, CausalModel]
"""One model for each block size."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    folder = save_tiny_checkpoint(tmp_path_factory.mktemp("target"), seed=5, max_context=2 * SMALLEST_POOL)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {
        block_size: CausalModel.load(
            str(folder),
            dtype="float32",
            device="cpu",
            limits=MemoryLimits(kv_budget_tokens=2 * LARGEST_POOL, block_size=block_size),
        )
        for block_size in BLOCK_SIZES
    }
    torch.set_num_threads(threads)


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens to one session, counted in steps of the service."""

    spec: SessionSpec
    prompt: tuple[int, ...]
    salt: int  # of its drafts
    joins: int
    cancelled: int | None
    opened_again: int | None


@dataclass(frozen=True, slots=True)
class Setting:
    """The service that the sessions share."""

    block_size: int
    pool_tokens: int
    max_batch_tokens: int


@dataclass
class Clock:
    """Time that passes when told to."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


# ---- what is drawn --------------------------------------------------------------------------------------------------

token_ids = st.integers(0, TINY_VOCAB_SIZE - 1)
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.5]),
    top_k=st.sampled_from([0, 0, 5, 40]),
    top_p=st.sampled_from([1.0, 1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    logit_bias=st.sampled_from([(), ((3, 4.0), (7, -5.0))]),
    banned_token_ids=st.sampled_from([(), (1, 2, 3)]),
    allowed_token_ids=st.sampled_from([None, None, tuple(range(0, TINY_VOCAB_SIZE, 3))]),
    min_tokens=st.sampled_from([0, 6]),
    stop_token_ids=st.just((0, 9)),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    # Beginnings in common, which are shared: a prefix of one of two texts, then tokens of its own.
    text = random.Random(draw(st.integers(0, 1))).choices(range(TINY_VOCAB_SIZE), k=PROMPT_LENGTH)
    own = draw(st.lists(token_ids, min_size=1, max_size=8))
    prompt = (*text[: draw(st.integers(0, PROMPT_LENGTH - len(own)))], *own)
    spec = SessionSpec(
        session_id="",
        prompt_length=len(prompt),
        sampling=draw(samplings),
        seed=draw(st.integers(0, 2**64 - 1)),
        rule=draw(st.sampled_from([VerificationRule.COUPLED, VerificationRule.REJECTION])),
        vocab_size=TINY_VOCAB_SIZE,
    )
    return Plan(
        spec,
        prompt,
        salt=draw(st.integers(0, 2**32)),
        joins=draw(st.integers(0, 6)),
        cancelled=draw(st.none() | st.none() | st.integers(2, 12)),
        opened_again=draw(st.none() | st.integers(1, 12)),
    )


batches = st.lists(plans(), min_size=2, max_size=6).map(
    lambda drawn: [replace(plan, spec=replace(plan.spec, session_id=str(number))) for number, plan in enumerate(drawn)]
)
shared_services = st.builds(
    Setting,
    block_size=st.sampled_from(BLOCK_SIZES),
    pool_tokens=st.sampled_from([SMALLEST_POOL, 150, 250, LARGEST_POOL]),
    max_batch_tokens=st.sampled_from([DRAFT_LENGTH + 1, 20, 64, 512]),
)
ALONE = Setting(block_size=16, pool_tokens=LARGEST_POOL, max_batch_tokens=512)


# ---- the target -----------------------------------------------------------------------------------------------------

DraftMaker = Callable[[Plan, Sequence[int]], DraftToJudge]
"""From a session and its output so far to its next draft, with no committed tokens told."""


def no_draft(plan: Plan, output: Sequence[int]) -> DraftToJudge:
    base_length = len(plan.prompt) + len(output)
    return DraftToJudge(base_length=base_length, committed_ids=(), draft_ids=(), distributions=None)


def some_draft(plan: Plan, output: Sequence[int], *, likely: Sequence[int]) -> DraftToJudge:
    """A draft that depends on the plan and the length of the output alone: up to where it is wrong, on `likely` output.

    Under `rejection` every other one comes with distributions.
    """
    chance = random.Random(plan.salt + len(output))
    ids = list(likely[len(output) :][: chance.randint(0, DRAFT_LENGTH)])
    if ids and chance.random() < 0.5:
        ids[chance.randrange(len(ids))] = chance.randrange(TINY_VOCAB_SIZE)
    distributions = None
    if ids and plan.spec.effective_rule is VerificationRule.REJECTION and chance.random() < 0.5:
        others = [chance.sample([other for other in range(TINY_VOCAB_SIZE) if other != each], k=3) for each in ids]
        distributions = tuple(
            SparseDistribution(torch.tensor([each, *more]), torch.tensor([chance.uniform(0.05, 1.0), 0.3, 0.2, 0.1]))
            for each, more in zip(ids, others, strict=True)
        )
    return replace(no_draft(plan, output), draft_ids=tuple(ids), distributions=distributions)


@dataclass
class Answer:
    """One session as its orchestrator sees it."""

    plan: Plan
    make_draft: DraftMaker
    output: list[int] = field(default_factory=list)
    epoch: int = 0  # 0: not open
    told_length: int = 0
    asked: DraftToJudge | None = None
    is_over: bool = False

    @property
    def address(self) -> Address:
        # Each opening comes over another stream.
        return Address(self.epoch, self.plan.spec.session_id, self.epoch)

    @property
    def committed(self) -> tuple[int, ...]:
        return (*self.plan.prompt, *self.output)

    def open(self) -> Open:
        self.epoch += 1
        self.told_length, self.asked = len(self.committed), None
        return Open(self.address, self.plan.spec, self.committed)

    def ask(self) -> Judge:
        committed = self.committed
        draft = self.make_draft(self.plan, self.output)
        self.asked = replace(draft, committed_ids=committed[self.told_length :])
        self.told_length = len(committed)
        return Judge(address=self.address, draft=self.asked, arrived_s=0.0, deadline_s=None)

    def hear(self, verdict_rows: VerdictRows) -> None:
        assert self.asked is not None
        verdict = walk(
            self.asked.draft_ids,
            verdict_rows.rows,
            accept_uniform=lambda position: uniform(self.plan.spec.seed, position, Purpose.ACCEPT),
            base_length=self.asked.base_length,
        )
        assert verdict.next_token is not None
        self.output += [*self.asked.draft_ids[: verdict.kept_length], verdict.next_token]
        self.asked = None


def serve(models: Models, setting: Setting, answers: Sequence[Answer]) -> None:
    """Run one target with all these sessions until each is as long as it should be, or cancelled."""
    model = models[setting.block_size]
    model.memory = BlockPool(setting.pool_tokens // setting.block_size, block_size=setting.block_size)
    clock = Clock()
    sessions = SessionTable[TargetSession[BlockTable]](
        max_sessions=len(answers),
        idle_ttl_s=1e9,
        pending_tokens_of=lambda session: session.pending_tokens,
        held_tokens=lambda: model.memory.held_tokens,
        clock=clock,
    )
    scheduler = Scheduler(model, sessions, max_batch_tokens=setting.max_batch_tokens, clock=clock)
    step = 0
    while not all(answer.is_over for answer in answers):
        for answer in answers:
            take_turn(scheduler, answer, step)
        if not scheduler.has_work():
            clock.now_s += SILENT_S + 0.1
            scheduler.expire_idle()
        for event in scheduler.step():
            answer = answers[int(event.address.session_id)]
            if answer.is_over:
                assert isinstance(event.outcome, SessionNotFound)
                continue
            assert event.address == answer.address
            assert isinstance(event.outcome, VerdictRows)
            answer.hear(event.outcome)
        step += 1
        assert step < 3000, "sessions do not get on"
    model.memory.check()
    assert (model.memory.held_tokens, sessions.kv_used_tokens) == (0, 0)


def take_turn(scheduler: Scheduler[BlockTable], answer: Answer, step: int) -> None:
    """What the orchestrator of one session does before a step."""
    plan = answer.plan
    if answer.is_over or step < plan.joins:
        return
    if answer.epoch == 0 or step == plan.opened_again:
        for event in scheduler.accept(answer.open()):
            assert event.address != answer.address, "the opening is refused"
    if len(answer.output) >= OUTPUT_LENGTH or step == plan.cancelled:
        scheduler.accept(Close(answer.address))
        answer.is_over = True
    elif answer.asked is None:
        assert scheduler.accept(answer.ask()) == []


def alone(models: Models, plan: Plan, make_draft: DraftMaker) -> list[int]:
    """The output of a session that nothing happens to, in a service of its own."""
    answer = Answer(undisturbed(plan), make_draft)
    serve(models, ALONE, [answer])
    return answer.output


def undisturbed(plan: Plan) -> Plan:
    return replace(plan, spec=replace(plan.spec, session_id="0"), joins=0, cancelled=None, opened_again=None)


def check_target(models: Models, plans: Sequence[Plan], setting: Setting) -> None:
    answers, expected = [], []
    for plan in plans:
        plain = alone(models, plan, no_draft)
        make_draft = partial(some_draft, likely=plain)
        is_by_ratio = plan.spec.effective_rule is VerificationRule.REJECTION
        expected.append(alone(models, plan, make_draft) if is_by_ratio else plain)
        answers.append(Answer(plan, make_draft))
    serve(models, setting, answers)
    for answer, tokens in zip(answers, expected, strict=True):
        compared = min(len(answer.output), len(tokens))
        assert answer.output[:compared] == tokens[:compared]
        assert compared >= OUTPUT_LENGTH or answer.plan.cancelled is not None


@settings(max_examples=12, deadline=None, derandomize=True)
@given(plans=batches, setting=shared_services)
def test_target_answers_each_session_as_if_it_were_alone(models: Models, plans: list[Plan], setting: Setting) -> None:
    """12 drawn mixtures of up to 6 sessions that join, are opened again and leave at any step, with drafts right and
    wrong, in memory for one session or for all: the tokens of plain decoding, under `rejection` those of the same
    drafts judged alone."""
    check_target(models, plans, setting)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@settings(max_examples=400, deadline=None, derandomize=True)
@given(plans=batches, setting=shared_services)
def test_target_answers_each_session_as_if_it_were_alone_in_any_mixture(
    models: Models, plans: list[Plan], setting: Setting
) -> None:
    """The same for 400 mixtures."""
    check_target(models, plans, setting)


# ---- the drafter ----------------------------------------------------------------------------------------------------

METHODS = ("draft model", "hybrid", "other tokenizer")

# Every tenth token of the target is spelled by two of the drafter's, and never proposed.
LACKED = range(9, TINY_VOCAB_SIZE, 10)
OTHER_TOKENS = VocabularyMap(
    pieces=[(each - 2, each - 1) if each in LACKED else (each,) for each in range(TINY_VOCAB_SIZE)],
    unknown=(0,),
    start=(),
    start_id=None,
    start_pieces=(),
    proposed_by=torch.tensor([TINY_VOCAB_SIZE if each in LACKED else each for each in range(TINY_VOCAB_SIZE)]),
    draft_vocab_size=TINY_VOCAB_SIZE,
)


@dataclass
class Reader:
    """One session of a drafter, whose orchestrator keeps of each draft what the plan's salt says."""

    plan: Plan
    committed: list[int] = field(default_factory=list)
    drafts: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # base length and tokens of each
    drawn_from: list[dict[int, float]] = field(default_factory=list)  # the first token of each; empty: deterministic
    epoch: int = 0
    told_length: int = 0
    is_waiting: bool = False
    is_over: bool = False

    @property
    def address(self) -> Address:
        return Address(self.epoch, self.plan.spec.session_id, self.epoch)

    @property
    def output_length(self) -> int:
        return len(self.committed) - len(self.plan.prompt)

    def open(self) -> Open:
        self.epoch += 1
        self.committed = self.committed or list(self.plan.prompt)
        self.told_length, self.is_waiting = len(self.committed), False
        return Open(self.address, self.plan.spec, tuple(self.committed))

    def ask(self) -> Commit:
        self.is_waiting = True
        new = tuple(self.committed[self.told_length :])
        self.told_length = len(self.committed)
        draft_length = 1 + (self.plan.salt + self.output_length) % DRAFT_LENGTH
        return Commit(
            address=self.address,
            base_length=len(self.committed),
            committed_ids=new,
            draft_length=draft_length,
            credit=draft_length,
        )

    def hear(self, drafted: Drafted) -> None:
        assert drafted.base_length == len(self.committed)
        ids = tuple(token.token_id for token in drafted.tokens)
        first = drafted.tokens[0].distribution
        self.drafts.append((len(self.committed), ids))
        self.drawn_from.append({} if first is None else dict(first.shares))
        kept_length = random.Random(self.plan.salt + self.output_length).randint(0, len(ids))
        # Behind a draft that is not kept whole: never the token that was refused.
        next_token = (ids[min(kept_length, len(ids) - 1)] + 1) % TINY_VOCAB_SIZE
        self.committed += [*ids[:kept_length], next_token]
        self.is_waiting = False


def method_of(name: str, model: CausalModel, max_batch_tokens: int, clock: Clock) -> DraftMethod[Any]:
    """The ways of drafting that hold memory; what other sessions were answered is not drafted from."""
    options: dict[str, Any] = {"distribution_entries": 8, "max_batch_tokens": max_batch_tokens, "clock": clock}
    if name == "other tokenizer":
        return DraftModelMethod(IntersectedModel(model, OTHER_TOKENS), **options)
    method = DraftModelMethod(model, **options)
    return HybridMethod(method, SuffixCache(max_cached_requests=0), min_score=0.3) if name == "hybrid" else method


def draft_for(name: str, models: Models, setting: Setting, readers: Sequence[Reader]) -> None:
    """Run one drafter with all these sessions until each is as long as it should be, or cancelled."""
    model = models[setting.block_size]
    pool_tokens = setting.pool_tokens * (2 if name == "other tokenizer" else 1)  # spelled, a session is longer
    model.memory = BlockPool(pool_tokens // setting.block_size, block_size=setting.block_size)
    clock = Clock()
    method = method_of(name, model, setting.max_batch_tokens, clock)
    drafter = Drafter(method, SessionTable[Entry[Any]](max_sessions=len(readers), idle_ttl_s=1e9))
    step = 0
    while not all(reader.is_over for reader in readers):
        for reader in readers:
            take_drafter_turn(drafter, reader, step)
        if not drafter.has_work():
            clock.now_s += 60.0
            drafter.expire_idle()
        for event in drafter.step() if drafter.has_work() else []:
            reader = readers[int(event.address.session_id)]
            assert event.address == reader.address
            assert isinstance(event.outcome, Drafted)
            reader.hear(event.outcome)
        step += 1
        assert step < 3000, "sessions do not get on"
    model.memory.check()
    assert model.memory.held_tokens == 0


def take_drafter_turn(drafter: Drafter[Any], reader: Reader, step: int) -> None:
    """What the orchestrator of one session does before a step."""
    plan = reader.plan
    if reader.is_over or step < plan.joins:
        return
    if reader.epoch == 0 or step == plan.opened_again:
        for event in drafter.accept(reader.open()):
            assert event.address != reader.address, "the opening is refused"
    if reader.output_length >= OUTPUT_LENGTH or step == plan.cancelled:
        drafter.accept(Close(reader.address))
        reader.is_over = True
    elif not reader.is_waiting:
        assert drafter.accept(reader.ask()) == []


def check_drafter(name: str, models: Models, plans: Sequence[Plan], setting: Setting) -> None:
    expected = [Reader(undisturbed(plan)) for plan in plans]
    for reader in expected:
        draft_for(name, models, ALONE, [reader])
    readers = [Reader(plan) for plan in plans]
    draft_for(name, models, setting, readers)
    for reader, same_alone in zip(readers, expected, strict=True):
        assert reader.drafts == same_alone.drafts[: len(reader.drafts)]
        for shares, same_shares in zip(reader.drawn_from, same_alone.drawn_from, strict=False):
            # They are rounded to half precision, where the last bits of a sum may tip the balance.
            assert shares == pytest.approx(same_shares, abs=1e-3)
        assert len(reader.drafts) == len(same_alone.drafts) or reader.plan.cancelled is not None


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(plans=batches, setting=shared_services)
def test_drafter_drafts_for_each_session_as_if_it_were_alone(
    models: Models, name: str, plans: list[Plan], setting: Setting
) -> None:
    """6 drawn mixtures of up to 6 sessions that join, are opened again and leave at any step, with drafts kept whole,
    in part and not at all, in memory for one session or for all: the same drafts, from the same distributions."""
    check_drafter(name, models, plans, setting)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=400, deadline=None, derandomize=True)
@given(plans=batches, setting=shared_services)
def test_drafter_drafts_for_each_session_as_if_it_were_alone_in_any_mixture(
    models: Models, name: str, plans: list[Plan], setting: Setting
) -> None:
    """The same for 400 mixtures."""
    check_drafter(name, models, plans, setting)
