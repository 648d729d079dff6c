"""The tree of lines: what is opened, shared, committed and closed, against a plain list of token sequences."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from drafter_service.lines import Bud, Line, LineTree, Run
from drafter_service.method import DraftView
from paceline.prefix import TokenPrefix
from paceline.sampling import DraftedToken
from tests.fakes import spec_of

PROMPT = (3, 1, 4)
SPEC = spec_of(prompt_length=3, vocab_size=1000)

State = list[int]
"""All tokens that a state was made for: those before the fork, as the method sees them."""


def state_of(session: DraftView) -> State:
    return [*session.committed_ids, *session.drafted_ids]


def forked(state: State, session: DraftView, length: int) -> State:
    ids = state_of(session)
    assert len(ids) == length + 1, "all but the guess are shared"
    return ids


def new_tree() -> LineTree[State]:
    return LineTree(SPEC, PROMPT, state_of)


def grow(tree: LineTree[State], line: Line[State], token_id: int, guesses: Sequence[int] = ()) -> None:
    """One more token, with guesses that are half as likely from one to the next."""
    shares = [0.5 ** (rank + 1) for rank in range(len(guesses) + 1)]
    tree.extend(line, DraftedToken(token_id, None, tuple(shares), tuple(guesses)), shares)


def bud_of(tree: LineTree[State], token_id: int) -> Bud[State]:
    return next(bud for bud in tree.buds if token_of(bud) == token_id)


def token_of(bud: Bud[State]) -> int:
    return bud.line.nodes[bud.depth].drafted.guess_ids[bud.place - 1]


def branch_of(tree: LineTree[State], token_id: int) -> Line[State]:
    return tree.fork(bud_of(tree, token_id), forked)


def fork_like_tree() -> tuple[LineTree[State], Line[State], Line[State]]:
    """The trunk 10 11 12, a branch 10 21 22 out of it, and a branch 10 21 42 43 out of that."""
    tree = new_tree()
    for token_id in (10, 11, 12):
        grow(tree, tree.trunk, token_id, (token_id + 10, token_id + 20))
    branch = branch_of(tree, 21)
    grow(tree, branch, 22, (42,))
    twig = branch_of(tree, 42)
    grow(tree, twig, 43)
    return tree, branch, twig


def test_a_branch_shares_the_tokens_before_its_guess() -> None:
    """And the state of exactly these; what it drafts is its own."""
    tree, branch, twig = fork_like_tree()
    assert [line.drafted_ids for line in tree.lines] == [[10, 11, 12], [10, 21, 22], [10, 21, 42, 43]]
    assert (branch.state, twig.state) == ([*PROMPT, 10, 21], [*PROMPT, 10, 21, 42])
    assert branch.nodes[0] is tree.trunk.nodes[0]
    assert twig.nodes[1] is branch.nodes[1]


def test_guesses_are_ranked_by_where_the_answer_goes() -> None:
    """The likelihood of a guess is that of all tokens before it and its own; the least likely are left out."""
    tree = new_tree()
    for token_id in (10, 11, 12):
        grow(tree, tree.trunk, token_id, (token_id + 10, token_id + 20, token_id + 30))
    assert [(token_of(bud), bud.likelihood) for bud in tree.buds] == [
        (20, 0.25),
        (30, 0.125),
        (21, 0.125),
        (40, 0.0625),
        (31, 0.0625),
        (22, 0.0625),
        (41, 0.03125),
        (32, 0.03125),
        (42, 0.015625),
    ]
    grow(tree, tree.trunk, 13, (23, 33, 43))
    assert {token_of(bud) for bud in tree.buds} & {23, 33, 43} == {23, 33}


def test_a_branch_that_comes_true_lives_on_as_it_is() -> None:
    """Its state too, and whatever grows out of it; the others are closed, and only they."""
    tree, branch, twig = fork_like_tree()
    trunk_state = tree.trunk.state
    committed = tree.commit([10, 21])
    assert (committed.closed, committed.rewound_to) == ([trunk_state], None)
    assert tree.lines == [branch, twig]
    assert [line.drafted_ids for line in tree.lines] == [[22], [42, 43]]
    assert branch.committed_ids == [*PROMPT, 10, 21] == twig.committed_ids
    assert (branch.likelihood, twig.likelihood) == (0.5, 0.25 * 0.5)
    assert tree.buds == []


def test_what_grows_out_of_a_branch_becomes_the_trunk_in_its_place() -> None:
    """When the tokens of both are committed up to where they part."""
    tree, branch, twig = fork_like_tree()
    trunk_state = tree.trunk.state
    committed = tree.commit([10, 21, 42, 43])
    assert list(committed.closed) == [trunk_state, branch.state]
    assert (tree.lines, twig.drafted_ids) == ([twig], [])


def test_without_a_line_that_fits_the_one_that_agrees_longest_is_rewound() -> None:
    """To the last token that is right; all others are closed."""
    tree, branch, twig = fork_like_tree()
    states = [tree.trunk.state, twig.state]
    committed = tree.commit([10, 21, 22, 99])
    assert (list(committed.closed), committed.rewound_to) == (states, None), "the branch has no further token"
    assert (tree.lines, branch.drafted_ids) == ([branch], [])
    tree, branch, twig = fork_like_tree()
    committed = tree.commit([10, 99])
    assert len(committed.closed) == 2
    assert committed.rewound_to == len(PROMPT) + 1
    assert tree.trunk.committed_ids == [*PROMPT, 10, 99]


def test_what_was_decided_is_told_with_the_right_tokens() -> None:
    """Each drafted position up to the first that came out otherwise, so that estimates can be learned from."""
    tree, *_ = fork_like_tree()
    decided = tree.commit([10, 99, 12]).decided
    assert [(token.token_id, right) for token, right in decided] == [(10, 10), (11, 99)]
    tree, *_ = fork_like_tree()
    decided = tree.commit([10, 21, 22]).decided
    assert [(token.token_id, right) for token, right in decided] == [(10, 10), (11, 21), (22, 22)]


def test_a_guess_is_never_sent_and_nothing_twice() -> None:
    """A branch sends what was drafted behind its guess; the tokens before are its parent's to send."""
    tree, branch, twig = fork_like_tree()
    runs = [tree.take_unsent(line) for line in tree.lines]
    assert [(run.base_length, [token.token_id for token in run.tokens]) for run in runs if run] == [
        (3, [10, 11, 12]),
        (5, [22]),
        (6, [43]),
    ]
    prefixes = [PROMPT, (*PROMPT, 10, 21), (*PROMPT, 10, 21, 42)]
    assert [run.prefix_digest for run in runs if run] == [TokenPrefix(prefix).digest() for prefix in prefixes]
    assert [tree.take_unsent(line) for line in tree.lines] == [None] * 3
    grow(tree, branch, 23)
    run = tree.take_unsent(branch)
    assert run is not None
    assert (run.base_length, run.prefix_digest) == (6, TokenPrefix((*PROMPT, 10, 21, 22)).digest())
    assert len(twig.nodes) == twig.sent


def test_a_branch_whose_parent_is_closed_first_sends_its_own() -> None:
    """The commit that closes the parent covers all that the two share."""
    tree, branch, _ = fork_like_tree()
    tree.commit([10, 21])
    run = tree.take_unsent(branch)
    assert run is not None
    assert (run.base_length, run.prefix_digest) == (5, TokenPrefix((*PROMPT, 10, 21)).digest())
    assert [token.token_id for token in run.tokens] == [22]


def taken(tree: LineTree[State]) -> list[Run | None]:
    """What each line sends now."""
    return [tree.take_unsent(line) for line in tree.lines]


def taken_again(tree: LineTree[State]) -> list[tuple[int, list[int]] | None]:
    """What each line sends once it is unsent, if anything: where it begins, and its tokens. Digests are checked."""
    for line in tree.lines:
        line.unsend()
    runs = list[tuple[int, list[int]] | None]()
    for line, run in zip(tree.lines, taken(tree), strict=True):
        if run is None:
            runs.append(None)
            continue
        ids = [*tree.prefix.ids, *line.drafted_ids]
        assert run.prefix_digest == TokenPrefix(ids[: run.base_length]).digest()
        runs.append((run.base_length, [token.token_id for token in run.tokens]))
    return runs


def test_what_is_unsent_is_sent_again() -> None:
    """By the line that it is the own of, whether it was the trunk or a branch; a guess is not sent this time either."""
    tree, _, twig = fork_like_tree()
    first = taken(tree)
    assert taken_again(tree) == [(3, [10, 11, 12]), (5, [22]), (6, [43])]
    assert taken(tree) == [None] * 3
    twig.unsend()
    assert taken(tree) == [None, None, first[2]]
    grow(tree, tree.trunk, 13)
    assert taken_again(tree)[0] == (3, [10, 11, 12, 13])


def test_a_branch_with_nothing_behind_its_guess_has_nothing_to_send_again() -> None:
    """Nor has a trunk without tokens."""
    tree = new_tree()
    assert taken_again(tree) == [None]
    grow(tree, tree.trunk, 10, (20,))
    branch_of(tree, 20)
    assert taken_again(tree) == [(3, [10]), None]


def test_a_grafted_branch_sends_all_behind_the_commit_again() -> None:
    """Its guess is committed, so nothing else of it is anyone's to send."""
    tree, branch, _ = fork_like_tree()
    taken(tree)
    tree.commit([10, 21])
    assert taken_again(tree) == [(5, [22]), (6, [43])]
    grow(tree, branch, 23)
    assert taken_again(tree) == [(5, [22, 23]), (6, [43])]
    tree.commit([42])
    assert taken_again(tree) == [(6, [43])]


@pytest.mark.parametrize("is_sent", [False, True])
def test_what_a_part_of_was_committed_sends_the_rest_again(is_sent: bool) -> None:
    """Behind the committed tokens; a branch whose guess is the next token begins behind that all the same."""
    tree, *_ = fork_like_tree()
    if is_sent:
        taken(tree)
    tree.commit([10])
    assert taken_again(tree) == [(4, [11, 12]), (5, [22]), (6, [43])]
    tree.commit([11])
    assert taken_again(tree) == [(5, [12])]
    tree.commit([99])
    assert taken_again(tree) == [None]


def test_closing_a_branch_closes_what_grows_out_of_it() -> None:
    """Nobody else has the tokens that they share."""
    tree, branch, twig = fork_like_tree()
    other = branch_of(tree, 20)
    assert tree.close(branch) == [branch.state, twig.state]
    assert tree.lines == [tree.trunk, other]
    assert not branch.is_open
    assert not twig.is_open
    assert all(bud.line is tree.trunk for bud in tree.buds)


def test_the_least_likely_branch_has_nothing_growing_out_of_it() -> None:
    """It is no likelier than what it grows out of, and of equals the younger one goes."""
    tree, branch, twig = fork_like_tree()
    assert tree.least_likely() is twig
    tree.close(twig)
    assert tree.least_likely() is branch


# ---- any history ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_after_any_history_the_lines_are_those_of_a_plain_list(seed: int) -> None:
    """20 seeded histories of 150 events: lines grow, branches are opened and closed, and commits agree with a line for as
    long as it goes, for a part of it, or not at all.

    The list holds the tokens of each line. In the end every state was closed once.
    """
    randomness, tree = random.Random(seed), new_tree()
    committed = list(PROMPT)
    expected = [list[int]()]
    open_states = [id(tree.trunk.state)]
    kept_alive = [tree.trunk.state]  # so that no two states ever have the same id
    fresh = iter(range(100, 10_000))
    for _ in range(150):
        action = randomness.choices(["grow", "fork", "close", "commit"], [8, 4, 1, 2])[0]
        if action == "grow":
            line = randomness.choice(tree.lines)
            token_id = next(fresh)
            expected[tree.lines.index(line)].append(token_id)
            grow(tree, line, token_id, [next(fresh) for _ in range(randomness.randint(0, 3))])
        elif action == "fork" and tree.buds and len(tree.lines) < 8:
            bud = randomness.choice(tree.buds)
            expected.append([*bud.line.drafted_ids[: bud.depth], token_of(bud)])
            kept_alive.append(tree.fork(bud, forked).state)
            open_states.append(id(kept_alive[-1]))
        elif action == "close" and tree.branches:
            line = tree.least_likely()
            expected.remove(line.drafted_ids)
            for state in tree.close(line):
                open_states.remove(id(state))
        elif action == "commit":
            line = randomness.choice(tree.lines)
            ids = [*line.drafted_ids[: randomness.randint(0, len(line.drafted_ids))]]
            ids += [next(fresh)] * (randomness.random() < 0.3 or not ids)
            result = tree.commit(ids)
            committed += ids
            agreeing = [each[len(ids) :] for each in expected if each[: len(ids)] == ids]
            expected = agreeing or [[]]
            for state in result.closed:
                open_states.remove(id(state))
        assert sorted(line.drafted_ids for line in tree.lines) == sorted(expected)
        expected = [list(line.drafted_ids) for line in tree.lines]
        assert sorted(id(line.state) for line in tree.lines) == sorted(open_states)
        assert_invariants(tree, committed)


def assert_invariants(tree: LineTree[State], committed: Sequence[int]) -> None:
    """Those of the class, and digests and likelihoods from scratch."""
    assert tree.prefix.ids == committed
    assert not any(node.is_guess for node in tree.trunk.nodes)
    for number, line in enumerate(tree.lines):
        assert line.is_open
        assert line.committed_ids is tree.prefix.ids
        digests = TokenPrefix([*committed, *line.drafted_ids])
        assert [node.digest for node in line.nodes] == [
            digests.digest(len(committed) + index + 1) for index in range(len(line.nodes))
        ]
        assert 0 <= line.start <= line.sent <= len(line.nodes)
        likelihood = 1.0
        for node in line.nodes:
            likelihood *= node.likelihood
        assert line.likelihood == pytest.approx(likelihood)
        for other in tree.lines[:number]:
            assert any(mine != theirs for mine, theirs in zip(line.drafted_ids, other.drafted_ids, strict=False))
    owned = [id(node) for line in tree.lines for node in line.nodes[line.start :]]
    assert len(owned) == len(set(owned)) == len({id(node) for line in tree.lines for node in line.nodes})
    assert all(bud.line in tree.lines and bud.line.start <= bud.depth < len(bud.line.nodes) for bud in tree.buds)
    assert all(earlier.likelihood >= later.likelihood for earlier, later in pairwise(tree.buds))
