"""How tests are shared out among processes (pytest-xdist, `--dist loadgroup`)."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a file stay together; all that need a Ray cluster stay in one process, for they take turns anyway."""
    for item in items:
        group = "cluster" if "cluster" in item.path.parts else item.path.as_posix()
        item.add_marker(pytest.mark.xdist_group(group))
