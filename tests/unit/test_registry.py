"""Drafting methods by name: built in or from another package, and what is said where a name cannot be used."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from drafter_service import methods, registry
from drafter_service.method import DraftView, DraftWork, Progress
from drafter_service.methods.ngram import NgramMethod
from drafter_service.registry import BUILT_IN_METHODS, BuiltMethod, build_method, info_without_model
from orchestrator.fixed_planner import FixedPlanner
from orchestrator.loop import run_session
from paceline.errors import ModelUnavailable, StartupFailed
from paceline.generation import Schedule
from paceline.sampling import DraftedToken
from paceline.settings import DrafterSettings
from paceline.types import SpeculationStats, VerificationRule
from tests.fakes import (
    CountingOutput,
    FakeModel,
    LocalDrafts,
    LocalTarget,
    counting_logits,
    spec_of,
    target_alone,
)

VOCAB_SIZE = 12

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package that registers methods: `name = "module:function"`."""
    monkeypatch.syspath_prepend(tmp_path)

    def install_package(package: str, **offers: str) -> None:
        folder = tmp_path / f"{package}-1.0.dist-info"
        folder.mkdir()
        folder.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in offers.items()]
        folder.joinpath("entry_points.txt").write_text("\n".join(["[paceline.draft_methods]", *lines, ""]))

    return install_package


def build(**options: Any) -> BuiltMethod:
    """The method that these settings of a drafter name."""
    return build_method(DrafterSettings(**options))


# ---- methods of other packages, as their modules would hold them ----------------------------------------------------


class StepMethod:
    """Drafts by arithmetic: each token is the last one plus `step`."""

    max_context = 2**31 - 1
    memory = None
    preemptions = 0

    def __init__(self, step: int) -> None:
        self._step = step

    def open(self, session: DraftView) -> None:
        """Nothing is kept."""

    def draft(self, batch: Sequence[DraftWork[None]]) -> Sequence[Progress]:
        return [Progress(drafted=self._tokens(work)) for work in batch]

    def rewind(self, state: None, length: int) -> None: ...

    def can_step(self) -> bool:
        return True

    def pending_tokens(self, state: None, session: DraftView) -> int:
        return 0

    def close(self, state: None) -> None: ...

    def _tokens(self, work: DraftWork[None]) -> list[DraftedToken]:
        ids, vocab_size = [*work.session.committed_ids, *work.session.drafted_ids], work.session.spec.vocab_size
        steps = range(1, work.max_tokens + 1)
        return [DraftedToken((ids[-1] + number * self._step) % vocab_size) for number in steps]


def build_steps(settings: DrafterSettings) -> BuiltMethod:
    return BuiltMethod(StepMethod(settings.method_options["step"]), info_without_model("other", max_context=2**31 - 1))


def build_nothing(settings: DrafterSettings) -> None: ...


def build_badly(settings: DrafterSettings) -> BuiltMethod:
    raise RuntimeError("no such table")


def build_without_weights(settings: DrafterSettings) -> BuiltMethod:
    raise ModelUnavailable("There are no weights; fetch them.")


NOT_A_FUNCTION = 7
HERE = "tests.unit.test_registry"


# ---- built in -------------------------------------------------------------------------------------------------------


def test_every_module_of_methods_is_a_built_in_method() -> None:
    """And the names that are offered are in order."""
    modules = {module.name for module in pkgutil.iter_modules(methods.__path__)}
    assert modules == set(BUILT_IN_METHODS)
    assert sorted(BUILT_IN_METHODS) == list(BUILT_IN_METHODS)


def test_only_the_chosen_methods_module_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that looks up prompts loads no network."""
    imported = []

    def import_recorded(name: str) -> Any:
        imported.append(name)
        return import_module(name)

    monkeypatch.setattr(registry, "import_module", import_recorded)
    built = build(method="ngram")
    assert isinstance(built.method, NgramMethod)
    assert (built.info.method, built.info.has_model, built.allocation) == ("ngram", False, None)
    assert imported == ["drafter_service.methods.ngram"]


def test_every_start_is_another_incarnation() -> None:
    """So that a service that was started again is recognised."""
    assert build(method="ngram").info.incarnation != build(method="ngram").info.incarnation


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}, "--prompt-lookup-min"),
        ({"method": "ngram", "emulated_step_ms": 1.0}, "--emulated-step-ms .* --method ngram has none"),
        ({"method": "ngram", "method_options": {"n": 1}}, "--method ngram takes no --method-options"),
    ],
)
def test_a_setting_that_the_method_cannot_honour_is_refused(settings: dict[str, Any], words: str) -> None:
    """None is ignored."""
    with pytest.raises(StartupFailed, match=words):
        build(**settings)


def test_an_unknown_method_is_refused_with_all_that_are_known(install: Install) -> None:
    """Those of other packages among them, in alphabetical order."""
    install("other", lookahead=f"{HERE}:build_steps")
    with pytest.raises(StartupFailed) as failure:
        build(method="suffixes")
    known = "draft_model, hybrid, lookahead, ngram, suffix"
    assert failure.value.message == f"There is no drafting method 'suffixes'; known are {known}."


# ---- from other packages --------------------------------------------------------------------------------------------


async def test_a_method_of_another_package_drafts_for_a_session(install: Install) -> None:
    """Built with its own options, it goes through drafter, loop and target: every draft is kept, the text is the
    target's."""
    install("other", step=f"{HERE}:build_steps")
    built = build(method="step", method_options={"step": 1})
    assert built.info.method == "step"
    spec = spec_of(prompt_length=2, vocab_size=VOCAB_SIZE, rule=VerificationRule.GREEDY)
    logits = counting_logits(VOCAB_SIZE)
    drafts, stats, ids = LocalDrafts(built.method, spec), SpeculationStats(), list[int]()
    async for result in run_session(
        spec,
        (3, 4),
        FixedPlanner(schedule=Schedule.PIPELINED, draft_length=3, rule=spec.effective_rule),
        target=LocalTarget(FakeModel(logits, vocab_size=VOCAB_SIZE), spec),
        drafts=drafts,
        output=CountingOutput(40),
        stats=stats,
    ):
        ids += result.delivery.token_ids
    assert ids == target_alone(logits, spec, (3, 4), 40)
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 20
    assert (drafts.stalls, drafts.failures) == (0, [])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            "no_such_module_anywhere:build",
            "cannot be built: ModuleNotFoundError: .*no_such_module",
        ),
        (f"{HERE}:no_such_function", "cannot be built: AttributeError: .*no_such_function"),
        (f"{HERE}:NOT_A_FUNCTION", "cannot be built: TypeError: .*not callable"),
        (f"{HERE}:build_badly", "cannot be built: RuntimeError: no such table"),
        (f"{HERE}:build_nothing", f"gives a NoneType; {HERE}:build_nothing must return .*BuiltMethod"),
    ],
)
def test_a_fault_of_another_package_ends_the_start_with_a_sentence(install: Install, value: str, words: str) -> None:
    """It names the method, the package and what went wrong."""
    install("other", odd=value)
    with pytest.raises(StartupFailed, match=f"The drafting method 'odd' of the package other .*{words}"):
        build(method="odd")


def test_what_another_package_raises_on_purpose_is_left_as_it_is(install: Install) -> None:
    """A sentence of its own, such as that its weights are missing."""
    install("other", odd=f"{HERE}:build_without_weights")
    with pytest.raises(ModelUnavailable, match="fetch them"):
        build(method="odd")


def test_a_method_of_another_package_is_loaded_only_if_it_is_chosen(install: Install) -> None:
    """A package with a fault is nobody's trouble until its method is asked for."""
    install("other", odd="no_such_module_anywhere:build")
    assert build(method="ngram").info.method == "ngram"


@pytest.mark.parametrize(
    ("packages", "method", "words"),
    [
        (["other"], "ngram", "'ngram' is offered by Paceline and by the package other"),
        (["one", "two"], "step", "'step' is offered by the package (one|two) and by the package (one|two)"),
    ],
)
def test_a_name_that_two_claim_is_refused(install: Install, packages: list[str], method: str, words: str) -> None:
    """Neither a built-in method nor another package's is replaced without a word."""
    for package in packages:
        install(package, **{method: f"{HERE}:build_steps"})
    with pytest.raises(StartupFailed, match=words):
        build(method=method, method_options={"step": 1})


@pytest.mark.parametrize(
    ("written", "meant"), [('{"step": 2, "deep": {"a": [1]}}', {"step": 2, "deep": {"a": [1]}}), ("{}", {}), ("", {})]
)
def test_the_options_of_a_method_are_json(written: str, meant: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the command line and in the environment; in a configuration file they may also be a mapping."""
    assert CliApp.run(DrafterSettings, cli_args=["--method-options", written]).method_options == meant
    assert DrafterSettings.model_validate({"method_options": meant}).method_options == meant
    monkeypatch.setenv("PACELINE_DRAFTER_METHOD_OPTIONS", written)
    assert DrafterSettings.model_validate({}).method_options == meant


@pytest.mark.parametrize("written", ['{"step": ', "[1]", "7", "two"])
def test_options_that_are_no_json_object_are_refused(written: str) -> None:
    """By the name of the setting."""
    with pytest.raises(ValidationError, match="method_options"):
        CliApp.run(DrafterSettings, cli_args=["--method-options", written])
