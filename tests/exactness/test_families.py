"""Every family of models that the README lists: ragged batches over paged memory against transformers' own `generate()`.

Tiny random networks in float32, with windows, soft caps and experts small enough to matter within a few dozen tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.engine.block_pool import BlockTable
from paceline.engine.interface import Extension
from paceline.engine.memory import MemoryLimits
from paceline.engine.model import CausalModel
from paceline.errors import ModelUnavailable

VOCAB_SIZE = 96
SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.5,  # wide enough that greedy output wanders
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": None,
}
WINDOW = {"sliding_window": 8}
MIXED_LAYERS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], **WINDOW}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": WINDOW,
    "mixtral": {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "head_dim": 8, "decoder_sparse_step": 1},
    "gemma": {"head_dim": 8},
    "gemma2": {**MIXED_LAYERS, "head_dim": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {**MIXED_LAYERS, "head_dim": 8, "query_pre_attn_scalar": 8},
    "phi": {},
    "phi3": WINDOW,
    "gpt2": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "olmo2": {},
    "granite": {},
    "starcoder2": WINDOW,
    "cohere": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
}
REFUSED: dict[str, dict[str, Any]] = {
    "stablelm": {},  # hands no arguments down to its attention
    "gpt_oss": {**MIXED_LAYERS, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},  # attention sinks
    "bloom": {"n_layer": 2, "n_head": 4},  # positions by a bias on the scores
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "mamba": {},
    "falcon_mamba": {},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8},
    "rwkv": {"attention_hidden_size": 32},
    "jamba": {"num_experts": 2},
}
PROMPT_LENGTHS = (1, 5, 17, 40)
NEW_TOKENS = 24
CHUNK = 18  # tokens; more than attention takes in place


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads, and lose much where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def network_of(family: str, changes: dict[str, Any]) -> Any:
    config = AutoConfig.for_model(family, **{**SHARED, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        network: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32
        )
    return network.eval()


def decoded_together(model: CausalModel, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers of all prompts at once: chunks of prompts beside single tokens, and blocks that are taken back."""
    caches = [model.new_cache() for _ in prompts]
    fed, outputs = [0] * len(prompts), [list[int]() for _ in prompts]
    while any(len(output) < NEW_TOKENS for output in outputs):
        batch, which = list[Extension[BlockTable]](), list[int]()
        for number, (prompt, cache) in enumerate(zip(prompts, caches, strict=True)):
            ids = [*prompt, *outputs[number]][fed[number] : fed[number] + CHUNK]
            if len(outputs[number]) < NEW_TOKENS:
                wrong = [7, 8, 9][: len(outputs[number]) % 4]  # a draft, every token of which is refused
                is_last = fed[number] + len(ids) == len(prompt) + len(outputs[number])
                batch.append(Extension(cache, [*ids, *(wrong if is_last else [])], len(wrong) + 1 if is_last else 0))
                which.append(number)
                fed[number] += len(ids)
        for number, rows in zip(which, model.step(batch), strict=True):
            model.truncate(caches[number], fed[number])
            if len(rows):
                outputs[number].append(int(rows[0].argmax()))
    return outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_batches_give_what_generate_gives(family: str) -> None:
    """Token for token, for every session of a batch."""
    network = network_of(family, FAMILIES[family])
    prompts = [[(31 * n + 7 * length) % VOCAB_SIZE for n in range(length)] for length in PROMPT_LENGTHS]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = network.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        expected.append(output[0, len(prompt) :].tolist())
    model = CausalModel(network, model_id=family, limits=MemoryLimits(kv_budget_tokens=512))
    assert decoded_together(model, prompts) == expected
    assert len({token_id for output in expected for token_id in output}) > 8, "constant output would prove nothing"


@pytest.mark.parametrize("family", REFUSED)
def test_family_that_attends_otherwise_is_refused_by_name(family: str, tmp_path: Path) -> None:
    """At load and in a sentence; none of them is served wrongly."""
    network = network_of(family, REFUSED[family])
    with pytest.raises(ModelUnavailable, match=family) as refused:
        CausalModel(network, model_id="it", limits=MemoryLimits(kv_budget_tokens=512))
    assert "choose" in refused.value.message
