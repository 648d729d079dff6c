"""Small ordinary checkpoints, written to a folder in well under a second, for tests of every kind.

Two sorts: Markov chains, whose law is known exactly for every sequence, and tiny random networks with a byte-level
tokenizer. Services in other processes load them like any other model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from paceline.engine.checkpoint import without_progress_bars

IMPOSSIBLE_LOGIT = -1e9  # its softmax is exactly 0 in float32, at any temperature a request may ask for
SLIDING_WINDOW = 8  # tokens, of the families that have one
TINY_VOCAB_SIZE = 320  # of the tiny tokenizer: 256 bytes, the special tokens, and merges
END_OF_TEXT = "<|end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_MERGES_TEXT = (
    "the rider in front breaks the wind and the rider behind saves strength; then they change places, "
    "and the line goes on faster than any one of them could go alone."
)


def save_markov_checkpoint(
    folder: Path,
    transition: Sequence[Sequence[float]],  # [vocab_size, vocab_size], rows sum to 1
    *,
    vocab: Sequence[str] | None = None,
    eos_token_id: int | None = None,
    max_context: int = 4096,
) -> Path:
    """Write a Llama whose next token depends on the last one alone: softmax of row i = `transition[i]` (in float32).

    Attention and MLP add nothing, the embeddings are one-hot, and the output layer holds the logarithms, divided by
    what the final norm makes of a one-hot vector. The tokenizer has one word a token (default: t0, t1, ...).
    """
    probs = torch.tensor(transition, dtype=torch.float64)
    vocab_size = len(transition)
    assert probs.shape == (vocab_size, vocab_size)
    assert torch.allclose(probs.sum(dim=1), torch.ones(vocab_size, dtype=torch.float64))
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=vocab_size,
        intermediate_size=2,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=2,
        max_position_embeddings=max_context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos_token_id,  # None: answers run to their length limit
    )
    network = LlamaForCausalLM(config)
    logits = torch.where(probs > 0, probs.log(), IMPOSSIBLE_LOGIT)
    norm_scale = 1.0 / math.sqrt(1.0 / vocab_size + config.rms_norm_eps)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        network.model.embed_tokens.weight.copy_(torch.eye(vocab_size))
        network.lm_head.weight.copy_((logits / norm_scale).T)
    words = vocab or [f"t{token_id}" for token_id in range(vocab_size)]
    assert len(words) == vocab_size
    return _save(folder, network, word_tokenizer(words))


def save_tiny_checkpoint(
    folder: Path,
    *,
    seed: int,
    family: str = "llama",
    vocab_size: int = TINY_VOCAB_SIZE,
    layers: int = 2,
    hidden: int = 32,
    max_context: int = 512,
    eos_token_id: int | None = None,
    swapped_ids: tuple[int, int] | None = None,
) -> Path:
    """Write a tiny random network with the tiny tokenizer: two seeds make a drafter and a target that fit together.

    A `vocab_size` above `TINY_VOCAB_SIZE` pads the model's vocabulary beyond the tokenizer's; `swapped_ids` exchanges
    two ids of the tokenizer, so that it fits no longer.
    """
    assert vocab_size >= TINY_VOCAB_SIZE
    config = FAMILIES[family](
        {
            "vocab_size": vocab_size,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": hidden // 4,
            "max_position_embeddings": max_context,
            "initializer_range": 0.5,  # wide enough that greedy output wanders
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "pad_token_id": None,
            "eos_token_id": eos_token_id,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return _save(folder, network, tiny_tokenizer(swapped_ids=swapped_ids))


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token a word: "a b" is two ids, and decodes to "a b"."""
    tokenizer = Tokenizer(models.WordLevel({word: token_id for token_id, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, chat_template="{{ messages[-1].content }}"
    )


def tiny_tokenizer(*, swapped_ids: tuple[int, int] | None = None) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `TINY_VOCAB_SIZE` ids, the same at each call: any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    tokenizer.train_from_iterator([_MERGES_TEXT], trainer)
    assert tokenizer.get_vocab_size() == TINY_VOCAB_SIZE
    if swapped_ids:
        tokenizer = _with_swapped_ids(tokenizer, *swapped_ids)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _with_swapped_ids(tokenizer: Tokenizer, first: int, second: int) -> Tokenizer:
    parts = json.loads(tokenizer.to_str())
    exchange = {first: second, second: first}
    vocab = parts["model"]["vocab"]
    parts["model"]["vocab"] = {token: exchange.get(token_id, token_id) for token, token_id in vocab.items()}
    return Tokenizer.from_str(json.dumps(parts))


def _sliding(shared: dict[str, Any]) -> PreTrainedConfig:
    return MistralConfig(**shared, sliding_window=SLIDING_WINDOW)


def _gemma(shared: dict[str, Any]) -> PreTrainedConfig:
    layer_types = ["full_attention", "sliding_attention"] * shared["num_hidden_layers"]
    layer_types = layer_types[: shared["num_hidden_layers"]]
    return Gemma3TextConfig(**shared, sliding_window=SLIDING_WINDOW, layer_types=layer_types)


FAMILIES: dict[str, Callable[[dict[str, Any]], PreTrainedConfig]] = {
    "llama": lambda shared: LlamaConfig(**shared),
    "qwen3": lambda shared: Qwen3Config(**shared),
    "gpt2": lambda shared: GPT2Config(**shared),
    "mistral": _sliding,
    "gemma3": _gemma,
}
"""Architectures, and how each is configured from what all of them share."""


def _save(folder: Path, network: Any, tokenizer: PreTrainedTokenizerFast) -> Path:
    with without_progress_bars():
        network.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder
