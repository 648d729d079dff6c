"""What was pushed ahead is found behind exactly its own prefix, in whole or by its rest, and nothing else is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.proposals import Arrival, ProposalStore
from paceline.prefix import TokenPrefix
from paceline.types import Branch, Draft, Proposal

COMMITTED = (5, 6, 7)


def digest_of(ids: Sequence[int]) -> int:
    return TokenPrefix(ids).digest()


def rows_for(ids: Sequence[int], *, name: str) -> tuple[bytes, ...]:
    """A row for each token, which says where it came from."""
    return tuple(f"{name}{place}".encode() for place in range(len(ids)))


def proposal(prefix: Sequence[int], ids: Sequence[int], *, name: str = "") -> Proposal:
    """A proposal behind that prefix; with a name it is drawn, without one deterministic."""
    draft = Draft(tuple(ids), rows_for(ids, name=name) if name else ())
    return Proposal(base_length=len(prefix), prefix_digest=digest_of(prefix), draft=draft)


def as_branch(pushed: Proposal) -> Proposal:
    """The same tokens as a branch, beside an empty draft."""
    branch = Branch(pushed.base_length, pushed.prefix_digest, pushed.draft)
    return replace(pushed, draft=Draft(), branches=(branch,))


def prune(store: ProposalStore, committed: Sequence[int]) -> None:
    store.prune(len(committed), digest_of(committed))


def store_with(*proposals: Proposal, committed: Sequence[int] = COMMITTED, max_runs: int = 256) -> ProposalStore:
    store = ProposalStore(max_runs=max_runs)
    prune(store, committed)
    for each in proposals:
        store.add(each)
    return store


def found(store: ProposalStore, prefix: Sequence[int], max_length: int = 100) -> tuple[int, ...] | None:
    draft = store.find(digest_of(prefix), max_length)
    return None if draft is None else draft.ids


def test_a_draft_is_found_behind_its_own_prefix_alone() -> None:
    """Not behind a shorter, a longer or another prefix of the same length."""
    store = store_with(proposal(COMMITTED, (1, 2, 3)))
    assert found(store, COMMITTED) == (1, 2, 3)
    assert store.continues(digest_of(COMMITTED))
    for other in ((5, 6), (5, 6, 7, 9), (5, 6, 8), (1, 2, 3), ()):
        assert found(store, other) is None
        assert not store.continues(digest_of(other))


@pytest.mark.parametrize("kept_length", [1, 2])
def test_the_rest_of_a_draft_serves_behind_tokens_that_match_it(kept_length: int) -> None:
    """So a draft is of use behind an emitted bonus or plain token; each token keeps its own row."""
    store = store_with(proposal(COMMITTED, (1, 2, 3), name="row"))
    prefix = (*COMMITTED, *(1, 2, 3)[:kept_length])
    draft = store.find(digest_of(prefix), 100)
    assert draft == Draft((1, 2, 3)[kept_length:], (b"row0", b"row1", b"row2")[kept_length:])
    assert store.continues(digest_of(prefix))
    assert found(store, (*COMMITTED, 9)) is None


def test_nothing_continues_the_end_of_a_draft() -> None:
    """Not even an empty draft: the drafter may well have more to offer there."""
    store = store_with(proposal(COMMITTED, (1, 2)))
    assert found(store, (*COMMITTED, 1, 2)) is None
    assert not store.continues(digest_of((*COMMITTED, 1, 2)))


def test_drafts_that_continue_one_another_are_joined() -> None:
    """In whatever order they came, and up to the length that is asked for."""
    parts = (proposal(COMMITTED, (1, 2)), proposal((*COMMITTED, 1, 2), (3,)), proposal((*COMMITTED, 1, 2, 3), (4, 0)))
    for order in (parts, parts[::-1]):
        store = store_with(*order)
        assert found(store, COMMITTED) == (1, 2, 3, 4, 0)
        assert [found(store, COMMITTED, length) for length in (1, 2, 3, 4)] == [
            (1,),
            (1, 2),
            (1, 2, 3),
            (1, 2, 3, 4),
        ]


def test_drawn_and_deterministic_drafts_are_never_joined() -> None:
    """A draft is judged by rows or as one-hot; the other part waits for its own round."""
    for names in (("row", ""), ("", "row")):
        store = store_with(
            proposal(COMMITTED, (1, 2), name=names[0]), proposal((*COMMITTED, 1, 2), (3, 4), name=names[1])
        )
        assert found(store, COMMITTED) == (1, 2)
        assert found(store, (*COMMITTED, 1, 2)) == (3, 4)


def test_the_first_to_arrive_for_a_prefix_is_kept() -> None:
    """Whatever its tokens are: to choose by their values would be lossy under `rejection`."""
    store = store_with(
        proposal(COMMITTED, (1, 2), name="first"),
        proposal(COMMITTED, (9, 9, 9), name="second"),
        proposal(COMMITTED, (1, 2, 3), name="third"),
    )
    assert store.find(digest_of(COMMITTED), 2) == Draft((1, 2), (b"first0", b"first1"))
    assert found(store, (*COMMITTED, 9)) == (9, 9)
    assert store.find(digest_of((*COMMITTED, 1, 2)), 2) == Draft((3,), (b"third2",))


def test_nothing_to_offer_counts_for_the_committed_tokens_alone() -> None:
    """An empty draft says that waiting is in vain; ahead of a verdict the drafter knew less than it will."""
    ahead = (*COMMITTED, 1)
    store = store_with(proposal(ahead, ()), proposal(COMMITTED, ()))
    assert found(store, COMMITTED) == ()
    assert not store.continues(digest_of(COMMITTED))
    assert found(store, ahead) is None
    prune(store, ahead)
    assert found(store, ahead) is None
    store.add(proposal(ahead, ()))
    assert found(store, ahead) == ()


def test_nothing_to_offer_at_the_end_of_a_draft_leaves_the_draft_as_it_is() -> None:
    """It ends there."""
    store = store_with(proposal(COMMITTED, (1, 2)), committed=(*COMMITTED, 1, 2))
    store.add(proposal((*COMMITTED, 1, 2), ()))
    assert found(store, COMMITTED) == (1, 2)


def test_what_ends_before_the_committed_tokens_is_dropped() -> None:
    """What reaches to them or beyond still serves by its rest."""
    store = store_with(proposal((5, 6), (7, 8)), proposal(COMMITTED, (8, 1)), proposal((*COMMITTED, 8, 1), (2,)))
    assert len(store) == 3
    prune(store, (*COMMITTED, 8, 1))
    assert len(store) == 2
    assert found(store, (*COMMITTED, 8, 1)) == (2,)
    prune(store, (*COMMITTED, 8, 1, 2, 3))
    assert len(store) == 0


def test_what_the_committed_tokens_contradict_is_dropped() -> None:
    """However far ahead it reaches, and whatever came before or behind it."""
    draft, other = proposal(COMMITTED, (1, 2, 3, 4)), as_branch(proposal((*COMMITTED, 9), (5, 6, 7)))
    behind = as_branch(proposal((*COMMITTED, 1, 2, 8), (6,)))
    store = store_with(draft, other, behind)
    prune(store, (*COMMITTED, 1))
    assert len(store) == 2
    assert found(store, (*COMMITTED, 9)) is None
    prune(store, (*COMMITTED, 1, 2, 8))
    assert len(store) == 1
    assert found(store, (*COMMITTED, 1, 2, 8)) == (6,)
    assert found(store, (*COMMITTED, 1, 2)) is None


def test_a_long_draft_keeps_nothing_else_alive() -> None:
    """A session whose drafts are kept for long, beside branches that never come true: what is held does not grow."""
    store, committed = store_with(proposal(COMMITTED, range(200))), list(COMMITTED)
    for token_id in range(100):
        store.add(as_branch(proposal((*committed, 300), (7, 8, 9))))
        committed.append(token_id)
        prune(store, committed)
        assert len(store) == 1
    assert found(store, committed) == tuple(range(100, 200))


def test_beyond_its_bounds_branches_that_begin_farthest_ahead_make_room() -> None:
    """The drafter sends nothing twice: a hole in the likeliest tokens would be waited at, round after round."""
    drafts = [proposal((*COMMITTED, *range(10, 10 + ahead)), (10 + ahead,)) for ahead in range(6)]
    branches = [as_branch(proposal((*COMMITTED, *[1] * ahead), (2, 3))) for ahead in (3, 1, 2)]
    store = store_with(*drafts, *branches, max_runs=8)
    assert len(store) == 8
    assert found(store, COMMITTED) == (10, 11, 12, 13, 14, 15)
    assert [found(store, (*COMMITTED, *[1] * ahead)) for ahead in (1, 2, 3)] == [(2, 3), (2, 3), None]
    for ahead in range(3):
        store.add(proposal((5, *range(ahead)), (1,)))
    assert len(store) == 8
    assert found(store, (*COMMITTED, 1)) is None
    store.clear()
    assert len(store) == 0
    assert found(store, COMMITTED) is None


def test_dropping_an_older_draft_leaves_what_a_newer_one_added() -> None:
    """Each prefix is forgotten with the proposal that it belongs to."""
    store = store_with(proposal(COMMITTED, (1, 2)), proposal(COMMITTED, (1, 2, 3, 4)), max_runs=2)
    store.add(proposal((0,), (1,)))
    assert found(store, (*COMMITTED, 1, 2)) == (3, 4)


# ---- branches -------------------------------------------------------------------------------------------------------


def test_a_branch_is_found_behind_the_outcome_it_was_drafted_for_alone() -> None:
    """The correction 9 in the place of the draft's second token, say: behind it the branch, elsewhere the draft."""
    store = store_with(
        replace(proposal(COMMITTED, (1, 2, 3)), branches=as_branch(proposal((*COMMITTED, 1, 9), (4, 5))).branches)
    )
    assert found(store, COMMITTED) == (1, 2, 3)
    assert found(store, (*COMMITTED, 1)) == (2, 3)
    assert found(store, (*COMMITTED, 1, 9)) == (4, 5)
    assert found(store, (*COMMITTED, 1, 8)) is None


def test_a_branch_of_a_branch_continues_it() -> None:
    """Two guesses that come true one after the other are two look-ups, and tokens behind a branch join it."""
    store = store_with(as_branch(proposal((*COMMITTED, 9), (4, 5))))
    store.add(as_branch(proposal((*COMMITTED, 9, 4, 8), (6,))))
    store.add(proposal((*COMMITTED, 9, 4, 5), (7,)))
    assert found(store, (*COMMITTED, 9)) == (4, 5, 7)
    assert found(store, (*COMMITTED, 9, 4, 8)) == (6,)


def test_an_empty_draft_beside_branches_says_nothing_of_the_committed_tokens() -> None:
    """The draft behind them is on its way, or was sent before: a round must not take it for "nothing to offer"."""
    store = store_with(as_branch(proposal(COMMITTED, (1,))), replace(proposal((*COMMITTED, 5), ()), branches=()))
    other = store_with(replace(as_branch(proposal((*COMMITTED, 5), (1,))), base_length=len(COMMITTED)))
    assert found(store, COMMITTED) == (1,)
    assert found(other, COMMITTED) is None


def test_a_draft_is_complete_once_the_drafter_has_nothing_to_offer_behind_it() -> None:
    """So that nobody waits for tokens that will never come; with the next commit the drafter knows more."""
    store = store_with(proposal(COMMITTED, (1, 2)))
    assert not store.is_complete(digest_of(COMMITTED))
    store.add(proposal((*COMMITTED, 1, 2), ()))
    assert store.is_complete(digest_of(COMMITTED))
    assert found(store, (*COMMITTED, 1, 2)) is None
    prune(store, (*COMMITTED, 1))
    assert not store.is_complete(digest_of((*COMMITTED, 1)))
    store.add(proposal((*COMMITTED, 4), ()))
    assert store.is_complete(digest_of((*COMMITTED, 4)))


def test_tokens_are_bounded() -> None:
    """Whatever a drafter sends: distributions can be 300 bytes a token."""
    store = ProposalStore(max_runs=100, max_tokens=10)
    for number in range(20):
        store.add(as_branch(proposal((*COMMITTED, number), (1, 2, 3, 4))))
        assert store.tokens <= 10
    assert (len(store), store.tokens) == (2, 8)


def test_what_comes_again_takes_up_no_room() -> None:
    """And nothing is dropped for it; what is new of it is kept."""
    ahead = as_branch(proposal((*COMMITTED, 4), (5, 6)))
    store = store_with(ahead, proposal(COMMITTED, (1, 2)), max_runs=3)
    for _ in range(5):
        store.add(ahead)
        store.add(proposal(COMMITTED, (1, 2)))
        store.add(proposal(COMMITTED, (1, 2, 3)))
    assert (len(store), store.tokens) == (3, 7)
    assert found(store, (*COMMITTED, 4)) == (5, 6)
    assert found(store, COMMITTED) == (1, 2, 3)


def test_an_arrival_is_that_of_the_tokens_that_come_first() -> None:
    """What the drafter spent goes with the proposal it said it of."""
    store = store_with()
    store.add(replace(proposal(COMMITTED, (1, 2)), draft_time_s=0.5, draft_steps=2), now_s=3.0)
    store.add(replace(proposal((*COMMITTED, 1, 2), (3,)), draft_time_s=0.25, draft_steps=1), now_s=4.0)
    assert store.arrival(digest_of((*COMMITTED, 1))) == Arrival(3.0, 0.5, 2)
    assert store.arrival(digest_of((*COMMITTED, 1, 2))) == Arrival(4.0, 0.25, 1)
    assert store.arrival(digest_of((9,))) is None


# ---- any history ----------------------------------------------------------------------------------------------------


@dataclass
class NaiveStore:
    """The rules once more, over the tokens themselves: every proposal is kept, and searched in order of arrival."""

    arrived: list[tuple[tuple[int, ...], Draft]] = field(default_factory=list)
    committed_length: int = 0

    def add(self, prefix: tuple[int, ...], draft: Draft) -> None:
        if draft.ids or len(prefix) == self.committed_length:
            self.arrived.append((prefix, draft))

    def covering(self, prefix: tuple[int, ...]) -> tuple[Draft, tuple[int, ...]] | None:
        """What continues the prefix, and where that ends."""
        for base, draft in self.arrived:
            offset = len(prefix) - len(base)
            if base == prefix or (0 <= offset < len(draft) and prefix == base + draft.ids[:offset]):
                return draft[offset:], base + draft.ids
        return None

    def find(self, prefix: tuple[int, ...], max_length: int) -> Draft | None:
        covering = self.covering(prefix)
        if covering is None:
            return None
        draft, end = covering
        while len(draft) < max_length:
            covering = self.covering(end)
            if covering is None or not covering[0].ids or bool(covering[0].distributions) != bool(draft.distributions):
                break
            draft, end = draft + covering[0], covering[1]
        return draft[:max_length]


BITS = st.lists(st.integers(0, 1), max_size=4)
ACTIONS = st.lists(
    st.tuples(BITS, BITS, st.booleans(), st.booleans()) | st.integers(0, 1),
    max_size=12,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(actions=ACTIONS, max_length=st.integers(1, 6))
def test_any_history_answers_as_a_search_of_everything_that_arrived(
    actions: list[tuple[list[int], list[int], bool, bool] | int], max_length: int
) -> None:
    """300 drawn histories over two tokens, where prefixes often meet: drafts and branches behind the committed tokens and
    some more, drawn or not, and tokens that are committed. Every prefix that could be asked for is compared."""
    store, naive, committed = ProposalStore(), NaiveStore(), tuple[int, ...]()
    for number, action in enumerate(actions):
        if isinstance(action, int):
            committed += (action,)
            prune(store, committed)
            naive.committed_length = len(committed)
        else:
            ahead, ids, is_drawn, is_branch = action
            pushed = proposal((*committed, *ahead), ids, name=f"p{number}-" if is_drawn else "")
            store.add(as_branch(pushed) if is_branch and ids else pushed)
            naive.add((*committed, *ahead), pushed.draft)
        reachable = [committed, *((*committed, *ahead[:length]) for ahead in STRETCHES for length in range(1, 6))]
        for prefix in dict.fromkeys(reachable):
            expected = naive.find(prefix, max_length)
            assert store.find(digest_of(prefix), max_length) == expected
            assert store.continues(digest_of(prefix)) == bool(expected and expected.ids)
            assert store.available(digest_of(prefix), max_length) == len(expected or ())


STRETCHES = [(0, 0, 0, 0, 0), (0, 1, 0, 1, 1), (1, 0, 1, 1, 0), (1, 1, 0, 0, 1), (1, 1, 1, 1, 1)]
