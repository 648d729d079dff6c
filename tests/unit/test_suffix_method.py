"""The suffix drafter: what its sessions are told, and what they leave to those of the same tenant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from drafter_service.method import DraftWork, Progress
from drafter_service.methods.suffix import SuffixMethod, build
from drafter_service.registry import build_method
from drafter_service.suffixes import SessionSuffixes
from orchestrator.fixed_planner import FixedPlanner
from orchestrator.loop import run_session
from paceline.generation import Schedule
from paceline.lookup.suffix import SuffixCache
from paceline.sessions import PeerGone
from paceline.settings import DrafterSettings
from paceline.types import SessionSpec, SpeculationStats, VerificationRule
from tests.fakes import CountingOutput, FakeModel, LocalDrafts, LocalTarget, View, hashed_logits, spec_of, target_alone

PROMPT = (9, 8)
ANSWER = (1, 2, 3, 4, 5, 6)
VOCAB_SIZE = 12


def spec(*, tenant: str = "", **changes: Any) -> SessionSpec:
    fields = {"prompt_length": len(PROMPT), "vocab_size": VOCAB_SIZE, **changes}
    return replace(spec_of(**fields), tenant=tenant)


def method_of(**options: Any) -> SuffixMethod:
    return SuffixMethod(SuffixCache(**options))


def settings(**changes: Any) -> DrafterSettings:
    return DrafterSettings(**{"method": "suffix", **changes})


class Drafting:
    """One session of the method, told and asked as a drafter does."""

    def __init__(self, method: SuffixMethod, ids: Sequence[int] = PROMPT, **changes: Any) -> None:
        self.method = method
        self.view = View(spec(**changes), ids)
        self.state: SessionSuffixes = method.open(self.view)

    def commit(self, ids: Sequence[int]) -> None:
        """Forget what is drafted, then commit more tokens."""
        self.view.drafted_ids.clear()
        self.view.committed_ids += ids

    def draft(self, max_tokens: int = 4) -> tuple[int, ...]:
        """The next tokens, which are then behind the others."""
        (outcome,) = self.method.draft([DraftWork(self.state, self.view, max_tokens)])
        assert isinstance(outcome, Progress)
        assert outcome.drafted is not None
        assert all(token.distribution is None for token in outcome.drafted), "judged as one-hot"
        drafted = tuple(token.token_id for token in outcome.drafted)
        self.view.drafted_ids += drafted
        return drafted

    def close(self) -> None:
        self.method.close(self.state)


def serve(method: SuffixMethod, answer: Sequence[int] = ANSWER, **changes: Any) -> None:
    """A session whose drafter was never asked for anything."""
    session = Drafting(method, **changes)
    session.commit(answer)
    session.close()


def test_a_draft_is_as_long_as_the_match_that_found_it() -> None:
    """However often it is asked, and whatever is drafted already, nothing is added that is not known more of."""
    session = Drafting(method_of(), (*ANSWER, 1, 2))
    assert session.draft(1) == (3,)
    assert session.draft(8) == (4,)
    assert session.draft(8) == ()
    session.commit((3, 4, 5))
    assert session.draft(3) + session.draft(8) == (6, 1, 2, 3, 4)


def test_tokens_that_no_longer_follow_are_not_continued() -> None:
    """What was drafted when less was known stays as it is; the draft behind the next commit is a new one."""
    session = Drafting(method_of(), (1, 2, 7, 1, 2, 3, 1))
    session.view.drafted_ids += (2, 7)
    assert session.draft() == ()
    session.commit((2,))
    assert session.draft() == (3, 1)


def test_a_session_that_only_catches_up_drafts_nothing() -> None:
    """Room for no token is a commit to be followed."""
    session = Drafting(method_of(), (1, 2, 1))
    assert session.draft(0) == ()
    assert len(session.state) == 3


def test_an_answer_serves_its_tenant_to_the_last_token_and_nobody_else() -> None:
    """Tokens committed since the last draft are in; prompts, other tenants and other vocabularies are not."""
    method = method_of()
    serve(method, tenant="one")
    cases: list[tuple[tuple[int, ...], dict[str, Any], tuple[int, ...]]] = [
        ((*PROMPT, 4, 5), {"tenant": "one"}, (6,)),
        ((*PROMPT, 4, 5), {"tenant": "two"}, ()),
        ((*PROMPT, 4, 5), {}, ()),
        ((*PROMPT, 4, 5), {"tenant": "one", "vocab_size": VOCAB_SIZE + 1}, ()),
        ((4, 9), {"tenant": "one", "prompt_length": 1}, ()),
    ]
    for ids, changes, expected in cases:
        assert Drafting(method, ids, **changes).draft() == expected


def test_what_a_session_is_opened_with_is_not_learnt_again() -> None:
    """An answer that moves on to this drafter, or is opened here again, counts once."""
    cache = SuffixCache()
    method = SuffixMethod(cache)
    session = Drafting(method)
    session.commit(ANSWER[:3])
    session.close()
    again = Drafting(method, PROMPT + ANSWER[:3])
    again.commit(ANSWER[3:])
    again.close()
    assert (cache.cached_requests, cache.cached_tokens) == (2, len(ANSWER))
    assert Drafting(method, (*PROMPT, 2)).draft() == (3,)
    assert Drafting(method, (*PROMPT, 5)).draft() == (6,)


def test_sharing_can_be_turned_off() -> None:
    """Then a session knows its own tokens alone."""
    method = method_of(max_cached_requests=0)
    serve(method)
    assert Drafting(method, (*PROMPT, 4, 5)).draft() == ()


def test_settings_reach_the_trees() -> None:
    """Each changes what is drafted; the method names itself and needs no model."""
    built = build_method(settings())
    assert (built.info.method, built.info.has_model, built.allocation) == ("suffix", False, None)
    cases: list[tuple[dict[str, Any], tuple[int, ...]]] = [
        ({}, (4, 5, 6)),
        ({"suffix_decoding_max_tree_depth": 5}, (4, 5)),
        ({"suffix_decoding_max_spec_factor": 0.5}, (4,)),
        ({"suffix_decoding_min_token_prob": 0.6}, ()),
        ({"suffix_decoding_max_cached_requests": 0}, ()),
    ]
    for changes, expected in cases:
        method = build(settings(**changes)).method
        assert isinstance(method, SuffixMethod)
        serve(method)
        assert Drafting(method, (*PROMPT, 1, 2, 3)).draft(8) == expected, changes


@pytest.mark.parametrize("rule", [VerificationRule.GREEDY, VerificationRule.COUPLED])
@pytest.mark.parametrize("schedule", [Schedule.SEQUENTIAL, Schedule.PIPELINED])
async def test_text_is_the_targets_own_whatever_was_learnt(rule: VerificationRule, schedule: Schedule) -> None:
    """Three answers in a row, the later ones drafted from the earlier: exactly what the target alone says."""
    method, logits = method_of(), hashed_logits(4)
    for seed in range(3):
        session = spec_of(prompt_length=1, vocab_size=4, rule=rule, seed=seed)
        drafts, stats, ids = LocalDrafts(method, session), SpeculationStats(), list[int]()
        async for result in run_session(
            session,
            (1,),
            FixedPlanner(schedule=schedule, draft_length=4, rule=session.effective_rule),
            target=LocalTarget(FakeModel(logits, vocab_size=4), session),
            drafts=drafts,
            output=CountingOutput(30),
            stats=stats,
        ):
            ids += result.delivery.token_ids
        assert ids == target_alone(logits, session, (1,), 30)
        assert stats.num_draft_tokens > 0
        assert (drafts.stalls, drafts.failures) == (0, [])
        drafts.drafter.accept(PeerGone(0))
