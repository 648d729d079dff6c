"""A small real model for emulated devices, and how noisy a copy of it must be to draft with a given acceptance.

Its weights come from a seed, so the text means nothing; but it is an ordinary checkpoint with a tokenizer, its
distributions are about as uncertain as those of a language model, and it never repeats itself for long: the next token
depends on each of the last few. Knows nothing of services, and of drafts only what makes one right.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from paceline import noise
from paceline.engine.checkpoint import without_progress_bars
from paceline.engine.interface import CacheT, Extension, Model
from paceline.engine.model import hashed_noise
from paceline.noise import Purpose

_HEADS = 8  # each reads one token: head n that n + 1 places back
_HEAD_DIM = 8
_HIDDEN = _HEADS * _HEAD_DIM
_WINDOW = 16  # tokens that attention sees, so that a step costs the same at any length
_TURN_BASE = 4.0  # of rotary positions: a head tells neighbouring places apart
_SHARPNESS = 6.0  # a head gives the places beside its own about exp(-5) of its attention
_LOGIT_DEVIATION = 3.45  # mean entropy of about 2 nats over this vocabulary
_CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"

_TOKENS = 256  # of each text
_LARGEST_NOISE = 256.0  # standard deviation; nothing is left of the logits
_BISECTIONS = 20


def write_tiny_model(folder: Path, *, seed: int = 0, max_context: int = 8192) -> Path:
    """Write a checkpoint of one layer, 64 wide, with about 250 tokens of plain text, and no end token; gives the folder.

    At temperature 1 its next-token distributions have about 2 nats on average, and at temperature 0 it goes on for
    hundreds of tokens without a loop. Answers run to their length limit.
    """
    tokenizer = _tokenizer()
    network = _network(len(tokenizer), seed=seed, max_context=max_context)
    with without_progress_bars():
        network.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def noise_for(
    target: Model[CacheT], *, acceptance: float, temperature: float = 0.0, texts: int = 64, seed: int = 0
) -> float:
    """The standard deviation of logit noise with which a copy of `target` drafts tokens of which `acceptance` are right.

    That is `CausalModel.load(..., logit_noise=...)`, the drafter's `--logit-noise`; `greedy` at temperature 0, and
    `coupled` without top-k and the like above. Found by bisection over `texts` of 256 tokens that the target itself
    writes from `seed`, on which the acceptance comes out within 0.005. On other text it differs further by a standard
    error of sqrt(acceptance * (1 - acceptance) / (256 * texts)): 0.004 at most for the 16,384 tokens of 64 texts. All
    must fit into the target's memory at once. Raises ValueError for an acceptance that is not between 0.05 and 0.99.
    """
    if not 0.05 <= acceptance <= 0.99:
        raise ValueError(f"an acceptance of {acceptance} cannot be set by noise; take one from 0.05 to 0.99")
    written = _write(target, temperature=temperature, texts=texts, seed=seed)
    low, high = 0.0, _LARGEST_NOISE
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        if written.agreement(middle) > acceptance:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True, eq=False)
class _Written:
    """Tokens that a target wrote, with the scores that it chose each by, and what a noisy copy would add to them."""

    scores: Tensor  # [rows, vocab_size] float32: logits, divided by the temperature and with Gumbel noise above 0
    unit_noise: Tensor  # [rows, vocab_size] float32: what logit noise of deviation 1 adds to the scores

    def agreement(self, deviation: float) -> float:
        """The share of tokens that a copy with so much logit noise would have chosen, too."""
        chosen = (self.scores + deviation * self.unit_noise).argmax(-1)
        return float((chosen == self.scores.argmax(-1)).float().mean())


def _write(target: Model[CacheT], *, temperature: float, texts: int, seed: int) -> _Written:
    """Let the target write so many texts of `_TOKENS` tokens at once, each from a random token."""
    generator = torch.Generator().manual_seed(seed)
    fed = torch.randint(target.vocab_size, (texts,), generator=generator)
    caches = [target.new_cache() for _ in range(texts)]
    scale = 1.0 / temperature if temperature else 1.0
    scores, unit_noise = list[Tensor](), list[Tensor]()
    for position in range(_TOKENS):
        batch = [Extension(cache, [token_id], 1) for cache, token_id in zip(caches, fed.tolist(), strict=True)]
        rows = torch.cat(target.step(batch)).float() * scale
        if temperature:
            rows += _gumbel_rows(target.vocab_size, seeds=range(seed, seed + texts), position=position + 1)
        positions = torch.full((texts,), position)
        unit_noise.append(scale * hashed_noise(fed, positions, vocab_size=target.vocab_size))
        scores.append(rows)
        fed = rows.argmax(-1)
    for cache in caches:
        target.release(cache)
    return _Written(torch.cat(scores), torch.cat(unit_noise))


def _gumbel_rows(vocab_size: int, *, seeds: Iterable[int], position: int) -> Tensor:  # [seeds, vocab_size] float32
    """The noise that sessions of these seeds draw their token at a position with (`sampling.coupled_sample`)."""
    counters = noise.first_counters(vocab_size, torch.device("cpu"))
    complements = torch.stack(
        [noise.complements(counters, seed=seed, position=position, purpose=Purpose.TARGET_SAMPLE) for seed in seeds]
    )
    return -torch.log(-torch.log1p(-complements.double() * 2.0**-53)).float()


# ---- the checkpoint ------------------------------------------------------------------------------------------------


def _tokenizer() -> PreTrainedTokenizerFast:
    """Printable characters, pairs of a consonant and a vowel, and letters behind a space; others are read as "?"."""
    characters = ["\n", *map(chr, range(32, 127))]
    merges = list(_merges())
    tokens = [*characters, *(first + second for first, second in merges)]
    tokenizer = Tokenizer(
        models.BPE({token: token_id for token_id, token in enumerate(tokens)}, merges, unk_token="?", fuse_unk=False)
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, chat_template=_CHAT_TEMPLATE, clean_up_tokenization_spaces=False
    )


def _merges() -> Iterator[tuple[str, str]]:
    vowels = "aeiou"
    consonants = [letter for letter in string.ascii_lowercase if letter not in vowels]
    yield from product(consonants, vowels)
    yield from product(" ", string.ascii_lowercase)
    yield from product(vowels, "lnrst")


def _network(vocab_size: int, *, seed: int, max_context: int) -> MistralForCausalLM:
    """A hash of the last tokens: each head hands on the token at its place, and all weights behind it are random."""
    config = MistralConfig(
        vocab_size=vocab_size,
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=_HEADS,
        num_key_value_heads=1,
        head_dim=_HEAD_DIM,
        sliding_window=_WINDOW,
        max_position_embeddings=max_context,
        rope_parameters={"rope_type": "default", "rope_theta": _TURN_BASE},
        tie_word_embeddings=False,
        bos_token_id=None,
        pad_token_id=None,
        eos_token_id=None,
    )
    network = MistralForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    layer = network.model.layers[0]
    with torch.no_grad():
        network.model.embed_tokens.weight.copy_(_embeddings(vocab_size, generator))
        # Keys and queries read the number that all tokens have in common, so attention depends on places alone.
        layer.self_attn.k_proj.weight.zero_()[:, 0] = _turned(0) * math.sqrt(_HEAD_DIM)
        layer.self_attn.q_proj.weight.zero_()[:, 0] = _SHARPNESS * torch.cat([_turned(1 + n) for n in range(_HEADS)])
        for linear, deviation in (
            (layer.self_attn.v_proj, 1.0),
            (layer.self_attn.o_proj, 1.0),
            (layer.mlp.gate_proj, 2.0),
            (layer.mlp.up_proj, 2.0),
            (layer.mlp.down_proj, 1.0),
            (network.lm_head, _LOGIT_DEVIATION),
        ):
            weight = linear.weight
            weight.copy_(torch.randn(weight.shape, generator=generator) * deviation / math.sqrt(weight.shape[1]))
    return network


def _embeddings(vocab_size: int, generator: torch.Generator) -> Tensor:  # [vocab_size, _HIDDEN]
    """Random directions of one length, so that the first number is still 1 for all tokens behind the norm."""
    rows = torch.randn(vocab_size, _HIDDEN, generator=generator)
    rows[:, 0] = 0.0
    rows *= math.sqrt(_HIDDEN - 1) / rows.norm(dim=1, keepdim=True)
    rows[:, 0] = 1.0
    return rows


def _turned(places: int) -> Tensor:  # [_HEAD_DIM]
    """What rotary positions make of the pairs (1, 0) that many places back: a query that finds the key there."""
    angles = -places * _TURN_BASE ** (-torch.arange(0, _HEAD_DIM, 2) / _HEAD_DIM)
    return torch.cat([angles.cos(), angles.sin()])
