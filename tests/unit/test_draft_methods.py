"""Ways of drafting: which token each proposes, and what it was drawn from, whatever was drafted and rolled back before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_service.method import DraftMethod, DraftView, DraftWork, Progress
from drafter_service.methods import draft_model
from drafter_service.methods.draft_model import DraftModelMethod, DraftState, fit_vocabulary
from drafter_service.methods.ngram import NgramMethod
from paceline.errors import PacelineError
from paceline.lookup.ngram import NgramIndex
from paceline.sampling import (
    DistributionUnusable,
    DraftedToken,
    DraftRow,
    TokenHistory,
    choose_draft_tokens,
    draw_draft_token,
)
from paceline.types import SamplingParams, SessionSpec, VerificationRule
from tests.fakes import FakeCache, FakeModel, View, hashed_logits, spec_of

VOCAB_SIZE = 12
LOGITS = hashed_logits(VOCAB_SIZE)
PROMPT = (3, 1, 4, 1, 5)
RULES = list(VerificationRule)
# What shapes a row may depend on all tokens before it: then a history that is off by one shows as well.
SAMPLING = SamplingParams(
    temperature=0.8,
    repetition_penalty=1.3,
    presence_penalty=0.2,
    frequency_penalty=0.4,
    min_tokens=6,
    stop_token_ids=(2,),
)


def outcome_of(method: DraftMethod[Any], state: Any, view: DraftView, max_tokens: int) -> Sequence[DraftedToken]:
    """What one step gives a session that is alone in it."""
    (outcome,) = method.draft([DraftWork(state, view, max_tokens)])
    if isinstance(outcome, PacelineError):
        raise outcome
    assert outcome.drafted is not None
    return outcome.drafted


@dataclass
class ModelDrafting:
    """One session of a draft model."""

    spec: SessionSpec
    logits_vocab_size: int = VOCAB_SIZE
    entries: int = 64
    model: FakeModel = field(init=False)

    def __post_init__(self) -> None:
        vocab_size = self.logits_vocab_size
        self.model = FakeModel(hashed_logits(vocab_size), vocab_size=vocab_size)
        self.method = DraftModelMethod[FakeCache](self.model, distribution_entries=self.entries)
        self.view = View(self.spec, PROMPT)
        self.state: DraftState[FakeCache] = self.method.open(self.view)

    def draft(self) -> DraftedToken:
        (token,) = outcome_of(self.method, self.state, self.view, 5)
        self.view.drafted_ids.append(token.token_id)
        return token

    def catch_up(self) -> None:
        outcome_of(self.method, self.state, self.view, 0)

    def commit(self, kept_length: int, next_token: int) -> None:
        fed_length, unchanged = self.state.cache.length, self.view.commit(kept_length, next_token)
        self.method.rewind(self.state, unchanged)
        assert self.state.cache.length == min(fed_length, unchanged), "all that is still right is kept"


def spec(rule: VerificationRule) -> SessionSpec:
    sampling = SamplingParams(temperature=0.0) if rule is VerificationRule.GREEDY else SAMPLING
    return spec_of(prompt_length=len(PROMPT), vocab_size=VOCAB_SIZE, rule=rule, sampling=sampling)


def drafted_from_scratch(spec: SessionSpec, ids: Sequence[int], committed_length: int) -> DraftedToken:
    """The definition: the model's row behind all ids, without a cache, shaped and drawn by `sampling`."""
    token_id, distribution = draw_draft_token(
        torch.tensor(LOGITS(ids)),
        params=spec.sampling,
        rule=spec.effective_rule,
        history=TokenHistory(ids[: spec.prompt_length], ids[spec.prompt_length : committed_length]),
        drafted=ids[committed_length:],
        seed=spec.seed,
        position=len(ids),
        max_entries=64,
    )
    return DraftedToken(token_id, distribution)


def assert_same(token: DraftedToken, expected: DraftedToken) -> None:
    assert token.token_id == expected.token_id
    assert (token.distribution is None) == (expected.distribution is None)
    if token.distribution is not None and expected.distribution is not None:
        assert token.distribution.ids.equal(expected.distribution.ids)
        assert token.distribution.probs.equal(expected.distribution.probs)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    rounds=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, VOCAB_SIZE - 1), st.booleans()), max_size=6
    ),
    rule=st.sampled_from(RULES),
)
def test_every_token_is_drawn_as_if_from_scratch(
    rounds: list[tuple[int, int, int, bool]], rule: VerificationRule
) -> None:
    """100 drawn histories of drafting, keeping a part, and reading in between: the ids alone decide each token and its
    row (C30, C32)."""
    drafting = ModelDrafting(spec(rule))
    view = drafting.view
    for draft_length, kept_length, next_token, ingests in rounds:
        for _ in range(draft_length):
            expected = drafted_from_scratch(view.spec, view.ids, len(view.committed_ids))
            assert_same(drafting.draft(), expected)
        drafting.commit(min(kept_length, draft_length), next_token)
        if ingests:
            drafting.catch_up()
        assert drafting.state.cache.length < len(view.ids)
        assert drafting.model.ids_of(drafting.state.cache) == view.ids[: drafting.state.cache.length]


def test_only_rejection_carries_distributions() -> None:
    """A draft that was not drawn from a row is judged as one-hot, never by a row beside it (C02, C03)."""
    for rule in RULES:
        token = ModelDrafting(spec(rule)).draft()
        assert (token.distribution is not None) == (rule is VerificationRule.REJECTION)


def test_a_distribution_holds_no_more_entries_than_were_asked_for() -> None:
    """And the draft is one of them."""
    token = ModelDrafting(spec(VerificationRule.REJECTION), entries=3).draft()
    assert token.distribution is not None
    assert len(token.distribution.ids) <= 3
    assert token.distribution.probability(token.token_id) > 0.0


def test_each_token_costs_one_step_and_reading_costs_at_most_one() -> None:
    """A token after a draft that was kept whole too: its last token and the bonus are fed together."""
    drafting = ModelDrafting(spec(VerificationRule.COUPLED))
    drafting.catch_up()
    assert drafting.state.cache.length == len(PROMPT) - 1
    drafting.catch_up()
    assert drafting.model.steps == 1
    for steps in (2, 3, 4):
        drafting.draft()
        assert drafting.model.steps == steps
    drafting.commit(3, next_token=0)
    drafting.draft()
    assert drafting.model.steps == 5
    assert drafting.model.lengths_before_step == [0, 4, 5, 6, 7]
    assert drafting.state.cache.length == len(PROMPT) + 4


def test_reading_never_goes_past_the_committed_tokens() -> None:
    """What was drafted behind them is in the cache already, and stays."""
    drafting = ModelDrafting(spec(VerificationRule.COUPLED))
    for _ in range(3):
        drafting.draft()
    drafting.catch_up()
    assert drafting.state.cache.length == len(PROMPT) + 2
    assert drafting.model.steps == 3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("logits_vocab_size", [6, 20])
def test_no_id_outside_the_target_is_ever_drafted(rule: VerificationRule, logits_vocab_size: int) -> None:
    """Draft models with fewer and with more rows than the target: 40 tokens each (C47)."""
    drafting = ModelDrafting(spec(rule), logits_vocab_size=logits_vocab_size)
    drafting.view.committed_ids[:] = [token_id % 6 for token_id in PROMPT]
    for _ in range(40):
        token = drafting.draft()
        assert 0 <= token.token_id < min(VOCAB_SIZE, logits_vocab_size)
        if token.distribution is not None:
            assert int(token.distribution.ids.max()) < min(VOCAB_SIZE, logits_vocab_size)


def test_rows_are_cut_and_padded_to_the_target() -> None:
    """A token that the draft model does not have has no probability."""
    row = torch.tensor([1.0, 2.0, 3.0])
    assert fit_vocabulary(row, 2).tolist() == [1.0, 2.0]
    assert fit_vocabulary(row, 3).tolist() == row.tolist()
    assert fit_vocabulary(row, 5).tolist() == [1.0, 2.0, 3.0, float("-inf"), float("-inf")]


def test_sessions_that_draw_alike_are_drawn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal parameters, rule and vocabulary are enough; each of the others is drawn by itself, and gets its own token."""
    together = list[int]()

    def counted(rows: Sequence[DraftRow], **law: Any) -> list[DraftedToken]:
        together.append(len(rows))
        return choose_draft_tokens(rows, **law)

    monkeypatch.setattr(draft_model, "choose_draft_tokens", counted)
    coupled = spec(VerificationRule.COUPLED)
    other_seed = replace(coupled, seed=8, sampling=replace(SAMPLING))
    specs = [coupled, spec(VerificationRule.GREEDY), other_seed, spec(VerificationRule.REJECTION)]
    views = [View(each, PROMPT) for each in specs]
    method = DraftModelMethod[FakeCache](FakeModel(LOGITS, vocab_size=VOCAB_SIZE), distribution_entries=64)
    outcomes = method.draft([DraftWork(method.open(view), view, 1) for view in views])
    assert together == [2, 1, 1]
    for view, outcome in zip(views, outcomes, strict=True):
        assert isinstance(outcome, Progress)
        assert outcome.drafted is not None
        assert_same(outcome.drafted[0], drafted_from_scratch(view.spec, PROMPT, len(PROMPT)))


def test_a_row_without_any_token_to_draw_is_a_typed_error() -> None:
    """Only tokens that the draft model does not have are allowed: it has nothing to draw, and says so."""
    session_spec = spec_of(
        prompt_length=5, vocab_size=VOCAB_SIZE, sampling=SamplingParams(allowed_token_ids=(VOCAB_SIZE - 1,))
    )
    with pytest.raises(DistributionUnusable):
        ModelDrafting(session_spec, logits_vocab_size=6).draft()


# ---- prompt lookup --------------------------------------------------------------------------------------------------


def lookup() -> NgramMethod:
    return NgramMethod(prompt_lookup_min=1, prompt_lookup_max=3)


def test_lookup_proposes_what_followed_before_and_marks_it_deterministic() -> None:
    """As many tokens as are asked for, none of them with a row."""
    session = View(spec_of(prompt_length=5, vocab_size=VOCAB_SIZE), (7, 8, 9, 7, 8))
    method = lookup()
    state = method.open(session)
    assert len(state) == 0
    assert outcome_of(method, state, session, 4) == [DraftedToken(token_id) for token_id in (9, 7, 8, 9)]
    assert outcome_of(method, state, session, 1) == [DraftedToken(9)]


def test_lookup_without_a_match_has_nothing_to_offer() -> None:
    """No dummy id stands in for an absent draft."""
    session = View(spec_of(prompt_length=3, vocab_size=VOCAB_SIZE), (1, 2, 3))
    method = lookup()
    assert outcome_of(method, method.open(session), session, 4) == []


TOKENS = st.lists(st.integers(0, 2), max_size=6)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rounds=st.lists(st.tuples(TOKENS, st.integers(0, 6), st.integers(0, 2), st.booleans()), max_size=6))
def test_lookup_depends_on_the_ids_alone(rounds: list[tuple[list[int], int, int, bool]]) -> None:
    """100 drawn histories of other tokens drafted, partly kept, and read in between: as a fresh index of the same."""
    method = lookup()
    view = View(spec_of(prompt_length=1, vocab_size=3), [0])
    state = method.open(view)
    for drafted, kept_length, next_token, ingests in rounds:
        view.drafted_ids += drafted
        expected = NgramIndex(prompt_lookup_min=1, prompt_lookup_max=3)
        expected.extend(view.ids)
        assert [token.token_id for token in outcome_of(method, state, view, 4)] == list(expected.propose((), 4))
        method.rewind(state, view.commit(min(kept_length, len(drafted)), next_token))
        if ingests:
            assert outcome_of(method, state, view, 0) == []
        assert len(state) <= len(view.committed_ids)
