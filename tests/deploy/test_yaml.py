"""Every YAML file of the deployment keeps to one form."""

from __future__ import annotations

from pathlib import Path

import pytest
from yamllint import linter
from yamllint.config import YamlLintConfig

from tests.deploy.files import DEPLOY

FILES = sorted(DEPLOY.rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_yaml_is_tidy(path: Path) -> None:
    """yamllint finds nothing, not even a warning."""
    rules = YamlLintConfig(file=str(DEPLOY / ".yamllint.yaml"))
    problems = [f"line {each.line}: {each.desc}" for each in linter.run(path.read_text(encoding="utf-8"), rules)]
    assert not problems
