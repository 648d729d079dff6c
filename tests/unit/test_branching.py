"""Drafting for other outcomes than the likeliest: what is opened, pushed, grafted, and given back.

The fake model's logits depend on every token in its cache, so a cache that holds one wrong token shows at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

from drafter_service.drafter import Drafter, Entry
from drafter_service.lines import Line, Run
from drafter_service.method import DraftView, DraftWork, Outcome, Progress
from drafter_service.methods.draft_model import DraftModelMethod, DraftState
from drafter_service.methods.ngram import NgramMethod
from drafter_service.session import Commit, Drafted, DraftSession
from orchestrator.fixed_planner import FixedPlanner
from orchestrator.loop import run_session
from paceline.engine.step_plan import StepReport
from paceline.errors import PacelineError
from paceline.generation import Schedule
from paceline.prefix import EMPTY_DIGEST, TokenPrefix, extend_digest
from paceline.sampling import DistributionUnusable, DraftedToken, TokenHistory, draw_draft_token
from paceline.sessions import Address, Close, Open, SessionTable
from paceline.types import SamplingParams, SessionSpec, SpeculationStats, VerificationRule
from tests.fakes import (
    CountingOutput,
    FakeCache,
    FakeModel,
    LocalDrafts,
    LocalTarget,
    Logits,
    hashed_logits,
    spec_of,
    target_alone,
)

VOCAB_SIZE = 12
PROMPT = (3, 1, 4, 1, 5)
LOGITS = hashed_logits(VOCAB_SIZE)
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


def spec(rule: VerificationRule, *, session_id: str = "a", seed: int = 7) -> SessionSpec:
    sampling = SamplingParams(temperature=0.0) if rule is VerificationRule.GREEDY else SAMPLING
    return spec_of(
        prompt_length=1, vocab_size=VOCAB_SIZE, rule=rule, sampling=sampling, session_id=session_id, seed=seed
    )


@cache
def drawn_alone(session_spec: SessionSpec, ids: tuple[int, ...]) -> DraftedToken:
    """The token that the session drafts behind these ids, from scratch."""
    token_id, distribution = draw_draft_token(
        torch.tensor(LOGITS(ids)),
        params=session_spec.sampling,
        rule=session_spec.effective_rule,
        history=TokenHistory(ids[:1], ids[1:]),
        drafted=(),
        seed=session_spec.seed,
        position=len(ids),
    )
    return DraftedToken(token_id, distribution)


Method = DraftModelMethod[FakeCache]
Tokens = tuple[int, ...]


@dataclass
class Bench:
    """A drafter of sessions that branch, on one fake model; every run of tokens is checked as it is pushed, every line and
    its cache after each step."""

    num_blocks: int = 256
    block_size: int = 4
    model: FakeModel = field(init=False)
    method: Method = field(init=False)
    reports: list[StepReport] = field(default_factory=list)
    pushed: list[Drafted] = field(default_factory=list)
    committed: dict[str, list[int]] = field(default_factory=dict)
    orders: dict[str, dict[str, Any]] = field(default_factory=dict)
    specs: dict[str, SessionSpec] = field(default_factory=dict)
    prefixes: dict[str, dict[int, Tokens]] = field(default_factory=dict)  # of lines that were seen, by digest

    def __post_init__(self) -> None:
        self.model = FakeModel(LOGITS, vocab_size=VOCAB_SIZE, num_blocks=self.num_blocks, block_size=self.block_size)
        self.method = DraftModelMethod(self.model, distribution_entries=64)
        self.sessions = SessionTable[Entry[DraftState[FakeCache]]](max_sessions=100, idle_ttl_s=1e9)
        self.drafter = Drafter(self.method, self.sessions, on_step=self.reports.append)

    def open(self, session_spec: SessionSpec, ids: Sequence[int] = PROMPT) -> None:
        name = session_spec.session_id
        self.specs[name], self.committed[name], self.prefixes[name] = session_spec, list(ids), {}
        self._take(name, self.drafter.accept(Open(Address(0, name, 1), session_spec, tuple(ids))))

    def commit(self, name: str, new: Sequence[int] = (), **order: Any) -> list[Drafted]:
        """Commit more tokens; what is ordered stays as it was where it is left out."""
        self.committed[name] += new
        defaults = {"draft_length": 3, "credit": 9, "branches": 3, "fan_out": 2, "acceptance": 0.7}
        self.orders[name] = {**defaults, **self.orders.get(name, {}), **order}
        command = Commit(
            address=Address(0, name, 1),
            base_length=len(self.committed[name]),
            committed_ids=tuple(new),
            **self.orders[name],
        )
        return self._take(name, self.drafter.accept(command))

    def step(self) -> list[Drafted]:
        for name in self.committed:
            self._note_prefixes(name)
        events = self.drafter.step()
        pushed = [drafted for event in events for drafted in self._take(event.address.session_id, [event])]
        self.model.memory.check()
        for name in self.committed:
            self._check_lines(name)
        return pushed

    def work(self, steps: int = 1000) -> list[Drafted]:
        pushed = []
        for _ in range(steps):
            if self.drafter.has_work():
                pushed += self.step()
        return pushed

    def close(self, name: str) -> None:
        del self.committed[name]
        self.drafter.accept(Close(Address(0, name, 1)))

    def session(self, name: str = "a") -> DraftSession[DraftState[FakeCache]]:
        held = self.sessions.find(name)
        assert held is not None
        return held.state.session

    def lines(self, name: str = "a") -> list[Tokens]:
        """The drafted tokens of each line, the likeliest line first."""
        return [tuple(line.drafted_ids) for line in self.session(name).tree.lines]

    def branch(self, number: int = 1, name: str = "a") -> tuple[Line[Any], Tokens]:
        """A branch, and its tokens up to its guess."""
        line = self.session(name).tree.lines[number]
        return line, tuple(line.drafted_ids[: line.start + 1])

    @property
    def fed(self) -> int:
        return sum(map(sum, self.model.batches))

    def _take(self, name: str, events: Sequence[Any]) -> list[Drafted]:
        pushed = []
        for event in events:
            assert isinstance(event.outcome, Drafted), event.outcome
            pushed.append(event.outcome)
            for run in runs_of(event.outcome):
                self._check_run(name, run)
        self.pushed += pushed
        return pushed

    def _check_run(self, name: str, run: Run) -> None:
        """Each token is what its prefix gives from scratch, the distribution it was drawn from included."""
        ids = self._prefix_of(name, run)
        for token in run.tokens:
            alone = drawn_alone(self.specs[name], ids)
            assert token.token_id == alone.token_id
            assert (token.distribution is None) == (alone.distribution is None)
            if token.distribution is not None and alone.distribution is not None:
                assert token.distribution.shares == alone.distribution.shares
            ids = (*ids, token.token_id)

    def _prefix_of(self, name: str, run: Run) -> Tokens:
        """The tokens with that digest: those of a line that is open now, or was. One that was opened and gave up its memory
        in the same step was never seen, but what it grew out of was."""
        self._note_prefixes(name)
        known = self.prefixes[name]
        if run.prefix_digest not in known:
            for ids in [ids for ids in known.values() if len(ids) == run.base_length - 1]:
                known |= {digest_of((*ids, token_id)): (*ids, token_id) for token_id in range(VOCAB_SIZE)}
        ids = known[run.prefix_digest]
        assert len(ids) == run.base_length
        return ids

    def _note_prefixes(self, name: str) -> None:
        committed = tuple(self.committed[name])
        committed_digest = digest_of(committed)
        self.prefixes[name][committed_digest] = committed
        for drafted in self.lines(name):
            digest = committed_digest
            for length, token_id in enumerate(drafted, start=1):
                digest = extend_digest(digest, token_id)
                self.prefixes[name][digest] = committed + drafted[:length]

    def _check_lines(self, name: str) -> None:
        session = self.session(name)
        assert len(session.tree.lines) <= session.branches + 1
        for line in session.tree.lines:
            ids = [*self.committed[name], *line.drafted_ids]
            cache = line.state.cache
            assert cache.length < len(ids)
            assert self.model.ids_of(cache) == ids[: cache.length]


def runs_of(drafted: Drafted) -> list[Run]:
    return [Run(drafted.base_length, drafted.prefix_digest, drafted.tokens), *drafted.branches]


def digest_of(ids: Sequence[int]) -> int:
    digest = EMPTY_DIGEST
    for token_id in ids:
        digest = extend_digest(digest, token_id)
    return digest


def opened(rule: VerificationRule = VerificationRule.COUPLED, **order: Any) -> Bench:
    """One session that has drafted all it may."""
    bench = Bench()
    bench.open(spec(rule))
    bench.commit("a", **order)
    bench.work()
    return bench


# ---- grafting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_a_branch_that_comes_true_is_drafted_on_without_recomputation(rule: VerificationRule) -> None:
    """Behind the commit only what was drafted last is fed: each token once in all, whichever line it is in."""
    bench = opened(rule)
    branch, outcome = bench.branch()
    ahead = len(branch.nodes) - len(outcome)
    assert ahead > 0
    bench.commit("a", outcome, branches=0, credit=ahead + 2)
    before, steps = bench.fed, bench.model.steps
    bench.work()
    assert bench.session().trunk is branch
    assert bench.model.batches[steps:] == [[1], [1]]
    assert bench.fed - before == 2
    assert len(bench.lines()[0]) == ahead + 2


def test_after_a_commit_that_fits_no_branch_one_line_is_rewound() -> None:
    """And the drafting begins afresh, without what was fed for the others."""
    bench = opened()
    wrong = next(token_id for token_id in range(VOCAB_SIZE) if all(drafted[0] != token_id for drafted in bench.lines()))
    bench.commit("a", (wrong,), draft_length=2, credit=2, branches=0)
    steps = bench.model.steps
    (drafted,) = bench.work()
    assert bench.model.lengths_before_step[-2:] == [len(PROMPT), len(PROMPT) + 1]
    assert bench.model.batches[steps:] == [[1], [1]]
    assert (drafted.base_length, len(drafted.tokens)) == (len(PROMPT) + 1, 2)


def test_branches_of_branches_are_drafted() -> None:
    """So a second miss, right behind the first, may have its tokens there too."""
    bench = opened(branches=15, fan_out=3, credit=12)
    twigs = [line for line in bench.session().tree.lines if line.guesses >= 2]
    assert twigs
    twig = twigs[0]
    pushed = {(run.base_length, run.prefix_digest) for drafted in bench.pushed for run in runs_of(drafted)}
    ids = [*PROMPT, *twig.drafted_ids[: twig.start + 1]]
    assert (len(ids), TokenPrefix(ids).digest()) in pushed
    first_guess = next(index for index, node in enumerate(twig.nodes) if node.is_guess)
    bench.commit("a", tuple(twig.drafted_ids[: first_guess + 1]))
    assert twig in bench.session().tree.lines
    bench.commit("a", tuple(twig.drafted_ids[: twig.start + 1]))
    assert bench.session().trunk is twig


def test_what_a_parent_had_not_pushed_yet_its_branch_does() -> None:
    """The parent is closed by the commit before the tokens of either were pushed."""
    bench = Bench()
    bench.open(spec(VerificationRule.COUPLED))
    bench.commit("a", draft_length=9, credit=9, branches=3, fan_out=2)
    bench.work(3)
    assert bench.pushed == []
    branch, outcome = bench.branch()
    ahead = branch.drafted_ids[len(outcome) :]
    bench.commit("a", outcome, draft_length=len(ahead))
    pushed = [run for drafted in bench.pushed for run in runs_of(drafted) if run.tokens]
    assert [token.token_id for token in pushed[0].tokens] == ahead
    assert pushed[0].base_length == len(PROMPT) + len(outcome)


# ---- how many lines, and for whom -----------------------------------------------------------------------------------


@pytest.mark.parametrize("branches", [1, 3, 7])
@pytest.mark.parametrize("fan_out", [1, 8])
def test_there_are_never_more_lines_than_ordered(branches: int, fan_out: int) -> None:
    """And as many as there are likely guesses for; checked after each step."""
    bench = opened(branches=branches, fan_out=fan_out, credit=16)
    assert len(bench.lines()) == branches + 1
    assert sum(report.tokens for report in bench.reports) == bench.fed


@pytest.mark.parametrize("ordered", ["branches", "fan_out"])
def test_without_branches_all_is_as_it_was(ordered: str) -> None:
    """One line, whole drafts, and no guesses that would cost time."""
    order: dict[str, Any] = {ordered: 0}
    bench = opened(draft_length=3, credit=7, **order)
    assert len(bench.lines()) == 1
    assert [(drafted.base_length, len(drafted.tokens)) for drafted in bench.pushed] == [(5, 3), (8, 4)]
    assert all(not token.guess_ids for drafted in bench.pushed for token in drafted.tokens)


def test_fewer_branches_ordered_close_the_least_likely() -> None:
    """At once, with their memory."""
    bench = opened(branches=7, fan_out=3)
    kept = sorted(bench.session().tree.branches, key=lambda line: -line.entry_likelihood)[:2]
    free_tokens = bench.model.memory.free_tokens
    bench.commit("a", branches=2)
    assert set(bench.session().tree.branches) == set(kept)
    bench.commit("a", branches=0)
    assert len(bench.lines()) == 1
    assert bench.model.memory.free_tokens > free_tokens


def test_a_method_that_cannot_branch_keeps_one_line() -> None:
    """Whatever is ordered."""
    method: Any = NgramMethod(prompt_lookup_min=1, prompt_lookup_max=3)
    drafter = Drafter(method, SessionTable[Entry[Any]](max_sessions=1, idle_ttl_s=1e9))
    address = Address(0, "a", 1)
    drafter.accept(Open(address, spec(VerificationRule.COUPLED), (7, 8, 9, 7, 8)))
    order = Commit(
        address=address,
        base_length=5,
        committed_ids=(),
        draft_length=2,
        credit=4,
        branches=7,
        fan_out=3,
        acceptance=0.5,
    )
    drafter.accept(order)
    (event,) = drafter.step()
    assert isinstance(event.outcome, Drafted)
    assert [token.token_id for token in event.outcome.tokens] == [9, 7, 8, 9]
    assert not drafter.has_work()


def test_the_likeliest_line_of_every_session_comes_before_branches() -> None:
    """With as many sessions as a step has lines, nothing is left for branches; with few, they fill it up."""
    for count, lines in ((40, 40), (4, 32)):
        bench = Bench()
        for number in range(count):
            bench.open(spec(VerificationRule.COUPLED, session_id=str(number), seed=number))
            bench.commit(str(number), draft_length=16, credit=16, branches=31, fan_out=8)
        bench.work(12)
        assert max(len(batch) for batch in bench.model.batches) == lines
        trunks = [len(bench.lines(str(number))[0]) for number in range(count)]
        assert set(trunks) == {12}


def test_branches_wait_for_no_more_credit_than_one_token_behind_the_guess() -> None:
    """Sequential: guesses at the last position have no room behind them, so no line is opened there."""
    bench = opened(draft_length=3, credit=3, branches=7, fan_out=3)
    assert all(line.start + 1 < 3 for line in bench.session().tree.branches)
    assert all(len(drafted) <= 3 for drafted in bench.lines())


def test_what_is_committed_teaches_how_sure_the_method_may_be() -> None:
    """A drafter that is right with every token is trusted more with each; under `rejection` nothing is learned, for that
    would be from what was drawn."""
    for rule in RULES:
        bench = opened(rule)
        exponents = []
        for _ in range(6):
            exponents.append(bench.drafter._sharpness[rule].exponent)
            bench.commit("a", bench.lines()[0][:6])
            bench.work()
        is_static = rule is VerificationRule.REJECTION
        assert exponents == sorted(exponents)
        assert exponents[-1] == 1.0 if is_static else exponents[-1] > exponents[0] == 1.0


# ---- what is pushed when --------------------------------------------------------------------------------------------


def test_a_draft_that_is_waited_for_is_pushed_token_by_token() -> None:
    """With credit beyond it and branches: it can be verified as soon as that is worthwhile."""
    bench = Bench()
    bench.open(spec(VerificationRule.COUPLED))
    bench.commit("a", draft_length=3, credit=9)
    assert [[len(drafted.tokens) for drafted in bench.step()] for _ in range(3)] == [[1], [1], [1]]
    later = bench.work()
    assert all(sum(len(run.tokens) for run in runs_of(drafted)) >= 3 for drafted in later[:-1])
    assert sum(len(drafted.tokens) for drafted in bench.pushed) == 9
    drafted_tokens = sum(
        len(line.nodes) - line.start - (line.start > 0 or line.guesses > 0) for line in lines_of(bench)
    )
    pushed_tokens = sum(len(run.tokens) for drafted in bench.pushed for run in runs_of(drafted))
    assert pushed_tokens >= drafted_tokens
    assert all(line.sent == len(line.nodes) for line in lines_of(bench))


def lines_of(bench: Bench) -> list[Line[DraftState[FakeCache]]]:
    return bench.session().tree.lines


def test_sequential_drafts_are_pushed_whole() -> None:
    """Branches go beside them, never a part of the draft before its length is reached."""
    bench = opened(draft_length=4, credit=4, branches=7, fan_out=3)
    drafts = [drafted for drafted in bench.pushed if drafted.tokens]
    assert [(drafted.base_length, len(drafted.tokens)) for drafted in drafts] == [(5, 4)]
    assert any(drafted.branches for drafted in bench.pushed)


def test_what_is_pushed_without_a_draft_is_not_taken_for_having_none() -> None:
    """A proposal without draft and without branches says that there is nothing to offer; none of these does."""
    bench = opened(draft_length=2, credit=6, branches=7, fan_out=3)
    assert any(not drafted.tokens for drafted in bench.pushed)
    assert all(drafted.tokens or drafted.branches for drafted in bench.pushed)


class EndingMethod:
    """Drafts two tokens behind the committed ones and then has no more; behind guesses it goes on."""

    max_context = 1000
    memory = None
    preemptions = 0

    def open(self, session: DraftView) -> None: ...

    def fork(self, state: None, session: DraftView, length: int) -> None: ...

    def draft(self, batch: Sequence[DraftWork[None]]) -> Sequence[Outcome]:
        return [Progress(1, drafted=self._tokens(work.session)) for work in batch]

    def rewind(self, state: None, length: int) -> None: ...

    def can_step(self) -> bool:
        return True

    def pending_tokens(self, state: None, session: DraftView) -> int:
        return 0

    def close(self, state: None) -> None: ...

    @staticmethod
    def _tokens(session: DraftView) -> list[DraftedToken]:
        is_trunk = 9 not in session.drafted_ids
        token = DraftedToken(1, None, (0.5, 0.4), (9,)) if is_trunk else DraftedToken(1, None, (0.5,))
        return [] if is_trunk and len(session.drafted_ids) == 2 else [token]


def test_that_there_is_nothing_more_to_offer_is_said_once_and_by_itself() -> None:
    """With branches beside it, it would say nothing."""
    drafter = Drafter(EndingMethod(), SessionTable[Entry[None]](max_sessions=1, idle_ttl_s=1e9))
    address = Address(0, "a", 1)
    drafter.accept(Open(address, spec(VerificationRule.COUPLED), PROMPT))
    order: dict[str, Any] = {"draft_length": 3, "credit": 6, "branches": 3, "fan_out": 1}
    drafter.accept(Commit(address=address, base_length=len(PROMPT), committed_ids=(), **order))
    pushed = list[Drafted]()
    while drafter.has_work():
        pushed += [event.outcome for event in drafter.step() if isinstance(event.outcome, Drafted)]
    ends = [drafted for drafted in pushed if not drafted.tokens and not drafted.branches]
    assert [(end.base_length, end.prefix_digest) for end in ends] == [(7, TokenPrefix((*PROMPT, 1, 1)).digest())]
    branches = [run for drafted in pushed for run in drafted.branches]
    assert {run.base_length for run in branches} >= {6, 7}


def test_steps_are_counted_with_the_time_they_took() -> None:
    """Each step that the session took part in is in one proposal."""
    bench = opened()
    assert sum(drafted.draft_steps for drafted in bench.pushed) == len(bench.reports)
    assert sum(drafted.draft_time_s for drafted in bench.pushed) == pytest.approx(
        sum(report.seconds for report in bench.reports)
    )


Sent = list[tuple[int, DraftedToken]]
"""Drafted tokens, each with the digest of all tokens before it."""


def sent_by(pushed: Sequence[Drafted]) -> Sent:
    sent: Sent = []
    for run in [run for drafted in pushed for run in runs_of(drafted)]:
        digest = run.prefix_digest
        for token in run.tokens:
            sent.append((digest, token))
            digest = extend_digest(digest, token.token_id)
    return sent


def sent_of(bench: Bench) -> Sent:
    """What all lines together have drafted behind the committed tokens, guesses left out."""
    drafted: Sent = []
    for line in lines_of(bench):
        digests = [digest_of(bench.committed["a"]), *(node.digest for node in line.nodes)]
        own = zip(digests[line.start :], line.nodes[line.start :], strict=False)
        drafted += [(digest, node.drafted) for digest, node in own if not node.is_guess]
    return drafted


def by_digest(sent: Sent) -> Sent:
    return sorted(sent, key=lambda each: each[0])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("order", [{"draft_length": 3, "credit": 9}, {"draft_length": 4, "credit": 4}])
@pytest.mark.parametrize("outcome", ["nothing new", "a part of the draft", "a branch"])
def test_what_was_sent_is_sent_again_when_asked_for(
    rule: VerificationRule, order: dict[str, int], outcome: str
) -> None:
    """The same tokens behind the same prefixes, of the draft and of all branches that live on, each once."""
    bench = opened(rule, branches=5, fan_out=3, **order)
    new = {"nothing new": (), "a part of the draft": bench.lines()[0][:1], "a branch": bench.branch()[1]}[outcome]
    first = sent_by(bench.pushed)
    again = sent_by([*bench.commit("a", new, credit=0, is_resend=True), *bench.work()])
    assert sent_of(bench), "there is something to be sent again"
    assert by_digest(again) == by_digest(sent_of(bench))
    assert all(any(digest == other and token is same for other, same in first) for digest, token in again)


@pytest.mark.parametrize("rule", RULES)
def test_nothing_is_sent_twice_unless_asked_for(rule: VerificationRule) -> None:
    """Not behind a commit that asked for all, either: that counts once."""
    bench = opened(rule, branches=5, fan_out=3)
    bench.commit("a", bench.branch()[1], is_resend=True)
    bench.work()
    asked = len(bench.pushed)
    for _ in range(3):
        bench.commit("a", bench.lines()[0][:2], is_resend=False)
        bench.work()
    digests = [digest for digest, _ in sent_by(bench.pushed[asked:])]
    assert digests
    assert len(digests) == len(set(digests))
    assert not set(digests) & {digest for digest, _ in sent_by(bench.pushed[:asked])}


@pytest.mark.parametrize("rule", RULES)
def test_with_branches_and_credit_beyond_one_draft_nothing_waits_to_be_sent(rule: VerificationRule) -> None:
    """Behind each step: which of it the verdict will ask for is not known."""
    bench = Bench()
    bench.open(spec(rule))
    for _ in range(3):
        bench.commit("a", bench.lines()[0][:2], draft_length=4, credit=9, branches=5, fan_out=3)
        while bench.drafter.has_work():
            bench.step()
            assert all(line.sent == len(line.nodes) for line in lines_of(bench))
    assert len(bench.lines()) == 6


# ---- rejection: shapes, never values (design 3.3) -------------------------------------------------------------------


def shapes_of(seed: int) -> tuple[list[Any], Bench]:
    """Where each run stands and how many tokens it has, step by step, through rounds that end in a given way."""
    bench, shapes = Bench(), list[Any]()
    bench.open(spec(VerificationRule.REJECTION, seed=seed))
    for kept_length, rank in ((0, 0), (2, 1), (3, 0), (1, None), (4, 0), (0, 1), (2, None)):
        shapes.append(shape_of(bench.commit("a", outcome_of(bench, kept_length, rank), branches=5, fan_out=3)))
        for _ in range(9):
            shapes.append(shape_of(bench.step()) if bench.drafter.has_work() else None)
    return shapes, bench


def outcome_of(bench: Bench, kept_length: int, rank: int | None) -> Tokens:
    """So much of the draft, then a guess of that rank at the next position, or a token that nobody guessed."""
    nodes = bench.session().trunk.nodes
    if len(nodes) <= kept_length:
        return ()
    kept = [node.drafted.token_id for node in nodes[:kept_length]]
    drafted = nodes[kept_length].drafted
    named = drafted.guess_ids
    other = next(token_id for token_id in range(VOCAB_SIZE) if token_id not in (*named, drafted.token_id))
    return (*kept, other if rank is None else named[rank])


def shape_of(pushed: Sequence[Drafted]) -> list[tuple[int, int]]:
    return [(run.base_length, len(run.tokens)) for drafted in pushed for run in runs_of(drafted)]


def test_under_rejection_what_is_pushed_when_does_not_hang_on_the_tokens_drawn() -> None:
    """Four seeds draw other tokens from other rows, and all push runs of the same shapes in the same steps."""
    shapes, benches = zip(*(shapes_of(seed) for seed in range(4)), strict=True)
    assert all(each == shapes[0] for each in shapes)
    assert sum(len(step or ()) for step in shapes[0]) > 50
    assert len({tuple(bench.committed["a"]) for bench in benches}) == 4


# ---- any history, many sessions, little memory ----------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_after_any_history_every_token_is_what_its_prefix_gives_from_scratch(rule: VerificationRule) -> None:
    """4 seeded histories a rule of three sessions that commit drafts, guesses and other tokens, with more and fewer
    branches; half of them in a memory that not all lines fit into. Caches hold exactly their lines' tokens, and all
    memory is free in the end."""
    preemptions = hits = 0
    for seed in range(4):
        randomness = random.Random(seed)
        bench = Bench(num_blocks=24 if seed % 2 else 256)
        for name in "abc":
            bench.open(spec(rule, session_id=name, seed=ord(name)), [randomness.randrange(12) for _ in range(9)])
            bench.commit(name)
        for _ in range(25):
            bench.work(randomness.randint(0, 5))
            name = randomness.choice("abc")
            line = randomness.choice(bench.session(name).tree.lines)
            new = list(line.drafted_ids[: randomness.randint(0, len(line.drafted_ids))])
            hits += line.start < len(new) and line is not bench.session(name).trunk
            new += [randomness.randrange(VOCAB_SIZE)] * (randomness.random() < 0.5)
            if len(bench.committed[name]) + len(new) > 60:
                new = []
            draft_length = randomness.randint(1, 4)
            order = {"draft_length": draft_length, "credit": draft_length * randomness.randint(0, 3)}
            bench.commit(name, new, **order, branches=randomness.choice([0, 1, 3, 9]), fan_out=randomness.randint(1, 4))
        preemptions += bench.drafter.preemptions
        for name in "abc":
            bench.commit(name, draft_length=2, credit=2, branches=3 * (seed % 2), fan_out=3)
            bench.work()
            assert len(bench.lines(name)[0]) >= 2
            bench.close(name)
        assert bench.model.memory.free_tokens == bench.model.memory.capacity_tokens
    assert hits > 5, "the histories are what they are meant to be"
    assert preemptions > 5


def test_branches_give_up_their_memory_before_any_session_does() -> None:
    """They are closed and not computed again; the sessions draft as if there had been none."""
    bench = Bench(num_blocks=15, block_size=4)
    bench.open(spec(VerificationRule.COUPLED), [token_id % VOCAB_SIZE for token_id in range(16)])
    bench.commit("a", branches=9, fan_out=4, credit=6)
    bench.work()
    assert len(bench.lines()) > 3
    bench.open(spec(VerificationRule.COUPLED, session_id="b"), [token_id % VOCAB_SIZE for token_id in range(5, 25)])
    bench.commit("b", draft_length=4, credit=4, branches=0)
    bench.work()
    assert bench.drafter.preemptions > 0
    assert len(bench.lines("b")[0]) == 4
    assert bench.session("a").trunk.state.cache.length >= 16
    assert all(line.state.cache.length > 16 for line in bench.session("a").tree.lines)


def test_a_fault_behind_a_guess_closes_that_branch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session goes on, and its peer hears nothing of it."""
    bench = Bench()
    draft = bench.method.draft

    def failing(batch: Sequence[DraftWork[DraftState[FakeCache]]]) -> Sequence[Outcome]:
        error: PacelineError = DistributionUnusable("There is no token to draw.")
        outcomes = draft(batch)
        guessed = [isinstance(work.session, Line) and work.session.guesses > 0 for work in batch]
        return [error if is_guessed else outcome for is_guessed, outcome in zip(guessed, outcomes, strict=True)]

    monkeypatch.setattr(bench.method, "draft", failing)
    bench.open(spec(VerificationRule.COUPLED))
    bench.commit("a")
    bench.work()
    assert bench.lines() == [bench.lines()[0]]
    assert len(bench.lines()[0]) == 9
    bench.close("a")
    assert bench.model.memory.free_tokens == bench.model.memory.capacity_tokens


# ---- through the loop -----------------------------------------------------------------------------------------------

WIDE = 40
TEXT_LENGTH = 70


def table(*, seed: int, scale: float) -> torch.Tensor:
    return scale * torch.randn(WIDE, WIDE, WIDE, generator=torch.Generator().manual_seed(seed))


def by_last_tokens(rows: torch.Tensor) -> Logits:
    """The next token depends on the last two, so that the likeliest text does not soon repeat itself."""
    return lambda ids: rows[ids[-2], ids[-1]].tolist()


WIDE_TARGET = by_last_tokens(table(seed=1, scale=2.5))
WIDE_DRAFTER = by_last_tokens(table(seed=1, scale=2.5) + table(seed=2, scale=1.2))


async def hit_rate(rule: VerificationRule, *, branches: int, fan_out: int) -> tuple[float, list[int]]:
    """How often, given a rejection, drafted tokens were there for what came instead; and the text."""
    session_spec = spec_of(prompt_length=3, vocab_size=WIDE, rule=rule)
    drafts = LocalDrafts(Method(FakeModel(WIDE_DRAFTER, vocab_size=WIDE), distribution_entries=64), session_spec)
    target = LocalTarget(FakeModel(WIDE_TARGET, vocab_size=WIDE), session_spec, meanwhile=lambda: drafts.work(7))
    stats, ids = SpeculationStats(), list[int]()
    planner = FixedPlanner(
        schedule=Schedule.PIPELINED, draft_length=4, rule=rule, branches=branches, fan_out=fan_out, acceptance=0.7
    )
    async for result in run_session(
        session_spec, (1, 2, 3), planner, target=target, drafts=drafts, output=CountingOutput(TEXT_LENGTH), stats=stats
    ):
        ids += result.delivery.token_ids
    assert (drafts.failures, drafts.stalls) == ([], 0)
    assert stats.num_rejections > 10
    return stats.branch_hits / stats.num_rejections, ids


@pytest.mark.parametrize("rule", [VerificationRule.COUPLED, VerificationRule.REJECTION])
async def test_more_guesses_are_right_more_often(rule: VerificationRule) -> None:
    """Given a rejection, with a noisy copy of the target and fan-out 1, 3 and 8; under `coupled` the text is the target's
    own throughout. One seed: the run is the same every time."""
    rates, texts = [], []
    for branches, fan_out in ((0, 0), (15, 1), (15, 3), (31, 8)):
        rate, ids = await hit_rate(rule, branches=branches, fan_out=fan_out)
        rates.append(rate)
        texts.append(ids)
    assert rates[0] == 0.0
    assert rates[0] < rates[1] < rates[2] < rates[3]
    if rule is VerificationRule.COUPLED:
        assert rates[2] > 0.6
        session_spec = spec_of(prompt_length=3, vocab_size=WIDE, rule=rule)
        assert texts == [target_alone(WIDE_TARGET, session_spec, (1, 2, 3), TEXT_LENGTH)] * 4


# ---- room at the drafter --------------------------------------------------------------------------------------------


def crowded() -> Bench:
    """A memory of 256 tokens that counts at admission, as at a drafter."""
    bench = Bench(num_blocks=64, block_size=4)
    bench.sessions = SessionTable(
        max_sessions=100,
        idle_ttl_s=1e9,
        pending_tokens_of=lambda entry: bench.method.pending_tokens(entry.state, entry.view),
        held_tokens=lambda: bench.method.memory.held_tokens,
        kv_capacity_tokens=bench.method.memory.capacity_tokens,
    )
    bench.drafter = Drafter(bench.method, bench.sessions)
    return bench


def join(bench: Bench, name: str) -> None:
    """A session of 16 tokens with as many branches as come up, which drafts until it has no credit left."""
    randomness = random.Random(name)
    ids = [randomness.randrange(VOCAB_SIZE) for _ in range(16)]
    bench.open(spec(VerificationRule.COUPLED, session_id=name, seed=ord(name)), ids)
    bench.commit(name, branches=15, fan_out=4, credit=9)
    bench.work()


def test_branches_take_no_room_from_new_sessions() -> None:
    """They fill all memory, and eight sessions find room that the branches give up: each has its whole draft. As many
    tokens are used as the likeliest lines hold, in whole blocks."""
    bench = crowded()
    least_free = bench.model.memory.free_tokens
    for joined, name in enumerate("abcdefgh", start=1):
        join(bench, name)
        least_free = min(least_free, bench.model.memory.free_tokens)
        assert len(bench.lines(name)[0]) == 9
        assert bench.sessions.kv_used_tokens <= joined * (16 + 12)
    assert least_free < 16 + 9, "without the branches' room the last session would not have fitted"
    assert bench.drafter.preemptions > 0


def test_a_grafted_branch_takes_room_like_any_session() -> None:
    """What the branch holds counts from the commit that makes it the session's own line, until the session closes."""
    bench = crowded()
    join(bench, "a")
    branch, outcome = max((bench.branch(number) for number in range(1, 16)), key=lambda pair: len(pair[1]))
    cache = branch.state.cache
    assert bench.sessions.kv_used_tokens < bench.model.memory.capacity_tokens - bench.model.memory.free_tokens
    bench.commit("a", outcome, credit=0, branches=0)
    assert bench.session().trunk is branch
    in_whole_blocks = -(-cache.length // 4) * 4
    assert bench.model.memory.held_tokens == in_whole_blocks
    assert bench.model.memory.free_tokens == bench.model.memory.capacity_tokens - in_whole_blocks
    bench.close("a")
    assert (bench.sessions.kv_used_tokens, bench.model.memory.free_tokens) == (0, 256)
