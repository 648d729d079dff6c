"""Model-free drafting: what a token costs to take in and a draft to look up, and the memory behind it.

    python -m benchmarks.lookup

One session of 10,000 tokens, told and asked token by token, in texts that repeat themselves in different ways; suffix
decoding beside the outputs of 200 earlier sessions of its tenant, 500 tokens each. Times are CPU time of one thread, so
that a busy machine blurs them less. A draft is looked up twice for each token: behind the committed tokens, and behind
four that are drafted already.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Protocol

from benchmarks.report import write_report
from paceline.bench.machine import machine
from paceline.lookup.ngram import NgramIndex
from paceline.lookup.suffix import SuffixCache, SuffixSession
from paceline.lookup.suffix_tree import prepare

HISTORY_TOKENS = 10_000
MEASURED_TOKENS = 2_000
EARLIER_SESSIONS, EARLIER_TOKENS = 200, 500
MAX_TOKENS = 16
TAIL_TOKENS = 4
VOCAB_SIZE = 49_152
LIMIT_US = 20.0


class Lookup(Protocol):
    """A way of drafting by lookup."""

    def extend(self, ids: Sequence[int], /) -> None: ...

    def propose(self, tail: Sequence[int], max_tokens: int, /) -> object: ...


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one call, in microseconds of CPU time."""

    median_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What one way of drafting costs in one kind of text."""

    method: str
    text: str
    update: Cost
    lookup: Cost
    lookup_behind_tail: Cost
    session_bytes_per_token: float | None
    shared_bytes_per_token: float | None


def new_tokens(draw: random.Random, length: int) -> list[int]:
    """Nothing ever comes twice, but by chance."""
    return [draw.randrange(VOCAB_SIZE) for _ in range(length)]


def frequent_tokens(draw: random.Random, length: int) -> list[int]:
    """As often as words are, without any order: a token's rank has a power law."""
    return [min(int(draw.paretovariate(0.7)), VOCAB_SIZE) - 1 for _ in range(length)]


def copied_passages(draw: random.Random, length: int) -> list[int]:
    """Passages of a page of 400 tokens, 10 to 50 at a time, as when a text is edited or quoted."""
    page, ids = new_tokens(random.Random(0), 400), list[int]()
    while len(ids) < length:
        start = draw.randrange(350)
        ids += page[start : start + draw.randint(10, 50)]
    return ids[:length]


def one_loop(draw: random.Random, length: int) -> list[int]:
    """Seven tokens, over and over."""
    loop = new_tokens(draw, 7)
    return [loop[position % 7] for position in range(length)]


TEXTS: dict[str, Callable[[random.Random, int], list[int]]] = {
    "new tokens": new_tokens,
    "frequent tokens": frequent_tokens,
    "copied passages": copied_passages,
    "one loop": one_loop,
}


def main() -> None:
    prepare()
    print(f"{machine()}; microseconds of CPU time, median (99th percentile)")
    print(f"{'method':8}{'text':18}{'update':>16}{'look-up':>16}{'behind a tail':>16}{'bytes a token':>16}")
    figures = []
    for text, write in TEXTS.items():
        figures += [measure_ngram(text, write), measure_suffix(text, write)]
        for found in figures[-2:]:
            show(found)
    slowest_us = max(
        cost.median_us for found in figures for cost in (found.update, found.lookup, found.lookup_behind_tail)
    )
    print(f"slowest median {slowest_us:.1f} us, limit {LIMIT_US:.0f} us")
    path = write_report(
        "lookup",
        {
            "history_tokens": HISTORY_TOKENS,
            "earlier_sessions": EARLIER_SESSIONS,
            "earlier_tokens": EARLIER_TOKENS,
            "max_tokens": MAX_TOKENS,
            "limit_us": LIMIT_US,
            "slowest_median_us": slowest_us,
            "figures": [asdict(found) for found in figures],
        },
    )
    print(f"written to {path}")


def measure_ngram(text: str, write: Callable[[random.Random, int], list[int]]) -> Figures:
    index = NgramIndex()
    update, lookup, behind_tail = time_calls(index, write)
    return Figures("ngram", text, update, lookup, behind_tail, None, None)


def measure_suffix(text: str, write: Callable[[random.Random, int], list[int]]) -> Figures:
    draw, cache = random.Random(1), SuffixCache()
    for _ in range(EARLIER_SESSIONS):
        earlier = cache.session("", prompt_length=0)
        earlier.extend(write(draw, EARLIER_TOKENS))
        earlier.close()
    session: SuffixSession = cache.session("", prompt_length=0)
    update, lookup, behind_tail = time_calls(session, write)
    return Figures(
        "suffix",
        text,
        update,
        lookup,
        behind_tail,
        session_bytes_per_token=session.held_bytes / len(session),
        shared_bytes_per_token=cache.held_bytes / cache.cached_tokens,
    )


def time_calls(lookup: Lookup, write: Callable[[random.Random, int], list[int]]) -> tuple[Cost, Cost, Cost]:
    """To take in a token, to look up a draft, and to do so behind a tail."""
    ids = write(random.Random(2), HISTORY_TOKENS + MEASURED_TOKENS + TAIL_TOKENS)
    lookup.extend(ids[:HISTORY_TOKENS])
    updates, lookups, behind_tails = list[int](), list[int](), list[int]()
    for position in range(HISTORY_TOKENS, HISTORY_TOKENS + MEASURED_TOKENS):
        token, tail = ids[position : position + 1], ids[position + 1 : position + 1 + TAIL_TOKENS]
        updates.append(time_ns(partial(lookup.extend, token)))
        lookups.append(time_ns(partial(lookup.propose, (), MAX_TOKENS)))
        behind_tails.append(time_ns(partial(lookup.propose, tail, MAX_TOKENS)))
    return cost_of(updates), cost_of(lookups), cost_of(behind_tails)


def time_ns(call: Callable[[], object]) -> int:
    started_ns = time.thread_time_ns()
    call()
    return time.thread_time_ns() - started_ns


def cost_of(times_ns: Sequence[int]) -> Cost:
    return Cost(statistics.median(times_ns) / 1e3, statistics.quantiles(times_ns, n=100)[-1] / 1e3)


def show(figures: Figures) -> None:
    costs = [
        f"{cost.median_us:.1f} ({cost.p99_us:.1f})"
        for cost in (figures.update, figures.lookup, figures.lookup_behind_tail)
    ]
    memory = [
        f"{held:.0f}" for held in (figures.session_bytes_per_token, figures.shared_bytes_per_token) if held is not None
    ]
    print(f"{figures.method:8}{figures.text:18}{''.join(f'{cost:>16}' for cost in costs)}{' / '.join(memory):>16}")


if __name__ == "__main__":
    main()
