"""Fixtures of the tests on Ray."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import save_tiny_checkpoint
from tests.cluster.applications import one_cluster_at_a_time


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("models") / "target", seed=1, max_context=2048)


@pytest.fixture(scope="module", autouse=True)
def _own_turn() -> Iterator[None]:
    with one_cluster_at_a_time(Path(tempfile.gettempdir())):
        yield
