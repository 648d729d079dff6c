"""The forward pass of a causal language model behind three verbs: extend, truncate, give rows of logits.

The only user of transformers models, through their public interface alone. A cache belongs to a session, never to the
model, so any number of sessions share one model. For now a step takes its sessions one after another; a batched engine
can replace it behind the same interface. Knows nothing of sampling, drafts, text or gRPC, and is used by one thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from paceline.engine.checkpoint import (
    fingerprint_of_checkpoint,
    load_network,
    reported_as_unavailable,
    resolve_checkpoint,
    without_progress_bars,
)
from paceline.engine.precision import choose_dtype
from paceline.errors import ModelUnavailable, StartupFailed

MAX_CHUNK_LENGTH = 512  # tokens fed in one forward pass, so that a long prompt's memory stays bounded
UNSTATED_MAX_CONTEXT = 2**20  # for models without positions (ALiBi), which state no limit
_FIRST_CAPACITY = 128  # tokens


class GrowingLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer in buffers with room to spare: appending copies the new tokens alone.

    Invariant: the first `length` positions of both buffers are the cached tokens; what lies behind is never read.
    Sliding-window layers use it too: all tokens stay, the attention mask keeps the window, so that truncation is exact
    at every length. `DynamicLayer` gives the same bits, but copies all it holds at each step: with 2,000 cached tokens
    9 ms of an 83 ms step, against 0.2 ms here (SmolLM2-135M, float32, one core).
    """

    is_croppable = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        self.is_initialized = True

    def update(
        self,
        key_states: Tensor,  # [1, heads, new tokens, head_dim]
        value_states: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Append; the result holds all cached tokens, as views that are good until the next truncation."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        end = self.length + key_states.shape[-2]
        capacity = self.keys.shape[-2]
        if end > capacity:
            capacity = max(end, 2 * capacity, _FIRST_CAPACITY)
            self.keys, self.values = self._grown(self.keys, capacity), self._grown(self.values, capacity)
        self.keys[..., self.length : end, :] = key_states
        self.values[..., self.length : end, :] = value_states
        self.length = end
        return self.keys[..., :end, :], self.values[..., :end, :]

    def _grown(self, buffer: Tensor, capacity: int) -> Tensor:
        larger = buffer.new_empty((*buffer.shape[:-2], capacity, buffer.shape[-1]))
        larger[..., : self.length, :] = buffer[..., : self.length, :]
        return larger

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1  # transformers' word for no limit

    def crop(self, tokens_to_remove: int) -> None:
        self.length -= abs(tokens_to_remove)


class KVCache:
    """Keys and values of one session's tokens; opaque to all but the model that made it.

    Invariant, between steps: every layer that keeps anything holds `length` tokens.
    """

    __slots__ = ("store",)

    def __init__(self, store: Cache) -> None:
        self.store = store

    @property
    def length(self) -> int:
        """How many tokens are cached."""
        return self.store.get_seq_length()

    @property
    def growing_layers(self) -> list[GrowingLayer]:
        return [layer for layer in self.store.layers if isinstance(layer, GrowingLayer)]

    def truncate(self, length: int) -> None:
        """Keep at most the first `length` tokens."""
        for layer in self.growing_layers:
            layer.length = min(layer.length, length)


CacheT = TypeVar("CacheT")


@dataclass(frozen=True, slots=True)
class Extension(Generic[CacheT]):
    """Work for one session in a step: feed `ids` behind `cache`, and give the logits of the last `rows` of them.

    `rows` may be 0, to ingest and no more. Generic in the cache, so that fake models can bring their own.
    """

    cache: CacheT
    ids: Sequence[int]
    rows: int


class CausalModel:
    """A language model: token ids in, rows of logits out.

    `vocab_size` (rows of the output layer), `max_context` (tokens), `eos_token_ids` (may be empty),
    `tokenizer_sha256` (empty: works on token ids only) and `dtype` describe it.
    """

    def __init__(
        self, network: PreTrainedModel, *, model_id: str, tokenizer_sha256: str = "", logit_noise: float = 0.0
    ) -> None:
        """Wrap a loaded network; raises `ModelUnavailable` if it is of a kind that cannot be served."""
        config = network.config.get_text_config(decoder=True)
        self.model_id = model_id
        self.tokenizer_sha256 = tokenizer_sha256
        self.vocab_size: int = config.vocab_size
        self.max_context = _max_context(config)
        self.eos_token_ids = _eos_token_ids(network, config)
        self.dtype: torch.dtype = network.dtype
        self._network = network
        self._logit_noise = logit_noise
        self._make_layers = _layer_makers(network.config)
        self._refuse_unless_cache_is_used()

    @classmethod
    def load(
        cls,
        name: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        cache_dir: Path | None = None,
        logit_noise: float = 0.0,
    ) -> CausalModel:
        """Load by name (`resolve_checkpoint`), as `dtype` (`choose_dtype`), onto `device` ("auto": a GPU if any).

        `logit_noise` is the standard deviation of noise added to every logit (`hashed_noise`), so that a noisy copy of
        a target drafts for it with any acceptance wanted. Raises `ModelUnavailable` and `StartupFailed`.
        """
        place = _choose_device(device)
        torch_dtype = choose_dtype(dtype, place)
        checkpoint = resolve_checkpoint(name, cache_dir=cache_dir)
        with reported_as_unavailable(f"'{name}'"), without_progress_bars():
            _refuse_unless_decoder(name, AutoConfig.from_pretrained(checkpoint, trust_remote_code=False))
            network = load_network(checkpoint, dtype=torch_dtype)
            network.to(place)  # type: ignore[arg-type]  # its decorator hides the signature
            return cls(
                network,
                model_id=name,
                tokenizer_sha256=fingerprint_of_checkpoint(checkpoint),
                logit_noise=logit_noise,
            )

    def new_cache(self) -> KVCache:
        """An empty cache; it takes memory as it is fed."""
        return KVCache(Cache(layers=[make_layer() for make_layer in self._make_layers]))

    def truncate(self, cache: KVCache, length: int) -> None:
        """Forget everything behind the first `length` tokens, in time that does not depend on how many."""
        assert 0 <= length <= cache.length, f"cannot truncate {cache.length} cached tokens to {length}"
        cache.truncate(length)

    @torch.inference_mode()
    def step(self, batch: Sequence[Extension[KVCache]]) -> list[Tensor]:
        """For each extension its rows of logits, `[rows, vocab_size]` in the model's dtype; the caches grow.

        One cache enters a batch once. A step that raises leaves every cache as it was.
        """
        lengths = [extension.cache.length for extension in batch]
        assert len({id(extension.cache) for extension in batch}) == len(batch), "one cache twice in a batch"
        try:
            return [self._extend(extension) for extension in batch]
        except BaseException:
            for extension, length in zip(batch, lengths, strict=True):
                extension.cache.truncate(length)
            raise

    def warm_up(self) -> None:
        """Run a block and a single token through a throw-away cache, so that no request pays for first use."""
        cache = self.new_cache()
        for ids in ([0] * min(8, self.max_context - 1), [0]):
            self.step([Extension(cache, ids, len(ids))])

    def _extend(self, extension: Extension[KVCache]) -> Tensor:
        cache, ids, rows = extension.cache, extension.ids, extension.rows
        assert ids, "nothing to feed"
        assert 0 <= rows <= len(ids), f"{rows} rows of {len(ids)} tokens"
        assert cache.length + len(ids) <= self.max_context, "beyond the model's context"
        assert min(ids) >= 0, "an id outside the vocabulary"
        assert max(ids) < self.vocab_size, "an id outside the vocabulary"
        first_position, first_row = cache.length, len(ids) - rows
        fed = torch.tensor(ids, device=self._network.device)
        chunks = [
            self._forward(cache, fed[start : start + MAX_CHUNK_LENGTH], first_row=max(0, first_row - start))
            for start in range(0, len(ids), MAX_CHUNK_LENGTH)
        ]
        logits = torch.cat(chunks)
        if not self._logit_noise:
            return logits
        positions = torch.arange(first_position + first_row, first_position + len(ids), device=fed.device)
        noise = hashed_noise(fed[first_row:], positions, vocab_size=self.vocab_size)
        return (logits + self._logit_noise * noise).to(logits.dtype)

    def _forward(self, cache: KVCache, ids: Tensor, *, first_row: int) -> Tensor:
        """Feed one chunk, `[tokens]`; gives the logits of its rows from `first_row` on, which may be none."""
        rows = torch.arange(min(first_row, len(ids)), len(ids), device=ids.device)
        # No attention mask: nothing is padded, and the rows are the same to the last bit.
        output = self._network(input_ids=ids[None], cache=cache.store, use_cache=True, logits_to_keep=rows)
        logits: Tensor = output.logits[0]
        return logits

    def _refuse_unless_cache_is_used(self) -> None:
        # Some older families take `cache` and pay it no heed; they would be wrong in silence.
        cache = self.new_cache()
        (logits,) = self.step([Extension(cache, [0, 0], 1)])
        if any(layer.length != 2 for layer in cache.growing_layers) or logits.shape != (1, self.vocab_size):
            raise ModelUnavailable(
                f"'{self.model_id}' ({self._network.config.model_type}) does not keep a key-value cache that can be "
                "rolled back; choose an attention-only decoder."
            )


def hashed_noise(
    token_ids: Tensor,  # [rows], the tokens fed
    positions: Tensor,  # [rows], absolute
    *,
    vocab_size: int,
) -> Tensor:
    """Noise `[rows, vocab_size]`, float32: uniform, mean 0, standard deviation 1, and a pure function of
    (token fed, position, vocabulary index), so the same in whatever batch or chunk a row is computed.

    Integer mixing as in `prefix.extend_digest`. For tests and benchmarks; no sampling draws on it.
    """
    keys = _mix(_mix(token_ids)[:, None] ^ positions[:, None])
    words = _mix(keys ^ _mix(torch.arange(vocab_size, device=token_ids.device)))
    uniform = ((words >> 40) & 0xFF_FFFF).float().add_(0.5).mul_(2.0**-24)  # inside (0, 1)
    return (uniform - 0.5) * math.sqrt(12.0)


def _mix(words: Tensor) -> Tensor:
    """The finaliser of MurmurHash3, on int64 words whose products wrap around."""
    mixed = (words + 1) * (0xFF51AFD7ED558CCD - 2**64)
    mixed = (mixed ^ ((mixed >> 33) & 0x7FFF_FFFF)) * (0xC4CEB9FE1A85EC53 - 2**64)
    return mixed ^ ((mixed >> 33) & 0x7FFF_FFFF)


def _choose_device(requested: str) -> torch.device:
    if requested == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=requested).device
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        raise StartupFailed(f"Device '{requested}' cannot be used here ({error}); use auto or cpu.") from error


def _refuse_unless_decoder(name: str, config: PreTrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise ModelUnavailable(
            f"'{name}' ({config.model_type}) is an encoder-decoder model; choose a causal (decoder-only) one."
        )
    # Encoders that can be told to be decoders say so in their configuration, and attend to both sides otherwise.
    if not getattr(config, "is_decoder", True) or not getattr(config, "is_causal", True):
        raise ModelUnavailable(f"'{name}' ({config.model_type}) attends to both sides; choose a causal language model.")


def _layer_makers(config: PreTrainedConfig) -> list[Callable[[], GrowingLayer | DummyLayer]]:
    """What makes the cache of each layer; layers that keep nothing (they share another's keys) stay as they are.

    Raises `ModelUnavailable` unless all others keep plain keys and values, which can be truncated at any length.
    """
    kinds = [type(layer) for layer in DynamicCache(config=config).layers]
    for kind in kinds:
        if kind not in (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer):
            raise ModelUnavailable(
                f"Models of type '{config.model_type}' keep a state that cannot be rolled back ({kind.__name__}); "
                "choose an attention-only decoder."
            )
    return [DummyLayer if kind is DummyLayer else GrowingLayer for kind in kinds]


def _max_context(config: PreTrainedConfig) -> int:
    """The longest sequence for which a token's keys never change, in tokens."""
    stated = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    limits = [limit for limit in stated if limit] or [UNSTATED_MAX_CONTEXT]
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = (value for value in rope.values() if isinstance(value, dict))
    # Beyond this length longrope changes all frequencies, those of cached keys included: a block and single steps
    # would differ.
    limits += [
        parameters["original_max_position_embeddings"]
        for parameters in (rope, *by_layer_type)
        if parameters.get("rope_type") == "longrope"
    ]
    return int(min(limits))


def _eos_token_ids(network: PreTrainedModel, config: PreTrainedConfig) -> tuple[int, ...]:
    """The tokens that end an answer: of the generation configuration, else of the model's."""
    stated = getattr(network.generation_config, "eos_token_id", None)
    if stated is None:
        stated = getattr(config, "eos_token_id", None)
    ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
    return tuple(token_id for token_id in ids if 0 <= token_id < config.vocab_size)
