"""The forward pass: caches, rows, chunks, refusals and noise, on tiny models in float32."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from paceline.engine.attention import RaggedAttention
from paceline.engine.batch import RaggedBatch
from paceline.engine.block_pool import BlockTable
from paceline.engine.checkpoint import load_network, resolve_checkpoint
from paceline.engine.interface import Extension
from paceline.engine.memory import MemoryLimits
from paceline.engine.model import CausalModel, hashed_noise
from paceline.errors import MemoryFull, ModelUnavailable, StartupFailed
from tests.checkpoints import (
    FAMILIES,
    SLIDING_WINDOW,
    TINY_VOCAB_SIZE,
    save_markov_checkpoint,
    save_tiny_checkpoint,
)

ROUNDING = 5e-5  # float32, logits of standard deviation 3: some tens of roundings
IDS = [(37 * n + 11) % TINY_VOCAB_SIZE for n in range(60)]


def load_tiny(folder: Path, *, seed: int = 1, family: str = "llama", **options: Any) -> CausalModel:
    save_tiny_checkpoint(folder / "model", seed=seed, family=family)
    return CausalModel.load(str(folder / "model"), dtype="float32", device="cpu", **options)


def logits_of(model: CausalModel, cache: BlockTable, ids: Sequence[int], rows: int | None = None) -> Tensor:
    (logits,) = model.step([Extension(cache, ids, len(ids) if rows is None else rows)])
    return logits


def _fed(model: CausalModel, ids: Sequence[int]) -> BlockTable:
    cache = model.new_cache()
    logits_of(model, cache, ids, 0)
    return cache


def greedy(model: CausalModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    cache, unfed, output = model.new_cache(), list(prompt), list[int]()
    while len(output) < max_tokens:
        unfed = [int(logits_of(model, cache, unfed, 1)[0].argmax())]
        output += unfed
    return output


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0.0, atol=ROUNDING)


def assert_same_rows(got: Tensor, expected: Tensor) -> None:
    assert_close(got, expected)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads, and lose much where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny(tmp_path: Path) -> CausalModel:
    return load_tiny(tmp_path)


# The cache changes nothing


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_blocks_equal_one_pass_without_cache(family: str, tmp_path: Path) -> None:
    """Prompt, single tokens, rollbacks and blocks give the rows that one whole pass with a mask of ones gives."""
    model = load_tiny(tmp_path, family=family)
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ids = torch.tensor([IDS])
    with torch.inference_mode():
        expected = network(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]

    assert len(IDS) > 3 * SLIDING_WINDOW, "the windows of the families that have one must matter"
    cache, parts = model.new_cache(), []
    for end, wrong in [(20, 9), (21, 1), (22, 0), (23, 4), (31, 12), (60, 0)]:
        start = cache.length
        parts.append(logits_of(model, cache, IDS[start:end]))
        if wrong:  # tokens that are fed and then taken back
            logits_of(model, cache, [5] * wrong, 0)
            model.truncate(cache, end)
    assert_same_rows(torch.cat(parts), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_block_equals_single_steps(family: str, tmp_path: Path) -> None:
    """A block's rows are those of its tokens fed one by one."""
    model = load_tiny(tmp_path, family=family)
    block, single = model.new_cache(), model.new_cache()
    logits_of(model, block, IDS[:30], 0)
    logits_of(model, single, IDS[:30], 0)
    singles = torch.cat([logits_of(model, single, [token_id]) for token_id in IDS[30:39]])
    assert_same_rows(logits_of(model, block, IDS[30:39]), singles)


def test_truncated_cache_equals_a_fresh_one_at_every_length(tiny: CausalModel) -> None:
    """Rollback leaves no trace: whatever was cached behind the length, the next rows are a fresh session's."""
    for length in (0, 1, 7, 19, 20):
        used, fresh = tiny.new_cache(), tiny.new_cache()
        logits_of(tiny, used, IDS[:20], 0)
        tiny.truncate(used, length)
        assert used.length == length
        if length:
            logits_of(tiny, fresh, IDS[:length], 0)
        assert_same_rows(logits_of(tiny, used, IDS[40:45]), logits_of(tiny, fresh, IDS[40:45]))


def test_random_walk_of_drafts_and_rollbacks_equals_a_fresh_session(tiny: CausalModel) -> None:
    """200 rounds of feeding up to 9 tokens and keeping some; then one row equals that of the kept tokens alone."""
    rng = random.Random(7)
    cache, kept = tiny.new_cache(), list[int]()
    for _ in range(200):
        draft = [rng.randrange(TINY_VOCAB_SIZE) for _ in range(rng.randint(1, 9))]
        logits_of(tiny, cache, draft, rng.randint(0, len(draft)))
        kept += draft[: rng.randint(0, len(draft))]
        del kept[400:]
        tiny.truncate(cache, len(kept))
        assert cache.length == len(kept)
    assert len(kept) > 300, "the walk must outgrow several buffers"
    assert_same_rows(logits_of(tiny, cache, [3], 1), logits_of(tiny, tiny.new_cache(), [*kept, 3], 1))


@pytest.mark.parametrize("length", [-1, 4])
def test_truncating_outside_the_cache_is_our_own_mistake(tiny: CausalModel, length: int) -> None:
    """A length below 0 or above the cached length is asserted away, never clipped."""
    cache = tiny.new_cache()
    logits_of(tiny, cache, IDS[:3], 0)
    with pytest.raises(AssertionError, match="truncate"):
        tiny.truncate(cache, length)


# Steps


def test_rows_are_the_last_ones_asked_for(tiny: CausalModel) -> None:
    """`rows` of the fed tokens, counted from the end; 0 rows ingest all the same."""
    everything = logits_of(tiny, tiny.new_cache(), IDS[:9])
    for rows in (0, 1, 4, 9):
        cache = tiny.new_cache()
        logits = logits_of(tiny, cache, IDS[:9], rows)
        assert logits.shape == (rows, TINY_VOCAB_SIZE)
        assert logits.dtype is torch.float32
        assert cache.length == 9
        assert_close(logits, everything[9 - rows :])


@pytest.mark.parametrize("family", FAMILIES)
def test_session_gets_the_same_rows_alone_and_in_company(family: str, tmp_path: Path) -> None:
    """The other sessions of a step, and their order, do not matter: prompts, blocks and single tokens side by side."""
    model = load_tiny(tmp_path, family=family)
    lengths = [0, 1, 7, 15, 16, 17, 40]
    counts = [30, 1, 4, 17, 1, 9, 16]

    def work(number: int) -> Extension[BlockTable]:
        cache = model.new_cache()
        if lengths[number]:
            logits_of(model, cache, IDS[number : number + lengths[number]], 0)
        return Extension(cache, IDS[number : number + counts[number]], min(3, counts[number]))

    numbers = range(len(lengths))
    alone = [model.step([work(number)])[0] for number in numbers]
    together = model.step([work(number) for number in numbers])
    backwards = model.step([work(number) for number in reversed(numbers)])[::-1]
    for one, two, three in zip(alone, together, backwards, strict=True):
        assert_same_rows(two, one)
        assert_same_rows(three, one)


def test_sessions_that_share_blocks_get_the_rows_of_their_own(tiny: CausalModel) -> None:
    """A prefix that another session computed gives the same rows, and what one of them writes the other never sees."""
    first, second, third = (tiny.new_cache() for _ in range(3))
    logits_of(tiny, first, IDS[:40], 0)
    tiny.share_prefix(first, IDS[:40])
    assert tiny.reuse_prefix(second, IDS[:32]) == 32
    assert tiny.reuse_prefix(third, IDS[:40]) == 32
    tiny.truncate(second, 20)  # within a shared block: what is written there now must be a copy
    apart = logits_of(tiny, second, IDS[40:50])
    assert_same_rows(logits_of(tiny, third, IDS[32:40]), logits_of(tiny, _fed(tiny, IDS[:32]), IDS[32:40]))
    assert_same_rows(apart, logits_of(tiny, _fed(tiny, IDS[:20]), IDS[40:50]))
    assert_same_rows(logits_of(tiny, first, [3]), logits_of(tiny, _fed(tiny, IDS[:40]), [3]))


@pytest.mark.parametrize("family", FAMILIES)
def test_forks_of_forks_get_the_rows_of_their_own(family: str, tmp_path: Path) -> None:
    """Eight sequences with one beginning, stepped together: each has the rows that its tokens have alone.

    They part at the end, within a block and at its border. Six of them, their ancestor too, write into one block that
    they share in the same step, and some of them once more after a rollback into it.
    """
    model = load_tiny(tmp_path, family=family)
    root = (_fed(model, IDS[:37]), IDS[:37])

    def fork(parent: tuple[BlockTable, list[int]], length: int) -> tuple[BlockTable, list[int]]:
        return model.fork(parent[0], length), parent[1][:length]

    forks = [fork(root, length) for length in (37, 37, 36, 32, 20)]
    lines = [root, *forks, fork(forks[0], 36), fork(forks[3], 31)]
    held_tokens = model.memory.held_tokens
    for cut, count in ((0, 3), (2, 4), (0, 1)):
        for number, (cache, ids) in enumerate(lines):
            length = cache.length - cut * (number % 2)
            model.truncate(cache, length)
            ids[length:] = [(101 * number + 7 * n) % TINY_VOCAB_SIZE for n in range(length, length + count)]
        got = model.step([Extension(cache, ids[cache.length :], count) for cache, ids in lines])
        model.memory.check()
        for rows, (cache, ids) in zip(got, lines, strict=True):
            assert cache.length == len(ids)
            assert_same_rows(rows, logits_of(model, alone := model.new_cache(), ids, count))
            model.release(alone)
    assert held_tokens == 3 * model.memory.block_size


def test_forks_cost_no_memory_until_they_are_fed_and_count_it_then(tmp_path: Path) -> None:
    """A memory of four blocks, three of them full: two forks fit, and room for a copy is asked for like any other."""
    model = load_tiny(tmp_path, limits=MemoryLimits(kv_budget_tokens=64))
    root = _fed(model, IDS[:40])
    first, second = model.fork(root, 40), model.fork(root, 40)
    assert (model.memory.held_tokens, model.memory.free_tokens) == (48, 16)
    assert model.reserve(first, 41)
    assert not model.reserve(second, 41)
    with pytest.raises(MemoryFull):
        model.step([Extension(first, [1], 1), Extension(second, [2], 1)])
    model.release(root)
    model.step([Extension(first, [1], 1), Extension(second, [2], 1)])
    assert (first.length, second.length) == (41, 41)


def test_forking_outside_the_cache_is_our_own_mistake(tiny: CausalModel) -> None:
    """There is nothing to share behind the last token."""
    with pytest.raises(AssertionError, match="fork"):
        tiny.fork(_fed(tiny, IDS[:3]), 4)


def test_prefixes_are_not_shared_when_told_so(tmp_path: Path) -> None:
    """Nothing is found, whatever was computed."""
    model = load_tiny(tmp_path, shares_prefixes=False)
    model.share_prefix(_fed(model, IDS[:40]), IDS[:40])
    assert model.reuse_prefix(model.new_cache(), IDS[:40]) == 0


def test_full_memory_is_a_typed_error_and_changes_nothing(tmp_path: Path) -> None:
    """Whoever plans steps asks for room first; a step without room says so, and leaves all caches as they were."""
    model = load_tiny(tmp_path, limits=MemoryLimits(kv_budget_tokens=64))
    assert (model.max_context, model.memory.capacity_tokens) == (64, 64)
    first, second = _fed(model, IDS[:40]), model.new_cache()
    assert not model.reserve(second, 25)
    with pytest.raises(MemoryFull):
        model.step([Extension(first, [1], 1), Extension(second, IDS[:20], 1)])
    assert (first.length, second.length) == (40, 0)
    model.release(first)
    assert logits_of(model, second, IDS[:20]).shape == (20, TINY_VOCAB_SIZE)


@pytest.mark.parametrize(
    ("ids", "rows"), [([], 0), ([1], 2), ([1], -1), ([TINY_VOCAB_SIZE], 1), ([-1], 1), ([1] * 510, 1)]
)
def test_impossible_extension_is_our_own_mistake_and_undoes_the_step(
    tiny: CausalModel, ids: list[int], rows: int
) -> None:
    """Servicers check first; should one slip through, no cache of the batch keeps a part of the step."""
    first, second = tiny.new_cache(), tiny.new_cache()
    logits_of(tiny, first, IDS[:5], 0)
    logits_of(tiny, second, IDS[:3], 0)
    with pytest.raises(AssertionError):
        tiny.step([Extension(first, [1, 2], 1), Extension(second, ids, rows)])
    assert (first.length, second.length) == (5, 3)


def test_failure_inside_the_network_undoes_the_step(tiny: CausalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory in mid-step leaves no cache longer, and the next step writes over what was left behind."""
    cache = tiny.new_cache()
    expected = logits_of(tiny, cache, IDS[:6])
    tiny.truncate(cache, 5)
    write = tiny._kv_memory.write

    def fail(layer: int, *tensors: Tensor) -> None:
        write(layer, *tensors)
        if layer == 1:
            raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(tiny._kv_memory, "write", fail)
        with pytest.raises(torch.OutOfMemoryError):
            logits_of(tiny, cache, [9, 9])
    assert cache.length == 5
    assert_same_rows(logits_of(tiny, cache, IDS[5:6]), expected[5:])


def test_failure_on_the_way_to_the_host_undoes_the_step(tiny: CausalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a device's errors show, long after its work was handed to it; each session of the step is then tried alone."""
    caches = [tiny.new_cache(), tiny.new_cache()]
    batch = [Extension(cache, IDS[:4], 1) for cache in caches]

    class Lost:
        def cpu(self) -> Tensor:
            raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(tiny, "_forward", lambda _: Lost())
        with pytest.raises(torch.OutOfMemoryError):
            tiny.step(batch)
    assert [cache.length for cache in caches] == [0, 0]
    (alone,) = tiny.step(batch[:1])
    assert_same_rows(alone, logits_of(tiny, tiny.new_cache(), IDS[:4])[-1:])


class RefusingKernel:
    """Attention that raises at its first step, as a kernel does that does not take a model's shapes."""

    def __init__(self, *_: object) -> None:
        raise ValueError("no kernel for blocks of 16")


def test_kernel_that_refuses_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention goes on without it: no memory is held, and a noisy drafter is as noisy as it was to be."""
    folder = save_tiny_checkpoint(tmp_path / "model", seed=1)
    plain = CausalModel.load(str(folder), dtype="float32", device="cpu", logit_noise=1.0)
    monkeypatch.setattr("paceline.engine.model._choose_attention", lambda *_: (RefusingKernel, 0))
    model = CausalModel.load(str(folder), dtype="float32", device="cpu", logit_noise=1.0)
    assert model.memory.held_tokens == 0
    model.memory.check()
    assert_same_rows(logits_of(model, model.new_cache(), IDS), logits_of(plain, plain.new_cache(), IDS))


class ReplayingSteps:
    """In place of captured graphs: takes single tokens, and computes them as the model does, or wrongly."""

    is_wrong = False

    def __init__(self, run: Any, **_: object) -> None:
        self.taken: list[int] = []

    def prepare(self, max_sessions: int) -> list[int]:
        return [1, 2]

    def takes(self, batch: RaggedBatch) -> bool:
        return len(batch.ids) == len(batch.order)

    def logits(self, batch: RaggedBatch) -> Tensor:
        self.taken.append(len(batch.order))
        return self.rows[len(batch.order)] + (1.0 if self.is_wrong and len(batch.order) == 2 else 0.0)

    rows: ClassVar[dict[int, Tensor]] = {}


@pytest.mark.parametrize("is_wrong", [False, True])
def test_graphs_are_used_where_each_gives_the_rows_of_a_plain_step(
    tiny: CausalModel, monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    """With a fused kernel each size is captured and compared; one that differs, and none is used. Simulated: what a graph
    would compute is known beforehand."""
    for sessions in (1, 2):
        caches = [tiny.new_cache() for _ in range(sessions)]
        rows = tiny.step([Extension(cache, [number], 1) for number, cache in enumerate(caches, start=1)])
        ReplayingSteps.rows[sessions] = torch.cat(rows)
        for cache in caches:
            tiny.release(cache)
    held = tiny.memory.held_tokens
    monkeypatch.setattr(tiny, "_attention", partial(RaggedAttention))  # any but the plain one
    monkeypatch.setattr("paceline.engine.model.GraphedSteps", ReplayingSteps)
    monkeypatch.setattr(ReplayingSteps, "is_wrong", is_wrong)
    monkeypatch.setattr(tiny, "_graphs", None)  # put back at the end
    assert tiny.capture_graphs(2) is not is_wrong
    assert (tiny._graphs is None) is is_wrong
    assert tiny.memory.held_tokens == held


def test_without_a_fused_kernel_no_graph_is_captured(tiny: CausalModel) -> None:
    """As on every processor."""
    assert not tiny.capture_graphs(2)


def test_one_cache_twice_in_a_batch_is_our_own_mistake(tiny: CausalModel) -> None:
    """A batched engine could not say which comes first."""
    cache = tiny.new_cache()
    with pytest.raises(AssertionError, match="twice"):
        tiny.step([Extension(cache, [1], 1), Extension(cache, [2], 1)])


def test_warm_up_leaves_the_model_as_it_was(tiny: CausalModel) -> None:
    """It works on a cache of its own."""
    before = greedy(tiny, IDS[:5], 10)
    tiny.warm_up()
    assert greedy(tiny, IDS[:5], 10) == before


def test_greedy_output_equals_generate(tmp_path: Path) -> None:
    """Token for token what transformers' own `generate()` gives, for two seeds that differ from each other."""
    outputs = []
    for seed in (1, 2):
        model = load_tiny(tmp_path / str(seed), seed=seed)
        network = AutoModelForCausalLM.from_pretrained(tmp_path / str(seed) / "model", dtype=torch.float32)
        outputs.append(greedy(model, IDS[:5], 60))
        assert outputs[-1] == generated(network, IDS[:5], 60)
        assert len(set(outputs[-1])) > 10, "constant output would prove nothing"
    assert outputs[0] != outputs[1]


# What a model says of itself


def test_attributes_describe_the_model(tmp_path: Path) -> None:
    """Name, sizes and format, as the services report them."""
    model = load_tiny(tmp_path)
    assert model.model_id == str(tmp_path / "model")
    assert (model.vocab_size, model.max_context, model.dtype) == (TINY_VOCAB_SIZE, 512, torch.float32)
    assert len(model.tokenizer_sha256) == 64
    assert model.eos_token_ids == ()


def test_padded_vocabulary_shows_in_its_size_alone(tmp_path: Path) -> None:
    """The output layer counts, whatever the tokenizer knows."""
    folder = save_tiny_checkpoint(tmp_path / "model", seed=1, vocab_size=TINY_VOCAB_SIZE + 32)
    model = CausalModel.load(str(folder), dtype="float32")
    assert model.vocab_size == TINY_VOCAB_SIZE + 32
    assert logits_of(model, model.new_cache(), [TINY_VOCAB_SIZE + 31]).shape == (1, TINY_VOCAB_SIZE + 32)


@pytest.mark.parametrize(
    ("generation", "in_config", "expected"),
    [
        ({"eos_token_id": [7, 9]}, 3, (7, 9)),
        ({"eos_token_id": 7}, 3, (7,)),
        ({}, 3, (3,)),
        ({}, [3, 4], (3, 4)),
        ({}, None, ()),
        ({"eos_token_id": [7, TINY_VOCAB_SIZE]}, 3, (7,)),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(
    tmp_path: Path, generation: dict[str, Any], in_config: int | list[int] | None, expected: tuple[int, ...]
) -> None:
    """One or several, with the model's own configuration as the fallback; ids the model lacks are left out."""
    folder = save_tiny_checkpoint(tmp_path / "model", seed=1)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    edit_config(folder, eos_token_id=in_config)
    assert CausalModel.load(str(folder), dtype="float32").eos_token_ids == expected


def test_longrope_model_ends_where_its_frequencies_change(tmp_path: Path) -> None:
    """Beyond its original length all keys would have to be computed again, the cached ones included."""
    folder = save_tiny_checkpoint(tmp_path / "model", seed=1)
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 8.0}
    edit_config(folder, rope_parameters={**rope, **factors})
    assert CausalModel.load(str(folder), dtype="float32").max_context == 64


def test_load_honours_the_dtype(tmp_path: Path) -> None:
    """The logits come in the format that was asked for."""
    folder = save_tiny_checkpoint(tmp_path / "model", seed=1)
    model = CausalModel.load(str(folder), dtype="bfloat16", device="cpu")
    assert model.dtype is torch.bfloat16
    assert logits_of(model, model.new_cache(), [1]).dtype is torch.bfloat16


# What is refused


def no_cache_tensors() -> PreTrainedModel:
    return OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=9, n_embd=8, n_layer=1, n_head=1))


def both_sides() -> PreTrainedModel:
    return BertLMHeadModel(
        BertConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )


def recurrent() -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, state_size=2))


def encoder_decoder() -> PreTrainedModel:
    return T5ForConditionalGeneration(T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=1))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (no_cache_tensors, "openai-gpt.*attention"),
        (both_sides, "bert.*both sides"),
        (recurrent, "mamba.*rolled back"),
        (encoder_decoder, "t5.*encoder-decoder"),
    ],
)
def test_model_that_cannot_be_served_is_refused_by_name(tmp_path: Path, build: Any, reason: str) -> None:
    """Encoders, encoder-decoders, recurrent states and families without a cache stop at load, not in mid-answer."""
    build().save_pretrained(tmp_path / "model")
    with pytest.raises(ModelUnavailable, match=reason) as raised:
        CausalModel.load(str(tmp_path / "model"), dtype="float32")
    assert "choose" in raised.value.message


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    """transformers would fill them with random numbers and go on."""
    folder = save_tiny_checkpoint(tmp_path / "model", seed=1)
    edit_config(folder, num_hidden_layers=3, layer_types=None)
    with pytest.raises(ModelUnavailable, match=r"lacks weights .*model\.layers\.2"):
        CausalModel.load(str(folder), dtype="float32")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("not json", "config"),
        ("{}", "model_type"),
        ('{"model_type": "from-the-future"}', "from-the-future"),
        ('{"model_type": "vit"}', "causal|AutoModelForCausalLM"),
        ('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}', "code"),
    ],
)
def test_folder_that_is_no_causal_model_is_refused(
    tmp_path: Path, config: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sentence instead of a traceback, and no question about running code that came with the model."""
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelUnavailable, match=reason) as raised:
        CausalModel.load(str(tmp_path), dtype="float32")
    assert str(tmp_path) in raised.value.message
    assert len(raised.value.message) < 600
    assert "\n" not in raised.value.message
    assert "y/N" not in capsys.readouterr().out


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    """A truncated download is named, not met in mid-answer."""
    folder = save_tiny_checkpoint(tmp_path / "model", seed=1)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelUnavailable, match="model"):
        CausalModel.load(str(folder), dtype="float32")


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_unusable_device_is_refused(tmp_path: Path, device: str) -> None:
    """A device that torch does not know, or has not got, stops the start."""
    with pytest.raises(StartupFailed, match=device):
        CausalModel.load(str(tmp_path), device=device)


# Noise that makes a drafter of any acceptance


def test_noise_is_a_function_of_token_position_and_index_alone() -> None:
    """Each row is what it is, in whatever block it is computed."""
    tokens, positions = torch.tensor([5, 6, 5, 5]), torch.tensor([10, 11, 12, 10])
    noise = hashed_noise(tokens, positions, vocab_size=100)
    assert torch.equal(noise[0], noise[3])
    assert len({tuple(row.tolist()) for row in noise}) == 3
    for row in range(4):
        alone = hashed_noise(tokens[row : row + 1], positions[row : row + 1], vocab_size=100)
        assert torch.equal(alone[0], noise[row])


def test_noise_has_mean_zero_and_unit_deviation() -> None:
    """2,000,000 values: mean and mean square within 5 standard errors, a false alarm in 1,700,000 runs.

    The inputs are fixed, so a run that passes once passes always.
    """
    tokens, positions = torch.arange(200), torch.arange(1000, 1200)
    noise = hashed_noise(tokens, positions, vocab_size=10_000).double()
    standard_error = 1.0 / math.sqrt(noise.numel())
    assert abs(noise.mean().item()) < 5 * standard_error
    assert abs((noise**2).mean().item() - 1.0) < 5 * standard_error * math.sqrt(0.8)  # variance of a squared uniform
    assert noise.abs().max().item() <= math.sqrt(3.0)
    neighbours = (noise[:, 1:] * noise[:, :-1]).mean().item(), (noise[1:] * noise[:-1]).mean().item()
    assert max(map(abs, neighbours)) < 6 * standard_error


def test_noisy_copy_agrees_less_the_more_noise_it_has(tmp_path: Path) -> None:
    """No noise: every arg max agrees; a little: most; much: few. So a drafter can have any acceptance."""
    target = load_tiny(tmp_path)
    expected = logits_of(target, target.new_cache(), IDS * 5).argmax(-1)
    agreement = []
    for deviation in (0.0, 0.5, 20.0):
        drafter = CausalModel.load(str(tmp_path / "model"), dtype="float32", logit_noise=deviation)
        got = logits_of(drafter, drafter.new_cache(), IDS * 5).argmax(-1)
        agreement.append((got == expected).float().mean().item())
    assert agreement[0] == 1.0
    assert 0.5 < agreement[1] < 1.0
    assert agreement[2] < 0.3


def test_noisy_rows_are_the_same_in_blocks_and_single_steps(tmp_path: Path) -> None:
    """The noise adds no difference between a block and single tokens, nor after a rollback."""
    model = load_tiny(tmp_path, logit_noise=2.0)
    plain = load_tiny(tmp_path / "plain")
    block = logits_of(model, model.new_cache(), IDS[:12])
    cache, singles = model.new_cache(), []
    for token_id in IDS[:12]:
        logits_of(model, cache, [1, 2, 3], 0)
        model.truncate(cache, cache.length - 3)
        singles.append(logits_of(model, cache, [token_id]))
    assert_same_rows(torch.cat(singles), block)
    added = block - logits_of(plain, plain.new_cache(), IDS[:12])
    expected = 2.0 * hashed_noise(torch.tensor(IDS[:12]), torch.arange(12), vocab_size=TINY_VOCAB_SIZE)
    assert_close(added, expected)


# The checkpoints that tests build


def test_markov_checkpoint_has_exactly_its_transition_matrix(tmp_path: Path) -> None:
    """Every row, whatever came before, is the row of its last token; impossible tokens have probability exactly 0."""
    transition = [[0.5, 0.5, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4], [1.0, 0.0, 0.0, 0.0], [0.0, 1e-6, 0.0, 1 - 1e-6]]
    model = CausalModel.load(str(save_markov_checkpoint(tmp_path, transition, eos_token_id=3)), dtype="float32")
    assert model.eos_token_ids == (3,)
    ids = [0, 1, 2, 3, 3, 1, 0, 2, 2]
    probs = logits_of(model, model.new_cache(), ids).softmax(dim=-1)
    expected = torch.tensor([transition[token_id] for token_id in ids])
    torch.testing.assert_close(probs, expected, rtol=2e-6, atol=0.0)
    assert torch.equal(probs == 0.0, expected == 0.0)


# The default model


@pytest.mark.slow
def test_default_model_decodes_as_generate_does() -> None:
    """The real model in float32: 40 greedy tokens, fed one by one and as blocks with rollbacks, equal `generate()`."""
    model = CausalModel.load("smollm2", dtype="float32", device="cpu")
    checkpoint = resolve_checkpoint("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    network = load_network(checkpoint, dtype=torch.float32)
    question = [{"role": "user", "content": "Explain in two sentences why the sky is blue."}]
    prompt = tokenizer(
        str(tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False))
    ).input_ids
    expected = generated(network, prompt, 40)
    assert greedy(model, prompt, 40) == expected

    cache = model.new_cache()
    logits_of(model, cache, [*prompt, *([7] * 5)], 0)
    model.truncate(cache, len(prompt) - 1)
    assert logits_of(model, cache, [prompt[-1], *expected]).argmax(-1).tolist()[:40] == expected
    assert model.eos_token_ids == (tokenizer.eos_token_id,)
    assert len(tokenizer) <= model.vocab_size


def generated(network: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What transformers gives, greedily."""
    ids = torch.tensor([prompt])
    output = network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    return [int(token_id) for token_id in output[0, len(prompt) :]]


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
