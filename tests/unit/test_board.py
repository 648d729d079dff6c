"""What is known of a pool's replicas, and the order in which sessions should take them."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.board import (
    SUSPICION_S,
    Link,
    Load,
    Order,
    PoolBoard,
    Rank,
    Replica,
    most_room_first,
    nearest_first,
)

NODES = ("", "node-1", "node-2")
ZONES = ("", "zone-1", "zone-2")
REPLICAS = tuple(
    Replica(replica_id=f"replica-{number}", address=f"host-{number}:1", node_id=node_id, zone=zone)
    for number, (node_id, zone) in enumerate(itertools.product(NODES, ZONES))
)
IDS = [replica.replica_id for replica in REPLICAS]

loads = st.builds(
    Load,
    sessions=st.integers(0, 9),
    max_sessions=st.sampled_from([0, 8]),
    queued=st.integers(0, 5),
    kv_used_tokens=st.integers(0, 1000),
    kv_capacity_tokens=st.sampled_from([0, 1000]),
    step_busy_share=st.floats(0, 1),
    is_draining=st.sampled_from([False, False, False, True]),
)
replica_ids = st.sampled_from(IDS)
changes = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["connect", "lose", "refuse", "join", "leave", "forget"]), replica_ids),
        st.tuples(st.sampled_from(["fill", "free", "drain", "suspect", "trust"]), replica_ids),
        st.tuples(st.just("place"), replica_ids, st.integers(1, 300)),
        st.tuples(st.just("report"), replica_ids, loads),
    ),
    max_size=60,
)
orders = st.sampled_from([most_room_first, nearest_first])


def board_of(order: Order = most_room_first, *connected: str) -> PoolBoard:
    board = PoolBoard(order, node_id="node-1", zone="zone-1")
    for replica_id in connected:
        board.connect(replica_id)
    return board


def board_after(order: Order, history: list[tuple[object, ...]]) -> PoolBoard:
    board = board_of(order)
    for what, replica_id, *value in history:
        if what == "place":
            board.place(str(replica_id), tokens=value[0])  # type: ignore[arg-type]
        else:
            getattr(board, str(what))(replica_id, *value)
    return board


def group_of(rank: Rank | None) -> float:
    assert rank is not None
    return rank[0]


@given(order=orders, history=changes)
@settings(max_examples=150, deadline=None)
def test_ranking_is_a_total_order_of_the_replicas_that_may_be_used(
    order: Order, history: list[tuple[object, ...]]
) -> None:
    """Whatever happened before (150 histories): each usable replica once, in the order of the ranks, whoever asks."""
    board = board_after(order, history)
    ranked = board.ranked(REPLICAS)
    assert {replica.replica_id for replica in ranked} == {
        replica_id for replica_id in IDS if board.standing(replica_id).is_usable
    }
    ranks = [board.rank(replica) for replica in ranked]
    assert None not in ranks
    assert ranks == sorted(ranks, key=lambda rank: rank or ())
    assert board.ranked(reversed(REPLICAS)) == ranked
    assert [replica for replica in REPLICAS if board.rank(replica) is None] == [
        replica for replica in REPLICAS if replica not in ranked
    ]


@given(order=orders, history=changes)
@settings(max_examples=150, deadline=None)
def test_replicas_with_room_come_before_unknown_ones_and_those_before_full_ones(
    order: Order, history: list[tuple[object, ...]]
) -> None:
    """A full replica is never ahead of one that may have room (150 histories)."""
    board = board_after(order, history)
    groups = [group_of(board.rank(replica)) for replica in board.ranked(REPLICAS)]
    assert groups == sorted(groups)
    for replica in board.ranked(REPLICAS):
        standing = board.standing(replica.replica_id)
        if standing.is_full:
            assert group_of(board.rank(replica)) == 2
        elif standing.link is Link.UNKNOWN:
            assert group_of(board.rank(replica)) >= 1


@given(order=orders, history=changes, replica=st.sampled_from(REPLICAS), tokens=st.integers(1, 300))
@settings(max_examples=150, deadline=None)
def test_a_session_placed_somewhere_never_makes_the_place_more_attractive(
    order: Order, history: list[tuple[object, ...]], replica: Replica, tokens: int
) -> None:
    """And a report replaces what was placed before it (150 histories)."""
    board = board_after(order, [*history, ("connect", replica.replica_id), ("join", replica.replica_id)])
    before = board.rank(replica)
    assert before is not None
    board.place(replica.replica_id, tokens=tokens)
    after = board.rank(replica)
    assert after is not None
    assert after >= before
    board.report(replica.replica_id, Load())
    standing = board.standing(replica.replica_id)
    assert (standing.placed_sessions, standing.placed_tokens) == (0, 0)


def test_targets_are_taken_by_free_memory_then_sessions_then_distance() -> None:
    """What was placed since the last report counts as used."""
    board = board_of(most_room_first, *IDS)
    far, near = REPLICAS[8], REPLICAS[4]
    assert (near.node_id, near.zone) == ("node-1", "zone-1")
    pair = (far, near)
    board.report(far.replica_id, Load(sessions=9, kv_used_tokens=100, kv_capacity_tokens=1000))
    board.report(near.replica_id, Load(sessions=1, kv_used_tokens=200, kv_capacity_tokens=1000))
    assert board.ranked(pair)[0] is far
    board.place(far.replica_id, tokens=150)
    assert board.ranked(pair)[0] is near
    for replica in pair:
        board.report(replica.replica_id, Load(sessions=3))
    assert board.ranked(pair)[0] is near
    board.place(near.replica_id, tokens=1)
    assert board.ranked(pair)[0] is far


def test_drafters_are_taken_by_distance_then_work() -> None:
    """The same node, then the same zone, then any: every round pays the way there and back."""
    board = board_of(nearest_first, *IDS)
    same_node = Replica(replica_id="replica-0", address="a:1", node_id="node-1", zone="")
    same_zone = Replica(replica_id="replica-1", address="b:1", node_id="node-2", zone="zone-1")
    far = Replica(replica_id="replica-2", address="c:1", node_id="node-2", zone="zone-2")
    other_far = replace(far, replica_id="replica-3")
    board.report("replica-0", Load(sessions=9))
    board.report("replica-2", Load(sessions=2, queued=3))
    board.report("replica-3", Load(sessions=4, queued=0))
    assert board.ranked([far, same_zone, other_far, same_node]) == [same_node, same_zone, other_far, far]


def test_an_orchestrator_that_knows_no_place_is_near_to_nobody() -> None:
    """An empty node id is not the same node as another empty one."""
    board = PoolBoard(nearest_first)
    replicas = [Replica(replica_id=name, address=f"{name}:1") for name in ("a", "b")]
    for replica in replicas:
        board.connect(replica.replica_id)
    board.report("a", Load(sessions=1))
    assert [replica.replica_id for replica in board.ranked(replicas)] == ["b", "a"]


@pytest.mark.parametrize("how", ["lose", "refuse", "leave", "drain"])
def test_a_replica_that_is_gone_or_going_is_never_ranked(how: str) -> None:
    """Until it is connected, or a member, again."""
    board = board_of(most_room_first, *IDS)
    replica = REPLICAS[0]
    getattr(board, how)(replica.replica_id)
    assert board.rank(replica) is None
    assert replica not in board.ranked(REPLICAS)
    board.connect(replica.replica_id)
    board.join(replica.replica_id)
    assert board.rank(replica) is not None


def test_a_replica_that_left_stays_so_when_its_stream_is_opened_again() -> None:
    """The control plane is going to stop it."""
    board = board_of(most_room_first, *IDS)
    board.leave(IDS[0])
    board.connect(IDS[0])
    assert board.standing(IDS[0]).is_draining


def test_a_refusal_holds_until_the_next_report_or_until_a_session_leaves() -> None:
    """It is told first-hand, so it outweighs what the report before it said."""
    board = board_of(most_room_first, *IDS[:2])
    pair = REPLICAS[:2]
    for end, arguments in (("report", (Load(),)), ("free", ())):
        board.report(IDS[1], Load(sessions=5))
        board.report(IDS[0], Load())
        assert board.ranked(pair)[0].replica_id == IDS[0]
        board.fill(IDS[0])
        assert board.ranked(pair)[0].replica_id == IDS[1]
        getattr(board, end)(IDS[0], *arguments)
        assert board.ranked(pair)[0].replica_id == IDS[0]


def test_a_replica_that_was_late_is_used_last_for_a_while() -> None:
    """It looks idle because its sessions leave: trusted again after some time, or with its next verdict."""
    now_s = 0.0
    board = PoolBoard(most_room_first, clock=lambda: now_s)
    pair = REPLICAS[:2]
    for replica_id in IDS[:2]:
        board.connect(replica_id)
    board.report(IDS[1], Load(sessions=5))
    board.suspect(IDS[0])
    board.report(IDS[0], Load())
    assert [replica.replica_id for replica in board.ranked(pair)] == [IDS[1], IDS[0]]
    assert board.has_room(IDS)
    assert not board.has_room(IDS[:1])
    now_s = SUSPICION_S
    assert board.ranked(pair)[0].replica_id == IDS[0]
    board.suspect(IDS[0])
    board.trust(IDS[0])
    assert board.ranked(pair)[0].replica_id == IDS[0]


def test_of_two_replicas_that_were_late_the_last_to_be_is_taken_last() -> None:
    """Whoever has just left it must not be sent back."""
    now_s = 0.0
    board = PoolBoard(most_room_first, clock=lambda: now_s)
    for last, first in ((0, 1), (1, 0)):
        now_s += 1.0
        for index in (first, last):
            board.connect(IDS[index])
            board.suspect(IDS[index])
            now_s += 1.0
        assert board.ranked(REPLICAS[:2])[-1].replica_id == IDS[last]


def test_orchestrators_on_different_nodes_break_ties_differently() -> None:
    """Else all of them would send their first session to the same replica: at least 3 of 9 are somebody's first."""
    firsts = set()
    for number in range(20):
        board = PoolBoard(most_room_first, node_id=f"elsewhere-{number}")
        for replica_id in IDS:
            board.connect(replica_id)
        firsts.add(board.ranked(REPLICAS)[0].replica_id)
    # With nine replicas, 20 uniform choices miss all but two of them with odds below 36 * (2/9)^20 < 1e-11.
    assert len(firsts) >= 3


def test_watchers_hear_of_every_change() -> None:
    """Whoever waits for a replica looks again then."""
    board, heard = board_of(), []
    board.watch(lambda: heard.append(board.standing(IDS[0]).link))
    board.connect(IDS[0])
    board.lose(IDS[0])
    board.forget(IDS[0])
    assert heard == [Link.CONNECTED, Link.LOST, Link.UNKNOWN]


def test_ranking_on_another_thread_never_meets_a_half_made_change() -> None:
    """Serve's router ranks on its own thread while reports come in: 2,000 rankings, none fails or repeats a replica."""
    board = board_of(most_room_first, *IDS)

    def rank() -> None:
        for _ in range(2000):
            ranked = board.ranked(REPLICAS)
            assert len({replica.replica_id for replica in ranked}) == len(ranked)

    with ThreadPoolExecutor(max_workers=1) as router:
        ranking = router.submit(rank)
        for number in itertools.count():
            board.place(IDS[number % len(IDS)], tokens=1)
            board.report(IDS[-1 - number % len(IDS)], Load(sessions=number % 7))
            board.forget(IDS[(number + 4) % len(IDS)])
            board.connect(IDS[(number + 4) % len(IDS)])
            if ranking.done():
                break
        ranking.result()
