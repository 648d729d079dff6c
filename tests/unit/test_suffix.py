"""Suffix decoding: drafts by frequency, found without searching, from trees that forget exactly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.lookup.suffix import SuffixCache, SuffixIndex, SuffixSession
from paceline.lookup.suffix_tree import NOTHING, SuffixProposal, SuffixTree

DEPTH = 6
VOCAB_SIZE = 100


def some_tokens(draw: random.Random, *, longest: int = 14) -> list[int]:
    """Of few different tokens, so that they repeat themselves all the time."""
    return [draw.randrange(draw.choice([2, 3])) for _ in range(draw.randrange(longest + 1))]


def some_texts(draw: random.Random, *, fewest: int, most: int) -> list[list[int]]:
    return [some_tokens(draw) for _ in range(draw.randint(fewest, most))]


def followers(sequences: Sequence[Sequence[int]], window: Sequence[int]) -> list[int]:
    """The token behind each occurrence of the window, in their order."""
    size = len(window)
    return [
        sequence[start + size]
        for sequence in sequences
        for start in range(len(sequence) - size)
        if list(sequence[start : start + size]) == list(window)
    ]


def expected_proposal(
    sequences: Sequence[Sequence[int]],
    context: Sequence[int],
    max_tokens: int,
    *,
    max_depth: int = DEPTH,
    max_spec_factor: float = 1.0,
    min_token_prob: float = 0.1,
) -> SuffixProposal:
    """The definition: count all sequences anew for every match and every step behind it."""
    best = NOTHING
    for match_length in range(min(max_depth - 1, len(context)), 0, -1):
        draft, prob, score = list[int](), 1.0, 0.0
        for _ in range(min(max_tokens, int(max_spec_factor * match_length), max_depth - match_length)):
            seen = followers(sequences, [*context[-match_length:], *draft])
            if not seen:
                break
            latest = {token: index for index, token in enumerate(seen)}
            token = max(latest, key=lambda token: (seen.count(token), latest[token]))
            prob *= seen.count(token) / (len(seen) + (not draft))
            if prob < min_token_prob:
                break
            draft.append(token)
            score += prob
        if score > best.score:
            best = SuffixProposal(tuple(draft), score, match_length)
    return best


def tree_of(sequences: Sequence[Sequence[int]]) -> SuffixTree:
    """The sequences, the last of them open."""
    tree = SuffixTree(max_depth=DEPTH)
    for sequence in sequences[:-1]:
        tree.extend(sequence)
        tree.close_sequence()
    tree.extend(sequences[-1])
    return tree


def cache(**options: Any) -> SuffixCache:
    return SuffixCache(**{"max_tree_depth": DEPTH, **options})


def session_of(
    cache: SuffixCache, ids: Sequence[int], *, tenant: str = "", vocab_size: int = VOCAB_SIZE, prompt_length: int = 0
) -> SuffixSession:
    session = cache.session(tenant, vocab_size=vocab_size, prompt_length=prompt_length)
    session.extend(ids)
    return session


def serve(cache: SuffixCache, ids: Sequence[int], *, tenant: str = "", prompt_length: int = 0) -> None:
    """A session from its first token to its end."""
    session_of(cache, ids, tenant=tenant, prompt_length=prompt_length).close()


def test_proposal_is_that_of_a_full_count() -> None:
    """1,000 random histories and contexts: tokens, score and match are those of counting all anew, to the bit."""
    draw = random.Random(1)
    for _ in range(1000):
        texts, context = some_texts(draw, fewest=1, most=4), some_tokens(draw)
        max_tokens, factor = draw.randrange(9), draw.choice([0.5, 1.0, 2.0])
        least_prob = draw.choice([0.0, 0.1, 0.34, 0.6])
        proposal = tree_of(texts).propose(context, max_tokens, max_spec_factor=factor, min_token_prob=least_prob)
        assert proposal == expected_proposal(
            texts, context, max_tokens, max_spec_factor=factor, min_token_prob=least_prob
        ), (texts, context)


def test_forgotten_sequences_leave_no_trace() -> None:
    """300 random histories, the oldest forgotten as others come: counts, choices and nodes as if they had never been."""
    draw = random.Random(2)
    for _ in range(300):
        texts, held, context = some_texts(draw, fewest=2, most=8), draw.randint(1, 3), some_tokens(draw)
        tree = SuffixTree(max_depth=DEPTH)
        for number, text in enumerate(texts):
            tree.extend(text)
            tree.close_sequence()
            if number >= held:
                assert tree.evict_oldest() == len(texts[number - held])
            present = texts[max(0, number - held + 1) : number + 1]
            assert tree.held_bytes == tree_of([*present, []]).held_bytes
            proposal = tree.propose(context, 5, max_spec_factor=1.0, min_token_prob=0.0)
            assert proposal == expected_proposal(present, context, 5, min_token_prob=0.0)


@pytest.mark.parametrize("alphabet", [1, 2, 40])
def test_a_long_history_that_grows_and_shrinks_is_counted_exactly(alphabet: int) -> None:
    """60 random sequences of up to 200 tokens, of which ten are held: memory grows, is reused, and nothing is lost."""
    random_numbers = random.Random(alphabet)
    sequences, tree = list[list[int]](), SuffixTree(max_depth=DEPTH)
    for _ in range(60):
        sequences.append([random_numbers.randrange(alphabet) for _ in range(random_numbers.randrange(1, 200))])
        tree.extend(sequences[-1])
        tree.close_sequence()
        if len(sequences) > 10:
            tree.evict_oldest()
            del sequences[0]
        context = random_numbers.choice(sequences)[:DEPTH]
        proposal = tree.propose(context, 4, max_spec_factor=2.0, min_token_prob=0.1)
        assert proposal == expected_proposal(sequences, context, 4, max_spec_factor=2.0)
    for _ in sequences:
        tree.evict_oldest()
    assert tree.is_empty
    assert tree.held_bytes == tree_of([[]]).held_bytes


def test_memory_that_evictions_free_is_given_back() -> None:
    """A tree that held 200 random sequences and goes on with three: its arrays are those of a small one, and what it
    proposes is that of the three."""
    draw = random.Random(5)
    sequences, tree = list[list[int]](), SuffixTree(max_depth=DEPTH)
    for number in range(400):
        sequences.append([draw.randrange(1000) for _ in range(100)])
        tree.extend(sequences[-1])
        tree.close_sequence()
        while len(sequences) > (200 if number < 200 else 3):
            tree.evict_oldest()
            del sequences[0]
    small = tree_of([*sequences, []])
    assert tree.held_bytes == small.held_bytes
    assert tree._nodes.nbytes + tree._table.nbytes + tree._ring.nbytes <= 4 * tree.held_bytes + 4096 * 64
    for sequence in sequences:
        for place in range(0, 90, 7):
            context = sequence[place : place + DEPTH]
            proposal = tree.propose(context, 4, max_spec_factor=2.0, min_token_prob=0.0)
            assert proposal == expected_proposal(sequences, context, 4, max_spec_factor=2.0, min_token_prob=0.0)


def test_better_of_own_and_shared_tree_is_proposed() -> None:
    """500 random histories: the higher score of the two wins, and tokens drafted already are context, not evidence."""
    draw = random.Random(3)
    for _ in range(500):
        served, committed, tail = some_texts(draw, fewest=0, most=3), some_tokens(draw), some_tokens(draw, longest=4)
        shared, max_tokens = cache(), draw.randrange(9)
        for output in served:
            serve(shared, output)
        session = session_of(shared, committed)
        own = expected_proposal([committed], committed + tail, max_tokens)
        others = expected_proposal(served, committed + tail, max_tokens)
        for _ in range(2):  # the first leaves all as it was
            assert session.propose(tail, max_tokens) == (others if others.score > own.score else own)


def test_proposal_does_not_depend_on_what_was_asked_before() -> None:
    """200 random histories, told in parts and asked in between with tails that were then not committed."""
    draw = random.Random(4)
    for _ in range(200):
        session, committed = session_of(cache(), []), list[int]()
        for part in some_texts(draw, fewest=0, most=6):
            session.extend(part)
            committed += part
            assert len(session) == len(committed)
            tail = some_tokens(draw)
            assert session.propose(tail, 8) == expected_proposal([committed], committed + tail, 8)


def test_outputs_teach_later_sessions_and_prompts_do_not() -> None:
    """What a session was asked stays with it; what it was answered is drafted for the next one."""
    shared = cache()
    serve(shared, [1, 2, 3, 4, 5, 6], prompt_length=3)
    assert session_of(shared, [4, 5]).propose((), 4).ids == (6,)
    assert session_of(shared, [1, 2]).propose((), 4) == NOTHING
    assert session_of(shared, [3]).propose((), 4) == NOTHING, "no window spans prompt and output"


def test_running_and_abandoned_drafts_never_enter_the_shared_tree() -> None:
    """C36: only committed tokens of ended sessions are found by others, whatever was drafted behind them."""
    shared = cache()
    session = session_of(shared, [1, 2, 1, 2])
    session.propose([7, 8, 9, 7, 8], 4)
    assert session_of(shared, [1]).propose((), 4) == NOTHING, "the session has not ended"
    session.close()
    session.close()
    assert (shared.cached_requests, shared.cached_tokens) == (1, 4), "once"
    assert session_of(shared, [7, 8]).propose((), 4) == NOTHING
    assert session_of(shared, [7]).propose([1], 4).ids == (2,)


def test_tenants_and_vocabularies_never_share() -> None:
    """The same context finds what its own tenant was served, with ids of its own vocabulary, and nothing else."""
    shared = cache()
    serve(shared, [1, 2, 3], tenant="one")
    serve(shared, [1, 2, 4], tenant="two")
    for tenant, expected in (("one", (3,)), ("two", (4,)), ("", ())):
        assert session_of(shared, [1, 2], tenant=tenant).propose((), 1).ids == expected
    assert session_of(shared, [1, 2], tenant="one", vocab_size=VOCAB_SIZE + 1).propose((), 1) == NOTHING


def test_nothing_is_kept_where_sharing_is_off() -> None:
    """`max_cached_requests` 0: sessions draft from their own tokens alone and leave nothing behind."""
    shared = cache(max_cached_requests=0)
    serve(shared, [1, 2, 3])
    assert (shared.cached_requests, shared.cached_tokens, shared.held_bytes) == (0, 0, 0)
    assert session_of(shared, [1, 2]).propose((), 4) == NOTHING
    assert session_of(shared, [1, 2, 3, 1, 2]).propose((), 4).ids == (3, 1)


def test_oldest_outputs_go_first_whoever_they_belong_to() -> None:
    """With room for two outputs, the third pushes out the first, and an emptied tenant takes no memory."""
    shared = cache(max_cached_requests=2)
    serve(shared, [1, 2, 3], tenant="one")
    serve(shared, [1, 2, 4], tenant="two")
    serve(shared, [1, 2, 5], tenant="two")
    assert (shared.cached_requests, shared.cached_tokens, shared.evicted_requests) == (2, 6, 1)
    assert session_of(shared, [1, 2], tenant="one").propose((), 1) == NOTHING
    two = cache()
    serve(two, [1, 2, 4])
    serve(two, [1, 2, 5])
    assert shared.held_bytes == two.held_bytes


@pytest.mark.parametrize("alphabet", [2, 1000])
def test_shared_memory_is_bounded_whatever_is_served(alphabet: int) -> None:
    """100 random outputs of 100 tokens, told apart or not: never more bytes than allowed, and the latest are held."""
    limit, random_numbers = 60_000, random.Random(alphabet)
    shared = cache(max_cached_bytes=limit)
    for _ in range(100):
        serve(shared, [random_numbers.randrange(alphabet) for _ in range(100)], tenant=str(random_numbers.randrange(2)))
        assert shared.held_bytes <= limit
        assert shared.cached_tokens == 100 * shared.cached_requests
    assert 1 < shared.cached_requests < 100
    assert shared.cached_requests + shared.evicted_requests == 100
    serve(shared, [7] * 10_000)
    serve(shared, list(range(1000, 11_000)))
    assert shared.held_bytes <= limit, "also where one output alone is too much"


def test_fallback_index_drafts_from_the_session_alone() -> None:
    """The orchestrator's index gives what a session without a shared tree would."""
    index = SuffixIndex()
    index.extend([1, 2, 3, 4, 1, 2, 3])
    assert len(index) == 7
    assert index.propose((), 8) == expected_proposal([[1, 2, 3, 4, 1, 2, 3]], [1, 2, 3], 8, max_depth=24).ids
    assert index.propose([9], 8) == ()


def test_tree_without_room_for_a_match_and_a_token_is_refused() -> None:
    """A depth of 1 could only propose nothing."""
    with pytest.raises(InvalidRequest, match="max_tree_depth"):
        cache(max_tree_depth=1)
