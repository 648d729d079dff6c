"""The small kustomize of these tests finds what would break `kubectl apply -k`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.kustomize import KustomizeError, apply_operations, render

CONFIG = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "one"}, "data": {"a": "1"}}


def write_kustomization(folder: Path, **content: Any) -> Path:
    """A folder with one object, `one.yaml`, and the given kustomization of it."""
    (folder / "one.yaml").write_text(yaml.safe_dump(CONFIG))
    (folder / "kustomization.yaml").write_text(
        yaml.safe_dump({"kind": "Kustomization", "resources": ["one.yaml"], **content})
    )
    return folder


def test_a_patch_changes_the_object_it_names(tmp_path: Path) -> None:
    """Operations are applied in order."""
    (tmp_path / "patch.yaml").write_text(
        "[{op: test, path: /data/a, value: '1'}, {op: replace, path: /data/a, value: x}]"
    )
    folder = write_kustomization(
        tmp_path, patches=[{"path": "patch.yaml", "target": {"kind": "ConfigMap", "name": "one"}}]
    )
    assert render(folder)[0]["data"] == {"a": "x"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"resources": ["two.yaml"]}, "two.yaml does not exist"),
        ({"resources": ["one.yaml", "one.yaml"]}, "is there twice"),
        ({"patchesJson6902": []}, "patchesJson6902 is not known"),
        ({"patches": [{"path": "p.yaml", "target": {"kind": "ConfigMap", "name": "one"}}]}, "p.yaml does not exist"),
        ({"patches": [{"path": "one.yaml", "target": {"kind": "Secret", "name": "one"}}]}, "meets no Secret one"),
        ({"configMapGenerator": [{"name": "two", "files": ["nothing"]}]}, "nothing does not exist"),
    ],
)
def test_a_broken_kustomization_is_refused(tmp_path: Path, content: dict[str, Any], said: str) -> None:
    """What it names must be there."""
    with pytest.raises(KustomizeError, match=said):
        render(write_kustomization(tmp_path, **content))


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "replace", "path": "/data/b", "value": "1"},
        {"op": "remove", "path": "/data/b"},
        {"op": "add", "path": "/spec/b", "value": "1"},
        {"op": "test", "path": "/data/a", "value": "2"},
        {"op": "replace", "path": "/data/a/0", "value": "2"},
    ],
)
def test_an_operation_on_what_is_not_there_is_refused(operation: dict[str, Any]) -> None:
    """So a patch cannot outlive the field it was written for."""
    with pytest.raises(KustomizeError):
        apply_operations({"data": {"a": "1"}}, [operation])
