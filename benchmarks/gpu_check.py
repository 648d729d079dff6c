"""Self-check of the GPU path, for one GPU and about a minute: attention, greedy tokens, step times, synchronisations.

    python -m benchmarks.gpu_check

Prints a line for each check and exits with 0 if all pass, with 1 if one fails, and with 2 where there is no GPU. Needs
no files and no network: the networks are random ones, made here.

- attention: the fused kernel against attention by matrix products, on the same ragged batch and paged memory, for both
  half-precision dtypes, head sizes of 64 and 128, grouped heads, and a sliding window; for each block size, those that
  the kernel refuses are named. The engine's own block size must be among those that work.
- tokens: greedy answers through the target's scheduler against transformers' `generate`. In float32 they are the same;
  in half precision each token must be transformers' own choice, or as good as tied with it.
- synchronisations: how often a step of the scheduler waits for the device, as far as torch notices; once is the limit.
- step times, by sessions, of a network of about a billion weights, without and with CUDA graphs; for information.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.engine import PaddedGenerate, Request, TargetEngine
from paceline.engine.attention import Attention, FusedAttention, RaggedAttention, Scoring
from paceline.engine.batch import RaggedBatch, pack
from paceline.engine.interface import Extension
from paceline.engine.kv_memory import KVMemory, LayerShape
from paceline.engine.memory import GPU_STEP_TOKENS, MemoryLimits
from paceline.engine.model import CausalModel
from paceline.errors import PacelineError
from paceline.sessions import Close

BLOCK_SIZES = (16, 32, 64, 128, 256)
USUAL_BLOCK_SIZE = MemoryLimits().block_size
HALF_DTYPES = (torch.bfloat16, torch.float16)
LIMIT_SYNCHRONISATIONS = 1  # a step
SESSIONS = (1, 4, 16, 64, 256)

# Sessions of the attention batch: tokens cached, tokens fed. Prompts, chunks, drafts and single tokens, some at the
# border of a block.
SESSION_LENGTHS = ((0, 40), (300, 1), (17, 5), (511, 9), (255, 1), (256, 1), (600, 128), (0, 1))
ATTENTION_TOLERANCE = 0.02  # relative; both sides round to 8 bits at the least, and sum in different orders
TIE_TOLERANCE = 0.05  # of the spread of a row's scores


@dataclass(slots=True)
class Report:
    """Prints a line for each check, and remembers whether all have passed."""

    print: Callable[[str], None]
    failed: list[str] = field(default_factory=list)

    def check(self, what: str, passes: bool, found: str) -> None:
        self.print(f"{'[green]pass[/]' if passes else '[red]FAIL[/]'}  {what}: {escape(found)}")
        if not passes:
            self.failed.append(what)

    def note(self, what: str, found: str) -> None:
        self.print(f"[dim]note[/]  {what}: {escape(found)}")


# ---------------------------------------------------------------------------------------------------------------------
# Attention


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One shape of attention."""

    dtype: torch.dtype
    head_dim: int
    heads: int
    kv_heads: int
    sliding_window: int | None
    block_size: int

    def __str__(self) -> str:
        dtype, window = str(self.dtype).removeprefix("torch."), self.sliding_window
        return (
            f"{dtype}, {self.heads}/{self.kv_heads} heads of {self.head_dim}, "
            f"{f'window of {window}' if window else 'no window'}, blocks of {self.block_size}"
        )


@dataclass(frozen=True, slots=True)
class _Table:
    """A session's place in paged memory."""

    length: int
    blocks: Sequence[int]


AttentionMaker = Callable[[KVMemory, RaggedBatch, Tensor], Attention]


def attention_cases(block_size: int) -> Iterator[AttentionCase]:
    for dtype, head_dim, (heads, kv_heads), window in product(
        HALF_DTYPES, (64, 128), ((8, 8), (8, 2), (9, 3)), (None, 100)
    ):
        yield AttentionCase(dtype, head_dim, heads, kv_heads, window, block_size)


class Refused(Exception):
    """The kernel does not take the case."""


def attention_difference(
    case: AttentionCase,
    device: torch.device,
    attention: AttentionMaker,
    reference: AttentionMaker = RaggedAttention,
    *,
    short: int = 0,
) -> float:
    """How far two ways of attention differ on the same batch, relative to the reference: the worst row.

    `attention` gets the batch packed with `short`, `reference` with 0 (`batch.pack`). Memory is filled with random keys
    and values, those of other sessions included, and blocks lie in a random order. Raises `Refused`.
    """
    generator = torch.Generator().manual_seed(0)
    tables, num_blocks = _tables(case.block_size, generator)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, case.dtype)

    rows = sum(fed for _, fed in SESSION_LENGTHS)
    stored = [random(num_blocks * case.block_size, case.kv_heads, case.head_dim) for _ in range(2)]
    states = [random(rows, heads, case.head_dim) for heads in (case.heads, case.kv_heads, case.kv_heads)]
    scoring = Scoring(case.head_dim**-0.5, case.sliding_window, None)
    extensions = [Extension(table, range(fed), fed) for table, (_, fed) in zip(tables, SESSION_LENGTHS, strict=True)]

    def attend(make: AttentionMaker, most_short: int) -> Tensor:
        """In the order of the extensions."""
        memory = KVMemory(
            [LayerShape(case.kv_heads, case.head_dim, case.head_dim)],
            num_blocks=num_blocks,
            block_size=case.block_size,
            dtype=case.dtype,
            device=device,
        )
        for place, values in zip((memory.keys[0], memory.values[0]), stored, strict=True):
            place[: len(values)] = values
        batch = pack(extensions, tables, block_size=case.block_size, short=most_short)
        # All rows are wanted, so `logit_rows` says where each extension's rows lie in the batch.
        places = batch.logit_rows.to(device)
        query, key, value = (torch.empty_like(each).index_copy_(0, places, each) for each in states)
        attended = make(memory, batch, batch.slots.to(device)).attend(0, query, key, value, scoring)
        return attended[places].float()

    expected = attend(reference, 0)
    try:
        got = attend(attention, short)
    except (RuntimeError, ValueError) as error:
        raise Refused(str(error).strip().partition("\n")[0]) from error
    errors = (got - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    return float(errors.max())


def _tables(block_size: int, generator: torch.Generator) -> tuple[list[_Table], int]:
    """Blocks for all sessions, in a random order, with some left over; and how many there are."""
    counts = [-(-(cached + fed) // block_size) for cached, fed in SESSION_LENGTHS]
    num_blocks = sum(counts) + 3
    free = iter(torch.randperm(num_blocks, generator=generator).tolist())
    tables = [
        _Table(cached, [next(free) for _ in range(count)])
        for (cached, _), count in zip(SESSION_LENGTHS, counts, strict=True)
    ]
    return tables, num_blocks


def check_attention(report: Report, device: torch.device) -> list[int]:
    """The block sizes that the fused kernel takes, and gets right."""
    working = []
    for block_size in BLOCK_SIZES:
        worst, where, refusal = 0.0, "", ""
        for case in attention_cases(block_size):
            try:
                difference = attention_difference(case, device, FusedAttention.of_batch)
            except Refused as error:
                refusal = f"refused ({case}): {error}"
                break
            if not difference <= worst:  # not a number counts as worst
                worst, where = difference, str(case)
        if refusal:
            report.note(f"fused attention, blocks of {block_size}", refusal)
            continue
        is_right = worst <= ATTENTION_TOLERANCE
        report.check(f"fused attention, blocks of {block_size}", is_right, f"differs by {worst:.4f} at most ({where})")
        if is_right:
            working.append(block_size)
    report.check(
        f"fused attention takes the engine's blocks of {USUAL_BLOCK_SIZE}",
        USUAL_BLOCK_SIZE in working,
        f"block sizes that work: {', '.join(map(str, working)) or 'none'}",
    )
    return working


# ---------------------------------------------------------------------------------------------------------------------
# Tokens


def random_network(
    device: torch.device, dtype: torch.dtype, *, hidden: int, layers: int, vocab_size: int, head_dim: int = 64
) -> PreTrainedModel:
    """A Llama with random weights, the same at each call, made on the device."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // head_dim,
        num_key_value_heads=max(1, hidden // head_dim // 4),
        head_dim=head_dim,
        max_position_embeddings=2048,
        initializer_range=2.0 * hidden**-0.5,  # wide enough that greedy output wanders
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]), device:
        torch.manual_seed(1)
        network: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype
        )
    network.train(False)
    return network


def small_requests(vocab_size: int) -> list[Request]:
    """Prompts and answers of different lengths, some longer than a step's tokens or just at a block's border."""
    lengths = ((1, 30), (15, 20), (16, 16), (100, 24), (257, 16), (400, 12))
    return [
        Request(tuple((7919 * n + 31 * length) % vocab_size for n in range(length)), answer_length)
        for length, answer_length in lengths
    ]


@torch.inference_mode()
def worst_gap(network: PreTrainedModel, request: Request, answer: Sequence[int]) -> float:
    """How far the worst token of an answer is from the network's own choice there, in spreads of the row's scores."""
    source: Any = network
    ids = torch.tensor([[*request.prompt, *answer]], device=network.device)
    rows = source(input_ids=ids, use_cache=False).logits[0, len(request.prompt) - 1 : -1].float()
    taken = rows.gather(1, torch.tensor(answer, device=network.device)[:, None])[:, 0]
    return float(((rows.amax(1) - taken) / rows.std(1)).max())


def check_tokens(report: Report, plain: PreTrainedModel, *, block_size: int) -> None:
    """Greedy answers of sessions that run together, against transformers one by one; with CUDA graphs too, if any."""
    what = f"greedy tokens, {str(plain.dtype).removeprefix('torch.')}, blocks of {block_size}"
    try:
        limits = MemoryLimits(kv_budget_tokens=8192, block_size=block_size)
        model = CausalModel(copy.deepcopy(plain), model_id="random", limits=limits)
    except (PacelineError, RuntimeError) as error:
        report.check(what, False, f"the model cannot be served: {error}")
        return
    _check_answers(report, what, plain, model)
    if model.capture_graphs(len(small_requests(model.vocab_size))):
        _check_answers(report, f"{what}, CUDA graphs", plain, model)


def _check_answers(report: Report, what: str, plain: PreTrainedModel, model: CausalModel) -> None:
    requests = small_requests(model.vocab_size)
    answers = TargetEngine(model).answer(requests)
    peer = PaddedGenerate(plain)
    expected = [answer for request in requests for answer in peer.answer([request])]
    same = sum(answer == other for answer, other in zip(answers, expected, strict=True))
    gap = max(worst_gap(plain, request, answer) for request, answer in zip(requests, answers, strict=True))
    passes = same == len(requests) if plain.dtype is torch.float32 else gap <= TIE_TOLERANCE
    report.check(what, passes, f"{same} of {len(requests)} answers as generate() gives them, worst gap {gap:.4f}")
    held = model.memory.held_tokens
    report.check(f"{what}: memory is free again", held == 0, f"{held} tokens held")


# ---------------------------------------------------------------------------------------------------------------------
# Steps


def count_synchronisations(
    run: Callable[[], object], *, set_mode: Callable[[str], None] = torch.cuda.set_sync_debug_mode
) -> list[str]:
    """Where `run` waits for the device, a "file:line" each time, as torch warns of it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_mode("warn")
        try:
            run()
        finally:
            set_mode("default")
    return [f"{each.filename}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)]


@contextmanager
def running_sessions(engine: TargetEngine, count: int, *, prompt_length: int) -> Iterator[Callable[[], None]]:
    """So many sessions whose prompts were read; calling what this gives asks all of them for their next token again."""
    vocab_size = engine.model.vocab_size
    addresses = [
        engine.open(tuple((31 * number + 7 * n + 1) % vocab_size for n in range(prompt_length)))
        for number in range(count)
    ]
    while engine.scheduler.has_work():
        engine.scheduler.step()

    def ask() -> None:
        for address in addresses:
            engine.ask(address, prompt_length)

    yield ask
    for address in addresses:
        engine.scheduler.accept(Close(address))


def check_synchronisations(report: Report, engine: TargetEngine, how: str, *, sessions: int = 8) -> None:
    with running_sessions(engine, sessions, prompt_length=64) as ask:
        for _ in range(3):  # what is only done at first is not a step's
            ask()
            engine.scheduler.step()
        ask()
        found = count_synchronisations(engine.scheduler.step)
    places = ", ".join(f"{place} ({found.count(place)} times)" for place in sorted(set(found)))
    report.check(
        f"synchronisations in a step of {sessions} sessions, {how}",
        len(found) <= LIMIT_SYNCHRONISATIONS,
        f"{len(found)}, of which {LIMIT_SYNCHRONISATIONS} is allowed{f': {places}' if found else ''}",
    )


def step_times_s(engine: TargetEngine, count: int, *, prompt_length: int = 256, rounds: int = 20) -> list[float]:
    """Of steps that give each of so many sessions one token, from start to verdicts."""
    times_s = []
    with running_sessions(engine, count, prompt_length=prompt_length) as ask:
        for _ in range(rounds):
            ask()
            started_s = time.perf_counter()
            engine.scheduler.step()
            times_s.append(time.perf_counter() - started_s)
    return times_s


def report_step_times(report: Report, engine: TargetEngine, how: str) -> None:
    for count in SESSIONS:
        time_s = statistics.median(step_times_s(engine, count)[5:])
        found = f"{time_s * 1e3:.2f} ms a step, {count / time_s:,.0f} tokens/s"
        report.note(f"{count} sessions of 256 tokens, {how}", found)


# ---------------------------------------------------------------------------------------------------------------------
# The whole


def check_all(report: Report, device: torch.device) -> None:
    check_tokens(report, small_network(device, torch.float32), block_size=USUAL_BLOCK_SIZE)
    working = check_attention(report, device)
    if not working:
        report.check("half precision", False, "not tried: no block size works")
        return
    block_size = USUAL_BLOCK_SIZE if USUAL_BLOCK_SIZE in working else working[0]
    for dtype in HALF_DTYPES:
        check_tokens(report, small_network(device, dtype), block_size=block_size)
    network = random_network(device, torch.bfloat16, hidden=2048, layers=16, vocab_size=32_768, head_dim=128)
    limits = MemoryLimits(kv_budget_tokens=max(SESSIONS) * 512, block_size=block_size)
    model = CausalModel(network, model_id="random", limits=limits)
    engine = TargetEngine(model, max_batch_tokens=GPU_STEP_TOKENS)
    check_synchronisations(report, engine, "launched one by one")
    report_step_times(report, engine, "launched one by one")
    has_graphs = model.capture_graphs(max(SESSIONS))
    report.check("CUDA graphs", has_graphs, "captured" if has_graphs else "could not be captured, or differ")
    if has_graphs:
        check_synchronisations(report, engine, "CUDA graphs")
        report_step_times(report, engine, "CUDA graphs")


def small_network(device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """For answers that are compared."""
    return random_network(device, dtype, hidden=256, layers=4, vocab_size=1024)


def main() -> None:
    """Run all checks on the first GPU."""
    if not torch.cuda.is_available():
        print("There is no GPU that torch can use here, so the GPU path cannot be checked.", file=sys.stderr)
        raise typer.Exit(2)
    console = Console(soft_wrap=True, highlight=False)
    started_s = time.perf_counter()
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    report = Report(console.print)
    check_all(report, torch.device("cuda"))
    seconds = time.perf_counter() - started_s
    console.print(f"{'All checks passed' if not report.failed else f'{len(report.failed)} failed'} in {seconds:.0f} s")
    raise typer.Exit(1 if report.failed else 0)


if __name__ == "__main__":
    typer.run(main)
