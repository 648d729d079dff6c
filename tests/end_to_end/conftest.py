"""Checkpoints and models that the end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoints import save_tiny_checkpoint
from tests.end_to_end.systems import Folders, tiny_folders


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Tiny models: more threads would only get in one another's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("models") / "target", seed=1)


@pytest.fixture(scope="session")
def tiny_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another network with the same tokenizer."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("models") / "drafter", seed=2)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Folders:
    """The tiny target, and the models of all drafters for it."""
    return tiny_folders(tmp_path_factory.mktemp("drafters"), tiny_target)
