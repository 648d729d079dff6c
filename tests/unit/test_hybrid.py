"""The hybrid: which of two ways drafts, by the tokens before alone, and that neither disturbs the other.

The model's logits depend on every token in its cache, so a cache that did not catch up shows at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_service.method import DraftMethod, DraftWork, Outcome, Progress
from drafter_service.methods import draft_model
from drafter_service.methods.draft_model import DraftModelMethod, DraftState
from drafter_service.methods.hybrid import HybridMethod, HybridState, build
from drafter_service.methods.suffix import SuffixMethod
from drafter_service.registry import BuiltMethod
from orchestrator.fixed_planner import FixedPlanner
from orchestrator.loop import DraftOrder, OfferedDraft, RoundPlan, run_session
from paceline.generation import Schedule
from paceline.lookup.suffix import SuffixCache
from paceline.prefix import TokenPrefix
from paceline.sampling import DraftedToken, TokenHistory, draw_draft_token
from paceline.settings import DrafterSettings
from paceline.types import MAX_CREDIT, Draft, SessionSpec, SpeculationStats, VerificationRule
from tests.exactness.chi_square import SIGNIFICANCE, conditional_p_value
from tests.fakes import (
    CountingOutput,
    FakeCache,
    FakeModel,
    LocalDrafts,
    LocalTarget,
    Logits,
    View,
    fake_info,
    hashed_logits,
    markov_logits,
    spec_of,
    target_alone,
)

VOCAB_SIZE = 5
LOGITS = hashed_logits(VOCAB_SIZE)
PERIOD = (0, 1, 2, 3)
PROMPT = PERIOD * 4
NOVEL = (0, 1, 2, 3, 4)  # says nothing twice
RULES = list(VerificationRule)
LENGTH = 16  # tokens asked for, so many that the hybrid asks for no more of a repetition

State = HybridState[DraftState[FakeCache]]


@dataclass
class Hybrid:
    """A hybrid, its model, and the suffixes of sessions that have ended."""

    min_score: float = 1.0
    most_others: int = MAX_CREDIT
    logits: Logits = LOGITS
    vocab_size: int = VOCAB_SIZE
    model: FakeModel = field(init=False)
    suffixes: SuffixCache = field(init=False)
    method: HybridMethod[DraftState[FakeCache]] = field(init=False)

    def __post_init__(self) -> None:
        self.model = FakeModel(self.logits, vocab_size=self.vocab_size)
        self.suffixes = SuffixCache()
        model_method = DraftModelMethod[FakeCache](self.model, distribution_entries=64)
        self.method = HybridMethod(model_method, self.suffixes, min_score=self.min_score, most_others=self.most_others)

    def draft(self, *batch: DraftWork[State]) -> Sequence[Outcome]:
        return self.method.draft(batch)


def spec(rule: VerificationRule, prompt: Sequence[int] = PROMPT, *, session_id: str = "session") -> SessionSpec:
    return spec_of(prompt_length=len(prompt), vocab_size=VOCAB_SIZE, rule=rule, session_id=session_id)


def opened(
    hybrid: Hybrid, ids: Sequence[int], rule: VerificationRule = VerificationRule.COUPLED, *, max_tokens: int = 4
) -> DraftWork[State]:
    """A new session that wants to draft."""
    session = View(spec(rule, ids, session_id=str(ids)), ids)
    return DraftWork(hybrid.method.open(session), session, max_tokens)


def tokens_of(outcome: Outcome) -> list[DraftedToken]:
    assert isinstance(outcome, Progress)
    assert outcome.drafted is not None
    return list(outcome.drafted)


# ---- which of the two drafts ----------------------------------------------------------------------------------------


def repetition(session: SessionSpec, ids: Sequence[int], committed_length: int, min_score: float) -> list[int]:
    """From scratch: what the suffixes of the committed tokens say, if that is worth enough."""
    suffixes = SuffixCache().session("", prompt_length=session.prompt_length)
    suffixes.extend(ids[:committed_length])
    proposal = suffixes.propose(ids[committed_length:], LENGTH)
    return list(proposal.ids) if proposal.score >= min_score else []


def models_token(session: SessionSpec, ids: Sequence[int], committed_length: int) -> int:
    """From scratch: what the model draws behind all ids."""
    token_id, _ = draw_draft_token(
        torch.tensor(LOGITS(ids)),
        params=session.sampling,
        rule=session.effective_rule,
        history=TokenHistory(ids[: session.prompt_length], ids[session.prompt_length : committed_length]),
        drafted=ids[committed_length:],
        seed=session.seed,
        position=len(ids),
        max_entries=64,
    )
    return token_id


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    rounds=st.lists(st.tuples(st.integers(0, 3), st.integers(0, LENGTH), st.integers(0, 1)), min_size=2, max_size=6),
    rule=st.sampled_from(RULES),
    min_score=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_the_tokens_before_alone_decide_who_drafts_and_what(
    rounds: list[tuple[int, int, int]], rule: VerificationRule, min_score: float
) -> None:
    """25 drawn histories of drafting and keeping a part, over few tokens, so that much of it repeats: each draft is what
    comes of the same tokens from scratch, and under `rejection` all that is drafted between two commits is of one
    kind."""
    hybrid = Hybrid(min_score)
    prompt = [0, 1, 0]
    view = View(spec(rule, prompt), prompt)
    state = hybrid.method.open(view)
    for steps, kept_length, next_token in rounds:
        drafted, is_repeating = list[DraftedToken](), False
        for _ in range(steps):
            ids, committed_length = view.ids, len(view.committed_ids)
            found = repetition(view.spec, ids, committed_length, min_score)
            is_free = rule is not VerificationRule.REJECTION or not drafted
            is_repeating = bool(found) if is_free else is_repeating
            tokens = tokens_of(hybrid.draft(DraftWork(state, view, LENGTH))[0])
            expected = found if is_repeating else [models_token(view.spec, ids, committed_length)]
            assert [token.token_id for token in tokens] == expected
            view.draft(tokens)
            drafted += tokens
        if rule is VerificationRule.REJECTION:
            assert len({token.distribution is None for token in drafted}) <= 1
        else:
            assert all(token.distribution is None for token in drafted)
        kept = min(kept_length, len(drafted))
        hybrid.method.rewind(state, view.commit(kept, next_token))


def test_a_repetition_is_judged_whole_even_if_little_of_it_may_be_drafted() -> None:
    """With credit for one token, as with credit for many: how much is left must not turn a good match away."""
    for max_tokens in (1, 2, 16):
        hybrid = Hybrid(min_score=4.0)
        (outcome,) = hybrid.draft(opened(hybrid, PROMPT, max_tokens=max_tokens))
        tokens = tokens_of(outcome)
        assert [token.token_id for token in tokens] == list(PERIOD * 4)[: len(tokens)]
        assert (len(tokens) == max_tokens) == (max_tokens < 16)
        assert hybrid.model.steps == 0


def proposals(method: DraftMethod[Any], rule: VerificationRule) -> list[Draft]:
    """What the drafter pushes in eight rounds, some of which keep what was drafted."""
    drafts, prefix, found = LocalDrafts(method, spec(rule)), TokenPrefix(PROMPT), list[Draft]()
    for number in range(8):
        drafts.commit(prefix, DraftOrder(draft_length=LENGTH, credit=LENGTH))
        drafts.work(100)
        draft = drafts.store.find(prefix.digest(), LENGTH)
        assert draft is not None
        found.append(draft)
        prefix.extend((*PERIOD, number % VOCAB_SIZE, 1, 2))
    assert drafts.failures == []
    return found


@pytest.mark.parametrize("rule", RULES)
def test_without_limit_it_is_the_model_alone(rule: VerificationRule) -> None:
    """No score is infinite."""
    model = FakeModel(LOGITS, vocab_size=VOCAB_SIZE)
    alone = DraftModelMethod[FakeCache](model, distribution_entries=64)
    assert proposals(Hybrid(math.inf).method, rule) == proposals(alone, rule)


@pytest.mark.parametrize("rule", RULES)
def test_with_a_limit_of_zero_suffixes_go_first_wherever_they_have_something(rule: VerificationRule) -> None:
    """Where the suffix drafter has nothing, the model drafts."""
    pairs = list(zip(proposals(Hybrid(0.0).method, rule), proposals(SuffixMethod(SuffixCache()), rule), strict=True))
    for hybrid, suffix in pairs:
        assert hybrid[: len(suffix)] == suffix
        assert len(hybrid) >= 1
    assert any(suffix.ids for _, suffix in pairs)


# ---- how the two share the steps ------------------------------------------------------------------------------------


def test_a_repetition_costs_no_step_and_the_model_catches_up_in_one() -> None:
    """Then it draws as a session that was opened on the same tokens just now."""
    hybrid = Hybrid()
    work = opened(hybrid, PROMPT)
    (outcome,) = hybrid.draft(work)
    assert [token.token_id for token in tokens_of(outcome)] == [0, 1, 2, 3]
    assert hybrid.model.steps == 0
    assert hybrid.method.pending_tokens(work.state, work.session) == len(PROMPT)
    session = work.session
    assert isinstance(session, View)
    session.committed_ids += [*(token.token_id for token in tokens_of(outcome)), 4, 0, 4]
    (outcome,) = hybrid.draft(work)
    assert hybrid.model.steps == 1
    assert hybrid.model.batches == [[len(session.ids)]]
    assert [token.token_id for token in tokens_of(outcome)] == [
        models_token(session.spec, session.ids, len(session.ids))
    ]


def test_whoever_waits_for_a_repetition_waits_for_no_model_step() -> None:
    """The other sessions are left out of that step, and get theirs in the next, all in one."""
    hybrid = Hybrid()
    first, second, third = (opened(hybrid, ids) for ids in (PROMPT, NOVEL, NOVEL[::-1]))
    outcomes = hybrid.draft(first, second, third)
    assert len(tokens_of(outcomes[0])) == 4
    assert [isinstance(outcome, Progress) and outcome.is_left_out for outcome in outcomes[1:]] == [True, True]
    assert hybrid.model.steps == 0
    assert [len(tokens_of(outcome)) for outcome in hybrid.draft(second, third)] == [1, 1]
    assert hybrid.model.batches == [[5, 5]]


def test_a_session_whose_turn_it_is_gets_its_step_whoever_repeats_behind_it() -> None:
    """So repetitions can hold up nobody for long: the drafter lets each be the first in turn."""
    hybrid = Hybrid()
    outcomes = hybrid.draft(opened(hybrid, NOVEL), opened(hybrid, PROMPT), opened(hybrid, NOVEL[::-1]))
    assert [len(tokens_of(outcome)) for outcome in outcomes] == [1, 4, 1]
    assert hybrid.model.batches == [[5, 5]]


def test_to_catch_up_is_the_models_business() -> None:
    """A session that may draft nothing reads, whatever its text repeats."""
    hybrid = Hybrid()
    work = opened(hybrid, PROMPT, max_tokens=0)
    assert tokens_of(hybrid.draft(work)[0]) == []
    assert hybrid.method.pending_tokens(work.state, work.session) == 1


# ---- what it passes on ----------------------------------------------------------------------------------------------


def test_it_answers_for_the_model() -> None:
    """Its context, its memory and what of it is forgotten are the model's."""
    hybrid = Hybrid()
    method, model = hybrid.method, hybrid.model
    assert (method.max_context, method.memory, method.preemptions) == (model.max_context, model.memory, 0)
    work = opened(hybrid, NOVEL)
    hybrid.draft(work)
    assert work.state.other.cache.length == 5
    method.rewind(work.state, 3)
    assert work.state.other.cache.length == 3


def answered(hybrid: Hybrid, answer: Sequence[int]) -> None:
    """A session comes and goes; the last of its tokens were committed behind its last step."""
    session = View(spec(VerificationRule.COUPLED, NOVEL), NOVEL)
    state = hybrid.method.open(session)
    hybrid.draft(DraftWork(state, session, 0))
    session.committed_ids += answer
    assert hybrid.model.memory.held_tokens > 0
    hybrid.method.close(state)
    assert hybrid.model.memory.held_tokens == 0


def test_a_session_that_ends_gives_its_memory_back_and_leaves_its_output_to_its_tenant() -> None:
    """What one was answered is drafted for the next, without a model step; the prompt is nobody else's."""
    hybrid, answer = Hybrid(), [4, 4, 2, 0, 2, 2, 4, 1, 0, 0]
    answered(hybrid, answer)
    assert (hybrid.suffixes.cached_requests, hybrid.suffixes.cached_tokens) == (1, len(answer))
    steps = hybrid.model.steps
    (outcome,) = hybrid.draft(opened(hybrid, [*NOVEL, *answer[:5]]))
    assert [token.token_id for token in tokens_of(outcome)] == answer[5:9]
    assert hybrid.model.steps == steps


@pytest.mark.parametrize("rule", RULES)
def test_the_model_drafts_no_further_than_it_may(rule: VerificationRule) -> None:
    """Behind so many tokens the draft ends, whatever they are; a repetition may be longer."""
    hybrid = Hybrid(math.inf, most_others=3)
    work = opened(hybrid, NOVEL, rule, max_tokens=LENGTH)
    view = work.session
    assert isinstance(view, View)
    for length in (1, 1, 1, 0, 0):
        tokens = tokens_of(hybrid.draft(work)[0])
        assert len(tokens) == length
        view.draft(tokens)
    repeating = Hybrid(0.0, most_others=3)
    assert len(tokens_of(repeating.draft(opened(repeating, PROMPT, rule, max_tokens=LENGTH))[0])) > 3


def test_the_model_reads_while_repetitions_serve() -> None:
    """Once the draft is out and nothing else is asked for: so it is at hand when the repetition ends."""
    hybrid = Hybrid()
    drafts, prefix = LocalDrafts(hybrid.method, spec(VerificationRule.COUPLED)), TokenPrefix(PROMPT)
    for _ in range(3):
        drafts.commit(prefix, DraftOrder(draft_length=4, credit=4))
        drafts.work(1)
        steps, draft = hybrid.model.steps, drafts.store.find(prefix.digest(), 4)
        assert draft is not None
        assert draft.ids == PERIOD
        drafts.work(100)
        assert hybrid.model.steps == steps + 1
        prefix.extend((*PERIOD, *PERIOD))


# ---- through drafter, loop and target -------------------------------------------------------------------------------


class RecordedDrafts(LocalDrafts):
    """A drafter in this process; remembers the drafts that it was asked for."""

    def __init__(self, method: DraftMethod[Any], session_spec: SessionSpec) -> None:
        super().__init__(method, session_spec)
        self.found: list[Draft] = []

    async def draft(self, prefix: TokenPrefix, plan: RoundPlan) -> OfferedDraft:
        offered = await super().draft(prefix, plan)
        self.found.append(offered.draft)
        return offered


async def answer_of(
    session_spec: SessionSpec, target: Logits, drafter: Logits, schedule: Schedule, *, steps_meanwhile: int, count: int
) -> tuple[list[int], RecordedDrafts]:
    """The first `count` tokens of an answer, and where its drafts came from; the drafter takes so many steps while the
    target judges a draft."""
    vocab_size = session_spec.vocab_size
    drafts = RecordedDrafts(Hybrid(logits=drafter, vocab_size=vocab_size).method, session_spec)
    model = FakeModel(target, vocab_size=vocab_size)
    ids = list[int]()
    async for result in run_session(
        session_spec,
        [token_id % vocab_size for token_id in range(session_spec.prompt_length)],
        FixedPlanner(schedule=schedule, draft_length=4, rule=session_spec.effective_rule),
        target=LocalTarget(model, session_spec, meanwhile=lambda: drafts.work(steps_meanwhile)),
        drafts=drafts,
        output=CountingOutput(count),
        stats=SpeculationStats(),
    ):
        ids += result.delivery.token_ids
    assert (drafts.stalls, drafts.failures) == (0, [])
    return ids, drafts


def almost_periodic(ids: Sequence[int]) -> list[float]:
    """Counts around the vocabulary, but for one token in seven, which depends on all before."""
    if len(ids) % 7 == 0:
        return list(LOGITS(ids))
    return [6.0 if token_id == (ids[-1] + 1) % VOCAB_SIZE else 0.0 for token_id in range(VOCAB_SIZE)]


@pytest.mark.parametrize("schedule", [Schedule.SEQUENTIAL, Schedule.PIPELINED])
@pytest.mark.parametrize("rule", [VerificationRule.GREEDY, VerificationRule.COUPLED])
async def test_the_text_is_the_targets(rule: VerificationRule, schedule: Schedule) -> None:
    """120 tokens, most of which repeat what came before: token for token those of the target alone, though the model
    drafts some and suffixes others."""
    session_spec = spec_of(prompt_length=5, vocab_size=VOCAB_SIZE, rule=rule)
    ids, drafts = await answer_of(session_spec, almost_periodic, LOGITS, schedule, steps_meanwhile=3, count=120)
    assert ids == target_alone(almost_periodic, session_spec, range(5), 120)
    assert len(drafts.found) < 80


TARGET_ROWS = [[0.1, 0.6, 0.1, 0.2], [0.2, 0.1, 0.6, 0.1], [0.5, 0.2, 0.1, 0.2], [0.4, 0.3, 0.2, 0.1]]
DRAFT_ROWS = [[0.2, 0.3, 0.3, 0.2], [0.4, 0.1, 0.3, 0.2], [0.2, 0.4, 0.2, 0.2], [0.1, 0.3, 0.2, 0.4]]


@pytest.mark.parametrize(
    ("schedule", "answers"),
    [
        (Schedule.PIPELINED, 15),
        pytest.param(Schedule.PIPELINED, 500, marks=pytest.mark.slow),
        pytest.param(Schedule.SEQUENTIAL, 500, marks=pytest.mark.slow),
    ],
)
async def test_under_rejection_the_law_is_the_targets(schedule: Schedule, answers: int) -> None:
    """15 answers of 60 tokens of a Markov chain, 500 in slow runs, drafted in both ways: the transitions follow the
    target's rows (chi-square; a false alarm in 1 of 10,000 choices of seeds)."""
    counts, found = torch.zeros(4, 4), list[Draft]()
    for seed in range(answers):
        session_spec = spec_of(prompt_length=4, vocab_size=4, rule=VerificationRule.REJECTION, seed=seed)
        target, drafter = markov_logits(TARGET_ROWS), markov_logits(DRAFT_ROWS)
        ids, drafts = await answer_of(session_spec, target, drafter, schedule, steps_meanwhile=seed % 4, count=60)
        for last, following in pairwise([3, *ids]):
            counts[last, following] += 1
        found += drafts.found
    assert sum(bool(draft.ids) and not draft.distributions for draft in found) > 5 * answers
    assert sum(bool(draft.distributions) for draft in found) > 5 * answers
    assert conditional_p_value(counts, torch.tensor(TARGET_ROWS)) > SIGNIFICANCE


def test_the_mix_is_not_held_to_the_record_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's evaluation counted all tokens, and here it drafts the harder ones."""
    hybrid = Hybrid()
    info = replace(fake_info(hybrid.model, method="draft_model"), expected_acceptance=((0.0, 0.6),))
    monkeypatch.setattr(draft_model, "build", lambda _: BuiltMethod(hybrid.method, info))
    assert build(DrafterSettings.model_validate({"method": "hybrid"})).info == replace(info, expected_acceptance=())
