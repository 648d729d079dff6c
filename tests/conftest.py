"""How tests are shared out among processes by pytest-xdist."""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling, Scheduling


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """The tests of a file stay together; all that need a Ray cluster are as one file, for they take turns anyway."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "tests/cluster" if file.startswith("tests/cluster/") else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    return ByFile(config, log)
