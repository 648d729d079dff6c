"""Verification of drafts: cache arithmetic after every outcome, and rows that depend on the committed tokens alone.

The fake model's logits depend on every token in its cache, so a cache cut by one too many or too few shows at once.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_service.methods.draft_model import DraftModelMethod
from orchestrator.fixed_planner import FixedPlanner
from orchestrator.loop import run_session
from paceline import noise
from paceline.errors import ContextTooLong, LengthMismatch, PayloadInvalid
from paceline.generation import Schedule
from paceline.noise import Purpose
from paceline.rejection import judge_draft, walk
from paceline.sampling import SparseDistribution, TokenHistory
from paceline.types import Origin, Row, SamplingParams, SessionSpec, SpeculationStats, VerificationRule
from target_service.verifier import SILENT_S, DraftToJudge, TargetSession, Verifier, common_prefix_length
from tests.fakes import (
    CountingOutput,
    FakeCache,
    FakeModel,
    LocalDrafts,
    LocalTarget,
    Logits,
    SoloVerifier,
    hashed_logits,
    spec_of,
    target_alone,
)

VOCAB_SIZE = 12
LOGITS = hashed_logits(VOCAB_SIZE)
PROMPT: tuple[int, ...] = (3, 1, 4, 1, 5)
MAX_DRAFT_LENGTH = 8
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


def fake_model(*, max_context: int = 4096) -> FakeModel:
    return FakeModel(LOGITS, vocab_size=VOCAB_SIZE, max_context=max_context)


def spec(rule: VerificationRule) -> SessionSpec:
    sampling = SamplingParams(temperature=0.0) if rule is VerificationRule.GREEDY else SAMPLING
    return spec_of(prompt_length=len(PROMPT), vocab_size=VOCAB_SIZE, rule=rule, sampling=sampling)


def draft(base_length: int, committed_ids: tuple[int, ...], draft_ids: tuple[int, ...] = ()) -> DraftToJudge:
    return DraftToJudge(base_length=base_length, committed_ids=committed_ids, draft_ids=draft_ids, distributions=None)


def drawn(base_length: int, committed_ids: tuple[int, ...], draft_ids: tuple[int, ...], salt: int) -> DraftToJudge:
    """A draft with a random row for each token."""
    generator = torch.Generator().manual_seed(salt)
    rows = tuple(
        SparseDistribution(torch.arange(VOCAB_SIZE), torch.rand(VOCAB_SIZE, generator=generator) + 0.05)
        for _ in draft_ids
    )
    return DraftToJudge(
        base_length=base_length, committed_ids=committed_ids, draft_ids=draft_ids, distributions=rows or None
    )


def rows_from_scratch(spec: SessionSpec, committed: tuple[int, ...], asked: DraftToJudge) -> tuple[Row, ...]:
    """What the rows must be: every logit computed from all tokens before it, without a session or a cache."""
    known = [*committed, *asked.draft_ids]
    return judge_draft(
        torch.tensor([LOGITS(known[: length + 1]) for length in range(len(committed) - 1, len(known))]),
        rule=spec.effective_rule,
        params=spec.sampling,
        history=TokenHistory(committed[: spec.prompt_length], committed[spec.prompt_length :]),
        draft_ids=asked.draft_ids,
        draft_distributions=asked.distributions,
        seed=spec.seed,
        base_length=len(committed),
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("draft_length", range(MAX_DRAFT_LENGTH + 1))
def test_cache_holds_all_committed_tokens_but_the_last_after_every_outcome(
    rule: VerificationRule, draft_length: int
) -> None:
    """For each kept length: `base_length - 1` tokens before the next steps, and rows as from scratch (C30, C40).

    The steps after it: one with a draft, one without, and one more behind that.
    """
    for kept_length in range(draft_length + 1):
        model, session_spec = fake_model(), spec(rule)
        verifier = SoloVerifier(model)
        session = verifier.open(session_spec, PROMPT)
        committed = PROMPT
        own = tuple(target_alone(LOGITS, session_spec, PROMPT, draft_length + 1))
        # Under `greedy` and `coupled` the target keeps exactly `kept_length` of these tokens.
        other = tuple((token_id + 1) % VOCAB_SIZE for token_id in own)
        first = drawn(len(PROMPT), (), own[:kept_length] + other[kept_length:draft_length], salt=1)
        verdict = verifier.judge(session, first)
        assert verdict.base_length == len(PROMPT)
        assert verdict.rows == rows_from_scratch(session_spec, committed, first)
        if rule is not VerificationRule.REJECTION:
            assert len(verdict.rows) == kept_length + 1
        for round_number, next_draft in enumerate(((7, 0, 9), (), (1,))):
            new = (*first.draft_ids[:kept_length], 6) if round_number == 0 else (round_number,)
            committed += new
            asked = drawn(len(committed), new, next_draft, salt=2 + round_number)
            assert verifier.judge(session, asked).rows == rows_from_scratch(session_spec, committed, asked)
            assert model.lengths_before_step[-1] == len(committed) - 1
            assert session.cache.length == len(session.cached_ids()) == len(committed) + len(next_draft)
        assert model.lengths_before_step[0] == 0


@pytest.mark.parametrize("rule", RULES)
def test_kept_lengths_of_one_session_are_nothing_to_another(rule: VerificationRule) -> None:
    """Nothing kept beside everything kept, step by step in turn (C40)."""
    model, session_spec = fake_model(), spec(rule)
    verifier = SoloVerifier(model)
    sessions = [verifier.open(session_spec, PROMPT) for _ in range(2)]
    drafted = (2, 4, 6, 8)
    committed: list[tuple[int, ...]] = [PROMPT, PROMPT]
    new: list[tuple[int, ...]] = [(), ()]
    for _ in range(4):
        for index, kept_length in enumerate((0, len(drafted))):
            asked = draft(len(committed[index]), new[index], drafted)
            rows = verifier.judge(sessions[index], asked).rows
            assert rows == rows_from_scratch(session_spec, committed[index], asked)
            new[index] = (*drafted[:kept_length], rows[0].token_id)
            committed[index] += new[index]


@pytest.mark.parametrize("rule", RULES)
def test_a_verdict_can_be_asked_for_again(rule: VerificationRule) -> None:
    """The same draft gives the same rows, and another draft on the same tokens its own."""
    verifier, session_spec = SoloVerifier(fake_model()), spec(rule)
    session = verifier.open(session_spec, PROMPT)
    for drafted in ((1, 2, 3), (1, 2, 3), (1, 5), (), (1, 2, 3)):
        asked = draft(len(PROMPT), (), drafted)
        assert verifier.judge(session, asked).rows == rows_from_scratch(session_spec, PROMPT, asked)


def test_committed_tokens_may_be_told_again() -> None:
    """A message may repeat tokens that are known, also from the prompt on: only what is new is added."""
    verifier, session_spec = SoloVerifier(fake_model()), spec(VerificationRule.COUPLED)
    session = verifier.open(session_spec, PROMPT)
    verifier.judge(session, draft(6, (9,), (1, 2)))
    committed = (*PROMPT, 9, 8, 7)
    for told in ((8, 7), (9, 8, 7), committed, (7,)):
        asked = draft(len(committed), told, (4,))
        assert verifier.judge(session, asked).rows == rows_from_scratch(session_spec, committed, asked)


@pytest.mark.parametrize(
    ("base_length", "committed_ids"),
    [
        (len(PROMPT) + 2, (9,)),  # a token is missing
        (len(PROMPT) + 1, (2, 9)),  # contradicts the prompt
        (len(PROMPT), (0,)),
        (len(PROMPT) - 1, ()),  # fewer than are committed
        (2, (9, 9, 9)),  # more tokens than that length
        (0, ()),
    ],
)
def test_tokens_that_do_not_join_on_are_refused(base_length: int, committed_ids: tuple[int, ...]) -> None:
    """The session is as it was: the next draft is judged as if nothing had been asked."""
    model, session_spec = fake_model(), spec(VerificationRule.COUPLED)
    verifier = SoloVerifier(model)
    session = verifier.open(session_spec, PROMPT)
    verifier.judge(session, draft(len(PROMPT), (), (7, 7)))
    with pytest.raises(LengthMismatch, match="open the session again"):
        verifier.judge(session, draft(base_length, committed_ids, (1,)))
    assert model.steps == 1
    asked = draft(len(PROMPT) + 2, (7, 1), (4,))
    assert verifier.judge(session, asked).rows == rows_from_scratch(session_spec, (*PROMPT, 7, 1), asked)


def test_a_draft_beyond_the_context_is_refused_and_one_that_just_fits_is_not() -> None:
    """`base_length + draft_length` tokens are fed; the token decided behind them needs no room (C50)."""
    verifier, session_spec = SoloVerifier(fake_model(max_context=8)), spec(VerificationRule.COUPLED)
    session = verifier.open(session_spec, PROMPT)
    with pytest.raises(ContextTooLong, match="ask for less"):
        verifier.judge(session, draft(len(PROMPT), (), (1, 2, 3, 4)))
    asked = draft(len(PROMPT), (), (1, 2, 3))
    assert verifier.judge(session, asked).rows == rows_from_scratch(session_spec, PROMPT, asked)
    full = (*PROMPT, 1, 2, 3)
    assert verifier.judge(session, draft(8, (1, 2, 3))).rows == rows_from_scratch(session_spec, full, draft(8, ()))
    with pytest.raises(ContextTooLong):
        verifier.judge(session, draft(9, (4,)))
    with pytest.raises(ContextTooLong):
        verifier.open(session_spec, (0,) * 9)


def test_a_draft_that_its_distribution_cannot_have_given_is_refused_and_harmless() -> None:
    """The rows cannot be computed; the session goes on (C47)."""
    verifier, session_spec = SoloVerifier(fake_model()), spec(VerificationRule.REJECTION)
    session = verifier.open(session_spec, PROMPT)
    bad = DraftToJudge(
        base_length=len(PROMPT), committed_ids=(), draft_ids=(3,), distributions=(SparseDistribution.one_hot(4),)
    )
    with pytest.raises(PayloadInvalid):
        verifier.judge(session, bad)
    asked = drawn(len(PROMPT) + 1, (6,), (1, 2), salt=5)
    assert verifier.judge(session, asked).rows == rows_from_scratch(session_spec, (*PROMPT, 6), asked)


@pytest.mark.parametrize(
    ("committed", "reused_length"),
    [
        ((*PROMPT, 9, 8, 7), 7),  # the same and one more
        ((*PROMPT, 9, 8), 6),  # the same: the last one is fed again
        ((*PROMPT, 9), 5),  # fewer
        ((*PROMPT, 0, 8), 5),  # another output
        ((*PROMPT[:2], 0, 0), 2),  # another prompt
        ((0, 0), 0),
    ],
)
@pytest.mark.parametrize("rule", RULES)
def test_a_session_opened_again_reuses_what_agrees(
    rule: VerificationRule, committed: tuple[int, ...], reused_length: int
) -> None:
    """The cache of the older session serves as far as the tokens are the same, and no further."""
    model, session_spec = fake_model(), spec(rule)
    verifier = SoloVerifier(model)
    old = verifier.open(session_spec, PROMPT)
    verifier.judge(old, draft(len(PROMPT) + 2, (9, 8), (5, 5, 5)))
    asked = draft(len(committed), (), (7, 1))
    new_spec = spec_of(
        prompt_length=min(len(PROMPT), len(committed)),
        vocab_size=VOCAB_SIZE,
        rule=rule,
        sampling=session_spec.sampling,
    )
    session = verifier.open(new_spec, committed, old)
    assert verifier.judge(session, asked).rows == rows_from_scratch(new_spec, committed, asked)
    assert model.lengths_before_step[-1] == reused_length


# ---- memory and time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_session_whose_memory_was_taken_is_judged_as_before(rule: VerificationRule) -> None:
    """Between a draft and the next one, and before the first: all tokens are fed again, none of the old draft (C34)."""
    model, session_spec = fake_model(), spec(rule)
    verifier = SoloVerifier(model)
    session = verifier.open(session_spec, PROMPT)
    committed = PROMPT
    for number, (new, drafted) in enumerate([((), (7, 8, 9)), ((7, 8, 1), (5, 5)), ((2,), (3,))]):
        model.release(session.cache)
        assert session.cached_ids() == []
        committed += new
        asked = drawn(len(committed), new, drafted, salt=number)
        assert verifier.judge(session, asked).rows == rows_from_scratch(session_spec, committed, asked)
        assert (model.lengths_before_step[-1], session.cached_ids()) == (0, [*committed, *drafted])
    assert (verifier.verifier.outcomes.num_draft_tokens, verifier.verifier.outcomes.num_accepted_tokens) == (5, 2)


def test_pending_tokens_are_the_committed_ones_that_are_not_cached() -> None:
    """Those of a draft are nobody's, so there are never fewer than none."""
    verifier = SoloVerifier(fake_model())
    session = verifier.open(spec(VerificationRule.COUPLED), PROMPT)
    assert session.pending_tokens == len(PROMPT)
    asked = draft(len(PROMPT) + 1, (6,), (1, 2))
    verifier.verifier.begin(session, asked)
    assert session.pending_tokens == len(PROMPT) + 1
    verifier.judge(session, asked)
    assert session.pending_tokens == 0
    verifier.verifier.begin(session, draft(len(PROMPT) + 2, (3,)))
    assert session.pending_tokens == 1  # the draft's first token was refused: 6 tokens are cached of 7


def test_session_is_silent_once_it_has_sent_nothing_for_long() -> None:
    """From its opening or its last draft on, whichever was later; opened again it has been heard."""
    now_s = [100.0]
    verifier = Verifier[FakeCache](fake_model(), clock=lambda: now_s[0])
    session = verifier.open(spec(VerificationRule.COUPLED), PROMPT)
    now_s[0] += SILENT_S
    assert not session.is_silent
    verifier.begin(session, draft(len(PROMPT), ()))
    now_s[0] += SILENT_S
    assert not session.is_silent
    now_s[0] += 0.1
    assert session.is_silent
    assert not verifier.open(session.spec, PROMPT, session).is_silent


def test_sessions_are_ranked_by_their_first_opening() -> None:
    """One that is opened again keeps its rank, wherever its cache ends."""
    verifier = SoloVerifier(fake_model())
    first, second = (verifier.open(spec(VerificationRule.COUPLED), PROMPT) for _ in range(2))
    again = verifier.open(first.spec, (*PROMPT, 1), first)
    assert first.opened == again.opened < second.opened


@pytest.mark.parametrize("rule", RULES)
def test_rows_carry_log_probabilities_where_the_session_asks_for_them(rule: VerificationRule) -> None:
    """As many alternatives as it asks for, and nothing otherwise."""
    for logprobs in (None, 0, 2):
        session_spec = replace(spec(rule), logprobs=logprobs)
        verifier = SoloVerifier(fake_model())
        rows = verifier.judge(verifier.open(session_spec, PROMPT), draft(len(PROMPT), (), (7, 8))).rows
        assert [None if row.logprobs is None else len(row.logprobs.top) for row in rows] == [logprobs] * len(rows)


# ---- what was kept --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("schedule", [Schedule.SEQUENTIAL, Schedule.PIPELINED])
async def test_what_was_kept_is_known_of_every_draft_but_the_last(rule: VerificationRule, schedule: Schedule) -> None:
    """The counts are those of whoever walked over the rows, one round behind: with a drafter that is right most of the
    time, so that drafts are kept whole, in part and not at all."""
    session_spec = spec(rule)
    drafter = FakeModel(often_right(LOGITS), vocab_size=VOCAB_SIZE)
    drafts = LocalDrafts(DraftModelMethod(drafter, distribution_entries=64), session_spec)
    target = LocalTarget(fake_model(), session_spec, meanwhile=lambda: drafts.work(3))
    stats, known = SpeculationStats(), [SpeculationStats()]
    async for _ in run_session(
        session_spec,
        PROMPT,
        FixedPlanner(schedule=schedule, draft_length=3, rule=session_spec.effective_rule),
        target=target,
        drafts=drafts,
        output=CountingOutput(120),
        stats=stats,
    ):
        outcomes = target._verifier.verifier.outcomes
        # The draft behind this round has not been judged, so the target knows what was kept up to the round before.
        assert counts(outcomes) == counts(known[-1])
        known.append(copy.deepcopy(stats))
    assert 0 < outcomes.num_accepted_tokens < outcomes.num_draft_tokens


def often_right(logits: Logits) -> Logits:
    """The same logits, but for every third length, where they are those of the tokens so far in reverse."""
    return lambda ids: logits(ids if len(ids) % 3 else ids[::-1])


def counts(stats: SpeculationStats) -> tuple[int, int, int, list[int]]:
    return stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens, stats.accepted_per_position


@pytest.mark.parametrize(
    ("told", "kept_length"),
    [
        ((7, 8, 9, 1), 3),  # the whole draft and a bonus
        ((7, 8, 9), 3),  # the bonus is left to the next draft
        ((7, 8, 1), 2),
        ((1,), 0),
        ((7, 8), None),  # too little to tell
        ((), None),
    ],
)
@pytest.mark.parametrize("is_opened_again", [False, True])
def test_what_was_kept_is_read_from_the_tokens_committed_next(
    told: tuple[int, ...], kept_length: int | None, is_opened_again: bool
) -> None:
    """Also where the session is opened again on them; where they do not reach far enough nothing is counted."""
    session_spec = spec(VerificationRule.COUPLED)
    verifier = SoloVerifier(fake_model())
    session = verifier.open(session_spec, PROMPT)
    verifier.judge(session, draft(len(PROMPT), (), (7, 8, 9)))
    if is_opened_again:
        session = verifier.open(session_spec, (*PROMPT, *told), session)
    verifier.judge(session, draft(len(PROMPT) + len(told), told, (4,)))
    outcomes = verifier.verifier.outcomes
    expected = (0, 0) if kept_length is None else (3, kept_length)
    assert (outcomes.num_draft_tokens, outcomes.num_accepted_tokens) == expected


def test_a_draft_that_is_asked_for_again_counts_once() -> None:
    """And one that was never answered, or that another prompt has overtaken, not at all."""
    session_spec = spec(VerificationRule.COUPLED)
    verifier = SoloVerifier(fake_model())
    session = verifier.open(session_spec, PROMPT)
    for _ in range(3):
        verifier.judge(session, draft(len(PROMPT), (), (7, 8)))
    verifier.judge(session, draft(len(PROMPT) + 2, (7, 1), ()))
    assert (verifier.verifier.outcomes.num_drafts, verifier.verifier.outcomes.num_accepted_tokens) == (1, 1)
    verifier.judge(session, draft(len(PROMPT) + 2, (), (5, 5)))
    session = verifier.open(session_spec, (0, *PROMPT[1:], 7, 1, 5, 5), session)
    verifier.judge(session, draft(len(PROMPT) + 4, (), ()))
    assert (verifier.verifier.outcomes.num_drafts, verifier.verifier.outcomes.num_accepted_tokens) == (1, 1)


def test_a_draft_counts_once_though_the_step_that_told_its_outcome_failed() -> None:
    """Whoever asked hears why, and asks again on the same tokens; the draft that failed was never answered."""
    verifier, session_spec = SoloVerifier(fake_model()), spec(VerificationRule.REJECTION)
    session = verifier.open(session_spec, PROMPT)
    verifier.judge(session, drawn(len(PROMPT), (), (7, 8), salt=1))
    bad = DraftToJudge(
        base_length=7, committed_ids=(7, 1), draft_ids=(3,), distributions=(SparseDistribution.one_hot(4),)
    )
    with pytest.raises(PayloadInvalid):
        verifier.judge(session, bad)
    verifier.judge(session, drawn(len(PROMPT) + 2, (7, 1), (5,), salt=2))
    assert counts(verifier.verifier.outcomes) == (1, 2, 1, [1, 0])


STEPS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), max_size=4),  # the draft
        st.integers(0, 4),  # how much of it is kept
        st.integers(0, 2),  # the next token
        st.sampled_from(["go on", "go on", "go on", "ask again", "open again", "open again shorter"]),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(steps=STEPS, rule=st.sampled_from(RULES))
def test_any_history_gives_the_rows_of_a_fresh_session(
    steps: list[tuple[list[int], int, int, str]], rule: VerificationRule
) -> None:
    """100 drawn histories over three tokens, where drafts often agree by chance: nothing is left of what was undone."""
    model, session_spec = fake_model(), spec(rule)
    verifier = SoloVerifier(model)
    committed, new = PROMPT, tuple[int, ...]()
    session: TargetSession[FakeCache] = verifier.open(session_spec, committed)
    for number, (drafted, kept_length, next_token, event) in enumerate(steps):
        if event == "open again shorter":
            committed = committed[: max(len(PROMPT), len(committed) - 3)]
        if event.startswith("open again"):
            session, new = verifier.open(session_spec, committed, session), ()
        asked = drawn(len(committed), new, tuple(drafted), salt=number)
        for _ in range(2 if event == "ask again" else 1):
            assert verifier.judge(session, asked).rows == rows_from_scratch(session_spec, committed, asked)
        new = (*drafted[:kept_length], next_token)
        committed += new


def test_the_walk_over_the_rows_gives_the_target_alone() -> None:
    """Under `coupled`, with drafts of every kind of error, token by token what the target emits without any draft."""
    session_spec = spec(VerificationRule.COUPLED)
    expected = target_alone(LOGITS, session_spec, PROMPT, 60)
    verifier = SoloVerifier(fake_model())
    session = verifier.open(session_spec, PROMPT)
    emitted: list[int] = []
    new: tuple[int, ...] = ()
    origins = set()
    for round_number in range(100):
        draft_length = round_number % 5
        drafted = expected[len(emitted) : len(emitted) + draft_length]
        if round_number % 3 and drafted:
            drafted[round_number % len(drafted)] += 1
        drafted_ids = tuple(token_id % VOCAB_SIZE for token_id in drafted)
        base_length = len(PROMPT) + len(emitted)
        rows = verifier.judge(session, draft(base_length, new, drafted_ids)).rows
        verdict = walk(
            drafted_ids,
            rows,
            accept_uniform=lambda position: noise.uniform(session_spec.seed, position, Purpose.ACCEPT),
            base_length=base_length,
        )
        assert verdict.next_token is not None
        new = (*drafted_ids[: verdict.kept_length], verdict.next_token)
        emitted += new
        origins.add(verdict.next_origin)
        if len(emitted) > len(expected) - 5:
            break
    assert emitted == expected[: len(emitted)]
    assert origins == {Origin.PLAIN, Origin.BONUS, Origin.CORRECTION}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    shared=st.lists(st.integers(0, 1), max_size=6),
    first=st.lists(st.integers(0, 1), max_size=4),
    second=st.lists(st.integers(0, 1), max_size=4),
)
def test_common_prefix_ends_where_tokens_differ(shared: list[int], first: list[int], second: list[int]) -> None:
    """100 drawn pairs against comparing token by token."""
    one, other = shared + first, shared + second
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    assert common_prefix_length(one, other) == length
