"""The folder of a trained drafter, and what becomes of it beside a target: the right one, another, or none."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from drafter_service.methods import draft_model
from paceline.engine import checkpoint as checkpoint_module
from paceline.engine.checkpoint import DEFAULT_DRAFTER, load_network, resolve_checkpoint
from paceline.engine.drafter_folder import TrainedDrafter, is_drafter_folder
from paceline.engine.drafter_network import load_drafter
from paceline.engine.interface import Extension
from paceline.engine.model import CausalModel
from paceline.engine.packed_linear import PackedLinear, pack_linears
from paceline.engine.shallow import DraftHead
from paceline.errors import ModelUnavailable
from paceline.settings import DrafterSettings
from paceline.training.evaluation import Acceptance, Evaluation
from paceline.training.folder import write_drafter
from paceline.training.student import Shape, Student
from tests.checkpoints import FAMILIES, TINY_VOCAB_SIZE, save_tiny_checkpoint

IDS = [(37 * n + 11) % TINY_VOCAB_SIZE for n in range(20)]
ROUNDING = 3e-4  # float32, logits of some tens: some tens of roundings
DRAFT_IDS = torch.arange(3, TINY_VOCAB_SIZE, 7)


def evaluation() -> Evaluation:
    """0.5 at temperature 0 and 0.25 at 1; fastest with drafts of two."""
    results = tuple(
        Acceptance(
            temperature=temperature,
            rows=10,
            acceptance=share,
            by_position=(share, share),
            tokens_per_round=(1.5, 1.75),
            tokens_per_block=(1.0, 1.5),
        )
        for temperature, share in ((0.0, 0.5), (1.0, 0.25))
    )
    return Evaluation(results).with_costs(0.1)


def make_student(target: Path, *, layers: tuple[int, ...] = (0, 3), trained_layers: int = 1) -> Student:
    """As if it had been trained: what learns is no longer the target's."""
    student = Student(
        load_network(target, dtype=torch.float32), Shape(layers, trained_layers, len(DRAFT_IDS)), DRAFT_IDS
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in student.parameters:
            change = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_((parameter + change).bfloat16())  # so that storing it loses nothing
    return student


def write(folder: Path, target: Path, **options: Any) -> Student:
    student = make_student(target, **options)
    write_drafter(folder, student, verifier=str(target), evaluation=evaluation())
    return student


def load(folder: Path, **options: Any) -> CausalModel:
    return CausalModel.load(str(folder), **{"dtype": "float32", "device": "cpu", **options})


def rows_of(model: CausalModel) -> Tensor:
    cache = model.new_cache()
    first = model.step([Extension(cache, IDS[:9], 9)])
    second = model.step([Extension(cache, IDS[9:], len(IDS) - 9)])
    model.release(cache)
    return torch.cat((*first, *second))


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}  # no longer mapped from what is replaced
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads, and lose much where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target`, four layers, and `drafter`, its first and its last; nobody changes them."""
    folder = tmp_path_factory.mktemp("pair")
    save_tiny_checkpoint(folder / "target", seed=1, layers=4, eos_token_id=7)
    (folder / "target" / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    write(folder / "drafter", folder / "target")
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """The same, to be changed."""
    save_tiny_checkpoint(tmp_path / "target", seed=1, layers=4)
    write(tmp_path / "drafter", tmp_path / "target")
    return tmp_path


# What is loaded


@pytest.mark.parametrize(
    ("family", "layers", "trained_layers"),
    [
        ("llama", (0, 3), 1),
        ("llama", (0, 2, 3), 1),
        ("llama", (0, 1, 3), 2),
        ("llama", (1,), 1),
        *((family, (0, 3), 1) for family in sorted(FAMILIES.keys() - {"llama"})),
        ("gemma3", (0, 2), 1),  # all of one type
    ],
)
def test_loaded_drafter_is_the_student(
    family: str, layers: tuple[int, ...], trained_layers: int, tmp_path: Path
) -> None:
    """Its rows are those of the network that was trained, -inf for all tokens that it cannot propose."""
    target = save_tiny_checkpoint(tmp_path / "target", seed=1, family=family, layers=4)
    student = write(tmp_path / "drafter", target, layers=layers, trained_layers=trained_layers)
    with torch.inference_mode():
        expected = student.network(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    torch.testing.assert_close(rows_of(load(tmp_path / "drafter")), expected, rtol=0.0, atol=ROUNDING)
    assert int(expected.isfinite().sum()) == len(IDS) * len(DRAFT_IDS)


def test_drafter_speaks_for_its_target(shared: Path) -> None:
    """It pairs with the target like any draft model, and says what its evaluation recorded."""
    drafter, target = load(shared / "drafter"), load(shared / "target")
    assert drafter.tokenizer_sha256 == target.tokenizer_sha256 != ""
    assert (drafter.vocab_size, drafter.max_context) == (target.vocab_size, target.max_context)
    assert drafter.eos_token_ids == target.eos_token_ids == (7, 9)
    assert drafter.expected_acceptance == ((0.0, 0.5), (1.0, 0.25))
    assert target.expected_acceptance == ()


def test_service_reports_what_the_drafter_should_reach(shared: Path) -> None:
    """Whoever pairs with it can compare."""
    options: dict[str, Any] = {"model": str(shared / "drafter"), "dtype": "float32", "device": "cpu", "max_context": 64}
    info = draft_model.build(DrafterSettings(**options)).info
    assert info.expected_acceptance == ((0.0, 0.5), (1.0, 0.25))
    assert info.vocab_size == TINY_VOCAB_SIZE


def test_nothing_is_read_of_layers_that_the_drafter_lacks(pair: Path) -> None:
    """Those behind the last that it shares with the target need not even be there, and nobody is told of them."""
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    expected = rows_of(load(pair / "drafter"))
    edit_tensors(pair / "target", lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers.2" in name])
    transformers_logging.add_handler(handler)
    try:
        assert torch.equal(rows_of(load(pair / "drafter")), expected)
    finally:
        transformers_logging.remove_handler(handler)
    assert heard.getvalue() == ""


def test_noise_leaves_impossible_tokens_impossible(shared: Path) -> None:
    """A noisy drafter proposes no token without a row in its head."""
    plain, noisy = rows_of(load(shared / "drafter")), rows_of(load(shared / "drafter", logit_noise=0.5))
    assert torch.equal(noisy.isfinite(), plain.isfinite())
    assert not torch.equal(noisy, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_number_format_is_not_another_revision(dtype: torch.dtype, shared: Path) -> None:
    """The target's weights are recognised in whatever format they are loaded, and all of the drafter is in that."""
    loaded = load_drafter(shared / "drafter", verifier=None, dtype=dtype, device=torch.device("cpu"), cache_dir=None)
    assert {tensor.dtype for tensor in loaded.network.parameters()} == {dtype}
    assert not any(tensor.is_meta for tensor in (*loaded.network.parameters(), *loaded.network.buffers()))


def test_small_head_is_packed_like_any_linear_layer(shared: Path) -> None:
    """The head is the largest matrix of a drafter."""
    loaded = load_drafter(
        shared / "drafter", verifier=None, dtype=torch.bfloat16, device=torch.device("cpu"), cache_dir=None
    )
    packs_here = pack_linears(nn.Sequential(nn.Linear(32, 32, dtype=torch.bfloat16))) == 1
    packed = pack_linears(loaded.network)
    head = loaded.network.get_submodule("lm_head")
    assert isinstance(head, DraftHead)
    assert isinstance(head.linear, PackedLinear) == packs_here
    assert (packed > 1) == packs_here


def test_model_that_proposes_other_tokens_in_a_batch_is_refused(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Impossible tokens must be the same ones however a row is computed."""
    forward = DraftHead.forward

    def forgetful(self: DraftHead, states: Tensor) -> Tensor:
        logits = forward(self, states)
        if states.shape[-2] == 24:  # the one sequence that batches are compared with
            logits[..., int(DRAFT_IDS[0])] = float("-inf")
        return logits

    monkeypatch.setattr(DraftHead, "forward", forgetful)
    with pytest.raises(ModelUnavailable, match="in a way that Paceline does not know"):
        load(shared / "drafter")


# The folder


def test_folder_follows_the_conventions_of_speculators(shared: Path) -> None:
    """Whoever knows such checkpoints finds the usual keys, and nothing tells of the machine that trained it."""
    config = json.loads((shared / "drafter" / "config.json").read_text())
    assert config["draft_vocab_size"] == len(DRAFT_IDS)
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert config["transformer_layer_config"]["num_hidden_layers"] == 2
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": str(shared / "target"),
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["speculators_config"]["default_proposal_method"] == "greedy"
    assert config["speculators_config"]["proposal_methods"] == [
        {"proposal_type": "greedy", "speculative_tokens": 2, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    ]
    assert (config["target_layers"], config["trained_layers"]) == ([0, 3], 1)
    assert Evaluation.from_json(config["evaluation"]) == evaluation()
    del config["speculators_config"]["verifier"]
    assert str(shared) not in json.dumps(config)


def test_folder_holds_what_was_trained_and_nothing_else(shared: Path) -> None:
    """In bfloat16, beside the offsets from draft ids to the target's."""
    tensors = load_file(shared / "drafter" / "model.safetensors")
    offsets = tensors.pop("d2t")
    assert offsets.dtype == torch.int64
    assert (torch.arange(len(offsets)) + offsets).tolist() == DRAFT_IDS.tolist()
    student = make_student(shared / "target")
    assert tensors.keys() == student.state_dict().keys()
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    assert all(torch.equal(tensors[name].float(), tensor) for name, tensor in student.state_dict().items())


def test_packaged_drafter_has_a_name(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies in the package, by the name of its target; an installation may lack it."""
    monkeypatch.setattr(checkpoint_module, "_DRAFTERS_FOLDER", shared)
    with pytest.raises(ModelUnavailable, match="not part of this installation; train one"):
        resolve_checkpoint(DEFAULT_DRAFTER)
    monkeypatch.setattr(checkpoint_module, "DEFAULT_MODEL", "drafter")
    assert resolve_checkpoint(DEFAULT_DRAFTER) == shared / "drafter"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model_type": "llama"}'])
def test_other_folders_are_no_drafters(content: str, tmp_path: Path) -> None:
    """A whole model is told by its configuration, and one that is damaged is not taken for a drafter."""
    (tmp_path / "config.json").write_text(content)
    assert not is_drafter_folder(tmp_path)
    assert not is_drafter_folder(tmp_path / "absent")
    assert not is_drafter_folder("a-hub-id")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config.update(speculators_model_type="eagle3"), "kind 'eagle3', which Paceline does not run"),
        (lambda config: config.pop("target_layers"), "it lacks 'target_layers'"),
        (lambda config: config.update(draft_vocab_size=7), "d2t does not name 7 tokens"),
        (lambda config: config.update(trained_layers=3), "cannot have been trained"),
        (lambda config: config.update(speculators_config=[]), "incomplete or damaged"),
    ],
)
def test_configuration_that_cannot_be_used_is_refused(
    change: Callable[[dict[str, Any]], object], message: str, pair: Path
) -> None:
    """In one sentence that says what is wrong."""
    edit_config(pair / "drafter", change)
    with pytest.raises(ModelUnavailable, match=message):
        load(pair / "drafter")


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NORM), f"it lacks {NORM}"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "it has extra, for which there is no place"),
        (lambda tensors: tensors.update({NORM: torch.zeros(5)}), rf"{NORM} in the shape \[5\] and not \[32\]"),
        (lambda tensors: tensors.update({"model.layers.0.input_layernorm.weight": torch.zeros(32)}), "no place"),
        (lambda tensors: tensors.pop("d2t"), "lacks 'd2t'"),
        (lambda tensors: tensors["d2t"].neg_(), "d2t does not name"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    change: Callable[[dict[str, Tensor]], object], message: str, pair: Path
) -> None:
    """Nothing is left at random, and nothing of the target's own is replaced."""
    edit_tensors(pair / "drafter", change)
    with pytest.raises(ModelUnavailable, match=message):
        load(pair / "drafter")


@pytest.mark.parametrize("keep_bytes", [None, 1000])
def test_file_that_is_missing_or_cut_is_refused(keep_bytes: int | None, pair: Path) -> None:
    """As happens when a copy is interrupted."""
    path = pair / "drafter" / "model.safetensors"
    content = path.read_bytes()
    path.unlink()
    if keep_bytes is not None:
        path.write_bytes(content[:keep_bytes])
    with pytest.raises(ModelUnavailable, match="incomplete or damaged"):
        load(pair / "drafter")


# The target


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"])
def test_another_revision_of_the_target_is_recognised(name: str, pair: Path) -> None:
    """By each part that the drafter takes from it."""
    edit_tensors(pair / "target", lambda tensors: tensors[name].mul_(1.02))
    with pytest.raises(ModelUnavailable, match="trained for another revision of"):
        load(pair / "drafter")


def test_target_that_was_moved_is_named_by_the_verifier_option(pair: Path) -> None:
    """Without it the error says so."""
    expected = rows_of(load(pair / "drafter"))
    (pair / "target").rename(pair / "elsewhere")
    with pytest.raises(ModelUnavailable, match=r"needs its target's checkpoint.*--verifier names it"):
        load(pair / "drafter")
    assert torch.equal(rows_of(load(pair / "drafter", verifier=str(pair / "elsewhere"))), expected)


def test_verifier_must_be_the_whole_model_of_the_drafter(pair: Path, tmp_path: Path) -> None:
    """Not a drafter, nor a smaller model, nor a quantised one."""
    drafter = pair / "drafter"
    with pytest.raises(ModelUnavailable, match="is a drafter itself"):
        load(drafter, verifier=str(drafter))
    smaller = save_tiny_checkpoint(tmp_path / "smaller", seed=1, layers=2)
    with pytest.raises(ModelUnavailable, match="has 2 layers and 320 tokens"):
        load(drafter, verifier=str(smaller))
    wider = save_tiny_checkpoint(tmp_path / "wider", seed=1, layers=4, hidden=64)
    with pytest.raises(ModelUnavailable, match="does not fit its target"):
        load(drafter, verifier=str(wider))
    edit_config(pair / "target", lambda config: config.update(quantization_config={"quant_method": "fp8"}))
    with pytest.raises(ModelUnavailable, match="is quantised"):
        load(drafter)


def test_options_that_are_of_no_use_are_refused(shared: Path) -> None:
    """A drafter is not quantised, and a whole model has no verifier."""
    with pytest.raises(ModelUnavailable, match="trained drafter, and small; it cannot be loaded with --quantization"):
        load(shared / "drafter", quantization={"quant_method": "fp8"})
    with pytest.raises(ModelUnavailable, match="so --verifier elsewhere is of no use"):
        load(shared / "target", verifier="elsewhere")


def test_reading_gives_what_was_written(shared: Path) -> None:
    """All that is known of a drafter, without its target."""
    drafter = TrainedDrafter.read(shared / "drafter")
    assert (drafter.verifier, drafter.target_layers, drafter.trained_layers) == (str(shared / "target"), (0, 3), 1)
    assert (drafter.draft_length, drafter.verifier_architectures) == (2, ("LlamaForCausalLM",))
    assert drafter.expected_acceptance == evaluation().expected_acceptance
    assert torch.equal(drafter.draft_ids, DRAFT_IDS)
