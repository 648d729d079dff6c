"""`paceline train`: what it shows, what it refuses, and what Ctrl-C does."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from paceline.cli.train import parse_layers, parse_temperatures
from paceline.training.corpus import Corpus
from tests.command_line import end, paceline, refused, started, uncoloured
from tests.training import sample, save_learnable_checkpoint

TINY = (
    "--answers",
    "16",
    "--answer-tokens",
    "4",
    "--draft-vocab-size",
    "64",
    "--batch-samples",
    "2",
    "--sessions",
    "16",
)
MACHINE = ("--threads", "1", "--dtype", "float32", "--device", "cpu")


@pytest.fixture(scope="module", autouse=True)
def same_threads_after() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.training.collect.TURN_TOKENS", 4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_learnable_checkpoint(tmp_path_factory.mktemp("target") / "model"))


def train(target: str, output: Path, *more: str) -> Any:
    return paceline("train", "--target", target, "--output", str(output), *TINY, *MACHINE, *more)


def test_command_goes_from_answers_to_a_drafter(tmp_path: Path, target: str) -> None:
    """It ends with a table, writes the folder's path to standard output, and other options on the folder are refused."""
    result = train(target, tmp_path / "drafter", "--steps", "4")
    assert result.exit_code == 0
    assert result.stdout == f"{tmp_path / 'drafter'}\n"
    shown = uncoloured(result.stderr)
    for words in ("answers: 16 of 16", "4 of 4 steps: loss", "training: 4 of 4", "tokens per round of 4"):
        assert words in shown
    files = {path.name for path in (tmp_path / "drafter").iterdir()}
    assert files >= {
        "config.json",
        "model.safetensors",
        "README.md",
        "evaluation.json",
        "settings.json",
        "checkpoint.pt",
    }
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert "--answers 16 --answer-tokens 4" in card
    assert "--seed" not in card
    words = refused(train(target, tmp_path / "drafter", "--steps", "5"), status=1)
    assert "was begun with --steps 4; give the same options" in words


def test_prompts_of_a_file_bound_the_answers(tmp_path: Path, target: str) -> None:
    """A prompt is answered once, so there are no more answers than prompts."""
    (tmp_path / "prompts.txt").write_text("\n".join(f"prompt {number}" for number in range(9)))
    result = train(target, tmp_path / "drafter", "--steps", "1", "--prompts", str(tmp_path / "prompts.txt"))
    assert result.exit_code == 0
    assert "answers: 9 of 9" in uncoloured(result.stderr)
    assert json.loads((tmp_path / "drafter" / "settings.json").read_text())["answers"] == 9


def test_ctrl_c_ends_behind_a_step_and_saves(tmp_path: Path, target: str) -> None:
    """Status 130, a checkpoint, and a line that says how to go on."""
    output = tmp_path / "drafter"
    for wave in range(4):  # so that the process has no answers to make
        samples = [sample([5, 6, 7], prompt_ids=(wave, number), temperature=1.0) for number in range(4)]
        Corpus(output / "answers").write(wave, samples)
    with started("train", "--target", target, "--output", str(output), *TINY, *MACHINE, "--steps", "100000") as process:
        assert process.stderr is not None
        assert any("steps: acceptance" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        status, words = end(process)
    assert status == 130
    assert "Stopped. The same command goes on from here." in words
    assert "Traceback" not in words
    checkpoint = torch.load(output / "checkpoint.pt", weights_only=True)
    assert 1 <= checkpoint["step"] < 100000


def test_ctrl_c_between_answers_keeps_whole_waves(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wave in the making is made again; the others are not."""
    made: list[int] = []

    def interrupted(self: object, tokens: int) -> None:
        made.append(tokens)
        if len(made) == 6:  # in the second wave of 4
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("paceline.cli.training_progress.TrainingProgress.on_answer", interrupted)
        result = train(target, tmp_path / "drafter", "--steps", "1")
    assert result.exit_code == 130
    assert "The same command goes on from here." in result.stderr
    assert [path.name for path in (tmp_path / "drafter" / "answers").glob("wave*")] == ["wave-0000.safetensors"]
    result = train(target, tmp_path / "drafter", "--steps", "1")
    assert result.exit_code == 0
    assert "answers: goes on from 4 of 16." in uncoloured(result.stderr)
    assert "answers: 16 of 16" in uncoloured(result.stderr)


def test_wrong_options_are_refused_before_anything_is_loaded(tmp_path: Path, target: str) -> None:
    """Each in a sentence, and no folder is made."""
    for options, words in (
        (("--temperatures", "0,x"), "--temperatures are numbers"),
        (("--layers", "2,1"), "ascending"),
        (("--held-out", "15"), "leaves fewer than one batch"),
        (("--prompts", str(tmp_path / "missing")), "missing"),
    ):
        result = train(target, tmp_path / "drafter", *options)
        assert result.exit_code in (1, 2)
        assert words in refused(result, status=result.exit_code)
    assert not (tmp_path / "drafter").exists()


def test_target_that_is_not_there_is_named(tmp_path: Path) -> None:
    """As everywhere else."""
    words = refused(train(str(tmp_path / "no model"), tmp_path / "drafter"), status=1)
    assert "no model" in words


def test_temperatures_are_read_with_or_without_shares() -> None:
    """Shares are made to sum to 1; all temperatures have one, or none has."""
    assert parse_temperatures("0:0.5,0.7:0.3,1:0.2") == ((0.0, 0.5), (0.7, 0.3), (1.0, 0.2))
    assert parse_temperatures("0,1") == ((0.0, 0.5), (1.0, 0.5))
    assert parse_temperatures("0:1,0.5:3") == ((0.0, 0.25), (0.5, 0.75))
    for wrong in ("", "0,0", "0:1,1", "0:0", "0:-1,1:2", "-1", "2", "nan", "0:inf", "0:nan"):
        with pytest.raises(typer.BadParameter):
            parse_temperatures(wrong)


def test_layers_are_read_in_order() -> None:
    """None leaves them to the target."""
    assert parse_layers("0,1,29") == (0, 1, 29)
    assert parse_layers(None) is None
    for wrong in ("", "1,0", "1,1", "-1", "a"):
        with pytest.raises(typer.BadParameter):
            parse_layers(wrong)
