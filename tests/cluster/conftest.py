"""Fixtures of the tests on Ray."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import save_tiny_checkpoint
from tests.cluster.applications import one_cluster_at_a_time
from tests.cluster.serving import Served, served_application


@pytest.fixture(scope="package", autouse=True)
def _own_turn() -> Iterator[None]:
    with one_cluster_at_a_time(Path(tempfile.gettempdir())):
        yield


@pytest.fixture(scope="package", autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """A shell's background jobs ignore Ctrl-C, and so would whatever they start."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="package")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("models") / "target", seed=1, max_context=2048)


@pytest.fixture(scope="package")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = served_application(tiny_model, tmp_path_factory.mktemp("served"))
    yield served
    served.kill()
