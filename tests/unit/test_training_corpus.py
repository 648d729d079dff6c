"""Answers on disk: what is written is read again, whole or not at all; which tokens are frequent in them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from paceline.errors import StartupFailed
from paceline.training.corpus import Corpus, Sample, coverage, frequent_ids
from paceline.training.log import TrainingLog
from paceline.training.writing import write_whole
from tests.training import sample


def _is_same(first: Sample, second: Sample) -> bool:
    names = ("prompt_ids", "answer_ids", "top_ids", "top_log_probs")
    pairs = [(getattr(first, name), getattr(second, name)) for name in names]
    return first.temperature == second.temperature and all(
        one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs
    )


def test_samples_come_back_as_they_were_written(tmp_path: Path) -> None:
    """Answers and prompts of any lengths, their rows and temperatures, bit for bit and in order."""
    corpus = Corpus(tmp_path / "answers")
    waves = [
        [
            sample([3, 1], prompt_ids=(5, 6, 7), top_ids=[[3, 9], [1, 2]], top_log_probs=[[-0.1, -2.5], [-0.2, -7.0]]),
            sample([4], prompt_ids=(8,), top_ids=[[4, 0]], top_log_probs=[[-0.5, -1.0]], temperature=0.7),
        ],
        [sample([2], top_ids=[[2, 3]], top_log_probs=[[0.0, -math.inf]], temperature=1.0)],
    ]
    for number, wave in enumerate(waves):
        corpus.write(number, wave)
    assert corpus.waves == 2
    read = list(corpus.samples(2))
    assert [_is_same(*pair) for pair in zip(read, waves[0] + waves[1], strict=True)] == [True] * 3
    assert len(list(corpus.samples(1))) == 2


def test_damaged_file_is_named(tmp_path: Path) -> None:
    """A file that was cut short is an error with a remedy, not a crash."""
    corpus = Corpus(tmp_path)
    corpus.write(0, [sample([1, 2])])
    corpus.path(0).write_bytes(corpus.path(0).read_bytes()[:40])
    with pytest.raises(StartupFailed, match="wave-0000"):
        corpus.read(0)


def test_full_disk_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    """What cannot be written whole is not written: neither the file's place nor its neighbour shows a trace."""
    path = tmp_path / "checkpoint.pt"
    path.write_text("old")

    def fail_half_way(partial: Path) -> None:
        partial.write_text("ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(StartupFailed, match="No space left"):
        write_whole(path, fail_half_way)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_frequent_tokens_are_those_given_and_those_probable() -> None:
    """A token counts once for each time it was given, and by its probability where it might have been; in id order."""
    probable = sample([5, 5], top_ids=[[5, 2], [5, 2]], top_log_probs=[[math.log(0.6), math.log(0.4)]] * 2)
    given = sample([1], top_ids=[[9, 8]], top_log_probs=[[math.log(0.3), math.log(0.1)]])
    # 5: 2 + 1.2, 1: 1, 2: 0.8, 9: 0.3, 8: 0.1
    assert frequent_ids([probable, given], 10, 3).tolist() == [1, 2, 5]
    assert frequent_ids([probable, given], 10, 4).tolist() == [1, 2, 5, 9]
    assert frequent_ids([probable], 10, 99).tolist() == list(range(10))


def test_coverage_is_the_share_of_tokens_that_can_be_proposed() -> None:
    """Counted over the tokens given, not over distinct ones."""
    assert coverage([sample([1, 1, 2]), sample([3])], torch.tensor([1, 3])) == 0.75
    assert math.isnan(coverage([], torch.tensor([1])))


def test_log_is_cut_back_to_where_a_run_goes_on(tmp_path: Path) -> None:
    """Steps that were lost with a killed process are not logged twice."""
    path = tmp_path / "log.jsonl"
    log = TrainingLog(path)
    for step in (0, 10, 20, 30):
        log.append({"step": step, "loss": 1.5})
    TrainingLog(path).cut_back(20)
    assert [entry["step"] for entry in TrainingLog(path).entries] == [0, 10, 20]
    path.write_text("no JSON\n")
    with pytest.raises(StartupFailed, match="delete it"):
        TrainingLog(path)
