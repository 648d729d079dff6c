"""A whole training on a tiny target: it helps, it can be interrupted anywhere, and its folder says how it was made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.engine.model import CausalModel
from paceline.errors import StartupFailed
from paceline.training import run
from paceline.training.corpus import Corpus
from paceline.training.evaluation import Evaluation
from paceline.training.run import Answers, Training, make_answers, opened
from paceline.training.settings import TrainingSettings
from paceline.training.trainer import Recipe, Trainer, collate
from tests.training import CountingObserver, sample, save_learnable_checkpoint, tiny_settings

COMMAND = "paceline train --target tiny --output drafter"


@dataclass(frozen=True)
class Trained:
    """A run that nobody interrupted."""

    folder: Path
    settings: TrainingSettings
    evaluation: Evaluation
    observer: CountingObserver


@dataclass(frozen=True)
class Short:
    """A shorter one, for runs that are interrupted to be compared with."""

    folder: Path
    settings: TrainingSettings


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    run.use_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> TrainingSettings:
    return tiny_settings(save_learnable_checkpoint(tmp_path_factory.mktemp("target") / "model"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, settings: TrainingSettings) -> Trained:
    folder, observer = tmp_path_factory.mktemp("run") / "drafter", CountingObserver()
    with opened(folder, settings):
        make_answers(folder, settings, observer)
        training = Training(folder, settings)
        assert training.run(observer)
        return Trained(folder, settings, training.finish(command=COMMAND), observer)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory, trained: Trained) -> Short:
    """A training of few steps on the same answers, to its end."""
    folder = tmp_path_factory.mktemp("short") / "drafter"
    shutil.copytree(trained.folder / "answers", folder / "answers")
    settings = replace(trained.settings, steps=12)
    assert Training(folder, settings).run(CountingObserver())
    return Short(folder, settings)


@pytest.fixture
def answered(tmp_path: Path, trained: Trained) -> Path:
    """The folder of a run that has its answers and nothing else."""
    folder = tmp_path / "drafter"
    shutil.copytree(trained.folder / "answers", folder / "answers")
    return folder


def weights(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "checkpoint.pt", weights_only=True)["weights"]
    return state


def is_same(first: Path, second: Path) -> bool:
    """Whether both runs learned the same, bit for bit."""
    one, other = weights(first), weights(second)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- what comes of it -----------------------------------------------------------------------------------------------


def test_training_improves_acceptance_on_held_out_answers(trained: Trained) -> None:
    """At every temperature, on answers that were not trained on (all seeds are fixed)."""
    lines = [json.loads(line) for line in (trained.folder / "training_log.jsonl").read_text().splitlines()]
    before, after = (Evaluation.from_json(lines[place]["evaluation"]) for place in (0, -1))
    gains = [late.acceptance - early.acceptance for early, late in zip(before.results, after.results, strict=True)]
    assert [result.temperature for result in after.results] == [0.0, 0.7, 1.0]
    assert min(gains) > 0.02
    assert max(gains) > 0.05
    assert after.results == trained.evaluation.results


def test_log_tells_of_every_stretch_of_steps(trained: Trained) -> None:
    """Step, loss, learning rate, tokens and seconds, and looks at the held-out answers at each tenth of the way."""
    lines = [json.loads(line) for line in (trained.folder / "training_log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(0, 61, 6))
    assert all("evaluation" in line for line in lines)
    assert lines[-1]["loss"] < lines[1]["loss"]
    assert lines[-1]["tokens"] > lines[1]["tokens"] > 0
    assert lines[1].keys() == {"step", "loss", "learning_rate", "tokens", "seconds", "evaluation"}
    assert len(trained.observer.losses) == 60
    assert trained.observer.answers == 64


def test_folder_is_a_drafter_with_its_evaluation_and_card(trained: Trained) -> None:
    """It can be loaded beside its target, and says how it was made and how good it is."""
    drafter = CausalModel.load(str(trained.folder), dtype="float32", device="cpu")
    assert drafter.expected_acceptance == trained.evaluation.expected_acceptance
    recorded = json.loads((trained.folder / "evaluation.json").read_text())
    assert Evaluation.from_json(recorded) == trained.evaluation
    assert trained.evaluation.costs is not None
    card = (trained.folder / "README.md").read_text()
    assert COMMAND in card
    assert "56 of them" in card
    assert "| 0.7 |" in card


# ---- interruptions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_at", [1, 7])
def test_stopped_run_goes_on_to_the_same_weights(answered: Path, short: Short, stop_at: int) -> None:
    """Wherever it was asked to stop, between two lines of the log and within a pass over the data."""
    observer = CountingObserver(stop_at=stop_at)
    assert not Training(answered, short.settings).run(observer)
    assert len(observer.losses) == stop_at
    resumed = Training(answered, short.settings)
    assert resumed.step == stop_at
    assert not is_same(answered, short.folder)
    assert resumed.run(CountingObserver())
    assert is_same(answered, short.folder)


def test_killed_run_goes_on_from_its_last_checkpoint(
    answered: Path, short: Short, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came behind it is done again, with the same outcome, and stands in the log once."""
    monkeypatch.setattr(run, "CHECKPOINT_INTERVAL_S", 0.0)

    class Killed(CountingObserver):
        def on_step(self, loss: float) -> None:
            super().on_step(loss)
            if len(self.losses) == 4:
                monkeypatch.setattr(run, "CHECKPOINT_INTERVAL_S", 1e9)
            if len(self.losses) == 9:
                raise MemoryError

    with pytest.raises(MemoryError):
        Training(answered, short.settings).run(Killed())
    resumed = Training(answered, short.settings)
    assert resumed.step == 3
    assert resumed.run(CountingObserver())
    assert is_same(answered, short.folder)
    assert [entry["step"] for entry in resumed.log] == list(range(0, 13, 2))


def test_finished_run_has_nothing_left_to_do(trained: Trained) -> None:
    """The same again evaluates, and neither answers nor trains."""
    observer = CountingObserver()
    make_answers(trained.folder, trained.settings, observer)
    again = Training(trained.folder, trained.settings)
    assert again.run(observer)
    assert (observer.answers, observer.losses) == (0, [])


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"answers": 63}, "--answers 64"),
        ({"temperatures": ((0.0, 1.0),)}, "--temperatures 0:0.5,0.7:0.3,1:0.2"),
        ({"layers": (0, 3)}, "without --layers"),
        ({"steps": None}, "--steps 60"),
        ({"prompts": "ab"}, "without --prompts"),
        ({"seed": 1, "batch_samples": 2}, "with --batch-samples 4, with --seed 0"),
    ],
)
def test_other_options_on_a_begun_run_are_refused(
    tmp_path: Path, settings: TrainingSettings, changed: dict[str, Any], words: str
) -> None:
    """By name and with what the run was begun with; the same options are welcome."""
    with opened(tmp_path, settings):
        pass
    with opened(tmp_path, replace(settings)):
        pass
    with pytest.raises(StartupFailed, match=words), opened(tmp_path, replace(settings, **changed)):
        raise AssertionError("opened")


def test_two_runs_in_one_folder_are_refused(tmp_path: Path, settings: TrainingSettings) -> None:
    """The second would write over what the first does."""
    with opened(tmp_path, settings), pytest.raises(StartupFailed, match="Another run"), opened(tmp_path, settings):
        raise AssertionError("opened twice")
    with opened(tmp_path, settings):
        pass


def test_folder_that_cannot_be_written_is_refused(tmp_path: Path, settings: TrainingSettings) -> None:
    """With the reason, and before a model is loaded."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupFailed, match="choose another --output"), opened(tmp_path / "file" / "run", settings):
        raise AssertionError("opened")


def test_checkpoint_of_other_making_is_refused(answered: Path, trained: Trained) -> None:
    """Of another recipe, of another student, or damaged."""
    shutil.copy(trained.folder / "checkpoint.pt", answered)
    with pytest.raises(StartupFailed, match="learning_rate"):
        Training(answered, replace(trained.settings, learning_rate=1e-4))
    with pytest.raises(StartupFailed, match="another student"):
        Training(answered, replace(trained.settings, layers=(0, 3)))
    (answered / "checkpoint.pt").write_bytes(b"PK")
    with pytest.raises(StartupFailed, match="Cannot read"):
        Training(answered, trained.settings)


def test_settings_that_contradict_each_other_are_refused(settings: TrainingSettings) -> None:
    """Layers that the target lacks, more trained ones than there are, nothing left to train on."""
    with pytest.raises(StartupFailed, match="numbered from 0 to 3"):
        replace(settings, layers=(0, 4)).layers_of(4)
    with pytest.raises(StartupFailed, match="--trained-layers 2"):
        replace(settings, layers=(0,)).layers_of(4)
    with pytest.raises(StartupFailed, match="--held-out 62"):
        replace(settings, held_out=62).check()


# ---- how it goes about ----------------------------------------------------------------------------------------------


def test_figures_that_are_left_out_follow_from_the_others() -> None:
    """Layers are the first two and the last, steps ten passes, waves of 512 answers or at least four."""
    usual = TrainingSettings(target="some")
    assert [usual.layers_of(count) for count in (30, 3, 2)] == [(0, 1, 29), (0, 1, 2), (0, 1)]
    assert (usual.held_out_answers, usual.trained_steps) == (160, 10 * (4096 - 160) // 4)
    assert (usual.wave_answers, usual.waves) == (512, 8)
    small = replace(usual, answers=30)
    assert (small.held_out_answers, small.wave_answers, small.waves) == (3, 8, 4)


def test_no_prompt_of_the_held_out_answers_is_trained_on(tmp_path: Path) -> None:
    """One that comes again among the others is left out of the evaluation."""
    samples = [sample([1, 2], prompt_ids=(number % 7, 5)) for number in range(8)]
    Corpus(tmp_path / "answers").write(0, samples[:2])
    for wave in range(1, 4):
        Corpus(tmp_path / "answers").write(wave, samples[2 * wave : 2 * wave + 2])
    answers = Answers.of(tmp_path, TrainingSettings(target="some", answers=8, held_out=2, batch_samples=2))
    assert [each.prompt_ids.tolist() for each in answers.held_out] == [[1, 5]]
    assert len(answers.trained) == 6


def test_batch_judges_what_a_drafter_drafts() -> None:
    """Behind each token of an answer but the last, against the row of the next; the first token nobody drafts. Of long
    prompts the student reads the end."""
    first = sample([11, 12, 13], prompt_ids=(1, 2, 3, 4))
    second = sample([21, 22], prompt_ids=(5,))
    batch = collate([first, second], prompt_tokens=2, entries=1)
    assert batch.ids.tolist() == [[3, 4, 11, 12, 13], [5, 21, 22, 0, 0]]
    assert batch.ids.flatten()[batch.judged].tolist() == [11, 12, 21]
    assert batch.given_ids.tolist() == [12, 13, 22]
    assert batch.top_ids.tolist() == [[12], [13], [22]]


def test_learning_rate_rises_holds_and_falls() -> None:
    """Up to the warm-up's end, level to the half, down to almost nothing."""
    recipe = Recipe(steps=100, learning_rate=1.0, warmup_steps=10)
    rates = [recipe.learning_rate_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9:51] == [1.0] * 42
    assert rates[75] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(0.02)
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)


def test_steps_are_as_long_as_the_learning_rate_says(trained: Trained) -> None:
    """The first step of a long warm-up changes next to nothing."""

    def change(warmup_steps: int) -> float:
        student = Training(trained.folder, trained.settings).student
        before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
        recipe = Recipe(steps=10, warmup_steps=warmup_steps)
        Trainer(student, [sample([1, 2, 3])] * 4, recipe).run(until=1)
        return max(float((tensor - before[name]).abs().max()) for name, tensor in student.state_dict().items())

    assert change(1) > 1e-3
    assert change(10**9) < 1e-6


def test_too_few_answers_for_a_batch_are_refused(trained: Trained) -> None:
    """Answers of one token teach nothing and do not count."""
    student = Training(trained.folder, trained.settings).student
    with pytest.raises(StartupFailed, match="There are 1 answers"):
        Trainer(student, [sample([1]), sample([1]), sample([1, 2])], Recipe(steps=1, batch_samples=2))
