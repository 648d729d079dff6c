"""The forward pass of a causal language model over many sessions at once, behind the verbs of `interface.Model`.

The only user of transformers models, through their public interfaces alone: the tokens of all sessions go in as one
sequence with their positions, and attention (`attention`) is ours. Memory belongs to sessions, never to the model.
Knows nothing of sampling, drafts, text or gRPC, and is used by one thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from paceline.engine import cpu_attention
from paceline.engine.attention import (
    IMPLEMENTATION,
    KEYWORD,
    SHORT_ROWS,
    Attention,
    FusedAttention,
    RaggedAttention,
    ShapeRecorder,
    fused_kernel,
)
from paceline.engine.batch import RaggedBatch, pack
from paceline.engine.block_pool import BlockPool, BlockTable
from paceline.engine.checkpoint import (
    fingerprint_of_checkpoint,
    load_network,
    reported_as_unavailable,
    resolve_checkpoint,
    without_progress_bars,
)
from paceline.engine.cuda_graphs import DecodeInputs, GraphedSteps
from paceline.engine.drafter_folder import is_drafter_folder
from paceline.engine.drafter_network import load_drafter
from paceline.engine.interface import Extension
from paceline.engine.kv_memory import KVMemory, bytes_per_token
from paceline.engine.memory import (
    GPU_STEP_TOKENS,
    Allocation,
    DeviceMemory,
    MemoryLimits,
    device_memory,
    estimate_step_bytes,
    plan_kv,
    weight_bytes,
)
from paceline.engine.packed_linear import pack_linears
from paceline.engine.precision import choose_dtype
from paceline.errors import MemoryFull, ModelUnavailable, StartupFailed

logger = structlog.get_logger(__name__)

UNSTATED_MAX_CONTEXT = 2**20  # for models without positions, which state no limit
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_USUAL_LIMITS = MemoryLimits()
_PROBE_LENGTH = 24  # tokens
_PROBE_TOLERANCE = 0.1  # relative; bfloat16 differs by 0.01 to 0.03, attention of another kind by 0.3 and more


class CausalModel:
    """A language model: token ids in, rows of logits out (`interface.Model`).

    `vocab_size` (rows of the output layer), `max_context` (tokens), `eos_token_ids` (may be empty),
    `tokenizer_sha256` (empty: works on token ids only), `dtype` and `allocation` (what memory it has, and why) describe it,
    and a trained drafter `expected_acceptance`: (temperature, acceptance) in its evaluation.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        *,
        model_id: str,
        tokenizer_sha256: str = "",
        logit_noise: float = 0.0,
        limits: MemoryLimits = _USUAL_LIMITS,
        free_memory: DeviceMemory | None = None,
        shares_prefixes: bool = True,
        expected_acceptance: Sequence[tuple[float, float]] = (),
    ) -> None:
        """Take over a loaded network, and give it memory as `limits` say.

        `free_memory` is what there was before it was loaded; None reads it now. Raises `ModelUnavailable` if the network
        is of a kind that cannot be served, and `StartupFailed` if the memory does not suffice.
        """
        config = network.config.get_text_config(decoder=True)
        _refuse_unless_truncatable(network.config)
        self.model_id = model_id
        self.tokenizer_sha256 = tokenizer_sha256
        self.expected_acceptance = tuple(expected_acceptance)
        self.vocab_size: int = config.vocab_size
        self.eos_token_ids = _eos_token_ids(network, config)
        self.dtype: torch.dtype = network.dtype
        self._network, self._device = network, network.device
        self._logit_noise = logit_noise
        model_context = _max_context(config)
        probe_ids = [(7919 * n + 1) % self.vocab_size for n in range(min(_PROBE_LENGTH, model_context))]
        expected = self._plain_logits(probe_ids)
        weights = weight_bytes(network)
        network.set_attn_implementation(IMPLEMENTATION)
        pack_linears(network)
        recorder = self._record_shapes()
        plan = plan_kv(
            free_memory or device_memory(self._device),
            limits,
            bytes_per_token=bytes_per_token(recorder.shapes, self.dtype),
            weight_bytes=weights,
            model_context=model_context,
            step_bytes=self._step_bytes(config) if self._device.type == "cuda" else 0,
        )
        self.allocation = Allocation(plan, weights, self._device.type)
        self.max_context = plan.max_context
        self.memory = BlockPool(plan.num_blocks, block_size=plan.block_size)
        self._kv_memory = KVMemory(
            recorder.shapes,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            dtype=self.dtype,
            device=self._device,
        )
        self._shares_prefixes = shares_prefixes
        self._graphs: GraphedSteps | None = None
        self._attention, self._short = _choose_attention(self._device, self.dtype, recorder)
        if not self._is_alike(probe_ids, expected):
            raise self._unsupported("it attends in a way that Paceline does not know")

    @classmethod
    def load(
        cls,
        name: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        cache_dir: Path | None = None,
        logit_noise: float = 0.0,
        quantization: Mapping[str, Any] | None = None,
        limits: MemoryLimits = _USUAL_LIMITS,
        shares_prefixes: bool = True,
        verifier: str | None = None,
    ) -> CausalModel:
        """Load by name (`resolve_checkpoint`), as `dtype` (`choose_dtype`), onto `device` ("auto": a GPU if any).

        `logit_noise` is the standard deviation of noise added to every logit (`hashed_noise`), so that a noisy copy of
        a target drafts for it with any acceptance wanted; `quantization` is a transformers quantization config. Of a
        trained drafter, `verifier` says where its target's checkpoint is, if not where its own configuration says.
        Raises `ModelUnavailable` and `StartupFailed`.
        """
        place = _choose_device(device)
        torch_dtype = choose_dtype(dtype, place)
        free_memory = device_memory(place)
        checkpoint = resolve_checkpoint(name, cache_dir=cache_dir)
        expected_acceptance: tuple[tuple[float, float], ...] = ()
        if isinstance(checkpoint, Path) and is_drafter_folder(checkpoint):
            _refuse_quantization(name, quantization)
            drafter = load_drafter(checkpoint, verifier=verifier, dtype=torch_dtype, device=place, cache_dir=cache_dir)
            network, checkpoint = drafter.network, drafter.target_checkpoint
            expected_acceptance = drafter.expected_acceptance
        else:
            _refuse_verifier(name, verifier)
            with reported_as_unavailable(f"'{name}'"), without_progress_bars():
                _refuse_unless_decoder(name, AutoConfig.from_pretrained(checkpoint, trust_remote_code=False))
                network = load_network(checkpoint, dtype=torch_dtype, device=place, quantization=quantization)
        return cls(
            network,
            model_id=name,
            tokenizer_sha256=fingerprint_of_checkpoint(checkpoint),
            logit_noise=logit_noise,
            limits=limits,
            free_memory=free_memory,
            shares_prefixes=shares_prefixes,
            expected_acceptance=expected_acceptance,
        )

    def new_cache(self) -> BlockTable:
        return self.memory.new_table()

    def fork(self, cache: BlockTable, length: int) -> BlockTable:
        assert 0 <= length <= cache.length, f"cannot fork {length} of {cache.length} cached tokens"
        return self.memory.fork(cache, length)

    def adopt(self, cache: BlockTable) -> None:
        self.memory.adopt(cache)

    def reserve(self, cache: BlockTable, length: int) -> bool:
        copies = self.memory.reserve(cache, length)
        if copies:
            self._kv_memory.copy(copies)
        return copies is not None

    def truncate(self, cache: BlockTable, length: int) -> None:
        assert 0 <= length <= cache.length, f"cannot truncate {cache.length} cached tokens to {length}"
        self.memory.truncate(cache, length)

    def release(self, cache: BlockTable) -> None:
        self.memory.release(cache)

    def reuse_prefix(self, cache: BlockTable, ids: Sequence[int]) -> int:
        return self.memory.reuse_prefix(cache, ids) if self._shares_prefixes else cache.length

    def share_prefix(self, cache: BlockTable, ids: Sequence[int]) -> None:
        if self._shares_prefixes:
            self.memory.share_prefix(cache, ids)

    @torch.inference_mode()
    def step(self, batch: Sequence[Extension[BlockTable]]) -> list[Tensor]:
        """As `interface.Model.step`. Raises `MemoryFull` where room was not reserved and cannot be had."""
        self._check(batch)
        packed = pack(
            batch, [extension.cache for extension in batch], block_size=self.memory.block_size, short=self._short
        )
        # To the host in one piece: that is the one time in a step that anybody waits for the device, and hears of its errors.
        logits = self._forward(packed).cpu()
        for extension in batch:
            self.memory.extend(extension.cache, len(extension.ids))
        return list(torch.split(logits, list(packed.logit_counts)))

    def warm_up(self) -> None:
        """Run a prompt, a block and a single token, so that no request pays for first use."""
        if self._short:
            cpu_attention.prepare(self.dtype)
        cache = self.new_cache()
        for count in (SHORT_ROWS + 1, 8, 1):
            if cache.length + count <= self.max_context:
                self.step([Extension(cache, [0] * count, count)])
        self.release(cache)

    def capture_graphs(self, max_sessions: int) -> bool:
        """Have steps of one token a session replayed as CUDA graphs; False, and nothing changes, where that is no use.

        That is without a GPU or a fused kernel, and where a graph cannot be captured or gives other rows than a plain
        step: some models wait for the device in mid-step.
        """
        if self._attention is RaggedAttention:
            return False
        graphs = GraphedSteps(
            self._decode,
            max_blocks=-(-self.max_context // self.memory.block_size),
            scratch_slot=self._kv_memory.scratch_slot,
            device=self._device,
        )
        try:
            with torch.inference_mode():
                captured = list(graphs.prepare(max_sessions))
            different = [sessions for sessions in captured if not self._replays_alike(graphs, sessions)]
        except RuntimeError as error:
            logger.warning("steps are not replayed as CUDA graphs: one could not be captured", reason=str(error))
            return False
        if different:
            logger.warning("steps are not replayed as CUDA graphs: they give other rows", sessions=different)
            return False
        self._graphs = graphs
        logger.info("steps of one token a session are replayed as CUDA graphs", sessions=captured)
        return True

    def _replays_alike(self, graphs: GraphedSteps, sessions: int) -> bool:
        """Whether a step of so many sessions gives what a plain one gives, each with a token of its own."""
        sessions = min(sessions, self.memory.capacity_tokens // self.memory.block_size)  # as many as there is room for
        caches = [self.new_cache() for _ in range(sessions)]
        batch = [Extension(cache, [number % self.vocab_size], 1) for number, cache in enumerate(caches, start=1)]
        try:
            expected = torch.cat(self.step(batch)).float()
            for cache in caches:
                self.truncate(cache, 0)
            self._graphs = graphs
            got = torch.cat(self.step(batch)).float()
        finally:
            self._graphs = None
            for cache in caches:
                self.release(cache)
        return torch.allclose(got, expected, rtol=_PROBE_TOLERANCE, atol=_PROBE_TOLERANCE)

    def _check(self, batch: Sequence[Extension[BlockTable]]) -> None:
        assert len({id(extension.cache) for extension in batch}) == len(batch), "one cache twice in a batch"
        for extension in batch:
            cache, ids, rows = extension.cache, extension.ids, extension.rows
            assert ids, "nothing to feed"
            assert 0 <= rows <= len(ids), f"{rows} rows of {len(ids)} tokens"
            assert cache.length + len(ids) <= self.max_context, "beyond the model's context"
            assert min(ids) >= 0, "an id outside the vocabulary"
            assert max(ids) < self.vocab_size, "an id outside the vocabulary"
            if not self.reserve(cache, cache.length + len(ids)):
                raise MemoryFull("The model's memory is full; end some sessions, or start it with more memory.")

    def _forward(self, batch: RaggedBatch) -> Tensor:
        """The logits of the rows that the batch asks for, `[logit rows, vocab_size]`."""
        if self._graphs is not None and self._graphs.takes(batch):
            return self._graphs.logits(batch)
        ids, positions, slots, logit_rows = (
            rows.to(self._device, non_blocking=True)
            for rows in (batch.ids, batch.positions, batch.slots, batch.logit_rows)
        )
        logits = self._run(ids, positions, logit_rows, self._attention(self._kv_memory, batch, slots))
        return self._noisy(logits, ids, positions, logit_rows)

    def _decode(self, inputs: DecodeInputs) -> Tensor:
        """The logits of one token a session, from tensors that stay in place."""
        sessions = torch.arange(len(inputs.ids) + 1, dtype=torch.int32, device=self._device)
        attention = FusedAttention(
            self._kv_memory,
            slots=inputs.slots,
            row_borders=sessions,
            total_lengths=inputs.total_lengths,
            block_tables=inputs.block_tables,
            most_rows=1,
            longest=self.max_context,
        )
        rows = sessions[:-1].long()
        logits = self._run(inputs.ids, inputs.positions, rows, attention)
        return self._noisy(logits, inputs.ids, inputs.positions, rows)

    def _noisy(self, logits: Tensor, ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        if not self._logit_noise:
            return logits
        noise = hashed_noise(ids[logit_rows], positions[logit_rows], vocab_size=self.vocab_size)
        return logits.add_(noise.to(logits.dtype), alpha=self._logit_noise)

    def _run(self, ids: Tensor, positions: Tensor, logit_rows: Tensor, attention: Attention) -> Tensor:
        # No attention mask: nothing is padded, and who sees whom is decided in the attention itself.
        output = self._network(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logit_rows,
            **{KEYWORD: attention},
        )
        logits: Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def _plain_logits(self, ids: Sequence[int]) -> Tensor:
        """What the network gives for one sequence as transformers runs it, `[tokens, vocab_size]`."""
        logits: Tensor = self._network(input_ids=torch.tensor([ids], device=self._device), use_cache=False).logits[0]
        return logits

    @torch.inference_mode()
    def _record_shapes(self) -> ShapeRecorder:
        recorder = ShapeRecorder()
        zero = torch.zeros(1, dtype=torch.int64, device=self._device)
        try:
            self._run(zero, zero, zero, recorder)
        except (AttributeError, TypeError, ValueError) as error:
            raise self._unsupported(f"its attention cannot be replaced: {error}") from error
        if len(recorder.shapes) == 0:
            raise self._unsupported("it does not use the attention interface in all layers")
        return recorder

    def _is_alike(self, ids: Sequence[int], expected: Tensor) -> bool:
        """Whether ragged batches give what the network gives as transformers runs it.

        What attention of ours leaves out would be wrong in silence. Where the fused kernel fails or differs, attention goes
        on without it.
        """
        if self._attention is RaggedAttention:
            return self._error_in_batches(ids, expected) < _PROBE_TOLERANCE
        try:
            is_alike, reason = self._error_in_batches(ids, expected) < _PROBE_TOLERANCE, "it differs"
        except (RuntimeError, ValueError) as error:
            is_alike, reason = False, str(error)
        if not is_alike:
            logger.warning("attention goes on without the fused kernel, and slower", reason=reason)
            self._attention = RaggedAttention
            return self._is_alike(ids, expected)
        return True

    def _error_in_batches(self, ids: Sequence[int], expected: Tensor) -> float:
        """How far the logits are from `expected`, relative, for a typical row: one session in one piece beside another
        in two."""
        middle = len(ids) // 2
        first, second = self.new_cache(), self.new_cache()
        noise, self._logit_noise = self._logit_noise, 0.0
        try:
            rows = self.step([Extension(first, ids[:middle], middle), Extension(second, ids, len(ids))])
            rows += self.step([Extension(first, ids[middle:], len(ids) - middle)])
        finally:
            self._logit_noise = noise
            self.release(first)
            self.release(second)
        return max(_typical_error(got, expected.cpu()) for got in (rows[1], torch.cat((rows[0], rows[2]))))

    def _step_bytes(self, config: PreTrainedConfig) -> int:
        """About what the largest step takes on a GPU: a whole budget of tokens, with the logits of each."""
        hidden_size = int(config.hidden_size)
        return estimate_step_bytes(
            tokens=GPU_STEP_TOKENS,
            hidden_size=hidden_size,
            intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * hidden_size),
            vocab_size=self.vocab_size,
            itemsize=self.dtype.itemsize,
        )

    def _unsupported(self, why: str) -> ModelUnavailable:
        return ModelUnavailable(
            f"'{self.model_id}' ({self._network.config.model_type}) cannot be served: {why}; choose a decoder of another "
            "family; the README lists those that are tested."
        )


def _typical_error(
    got: Tensor,  # [rows, vocab_size]
    expected: Tensor,  # [rows, vocab_size]
) -> float:
    """How far logits are from others, relative, in the median over rows.

    Tokens that a model cannot propose are -inf, and must be so in both.
    """
    is_impossible = expected == -math.inf
    if not torch.equal(got == -math.inf, is_impossible):
        return math.inf
    difference = (got.float() - expected.float()).masked_fill(is_impossible, 0.0)
    errors = difference.norm(dim=-1) / expected.float().masked_fill(is_impossible, 0.0).norm(dim=-1)
    return math.inf if errors.isnan().any() else float(errors.median())


AttentionMaker = Callable[[KVMemory, RaggedBatch, Tensor], Attention]


def _choose_attention(device: torch.device, dtype: torch.dtype, recorder: ShapeRecorder) -> tuple[AttentionMaker, int]:
    """How attention is computed, and up to how many rows a session counts as short."""
    is_even = all(shape.key_dim == shape.value_dim for shape in recorder.shapes)
    is_half = dtype in (torch.bfloat16, torch.float16)
    if device.type == "cuda" and is_even and is_half and not recorder.has_softcap and fused_kernel():
        return FusedAttention.of_batch, 0
    has_kernel = device.type == "cpu" and is_even and cpu_attention.is_supported(dtype)
    return RaggedAttention, SHORT_ROWS if has_kernel else 0


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
    keys = _mix(_mix(token_ids).bitwise_xor_(positions))
    words = _mix(keys[:, None] ^ _mixed_indices(vocab_size, token_ids.device))
    uniform = words.bitwise_right_shift_(40).bitwise_and_(0xFF_FFFF).float().add_(0.5).mul_(2.0**-24)  # inside (0, 1)
    return uniform.sub_(0.5).mul_(math.sqrt(12.0))


@cache
def _mixed_indices(vocab_size: int, device: torch.device) -> Tensor:  # [vocab_size] int64
    """Shared between callers, so not to be changed."""
    return _mix(torch.arange(vocab_size, device=device))


def _mix(words: Tensor) -> Tensor:
    """The finaliser of MurmurHash3, on int64 words whose products wrap around."""
    mixed = (words + 1).mul_(0xFF51AFD7ED558CCD - 2**64)
    mixed.bitwise_xor_((mixed >> 33).bitwise_and_(0x7FFF_FFFF)).mul_(0xC4CEB9FE1A85EC53 - 2**64)
    return mixed.bitwise_xor_((mixed >> 33).bitwise_and_(0x7FFF_FFFF))


def _choose_device(requested: str) -> torch.device:
    if requested == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=requested).device
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        raise StartupFailed(f"Device '{requested}' cannot be used here ({error}); use auto or cpu.") from error


def _refuse_quantization(name: str, quantization: Mapping[str, Any] | None) -> None:
    if quantization:
        raise ModelUnavailable(
            f"'{name}' is a trained drafter, and small; it cannot be loaded with --quantization {dict(quantization)}; leave "
            "that out."
        )


def _refuse_verifier(name: str, verifier: str | None) -> None:
    if verifier:
        raise ModelUnavailable(
            f"'{name}' is a whole model and not a trained drafter, so --verifier {verifier} is of no use; leave that out."
        )


def _refuse_unless_decoder(name: str, config: PreTrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise ModelUnavailable(
            f"'{name}' ({config.model_type}) is an encoder-decoder model; choose a causal (decoder-only) one."
        )
    # Encoders that can be told to be decoders say so in their configuration, and attend to both sides otherwise.
    if not getattr(config, "is_decoder", True) or not getattr(config, "is_causal", True):
        raise ModelUnavailable(f"'{name}' ({config.model_type}) attends to both sides; choose a causal language model.")


def _refuse_unless_truncatable(config: PreTrainedConfig) -> None:
    """Raises `ModelUnavailable` unless all layers keep plain keys and values, which can be cut at any length.

    A sliding window is no obstacle: all tokens stay in memory, and attention keeps the window.
    """
    for kind in {type(layer) for layer in DynamicCache(config=config).layers}:
        if kind not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ModelUnavailable(
                f"Models of type '{config.model_type}' keep a state that cannot be rolled back ({kind.__name__}); "
                "choose an attention-only decoder."
            )
    layer_types = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    if unknown := sorted(layer_types - _LAYER_TYPES):
        raise ModelUnavailable(
            f"Models of type '{config.model_type}' have layers of a kind that Paceline does not know "
            f"({', '.join(unknown)}); choose a decoder with full or sliding-window attention."
        )


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
