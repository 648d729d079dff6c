"""Compiled passes over a counted suffix tree in flat arrays: a token comes in, a sequence goes, a draft is looked up.

The tree holds every substring ("window") of at most `max_depth` tokens of some sequences of tokens, and how often each
occurs: a node is a window, a child a window with one more token. A window that occurs once is a leaf, and its
continuation is read off the text; so a text that never repeats itself costs few nodes a token. A second occurrence
makes the leaf an inner node and gives each occurrence a child; eviction makes it a leaf again.

Invariants, between any two calls:

* `count` is the number of occurrences, `followed` (of inner nodes) the number of those with a token behind them in their
  sequence, which is the sum of the children's counts
* `link` is the node of the same window without its first token; it exists, for that window occurs at least as often
* `best` is the child with the highest count, among equals the one that occurred last
* `active[n]` is the inner node that the last n tokens of the open sequence have come to, for n up to `state.active`;
  the last tokens of any greater length stand for a window that occurs once

A position counts all tokens that ever came in, and one separator a closed sequence; `ring[position & mask]` is the token
there. Knows nothing of sessions, tenants or growing: there must be room. To be imported when needed: numba takes a while to load.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.compiled import compiled

Ints = NDArray[np.int32]
Records = Any  # an array of `NODE` or `STATE`
Index = Any  # an integer of numpy or of Python

NODE = np.dtype(
    [
        ("last", np.int64),  # where the latest occurrence begins
        ("parent", np.int32),
        ("token", np.int32),
        ("count", np.int32),  # 0: not in use
        ("followed", np.int32),
        ("best", np.int32),
        ("link", np.int32),
        ("first_child", np.int32),
        ("next", np.int32),  # sibling; of nodes not in use, the next such
        ("previous", np.int32),
    ],
    align=True,
)
STATE = np.dtype(
    [
        ("length", np.int64),  # the position of the next token
        ("first", np.int64),  # the position of the oldest token still held
        ("used", np.int32),  # nodes that were ever in use, the root among them
        ("free", np.int32),  # the first node that is no longer in use
        ("live", np.int32),  # nodes in use, the root among them
        ("active", np.int32),
    ],
    align=True,
)

ROOT = 0  # the empty window; as it is nobody's child or sibling, 0 also stands for "none"
NONE = 0
SEPARATOR = -1  # behind the last token of a sequence

_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_SLACK = 1.0 + 1e-12  # far above the rounding of a score, far below what would look at many drafts in vain


# ---- children -------------------------------------------------------------------------------------------------------


@compiled()
def _home(parent: Index, token: int, mask: int) -> Any:
    """Where in the table the search for a child begins."""
    word = (np.uint64(parent) * _FIRST_FACTOR) ^ (np.uint64(token) * _SECOND_FACTOR)
    word = (word ^ (word >> np.uint64(32))) * _FIRST_FACTOR
    return np.int64((word >> np.uint64(32)) & np.uint64(mask))


@compiled()
def _find(nodes: Records, table: Ints, parent: Index, token: int) -> Any:
    """The child, or `NONE`."""
    mask = table.size - 1
    slot = _home(parent, token, mask)
    while table[slot] != NONE:
        child = table[slot]
        if nodes[child].parent == parent and nodes[child].token == token:
            return np.int64(child)
        slot = (slot + 1) & mask
    return np.int64(NONE)


@compiled()
def _enter(nodes: Records, table: Ints, child: Index) -> None:
    mask = table.size - 1
    slot = _home(nodes[child].parent, nodes[child].token, mask)
    while table[slot] != NONE:
        slot = (slot + 1) & mask
    table[slot] = child


@compiled()
def _erase(nodes: Records, table: Ints, child: Index) -> None:
    """Take a node out of the table and close the gap, so that every other is found without a mark where it was."""
    mask = table.size - 1
    gap = _home(nodes[child].parent, nodes[child].token, mask)
    while table[gap] != child:
        gap = (gap + 1) & mask
    slot = (gap + 1) & mask
    while table[slot] != NONE:
        moved = table[slot]
        home = _home(nodes[moved].parent, nodes[moved].token, mask)
        if ((slot - home) & mask) >= ((slot - gap) & mask):
            table[gap] = moved
            gap = slot
        slot = (slot + 1) & mask
    table[gap] = NONE


@compiled()
def rehash(nodes: Records, table: Ints, state: Records) -> None:
    """Fill an empty table with all nodes."""
    for node in range(1, state[0].used):
        if nodes[node].count > 0:
            _enter(nodes, table, node)


@compiled()
def _add_leaf(nodes: Records, table: Ints, state: Records, parent: Index, token: int, start: int, link: Index) -> Any:
    """A new child for a window that occurs once, from `start` on."""
    child = np.int64(state[0].free)
    if child != NONE:
        state[0].free = nodes[child].next
    else:
        child = np.int64(state[0].used)
        state[0].used += 1
    state[0].live += 1
    node = nodes[child]
    node.last, node.parent, node.token, node.count, node.followed = start, parent, token, 1, 0
    node.best, node.link, node.first_child, node.previous = NONE, link, NONE, NONE
    node.next = nodes[parent].first_child
    if node.next != NONE:
        nodes[node.next].previous = child
    nodes[parent].first_child = child
    _enter(nodes, table, child)
    return child


@compiled()
def _remove(nodes: Records, table: Ints, state: Records, child: Index) -> None:
    """Take a node without children out of the tree; its parent's `best` is the caller's business."""
    _erase(nodes, table, child)
    node = nodes[child]
    if node.previous != NONE:
        nodes[node.previous].next = node.next
    else:
        nodes[node.parent].first_child = node.next
    if node.next != NONE:
        nodes[node.next].previous = node.previous
    node.count, node.next = 0, state[0].free
    state[0].free = child
    state[0].live -= 1


# ---- tokens come in -------------------------------------------------------------------------------------------------


@compiled()
def extend(
    nodes: Records, table: Ints, ring: Ints, state: Records, active: Ints, ids: Ints, first: int, max_depth: int
) -> Any:
    """Append `ids[first:]` to the open sequence as far as there are nodes; returns how many of `ids` are in."""
    for index in range(first, ids.size):
        if nodes.size - state[0].live < max_depth:  # a token adds at most one node for each length
            return index
        _append(nodes, table, ring, state, active, ids[index], max_depth)
    return ids.size


@compiled()
def _append(nodes: Records, table: Ints, ring: Ints, state: Records, active: Ints, token: int, max_depth: int) -> None:
    """Every window that the open sequence now ends with occurs once more, the shortest first."""
    ring[state[0].length & (ring.size - 1)] = token
    state[0].length += 1
    grown, parent, shorter = 0, np.int64(ROOT), np.int64(ROOT)
    for depth in range(1, min(state[0].active + 1, max_depth) + 1):
        start = state[0].length - depth
        child = _find(nodes, table, parent, token)
        if child == NONE:
            child = _add_leaf(nodes, table, state, parent, token, start, shorter)
        else:
            nodes[child].count += 1
            if nodes[child].count == 2 and depth < max_depth:
                _open_leaf(nodes, table, ring, state, child, depth, shorter)
            nodes[child].last = start
        nodes[parent].followed += 1
        best = nodes[parent].best
        if best == NONE or nodes[child].count >= nodes[best].count:
            nodes[parent].best = child
        parent, shorter = np.int64(active[depth]), child  # the next length's parent, before it is overwritten
        if nodes[child].count > 1 and depth < max_depth:
            active[depth], grown = child, depth
    state[0].active = grown


@compiled()
def _open_leaf(
    nodes: Records, table: Ints, ring: Ints, state: Records, leaf: Index, depth: int, shorter: Index
) -> None:
    """Give the occurrence that had the leaf for itself a child, if a token is behind it."""
    start = nodes[leaf].last
    token = ring[(start + depth) & (ring.size - 1)]
    if token == SEPARATOR:
        return
    link = _find(nodes, table, shorter, token)
    nodes[leaf].best = _add_leaf(nodes, table, state, leaf, token, start, link)
    nodes[leaf].followed = 1


@compiled()
def close_sequence(ring: Ints, state: Records) -> None:
    """The next token begins another sequence."""
    ring[state[0].length & (ring.size - 1)] = SEPARATOR
    state[0].length += 1
    state[0].active = 0


# ---- sequences go ---------------------------------------------------------------------------------------------------


@compiled()
def evict_oldest(nodes: Records, table: Ints, ring: Ints, state: Records, max_depth: int) -> Any:
    """Forget the oldest sequence, which must be closed; returns its number of tokens."""
    first = start = state[0].first
    while ring[start & (ring.size - 1)] != SEPARATOR:
        _forget(nodes, table, ring, state, start, max_depth)
        start += 1
    state[0].first = start + 1
    return start - first


@compiled()
def _forget(nodes: Records, table: Ints, ring: Ints, state: Records, start: int, max_depth: int) -> None:
    """Every window that begins at `start`, the oldest position, occurs once less."""
    parent = np.int64(ROOT)
    for depth in range(max_depth):
        token = ring[(start + depth) & (ring.size - 1)]
        if token == SEPARATOR:
            return
        child = _find(nodes, table, parent, token)
        nodes[parent].followed -= 1
        nodes[child].count -= 1
        count = nodes[child].count
        if count == 0:
            _remove(nodes, table, state, child)
        elif count == 1:
            _fold(nodes, table, state, child)
        if nodes[parent].best == child and parent != ROOT:
            nodes[parent].best = _best_child(nodes, parent)
        if count <= 1:
            return
        parent = child


@compiled()
def _fold(nodes: Records, table: Ints, state: Records, top: Index) -> None:
    """Make a node whose window now occurs once a leaf: all below it goes."""
    node = np.int64(top)
    while True:
        child = np.int64(nodes[node].first_child)
        if child != NONE:
            node = child
        elif node == top:
            break
        else:
            above = np.int64(nodes[node].parent)
            _remove(nodes, table, state, node)
            node = above
    nodes[top].best, nodes[top].followed = NONE, 0


@compiled()
def _best_child(nodes: Records, parent: Index) -> Any:
    best = child = np.int64(nodes[parent].first_child)
    while child != NONE:
        if nodes[child].count > nodes[best].count or (
            nodes[child].count == nodes[best].count and nodes[child].last > nodes[best].last
        ):
            best = child
        child = np.int64(nodes[child].next)
    return best


# ---- drafts are looked up -------------------------------------------------------------------------------------------

# A place in the tree is (node, depth, beyond): the node's depth, and how many tokens of a leaf's text come behind it.


@compiled()
def look_up(
    nodes: Records,
    table: Ints,
    ring: Ints,
    state: Records,
    context: Ints,
    found: Ints,
    max_depth: int,
    max_tokens: int,
    max_spec_factor: float,
    min_token_prob: float,
) -> Any:
    """The best draft behind `context`, written into `found`; returns its length, score and match length.

    `context` is at most `max_depth` - 1 tokens. Leaves the tree as it is. A score is compared with what the best draft
    of another match could have, so that most are never written.
    """
    node, depth, beyond = _match(nodes, table, ring, state, context)
    draft = np.empty(found.size, np.int32)
    best_length, best_score, best_match = 0, 0.0, 0
    for match_length in range(depth + beyond, 0, -1):
        room = min(max_tokens, int(max_spec_factor * match_length), max_depth - match_length)
        followed = nodes[node].followed if nodes[node].count > 1 else 1
        if room * (followed / (followed + 1.0)) * _SLACK > best_score:
            length, score = _follow(nodes, ring, state, node, depth + beyond, draft[:room], min_token_prob)
            if score > best_score:
                best_length, best_score, best_match = length, score, match_length
                found[:length] = draft[:length]
        node, depth, beyond = _drop_first(nodes, table, ring, node, depth, beyond)
    return best_length, best_score, best_match


@compiled()
def _match(nodes: Records, table: Ints, ring: Ints, state: Records, context: Ints) -> Any:
    """The place of the longest suffix of the context that occurs (Ukkonen's walk: links for what does not go on)."""
    node, depth, beyond = np.int64(ROOT), 0, 0
    for token in context:
        while True:
            if node == ROOT or nodes[node].count > 1:
                child = _find(nodes, table, node, token)
                if child != NONE:
                    node, depth = child, depth + 1
                    break
            else:
                position = nodes[node].last + depth + beyond
                if position < state[0].length and ring[position & (ring.size - 1)] == token:
                    beyond += 1
                    break
            if node == ROOT:
                break
            node, depth, beyond = _drop_first(nodes, table, ring, node, depth, beyond)
    return node, depth, beyond


@compiled()
def _drop_first(nodes: Records, table: Ints, ring: Ints, node: Index, depth: int, beyond: int) -> Any:
    """The place of the same tokens without the first."""
    position = nodes[node].last + depth
    shorter = np.int64(nodes[node].link)
    depth -= 1
    while beyond > 0 and (shorter == ROOT or nodes[shorter].count > 1):
        shorter = _find(nodes, table, shorter, ring[position & (ring.size - 1)])
        position, depth, beyond = position + 1, depth + 1, beyond - 1
    return shorter, depth, beyond


@compiled()
def _follow(
    nodes: Records, ring: Ints, state: Records, node: Index, match_length: int, draft: Ints, min_token_prob: float
) -> Any:
    """Write the most frequent way on from a match into `draft`; returns its length and score."""
    prob, score, unseen = 1.0, 0.0, 1  # one more occurrence, with another token behind it, counts at the match alone
    for length in range(draft.size):
        if nodes[node].count > 1:
            followed = nodes[node].followed
            node = np.int64(nodes[node].best)
            if node == NONE:
                return length, score
            token = nodes[node].token
            prob *= nodes[node].count / (followed + unseen)
        else:
            position = nodes[node].last + match_length + length
            if position >= state[0].length:
                return length, score
            token = ring[position & (ring.size - 1)]
            if token == SEPARATOR:
                return length, score
            prob *= 1.0 / (1 + unseen)
        if prob < min_token_prob:
            return length, score
        draft[length] = token
        score += prob
        unseen = 0
    return draft.size, score
