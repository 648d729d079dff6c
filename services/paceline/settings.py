"""Settings of the three services: from the command line, then the environment (`PACELINE_TARGET_MODEL=...`).

One frozen object a service, built once at start and passed down as values; nothing else reads the environment.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from paceline.tls import ClientTls, ServerTls
from paceline.types import MAX_DRAFT_LENGTH, MAX_FAN_OUT

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

_METHODS_WITHOUT_TOKENIZER = ("ngram", "suffix")
MIN_STEP_TOKENS = MAX_DRAFT_LENGTH + 1  # a draft is verified within one step, together with the token before it


def _quantization(value: object) -> object:
    """A transformers quantization config: as it is, as JSON, or by the name of a method with its usual settings."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        return json.loads(value)
    return dict(_QUANTIZATION_BY_NAME.get(value, {"quant_method": value})) if value else {}


def _json_object(value: object) -> object:
    return json.loads(value or "{}") if isinstance(value, str) else value


# transformers knows the two of this library by a flag.
_QUANTIZATION_BY_NAME = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},  # as in vLLM
    "bitsandbytes_4bit": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "bitsandbytes_8bit": {"quant_method": "bitsandbytes", "load_in_8bit": True},
}


def _config(env_prefix: str) -> SettingsConfigDict:
    return SettingsConfigDict(
        env_prefix=env_prefix,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        frozen=True,
        extra="forbid",
    )


def _none_if_empty(value: object) -> object:
    return None if value == "" else value


OptionalPath = Annotated[Path | None, BeforeValidator(_none_if_empty)]
"""A file, or none; an empty variable in the environment means none."""


class ServiceSettings(BaseSettings):
    """What every service can be told."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(0, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    threads: int = Field(0, ge=0, description="Threads for arithmetic; 0 takes one for each core.")
    stop_with_parent: bool = Field(False, description="Stop when standard input reaches its end.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least important log line.")
    metrics_port: int = Field(0, ge=0, le=65535, description="Port for Prometheus metrics; 0 leaves them off.")
    max_sessions: int = Field(256, ge=1, description="Sessions held at once.")
    heartbeat_s: float = Field(1.0, gt=0, description="Seconds between two signs of life on a stream.")
    drain_s: float = Field(5.0, ge=0, description="Seconds that running sessions get to end before the service stops.")
    tls_cert: OptionalPath = Field(
        None, description="PEM file of the certificate that this service shows to the others of Paceline."
    )
    tls_key: OptionalPath = Field(None, description="PEM file of its key.")
    tls_ca: OptionalPath = Field(
        None,
        validate_default=True,
        description="PEM file of the authority whose certificates the services of Paceline believe.",
    )
    trust_network: bool = Field(
        False, description="Listen on any host without protection: strangers cannot reach this network."
    )

    @field_validator("tls_ca")
    @classmethod
    def _all_three_or_none(cls, value: Path | None, others: ValidationInfo) -> Path | None:
        given = [bool(path) for path in (others.data.get("tls_cert"), others.data.get("tls_key"), value)]
        if any(given) and not all(given):
            raise ValueError("goes together with --tls-cert and --tls-key; give all three, or none")
        return value

    @property
    @abstractmethod
    def is_protected(self) -> bool:
        """Whether whoever may not call is refused, by certificate or token."""

    @property
    @abstractmethod
    def protection_options(self) -> str:
        """How it would be protected, in words for a person."""


class ModelServiceSettings(ServiceSettings):
    """What drafter and target have in common."""

    model: str = Field("smollm2", description="Hugging Face model id, local folder, GGUF file, or 'smollm2'.")
    dtype: Dtype = Field("auto", description="Arithmetic of the model; auto measures which is faster here.")
    device: str = Field("auto", description="cpu, cuda, cuda:0, ...; auto takes a GPU if there is one.")
    cache_dir: Path | None = Field(None, description="Where converted models are kept.")
    orphan_grace_s: float = Field(
        default=5.0, ge=0, description="Seconds that the sessions of an orchestrator outlive its connection."
    )
    session_idle_ttl_s: float = Field(120.0, gt=0, description="Seconds after which an unused session is forgotten.")
    tls_clients: str = Field(
        "orchestrator.paceline",
        description="With certificates: names of which a caller's must bear one, with commas between them; empty: any "
        "that the authority has signed.",
    )
    quantization: Annotated[dict[str, Any], NoDecode, BeforeValidator(_quantization)] = Field(
        {},
        description="transformers quantization config as JSON, or a method's name; {} loads the weights as they are.",
    )
    memory_fraction: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of a GPU's memory to use, weights included (0 takes 0.9); on a CPU, share of the free memory "
        "for keys and values (0 takes 0.25).",
    )
    kv_budget_tokens: int = Field(
        0, ge=0, description="Tokens whose keys and values are kept in memory; 0 leaves it to the memory fraction."
    )
    max_context: int = Field(0, ge=0, description="Tokens of the longest session; 0 takes the model's own limit.")
    block_size: int = Field(
        0,
        ge=0,
        le=1024,
        description="Tokens of one block of memory, the unit that is shared; 0 takes 16, on a GPU 256.",
    )
    max_num_batched_tokens: int = Field(
        0, ge=0, description="Tokens fed in one step; 0 takes 8192 on a GPU and 256 on a CPU."
    )
    cuda_graphs: bool = Field(True, description="On a GPU, replay steps of one token a session as CUDA graphs.")
    enable_prefix_caching: bool = Field(True, description="Reuse what was computed for prompts that begin alike.")
    emulated_step_ms: float = Field(
        0.0,
        ge=0,
        le=60_000,
        description="Hold every model step to so many milliseconds, to stand for other hardware; 0 does not.",
    )
    emulated_step_ms_per_session: float = Field(
        0.0, ge=0, le=60_000, description="Milliseconds more for each session in a held step."
    )
    emulated_step_ms_per_token: float = Field(
        0.0, ge=0, le=60_000, description="Milliseconds more for each token fed in a held step."
    )

    @property
    def server_tls(self) -> ServerTls | None:
        """How orchestrators are let in; None: in plaintext."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        names = frozenset(_addresses(self.tls_clients))
        return ServerTls(cert=self.tls_cert, key=self.tls_key, client_ca=self.tls_ca, client_names=names)

    @property
    def is_protected(self) -> bool:
        return self.server_tls is not None

    @property
    def protection_options(self) -> str:
        return "it certificates by --tls-cert, --tls-key and --tls-ca"

    @property
    def is_emulated(self) -> bool:
        """Whether steps are held to a set time, so that no speed seen is a measurement."""
        return bool(self.emulated_times)

    @property
    def emulated_times(self) -> dict[str, float]:
        """How long steps are held, in milliseconds: the times that are not 0, by the names of their settings."""
        times = {
            "emulated_step_ms": self.emulated_step_ms,
            "emulated_step_ms_per_session": self.emulated_step_ms_per_session,
            "emulated_step_ms_per_token": self.emulated_step_ms_per_token,
        }
        return {name: time_ms for name, time_ms in times.items() if time_ms}

    @field_validator("max_num_batched_tokens")
    @classmethod
    def _room_for_a_draft(cls, value: int) -> int:
        if 0 < value < MIN_STEP_TOKENS:
            raise ValueError(f"must be 0 or at least {MIN_STEP_TOKENS}, for a draft is verified within one step")
        return value


class TargetSettings(ModelServiceSettings):
    """Settings of `python -m target_service`."""

    model_config = _config("PACELINE_TARGET_")


class DrafterSettings(ModelServiceSettings):
    """Settings of `python -m drafter_service`."""

    model_config = _config("PACELINE_DRAFTER_")

    method: str = Field(
        "draft_model",
        min_length=1,
        description="How drafts are made: draft_model, hybrid, ngram, suffix, or a method that another package registers.",
    )
    method_options: Annotated[dict[str, Any], NoDecode, BeforeValidator(_json_object)] = Field(
        {}, description="Options of another package's method, as JSON."
    )
    verifier: str | None = Field(
        None, description="Where the target's checkpoint is, if not where a trained drafter's own configuration says."
    )
    logit_noise: float = Field(
        0.0, ge=0, description="Standard deviation of noise added to the model's logits: any acceptance, for tests."
    )
    prompt_lookup_min: int = Field(2, ge=1, description="ngram: fewest tokens that must match.")
    prompt_lookup_max: int = Field(4, ge=1, description="ngram: most tokens that are matched.")
    suffix_decoding_max_tree_depth: int = Field(
        24, ge=2, le=128, description="suffix: most tokens of a match and the draft behind it together."
    )
    suffix_decoding_max_spec_factor: float = Field(
        1.0, gt=0, le=64, description="suffix: most tokens of a draft for each that matched."
    )
    suffix_decoding_min_token_prob: float = Field(
        0.1, ge=0, le=1, description="suffix: least probability of a drafted token together with those before it."
    )
    suffix_decoding_max_cached_requests: int = Field(
        10_000,
        ge=0,
        description="suffix: ended sessions whose outputs are drafted from in later ones of the same tenant; 0: none.",
    )
    suffix_decoding_max_cached_mib: int = Field(
        256, ge=1, description="suffix: MiB that these outputs take in memory; at most twice as many are allocated."
    )
    hybrid_suffix_min_score: float = Field(
        0.75,  # what a model's draft of three tokens has accepted at an acceptance of 0.45
        ge=0,
        description="hybrid: tokens that a repetition must be expected to have accepted, to be drafted instead of the "
        "model's.",
    )
    hybrid_model_draft_length: int = Field(
        3,
        ge=1,
        le=MAX_DRAFT_LENGTH,
        description="hybrid: most tokens that the model drafts beyond the committed ones; a repetition may be as long as the "
        "draft.",
    )
    distribution_entries: int = Field(
        64, ge=1, le=4096, description="rejection: most probable tokens that a draft is drawn from."
    )
    use_heterogeneous_vocab: bool = Field(
        False, description="Draft with a model whose tokenizer is not the target's, by the tokens that both have."
    )
    target_tokenizer: str | None = Field(
        None,
        validate_default=True,
        description="Where the target's tokenizer is loaded from, for --use-heterogeneous-vocab.",
    )

    @field_validator("target_tokenizer")
    @classmethod
    def _goes_with_its_switch(cls, value: str | None, others: ValidationInfo) -> str | None:
        is_on, method = others.data.get("use_heterogeneous_vocab", False), others.data.get("method")
        if is_on != bool(value):
            raise ValueError("goes together with --use-heterogeneous-vocab; give both, or none")
        if value and method in _METHODS_WITHOUT_TOKENIZER:
            raise ValueError(f"is of no use to --method {method}, which works with any tokenizer; leave it out")
        return value or None


class OrchestratorSettings(ServiceSettings):
    """Settings of `python -m orchestrator`."""

    model_config = _config("PACELINE_ORCHESTRATOR_")

    colocated_target: TargetSettings | None = Field(
        None,
        description="Run the target in this process instead: its settings as JSON, or one by one; the others come from "
        "PACELINE_TARGET_..., as a target service's do.",
    )
    target: str = Field(
        "", validate_default=True, description="HOST:PORT of the target service; several with commas between them."
    )
    drafter: str | None = Field(
        None, description="HOST:PORT of the drafter service, or several likewise; none decodes plainly."
    )
    tokenizer: str | None = Field(
        None, description="Where the tokenizer is loaded from; the target's model if left out."
    )
    cache_dir: Path | None = Field(None, description="Where converted models are kept.")
    schedule: Literal["plain", "sequential", "pipelined"] = Field(
        "pipelined", description="Whether drafting waits for each verdict."
    )
    rule: Literal["rejection", "coupled"] = Field("coupled", description="How drafts are judged above temperature 0.")
    draft_length: Annotated[int, Field(ge=0, le=MAX_DRAFT_LENGTH)] | Literal["auto"] = Field(
        "auto",
        description="Tokens of one draft; auto decides round by round from what is measured, and not to draft at all where "
        "that does not pay.",
    )
    fan_out: Annotated[int, Field(ge=0, le=MAX_FAN_OUT)] | Literal["auto"] = Field(
        "auto", description="Most guesses at one position that branches are drafted for; 0: no branches."
    )
    fallback: Literal["ngram", "suffix", "none"] = Field(
        "ngram", description="What drafts when the drafter does not answer."
    )
    prompt_lookup_min: int = Field(2, ge=1, description="Fallback: fewest tokens that must match.")
    prompt_lookup_max: int = Field(4, ge=1, description="Fallback: most tokens that are matched.")
    draft_deadline_s: float = Field(2.0, gt=0, description="Longest wait for one draft.")
    verify_deadline_s: float = Field(120.0, gt=0, description="Longest wait for one verdict.")
    connect_timeout_s: float = Field(30.0, gt=0, description="Longest wait for the target at start.")
    drafter_timeout_s: float = Field(5.0, gt=0, description="Longest wait for the drafter at start; it may come later.")
    silence_limit_s: float = Field(5.0, gt=0, description="A peer that says nothing for so long counts as gone.")
    failover_timeout_s: float = Field(
        1.0, gt=0, description="Longest that an answer waits for another target when it has lost its own."
    )
    max_migrations: int = Field(
        8, ge=0, description="Targets that an answer may lose in a row, none giving a verdict, before it fails."
    )
    max_queued_requests: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="Requests that wait while --max-sessions answers run; beyond it they are refused at once. auto takes "
        "a quarter of --max-sessions, so that waiting adds at most a quarter to the time of an answer; 0: nobody waits.",
    )
    queue_timeout_s: float = Field(
        10.0, gt=0, description="Longest that a request waits to begin; one that would wait longer is refused at once."
    )
    stalled_reader_timeout_s: float = Field(
        60.0, gt=0, description="An answer of which nothing was read for so long is ended; its caller can resume it."
    )
    otlp_endpoint: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="URL of an OpenTelemetry collector for traces, over gRPC: http://HOST:4317, or https:// for TLS; none: "
        "no traces.",
    )
    trace_sample_ratio: float = Field(
        1.0, ge=0, le=1, description="Share of requests that are traced, of those whose caller has not decided it."
    )
    reflection: bool = Field(
        False, description="Describe the protocol to gRPC clients that ask, as grpcurl does; for development."
    )
    default_max_tokens: int = Field(256, ge=1, description="max_tokens of requests that name none.")
    max_tokens_limit: int = Field(131_072, ge=1, description="Largest max_tokens that a request may ask for.")
    max_prompt_tokens: int = Field(131_072, ge=1, description="Longest prompt taken, whatever the model's context.")
    http_port: Annotated[int | None, Field(ge=0, le=65535), BeforeValidator(_none_if_empty)] = Field(
        None, description="Port for the OpenAI-compatible HTTP API; 0 takes any free one, none leaves it off."
    )
    http_max_body_bytes: int = Field(8 * 1024 * 1024, ge=1024, description="Largest body of an HTTP request.")

    target_tls_name: str = Field(
        "target.paceline", min_length=1, description="With certificates: the name that a target's must bear."
    )
    drafter_tls_name: str = Field(
        "drafter.paceline", min_length=1, description="With certificates: the name that a drafter's must bear."
    )
    public_tls_cert: OptionalPath = Field(
        None, description="PEM file of the certificate that callers of this orchestrator see; none: plaintext."
    )
    public_tls_key: OptionalPath = Field(None, validate_default=True, description="PEM file of its key.")
    public_tls_ca: OptionalPath = Field(
        None,
        validate_default=True,
        description="PEM file of the authority that must have signed a caller's certificate; none: callers need none.",
    )
    tokens_file: OptionalPath = Field(
        None, description="File of the tokens that callers need, made by `paceline token new`; none: no tokens."
    )

    @field_validator("public_tls_key")
    @classmethod
    def _key_with_certificate(cls, value: Path | None, others: ValidationInfo) -> Path | None:
        if bool(value) != bool(others.data.get("public_tls_cert")):
            raise ValueError("goes together with --public-tls-cert; give both, or none")
        return value

    @field_validator("public_tls_ca")
    @classmethod
    def _authority_with_certificate(cls, value: Path | None, others: ValidationInfo) -> Path | None:
        if value and not others.data.get("public_tls_cert"):
            raise ValueError(
                "goes together with --public-tls-cert and --public-tls-key; give all three, or leave it out"
            )
        return value

    @field_validator("target")
    @classmethod
    def _one_kind_of_target(cls, value: str, others: ValidationInfo) -> str:
        is_here = others.data.get("colocated_target") is not None
        if is_here and value:
            raise ValueError("goes without --colocated-target; give one of the two")
        if not is_here and not value:
            raise ValueError("Field required, unless the target runs here by --colocated-target")
        return value

    @field_validator("drafter")
    @classmethod
    def _none_means_none(cls, value: str | None) -> str | None:
        return None if value in (None, "", "none") else value

    @property
    def target_tls(self) -> ClientTls | None:
        """How targets are reached; None: in plaintext."""
        return self._client_tls(self.target_tls_name)

    @property
    def drafter_tls(self) -> ClientTls | None:
        """How drafters are reached; None: in plaintext."""
        return self._client_tls(self.drafter_tls_name)

    def _client_tls(self, server_name: str) -> ClientTls | None:
        if self.tls_ca is None:
            return None
        return ClientTls(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key, server_name=server_name)

    @property
    def public_tls(self) -> ServerTls | None:
        """How callers are let in, over gRPC and HTTP; None: in plaintext."""
        if self.public_tls_cert is None or self.public_tls_key is None:
            return None
        return ServerTls(cert=self.public_tls_cert, key=self.public_tls_key, client_ca=self.public_tls_ca)

    @property
    def is_protected(self) -> bool:
        return self.tokens_file is not None or self.public_tls_ca is not None

    @property
    def protection_options(self) -> str:
        return (
            "callers tokens by --tokens-file or certificates by --public-tls-cert, --public-tls-key and --public-tls-ca"
        )

    @property
    def longest_queue(self) -> int:
        """Requests that may wait."""
        return self.max_sessions // 4 if self.max_queued_requests == "auto" else self.max_queued_requests

    @property
    def target_addresses(self) -> tuple[str, ...]:
        return _addresses(self.target)

    @property
    def drafter_addresses(self) -> tuple[str, ...]:
        return _addresses(self.drafter or "")


def _addresses(text: str) -> tuple[str, ...]:
    """The addresses between the commas, each once."""
    return tuple(dict.fromkeys(address for part in text.split(",") if (address := part.strip())))
