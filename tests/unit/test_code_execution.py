"""Data is never code: nothing is unpickled, no checkpoint's code is run, nothing is evaluated.

The first half reads the sources, the second loads a checkpoint that carries code.
"""

from __future__ import annotations

import ast
import json
import runpy
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from orchestrator.text import Tokenizer
from paceline.engine.model import CausalModel
from paceline.errors import PacelineError
from tests.checkpoints import save_markov_checkpoint

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("services/paceline", "orchestrator", "drafter_service", "target_service", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
HARMLESS = {("pickle", "UnpicklingError")}  # an exception, which torch raises for what is no checkpoint
EVALUATORS = {"eval", "exec", "compile", "__import__"}


def test_the_sources_are_found() -> None:
    """Else the tests below would say nothing."""
    assert len(SOURCES) > 150


def faults_in(source: str) -> Iterator[str]:
    """What of a module could run data as code, one sentence each."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"imports {each.name}" for each in node.names if each.name.partition(".")[0] in UNPICKLERS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in UNPICKLERS:
            yield from (
                f"imports {each.name} of {node.module}"
                for each in node.names
                if (node.module, each.name) not in HARMLESS
            )
        elif isinstance(node, ast.Call):
            yield from _faults_of(node)


def _faults_of(call: ast.Call) -> Iterator[str]:
    said = {keyword.arg: keyword.value for keyword in call.keywords}
    match call.func:
        case ast.Name(id=name) if name in EVALUATORS:
            yield f"calls {name}"
        case ast.Attribute(value=ast.Name(id="torch"), attr="load") if not _is(said.get("weights_only"), True):
            yield "calls torch.load without weights_only=True"
        case ast.Attribute(value=ast.Name(id="yaml"), attr="load" | "unsafe_load" | "full_load" as name):
            yield f"calls yaml.{name}, where safe_load would do"
        case ast.Attribute(attr="from_pretrained", value=ast.Name(id=owner)) if owner.startswith("Auto"):
            if not _is(said.get("trust_remote_code"), False):
                yield f"calls {owner}.from_pretrained without trust_remote_code=False"
    for name, value in (("trust_remote_code", True), ("allow_pickle", True), ("shell", True)):
        if _is(said.get(name), value):
            yield f"says {name}={value}"


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "from dill import *",
        "import shelve, os",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text, Loader)",
        "AutoConfig.from_pretrained(name)",
        "AutoTokenizer.from_pretrained(name, trust_remote_code=flag)",
        "Model.from_pretrained(name, trust_remote_code=True)",
        "numpy.load(path, allow_pickle=True)",
        "subprocess.run(command, shell=True)",
        "eval(text)",
    ],
)
def test_each_way_to_run_data_is_seen(source: str) -> None:
    """The check below can fail."""
    assert list(faults_in(source))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_runs_data_as_code(path: Path) -> None:
    """Messages are protobuf and msgpack, files are safetensors, JSON and YAML's safe part."""
    assert not list(faults_in(path.read_text(encoding="utf-8")))


@pytest.fixture
def laden(tmp_path: Path) -> Path:
    """A checkpoint whose every part names code of its own, which leaves a file behind when it is run."""
    folder = save_markov_checkpoint(tmp_path / "laden", [[0.25] * 4] * 4)
    code = f"open({str(tmp_path / 'was_run')!r}, 'w').close()\n" + "\n".join(
        f"class {name}: pass" for name in ("Config", "Model", "Tokenizer")
    )
    (folder / "laden.py").write_text(code)
    for file, named in (
        ("config.json", {"AutoConfig": "laden.Config", "AutoModelForCausalLM": "laden.Model"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["laden.Tokenizer", "laden.Tokenizer"]}),
    ):
        content = json.loads((folder / file).read_text())
        content["auto_map"] = named
        (folder / file).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("model_type", [None, "laden"])
def test_code_of_a_checkpoint_is_never_run(laden: Path, model_type: str | None) -> None:
    """Where transformers knows the model itself it is loaded without; a model that is all code is refused in words."""
    if model_type is not None:
        content = json.loads((laden / "config.json").read_text())
        (laden / "config.json").write_text(json.dumps({**content, "model_type": model_type}))
    for load in (lambda: CausalModel.load(str(laden), dtype="float32"), lambda: Tokenizer.load(str(laden))):
        with suppress(PacelineError):
            load()
    assert not (laden.parent / "was_run").exists()


def test_the_code_would_leave_its_mark(laden: Path) -> None:
    """The check above can fail."""
    runpy.run_path(str(laden / "laden.py"))
    assert (laden.parent / "was_run").exists()
