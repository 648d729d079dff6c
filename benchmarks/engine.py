"""Throughput of the target's engine against transformers on a CPU, and what its steps cost.

All three engines run the same network in the same dtype on the same threads, decode greedily, ignore the end token, and
get all requests at once; only the tokens that were asked for count.

- ours: the target's scheduler and model in this process, a verdict on an empty draft for each token. It packs the linear
  layers' weights when it is loaded, which transformers does not; prompts go through in chunks of its token budget.
- padded: transformers' `generate` on batches padded to the longest prompt, each batch as long as its longest answer. An even
  load is one batch; of halves and quarters of a ragged one, sorted by the length of the answers (`--thorough`: also of all,
  eighths, and sorted by prompt), the quicker in a trial of each is used: an advantage that no server has, which must decide before it knows
  how long answers get.
- continuous: transformers' own continuous batching, kept running between repeats, its memory large enough for all
  requests, without the prefix sharing that these prompts cannot use, eight requests at a time (`--thorough`: or all, if
  that is quicker).

Prompts are random tokens, new ones in each repeat, so that no prefix cache helps anybody. The engines take turns within
a repeat; ratios are taken within a repeat, and their median is reported. A continuous batching that is slower than half
of padded in the first repeat is not repeated: it decides no ratio.

Beside that: the cost of verifying 1 to 16 tokens on one thread; what a step costs apart from its forward pass; how soon
the first token of a prompt comes whose beginning another session had; step times by sessions and tokens.
"""

from __future__ import annotations

import logging
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import matplotlib.pyplot as plt
import torch
import typer
from matplotlib.axes import Axes
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig, PreTrainedModel

from benchmarks.report import write_report
from paceline.bench.machine import machine
from paceline.engine.block_pool import BlockTable
from paceline.engine.checkpoint import DEFAULT_MODEL, load_network, resolve_checkpoint
from paceline.engine.interface import Extension
from paceline.engine.memory import HOST_STEP_TOKENS, MemoryLimits
from paceline.engine.model import CausalModel
from paceline.engine.precision import choose_dtype
from paceline.engine.torch_threads import use_threads
from paceline.sessions import Address, Close, Open, SessionTable
from paceline.types import SamplingParams, SessionSpec, VerdictRows, VerificationRule
from target_service.scheduler import Judge, Scheduler, TargetEvent
from target_service.verifier import DraftToJudge, TargetSession

FIGURE = Path(__file__).parent.parent / "docs" / "engine.svg"
COLOURS = {"ours": "#1f5fa8", "padded": "#e08a1e", "continuous": "#7a7a7a"}
NAMES = {"ours": "Paceline", "padded": "transformers, padded", "continuous": "transformers, continuous batching"}
SECTIONS = ("throughput", "continuous", "verify", "overhead", "prefix", "steps")

CONTEXT = 256  # tokens, behind which steps are measured
PREFIX_LENGTH, PROMPT_LENGTH = 1000, 1016  # tokens
MOST_VERIFIED = 16  # tokens
LONGEST_SESSION = 1200  # tokens, of anything measured here
NO_END = -1  # a token id that never comes
AT_ONCE = 8  # requests; a size that continuous batching is tried with, beside all of them

CandidateT = TypeVar("CandidateT")


# ---------------------------------------------------------------------------------------------------------------------
# Loads


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, and how many tokens its answer has."""

    prompt: tuple[int, ...]
    answer_length: int


@dataclass(frozen=True, slots=True)
class Load:
    """Lengths are spread evenly between two ends, so that any number of requests has the same mean."""

    name: str
    prompt_lengths: tuple[int, int]
    answer_lengths: tuple[int, int]

    def requests(self, count: int, *, vocab_size: int, repeat: int) -> list[Request]:
        """The same lengths in each repeat, in an order that has nothing to do with them; other tokens."""
        order, tokens = random.Random(count), random.Random(f"{self.name} {count} {repeat}")
        prompts, answers = (_spread(ends, count) for ends in (self.prompt_lengths, self.answer_lengths))
        order.shuffle(prompts)
        order.shuffle(answers)
        return [
            Request(tuple(tokens.choices(range(vocab_size), k=prompt_length)), answer_length)
            for prompt_length, answer_length in zip(prompts, answers, strict=True)
        ]

    def __str__(self) -> str:
        prompts, answers = (_ends(ends) for ends in (self.prompt_lengths, self.answer_lengths))
        return f"{self.name}: prompts of {prompts} tokens, answers of {answers}"


RAGGED = Load("ragged", (20, 600), (16, 256))
EVEN = Load("even", (64, 64), (64, 64))


def _spread(ends: tuple[int, int], count: int) -> list[int]:
    """The middles of `count` equal parts between the ends."""
    low, high = ends
    return [round(low + (high - low) * (index + 0.5) / count) for index in range(count)]


def _ends(ends: tuple[int, int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


# ---------------------------------------------------------------------------------------------------------------------
# Engines


class Engine(Protocol):
    """What is compared."""

    def answer(self, requests: Sequence[Request]) -> list[list[int]]:
        """The answers in order, each exactly as long as was asked for."""


class TargetEngine:
    """The target's scheduler over a model, driven as a service's model thread drives it."""

    def __init__(
        self, model: CausalModel, *, max_batch_tokens: int = HOST_STEP_TOKENS, max_sessions: int = 256
    ) -> None:
        self.model = model
        sessions = SessionTable[TargetSession[BlockTable]](
            max_sessions=max_sessions,
            idle_ttl_s=3600.0,
            pending_tokens_of=lambda session: session.pending_tokens,
            held_tokens=lambda: model.memory.held_tokens,
        )
        self.scheduler = Scheduler(model, sessions, max_batch_tokens=max_batch_tokens)
        self._opened = 0

    def answer(self, requests: Sequence[Request]) -> list[list[int]]:
        addresses = {self.open(request.prompt): number for number, request in enumerate(requests)}
        answers: list[list[int]] = [[] for _ in requests]
        while self.scheduler.has_work():
            for event in self.scheduler.step():
                number = addresses[event.address]
                request, answer = requests[number], answers[number]
                answer.append(token_of(event))
                if len(answer) == request.answer_length:
                    self.scheduler.accept(Close(event.address))
                else:
                    self.ask(event.address, len(request.prompt) + len(answer), answer[-1:])
        return answers

    def open(self, prompt: tuple[int, ...]) -> Address:
        """Open a session and ask for its first token."""
        self._opened += 1
        address = Address(0, str(self._opened), 1)
        spec = SessionSpec(
            session_id=address.session_id,
            prompt_length=len(prompt),
            sampling=SamplingParams(temperature=0.0),
            seed=1,
            rule=VerificationRule.GREEDY,
            vocab_size=self.model.vocab_size,
        )
        self._accept(Open(address, spec, prompt))
        self.ask(address, len(prompt))
        return address

    def ask(self, address: Address, base_length: int, committed_ids: Sequence[int] = ()) -> None:
        """Ask for the token behind the first `base_length`, of which `committed_ids` are the last."""
        draft = DraftToJudge(
            base_length=base_length, committed_ids=tuple(committed_ids), draft_ids=(), distributions=None
        )
        self._accept(Judge(address=address, draft=draft, arrived_s=time.monotonic(), deadline_s=None))

    def first_token_time_s(self, prompt: tuple[int, ...]) -> float:
        """From the opening of a session to its first token; then it is closed."""
        started_s = time.perf_counter()
        address = self.open(prompt)
        while not self.scheduler.step():
            pass
        time_s = time.perf_counter() - started_s
        self.scheduler.accept(Close(address))
        return time_s

    def _accept(self, command: Open | Judge) -> None:
        events = self.scheduler.accept(command)
        assert not events, events


def token_of(event: TargetEvent) -> int:
    """The one token that a verdict on an empty draft holds."""
    if not isinstance(event.outcome, VerdictRows):
        raise event.outcome
    return event.outcome.rows[0].token_id


@dataclass(frozen=True, slots=True)
class Batching:
    """How requests are put into batches: by falling length of their answers or prompts, so many at a time."""

    batch_size: int
    by: str  # "answer" or "prompt"

    def batches(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """The numbers of the requests in each batch."""

        def length(number: int) -> int:
            request = requests[number]
            return request.answer_length if self.by == "answer" else len(request.prompt)

        numbers = sorted(range(len(requests)), key=length, reverse=True)
        for start in range(0, len(numbers), self.batch_size):
            yield numbers[start : start + self.batch_size]

    def __str__(self) -> str:
        return f"{self.batch_size} by {self.by}"


def batchings(load: Load, count: int, *, is_thorough: bool) -> list[Batching]:
    """The ways worth a trial."""
    is_even = load.prompt_lengths[0] == load.prompt_lengths[1] and load.answer_lengths[0] == load.answer_lengths[1]
    if not is_thorough:
        parts = (1,) if is_even else (2, 4)
        return [Batching(size, "answer") for size in sorted({max(1, count // part) for part in parts})]
    sizes = sorted({max(1, count // part) for part in (1, 2, 4, 8)}, reverse=True)
    orders = ("answer",) if is_even else ("answer", "prompt")
    # All requests in one batch are in no order.
    return [Batching(size, by) for size, by in product(sizes, orders) if size < count or by == orders[0]]


class PaddedGenerate:
    """transformers' `generate` on padded batches."""

    def __init__(self, network: PreTrainedModel) -> None:
        """Take over the network: its end token is forgotten, which is cheaper than forbidding it in each step."""
        self.network = network
        self.batching = Batching(1, "answer")
        if network.generation_config is not None:
            network.generation_config.eos_token_id = None

    def answer(self, requests: Sequence[Request]) -> list[list[int]]:
        answers: dict[int, list[int]] = {}
        for numbers in self.batching.batches(requests):
            batch = [requests[number] for number in numbers]
            for number, request, tokens in zip(numbers, batch, self._generate(batch), strict=True):
                answers[number] = tokens[: request.answer_length]
        return [answers[number] for number in range(len(requests))]

    @torch.inference_mode()
    def _generate(self, batch: Sequence[Request]) -> list[list[int]]:
        width = max(len(request.prompt) for request in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        network: Any = self.network
        output = network.generate(
            input_ids=ids.to(network.device),
            attention_mask=mask.to(network.device),
            do_sample=False,
            max_new_tokens=max(request.answer_length for request in batch),
            pad_token_id=0,
        )
        tokens: list[list[int]] = output[:, width:].tolist()
        return tokens


class ContinuousBatching:
    """transformers' own continuous batching, kept running until it is closed.

    Its attention on a CPU scores each row against the tokens of all requests in the step, so it can pay to take only
    some requests at a time.
    """

    PAGE_SIZE = 32  # tokens; 32 to 256, and steps of 64 to 1,024 tokens, make little difference
    STEP_TOKENS = 256

    def __init__(self, network: PreTrainedModel, *, most_requests: int) -> None:
        """Take over the network, for at most so many requests of any load here."""
        logging.getLogger("transformers.generation.continuous_batching").setLevel(logging.ERROR)
        self._network: Any = network
        self._most_requests = most_requests
        self._manager: Any = None
        self.start(most_requests)

    def start(self, at_once: int) -> None:
        """Start (again), so that at most `at_once` requests run at a time."""
        self.close()
        config: Any = ContinuousBatchingConfig(
            page_size=self.PAGE_SIZE,
            num_blocks=self._most_requests * -(-LONGEST_SESSION // self.PAGE_SIZE),
            max_batch_tokens=self.STEP_TOKENS,
            max_requests_per_batch=at_once,
            allow_block_sharing=False,
        )
        generation = GenerationConfig(do_sample=False, eos_token_id=NO_END, max_new_tokens=1)  # type: ignore[no-untyped-call]
        with torch.inference_mode():
            self._manager = self._network.init_continuous_batching(generation, continuous_batching_config=config)
            self._manager.start()
        self.answer([Request((1, 2, 3), 2)])

    def answer(self, requests: Sequence[Request]) -> list[list[int]]:
        ids = [
            self._manager.add_request(list(request.prompt), max_new_tokens=request.answer_length, eos_token_id=NO_END)
            for request in requests
        ]
        answers: dict[str, list[int]] = {}
        while len(answers) < len(requests):
            result = self._manager.get_result(timeout=1.0)
            if result is not None and result.is_finished():
                answers[result.request_id] = list(result.generated_tokens)
            elif result is None and not self._manager.is_running():
                raise RuntimeError("transformers' continuous batching has stopped by itself")
        return [answers[request_id] for request_id in ids]

    def close(self) -> None:
        if self._manager is not None:
            self._manager.stop(block=True)


# ---------------------------------------------------------------------------------------------------------------------
# Throughput


@dataclass(slots=True)
class Comparison:
    """Tokens a second of each engine, by repeat, under one load."""

    load: str
    sessions: int
    batching: str  # of the padded engine
    at_once: int = 0  # requests that continuous batching takes at a time
    speeds: dict[str, list[float]] = field(default_factory=dict)

    def median(self, engine: str) -> float | None:
        return statistics.median(self.speeds[engine]) if engine in self.speeds else None

    def ratio(self, peers: Sequence[str]) -> float:
        """Of ours to the better of the peers, the median of the repeats."""
        ratios = []
        for repeat, ours in enumerate(self.speeds["ours"]):
            of_peers = [self.speeds[peer][repeat] for peer in peers if repeat < len(self.speeds.get(peer, ()))]
            ratios.append(ours / max(of_peers))
        return statistics.median(ratios)


def speed(engine: Engine, requests: Sequence[Request]) -> float:
    """Tokens a second, of those that were asked for."""
    started_s = time.perf_counter()
    answers = engine.answer(requests)
    seconds = time.perf_counter() - started_s
    assert [len(answer) for answer in answers] == [request.answer_length for request in requests]
    return sum(map(len, answers)) / seconds


def quickest(candidates: Sequence[CandidateT], tried: Callable[[CandidateT], float]) -> CandidateT:
    """The candidate with the highest speed in a trial, if there is more than one."""
    return max(candidates, key=tried) if len(candidates) > 1 else candidates[0]


def compare(
    load: Load,
    count: int,
    *,
    ours: TargetEngine,
    padded: PaddedGenerate,
    continuous: ContinuousBatching | None,
    repeats: int,
    is_thorough: bool,
    say: Callable[[str], None],
) -> Comparison:
    """Choose how the peers batch, then let the engines take turns."""
    vocab_size = ours.model.vocab_size
    trial = load.requests(count, vocab_size=vocab_size, repeat=-1)

    def try_padded(batching: Batching) -> float:
        say(f"{load.name}, {count} sessions: padded in batches of {batching}")
        padded.batching = batching
        return speed(padded, trial)

    def try_continuous(at_once: int) -> float:
        assert continuous is not None
        say(f"{load.name}, {count} sessions: continuous batching of {at_once}")
        continuous.start(at_once)
        return speed(continuous, trial)

    padded.batching = quickest(batchings(load, count, is_thorough=is_thorough), try_padded)
    comparison = Comparison(load.name, count, str(padded.batching))
    if continuous is not None:
        few, most = min(count, AT_ONCE), count
        comparison.at_once = quickest(sorted({few, most} if is_thorough else {few}), try_continuous)
        continuous.start(comparison.at_once)
    engines: dict[str, Engine] = {"ours": ours, "padded": padded}
    if continuous is not None:
        engines["continuous"] = continuous
    for repeat in range(repeats):
        requests = load.requests(count, vocab_size=vocab_size, repeat=repeat)
        for name, engine in engines.items():
            say(f"{load.name}, {count} sessions, repeat {repeat + 1} of {repeats}: {NAMES[name]}")
            comparison.speeds.setdefault(name, []).append(speed(engine, requests))
        if comparison.speeds.get("continuous", [0.0])[0] < comparison.speeds["padded"][0] / 2:
            engines.pop("continuous", None)
    return comparison


# ---------------------------------------------------------------------------------------------------------------------
# Steps


@contextmanager
def on_threads(threads: int) -> Iterator[None]:
    previous = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def filled_cache(model: CausalModel, length: int, *, seed: int) -> BlockTable:
    """A cache that holds `length` random tokens."""
    cache, tokens = model.new_cache(), random.Random(seed)
    while cache.length < length:
        count = min(HOST_STEP_TOKENS, length - cache.length)
        model.step([Extension(cache, tokens.choices(range(model.vocab_size), k=count), 0)])
    return cache


def median_times_s(jobs: dict[Any, Callable[[], float]], *, rounds: int) -> dict[Any, float]:
    """The median of what each job says that it took; the jobs take turns, in another order each round."""
    order, times_s = list(jobs), {key: list[float]() for key in jobs}
    shuffle = random.Random(0).shuffle
    for number in range(rounds + 1):
        shuffle(order)
        for key in order:
            time_s = jobs[key]()
            if number:  # the first round warms up
                times_s[key].append(time_s)
    return {key: statistics.median(values) for key, values in times_s.items()}


def step_job(model: CausalModel, caches: Sequence[BlockTable], count: int) -> Callable[[], float]:
    """Feed each session `count` tokens with all their rows, say how long that took, and forget them."""
    lengths = [cache.length for cache in caches]
    extensions = [Extension(cache, list(range(1, count + 1)), count) for cache in caches]

    def run() -> float:
        started_s = time.perf_counter()
        model.step(extensions)
        time_s = time.perf_counter() - started_s
        for cache, length in zip(caches, lengths, strict=True):
            model.truncate(cache, length)
        return time_s

    return run


def verify_times_s(model: CausalModel, *, rounds: int = 60) -> dict[int, float]:
    """t_v(n): seconds of a step that feeds n tokens of one session and gives all their rows, on one thread."""
    cache = filled_cache(model, CONTEXT, seed=1)
    jobs = {count: step_job(model, [cache], count) for count in range(1, MOST_VERIFIED + 1)}
    with on_threads(1):
        times_s = median_times_s(jobs, rounds=rounds)
    model.release(cache)
    return times_s


def step_times_s(
    model: CausalModel, sessions: Sequence[int], counts: Sequence[int], *, rounds: int = 10
) -> dict[tuple[int, int], float]:
    """Seconds of a step by (sessions, tokens of each session)."""
    caches = [filled_cache(model, CONTEXT, seed=number) for number in range(max(sessions))]
    jobs = {(some, count): step_job(model, caches[:some], count) for some, count in product(sessions, counts)}
    times_s = median_times_s(jobs, rounds=rounds)
    for cache in caches:
        model.release(cache)
    return times_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Medians of a step that gives one session one token behind `CONTEXT` others."""

    step_s: float  # of the scheduler
    forward_s: float  # of that, in the network
    overhead_share: float  # of the step, outside the network
    plain_forward_s: float  # transformers' network with its own cache and attention
    step_to_plain_forward: float


def step_cost(engine: TargetEngine, network: PreTrainedModel, plain: PreTrainedModel, *, rounds: int = 150) -> StepCost:
    """`network` is the one that the engine runs, `plain` the same network as transformers runs it."""
    context = tuple(random.Random(0).choices(range(engine.model.vocab_size), k=CONTEXT))
    address = engine.open(context)
    while not engine.scheduler.step():
        pass
    forward_s: list[float] = []
    handles = _timed(network, forward_s)

    def step() -> float:
        engine.ask(address, CONTEXT)  # again: its last token is fed once more
        started_s = time.perf_counter()
        events = engine.scheduler.step()
        time_s = time.perf_counter() - started_s
        assert events
        return time_s

    steps_s: list[float] = []
    plain_s: list[float] = []
    plain_forward = _plain_forward(plain, context)
    for number in range(rounds + 10):
        step_s, plain_step_s = step(), plain_forward()
        if number >= 10:  # the first ones warm up
            steps_s.append(step_s)
            plain_s.append(plain_step_s)
    for handle in handles:
        handle.remove()
    engine.scheduler.accept(Close(address))
    forward_s = forward_s[-rounds:]
    return StepCost(
        step_s=statistics.median(steps_s),
        forward_s=statistics.median(forward_s),
        overhead_share=statistics.median(1 - inner / outer for inner, outer in zip(forward_s, steps_s, strict=True)),
        plain_forward_s=statistics.median(plain_s),
        step_to_plain_forward=statistics.median(ours / other for ours, other in zip(steps_s, plain_s, strict=True)),
    )


def _timed(network: PreTrainedModel, times_s: list[float]) -> list[Any]:
    """Append to `times_s` how long each forward pass takes, until the handles that this returns are removed."""
    started_s = 0.0

    def before(*_: object) -> None:
        nonlocal started_s
        started_s = time.perf_counter()

    def after(*_: object) -> None:
        times_s.append(time.perf_counter() - started_s)

    return [network.register_forward_pre_hook(before), network.register_forward_hook(after)]


def _plain_forward(network: PreTrainedModel, context: Sequence[int]) -> Callable[[], float]:
    """One token behind all but the last of the context, through transformers' own cache."""
    source: Any = network
    cache = DynamicCache(config=network.config)
    with torch.inference_mode():
        source(input_ids=torch.tensor([context[:-1]]), cache=cache, use_cache=True, logits_to_keep=1)
    last = torch.tensor([context[-1:]])

    @torch.inference_mode()
    def run() -> float:
        started_s = time.perf_counter()
        source(input_ids=last, cache=cache, use_cache=True, logits_to_keep=1)
        time_s = time.perf_counter() - started_s
        cache.crop(-1)
        return time_s

    return run


def first_token_times_s(engine: TargetEngine, *, rounds: int = 5) -> list[tuple[float, float]]:
    """Of a prompt that nobody had before, and of one that begins like it, for some prompts."""
    times_s = []
    for number in range(rounds):
        tokens = random.Random(f"prefix {number}").choices(range(engine.model.vocab_size), k=2 * PROMPT_LENGTH)
        prefix, rest = tokens[:PREFIX_LENGTH], tokens[PREFIX_LENGTH:]
        length = PROMPT_LENGTH - PREFIX_LENGTH
        cold_s = engine.first_token_time_s((*prefix, *rest[:length]))
        times_s.append((cold_s, engine.first_token_time_s((*prefix, *rest[length : 2 * length]))))
    return times_s


# ---------------------------------------------------------------------------------------------------------------------
# Report


@dataclass(frozen=True, slots=True)
class Check:
    """A figure that has a limit."""

    what: str
    value: float
    limit: float
    is_most: bool  # whether the limit is the most it may be, or the least

    @property
    def passes(self) -> bool:
        return self.value <= self.limit if self.is_most else self.value >= self.limit

    def __str__(self) -> str:
        colour, sign = "green" if self.passes else "red", "≤" if self.is_most else "≥"
        return f"[{colour}]{self.value:.2f}[/] ({sign} {self.limit:.2f})"


def check_of(comparison: Comparison) -> Check:
    """Ragged loads are compared with the better peer, even ones with padded batches."""
    what = f"{comparison.load}, {comparison.sessions} sessions"
    if comparison.load == EVEN.name:
        return Check(what, comparison.ratio(["padded"]), 0.95, is_most=False)
    limit = 1.3 if comparison.sessions >= 16 else 1.0
    return Check(what, comparison.ratio(["padded", "continuous"]), limit, is_most=False)


def throughput_table(load: Load, comparisons: Sequence[Comparison]) -> Table:
    table = Table(title=f"Tokens a second, {load}")
    for column in ("sessions", *NAMES, "batches of", "/ padded", "/ better", "limit"):
        table.add_column(column, justify="right")
    for comparison in comparisons:
        medians = (comparison.median(engine) for engine in NAMES)
        table.add_row(
            str(comparison.sessions),
            *("" if value is None else f"{value:.1f}" for value in medians),
            comparison.batching,
            f"{comparison.ratio(['padded']):.2f}",
            f"{comparison.ratio(['padded', 'continuous']):.2f}",
            str(check_of(comparison)),
        )
    return table


def verify_table(times_s: dict[int, float], check: Check) -> Table:
    table = Table(title=f"n tokens behind {CONTEXT}, one thread", caption=f"t_v(8) / t_v(1): {check}")
    for column in ("n", "t_v(n), ms", "t_v(n) / t_v(1)"):
        table.add_column(column, justify="right")
    for count, time_s in times_s.items():
        table.add_row(str(count), f"{time_s * 1e3:.2f}", f"{time_s / times_s[1]:.2f}")
    return table


def step_table(times_s: dict[tuple[int, int], float]) -> Table:
    table = Table(title=f"Milliseconds of a step, sessions of {CONTEXT} tokens")
    table.add_column("sessions", justify="right")
    counts = sorted({count for _, count in times_s})
    for count in counts:
        table.add_column(f"{count} tokens each" if count > 1 else "1 token each", justify="right")
    for some in sorted({some for some, _ in times_s}):
        table.add_row(str(some), *(f"{times_s[some, count] * 1e3:.1f}" for count in counts))
    return table


def draw(comparisons: Sequence[Comparison], loads: Iterable[Load], *, caption: str) -> None:
    """Tokens a second by sessions, a panel for each load."""
    shown = [(load, [each for each in comparisons if each.load == load.name]) for load in loads]
    figure, panels = plt.subplots(
        1, len(shown), figsize=(5.6 * len(shown), 4.6), layout="constrained", sharey=False, squeeze=False
    )
    for axes, (load, of_load) in zip(panels[0], shown, strict=True):
        _draw_load(axes, load, of_load)
    panels[0][0].set_ylabel("tokens a second")
    panels[0][0].legend(frameon=False, fontsize=9, loc="upper left")
    figure.supxlabel(f"sessions\n{caption}", fontsize=9)
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE)
    figure.savefig(FIGURE.with_suffix(".png"), dpi=110)
    plt.close(figure)


def _draw_load(axes: Axes, load: Load, comparisons: Sequence[Comparison]) -> None:
    places = range(len(comparisons))
    width = 0.27
    for offset, (engine, name) in enumerate(NAMES.items(), start=-1):
        heights = [comparison.median(engine) or 0.0 for comparison in comparisons]
        bars = axes.bar(
            [place + offset * width for place in places], heights, width * 0.94, color=COLOURS[engine], label=name
        )
        axes.bar_label(bars, [f"{height:.0f}" if height else "" for height in heights], padding=2, fontsize=8)
    axes.set_title(str(load), loc="left", fontsize=10)
    axes.set_xticks(list(places), [str(comparison.sessions) for comparison in comparisons])
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.12)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


# ---------------------------------------------------------------------------------------------------------------------
# The whole


@dataclass(slots=True)
class Bench:
    """The engines, and what is found out about them on the way."""

    ours: TargetEngine
    network: PreTrainedModel  # that ours runs
    padded: PaddedGenerate
    continuous: ContinuousBatching | None
    say: Callable[[str], None]
    print: Callable[[object], None]
    checks: list[Check] = field(default_factory=list)
    body: dict[str, object] = field(default_factory=dict)

    def warm_up(self) -> None:
        """No measurement pays for first use."""
        self.say("first use")
        self.ours.model.warm_up()
        for engine in (self.ours, self.padded, self.continuous):
            if engine is not None:
                engine.answer([Request(tuple(range(length)), 2) for length in (40, 80)])

    def throughput(
        self, loads: Sequence[Load], sessions: Sequence[int], *, repeats: int, is_thorough: bool
    ) -> list[Comparison]:
        found: list[Comparison] = []
        for load in loads:
            of_load = [
                compare(
                    load,
                    count,
                    ours=self.ours,
                    padded=self.padded,
                    continuous=self.continuous,
                    repeats=repeats,
                    is_thorough=is_thorough,
                    say=self.say,
                )
                for count in sessions
            ]
            self.print(throughput_table(load, of_load))
            self.checks += map(check_of, of_load)
            found += of_load
        self.body["throughput"] = [asdict(comparison) for comparison in found]
        return found

    def verify(self) -> None:
        self.say("cost of verifying")
        times_s = verify_times_s(self.ours.model)
        check = Check("verifying 8 tokens / 1 token", times_s[8] / times_s[1], 1.35, is_most=True)
        self.print(verify_table(times_s, check))
        self.checks.append(check)
        self.body["verify_s"] = times_s

    def overhead(self) -> None:
        self.say("overhead of a step")
        cost = step_cost(self.ours, self.network, self.padded.network)
        check = Check("share of a step outside the network", cost.overhead_share, 0.10, is_most=True)
        self.print(
            f"One session, one token behind {CONTEXT}: a step takes {cost.step_s * 1e3:.2f} ms, {cost.forward_s * 1e3:.2f} "
            f"of it in the network; outside is a share of {check}. transformers' own forward takes "
            f"{cost.plain_forward_s * 1e3:.2f} ms, and our step {cost.step_to_plain_forward:.2f} of that."
        )
        self.checks.append(check)
        self.body["step_cost"] = asdict(cost)

    def prefix(self) -> None:
        self.say("first tokens")
        times_s = first_token_times_s(self.ours)
        cold_s, warm_s = (statistics.median(times) for times in zip(*times_s, strict=True))
        ratio = statistics.median(warm / cold for cold, warm in times_s)
        check = Check("first token behind a shared prefix / without", ratio, 0.25, is_most=True)
        self.print(
            f"First token of a prompt of {PROMPT_LENGTH:,}: {cold_s * 1e3:.0f} ms, and {warm_s * 1e3:.0f} ms where the first "
            f"{PREFIX_LENGTH:,} are shared: {check}."
        )
        self.checks.append(check)
        self.body["first_token_s"] = times_s

    def steps(self, sessions: Sequence[int]) -> None:
        self.say("times of steps")
        times_s = step_times_s(self.ours.model, sessions, (1, 2, 4, 8))
        self.print(step_table(times_s))
        self.body["steps"] = [
            {"sessions": some, "tokens_each": count, "seconds": seconds} for (some, count), seconds in times_s.items()
        ]


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Say on the terminal what is being measured; it leaves no trace."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("")
        yield lambda description: bar.update(task, description=description)


def chosen(names: str, allowed: Sequence[str], option: str) -> set[str]:
    """The names in a comma-separated list."""
    found = {name.strip() for name in names.split(",") if name.strip()}
    if unknown := sorted(found - set(allowed)):
        raise typer.BadParameter(f"{', '.join(unknown)} is none of {', '.join(allowed)}", param_hint=option)
    return found


def main(
    model: Annotated[str, typer.Option(help="What the engines run: as for `paceline serve`.")] = DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="Of weights and activations.")] = "bfloat16",
    threads: Annotated[int, typer.Option(help="For arithmetic; 0: one for each core.")] = 0,
    sessions: Annotated[str, typer.Option(help="How many at a time, comma-separated.")] = "1,4,16,32",
    load: Annotated[str, typer.Option(help="ragged, even, or both, comma-separated.")] = "ragged,even",
    repeats: Annotated[int, typer.Option(min=1, help="Of each throughput.")] = 3,
    thorough: Annotated[
        bool, typer.Option(help="Try more ways of batching for the peers; takes most of an hour.")
    ] = False,
    skip: Annotated[str, typer.Option(help=f"Of {', '.join(SECTIONS)}, comma-separated.")] = "",
) -> None:
    """Measure, print the tables, draw `docs/engine.svg`, and keep the figures under benchmarks/results/."""
    counts = [int(count) for count in sessions.split(",")]
    names, skipped = chosen(load, [RAGGED.name, EVEN.name], "--load"), chosen(skip, SECTIONS, "--skip")
    loads = [each for each in (RAGGED, EVEN) if each.name in names]
    circumstances = f"{model}, {dtype}, {use_threads(threads)} threads; {machine()}"
    console = Console()
    with progress() as say:
        say(f"loading {model}")
        checkpoint, torch_dtype = resolve_checkpoint(model), choose_dtype(dtype, torch.device("cpu"))
        network, for_padded = (load_network(checkpoint, dtype=torch_dtype) for _ in range(2))
        limits = MemoryLimits(kv_budget_tokens=(max(counts) + 2) * LONGEST_SESSION)
        continuous = None
        if not skipped & {"throughput", "continuous"}:
            for_continuous = load_network(checkpoint, dtype=torch_dtype)
            continuous = ContinuousBatching(for_continuous, most_requests=max(counts))
        bench = Bench(
            TargetEngine(CausalModel(network, model_id=model, limits=limits)),
            network,
            PaddedGenerate(for_padded),
            continuous,
            say,
            console.print,
        )
        bench.warm_up()
        console.print(circumstances)
        comparisons = (
            [] if "throughput" in skipped else bench.throughput(loads, counts, repeats=repeats, is_thorough=thorough)
        )
        if continuous is not None:
            continuous.close()
        for name, section in (("verify", bench.verify), ("overhead", bench.overhead), ("prefix", bench.prefix)):
            if name not in skipped:
                section()
        if "steps" not in skipped:
            bench.steps(counts)
    if comparisons:
        draw(comparisons, loads, caption=circumstances)
    failed = [check.what for check in bench.checks if not check.passes]
    console.print(f"{len(bench.checks) - len(failed)} of {len(bench.checks)} figures are within their limits")
    checks = [{**asdict(check), "passes": check.passes} for check in bench.checks]
    write_report(
        "engine", {"model": model, "dtype": dtype, "threads": torch.get_num_threads(), "checks": checks, **bench.body}
    )


if __name__ == "__main__":
    typer.run(main)
