"""Where the deployment files are, and what is in them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SERVE_FILES = sorted((DEPLOY / "serve").glob("*.yaml"))

Manifest = dict[str, Any]


def read_yaml(path: Path) -> Any:
    """The one document of a file; no two places in it share an object, as aliases would make them."""
    return _unshared(yaml.safe_load(path.read_text(encoding="utf-8")))


def read_manifests(path: Path) -> list[Manifest]:
    """All documents of a file of Kubernetes manifests."""
    return [_unshared(document) for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))]


def pinned_version(package: str) -> str:
    """The version that constraints.txt pins."""
    found = re.search(rf"^{re.escape(package)}==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    assert found is not None, f"constraints.txt does not pin {package}"
    return found[1]


def project_version() -> str:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert isinstance(version, str)
    return version


def _unshared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unshared(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_unshared(inner) for inner in value]
    return value
