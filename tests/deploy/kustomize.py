"""As much of kustomize as deploy/ uses: what `kubectl apply -k FOLDER` would send.

Stricter than kustomize where it forgives: a key that is not known here, a file that does not exist, and a patch that
meets no object are errors. Names of generated objects get no hash.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.deploy.files import Manifest, read_manifests, read_yaml

_KEYS = {
    "apiVersion",
    "components",
    "configMapGenerator",
    "images",
    "kind",
    "labels",
    "namespace",
    "patches",
    "resources",
    "secretGenerator",
}
_WITHOUT_NAMESPACE = {"Namespace"}


class KustomizeError(Exception):
    """The folder cannot be built."""


def render(folder: Path, *, components: tuple[Path, ...] = ()) -> list[Manifest]:
    """The objects of a kustomization; `components` are added to those that it names."""
    content = _read_kustomization(folder, "Kustomization")
    objects: list[Manifest] = []
    for name in content.get("resources", []):
        path = folder / name
        objects += render(path) if path.is_dir() else _read_objects(path)
    objects += [_config_map(folder, each) for each in content.get("configMapGenerator", [])]
    objects += [_secret(each) for each in content.get("secretGenerator", [])]
    for component in [*(folder / name for name in content.get("components", [])), *components]:
        objects = _patched(objects, component, _read_kustomization(component, "Component"))
    objects = _patched(objects, folder, content)
    for each in objects:
        _set_labels(each, content.get("labels", []))
        _set_namespace(each, content.get("namespace"))
        _set_images(each, content.get("images", []))
    _refuse_duplicates(objects)
    return objects


def identity(manifest: Manifest) -> tuple[str, str]:
    """Kind and name."""
    return manifest["kind"], manifest["metadata"]["name"]


def apply_operations(manifest: Manifest, operations: list[dict[str, Any]]) -> None:
    """A JSON patch (RFC 6902), in place."""
    for operation in operations:
        *parents, last = _pointer(operation["path"])
        place: Any = manifest
        for part in parents:
            place = _step(place, part, operation)
        _operate(place, last, operation)


def _read_kustomization(folder: Path, kind: str) -> dict[str, Any]:
    path = folder / "kustomization.yaml"
    if not path.is_file():
        raise KustomizeError(f"{path} does not exist")
    content: dict[str, Any] = read_yaml(path)
    if content["kind"] != kind:
        raise KustomizeError(f"{path} is no {kind}")
    unknown = content.keys() - _KEYS
    if unknown:
        raise KustomizeError(f"{path}: {min(unknown)} is not known here")
    return content


def _read_objects(path: Path) -> list[Manifest]:
    if not path.is_file():
        raise KustomizeError(f"{path} does not exist")
    return read_manifests(path)


def _config_map(folder: Path, generator: dict[str, Any]) -> Manifest:
    for name in generator["files"]:
        if not (folder / name).is_file():
            raise KustomizeError(f"{folder / name} does not exist")
    data = {name: (folder / name).read_text(encoding="utf-8") for name in generator["files"]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": data}


def _secret(generator: dict[str, Any]) -> Manifest:
    data = dict(literal.split("=", 1) for literal in generator["literals"])
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": generator["name"]}, "stringData": data}


def _patched(objects: list[Manifest], folder: Path, content: dict[str, Any]) -> list[Manifest]:
    for patch in content.get("patches", []):
        path = folder / patch["path"]
        if not path.is_file():
            raise KustomizeError(f"{path} does not exist")
        body = read_yaml(path)
        wanted = (patch["target"]["kind"], patch["target"]["name"]) if "target" in patch else identity(body)
        targets = [each for each in objects if identity(each) == wanted]
        if not targets:
            raise KustomizeError(f"{path} meets no {' '.join(wanted)}")
        if isinstance(body, list):
            for each in targets:
                apply_operations(each, body)
        elif body.get("$patch") == "delete":
            objects = [each for each in objects if each not in targets]
        else:
            raise KustomizeError(f"{path} is neither a list of operations nor a deletion")
    return objects


def _pointer(path: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in path.removeprefix("/").split("/")]


def _step(place: Any, part: str, operation: dict[str, Any]) -> Any:
    try:
        return place[int(part)] if isinstance(place, list) else place[part]
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise KustomizeError(f"nothing is at {operation['path']}") from error


def _operate(place: Any, last: str, operation: dict[str, Any]) -> None:
    kind, value = operation["op"], operation.get("value")
    if kind == "add" and isinstance(place, list) and last == "-":
        place.append(value)
    elif kind == "add" and isinstance(place, dict):
        place[last] = value
    elif kind == "test":
        if (found := _step(place, last, operation)) != value:
            raise KustomizeError(f"{operation['path']} is {found!r}, not {value!r}")
    elif kind in ("replace", "remove"):
        _step(place, last, operation)
        key = int(last) if isinstance(place, list) else last
        if kind == "replace":
            place[key] = value
        else:
            del place[key]
    else:
        raise KustomizeError(f"{kind} at {operation['path']} is not known here")


def _set_labels(manifest: Manifest, labels: list[dict[str, Any]]) -> None:
    for each in labels:
        if each.keys() != {"pairs"}:
            raise KustomizeError("only labels without selectors are known here")
        manifest["metadata"].setdefault("labels", {}).update(each["pairs"])


def _set_namespace(manifest: Manifest, namespace: str | None) -> None:
    if namespace is not None and manifest["kind"] not in _WITHOUT_NAMESPACE:
        manifest["metadata"]["namespace"] = namespace


def _set_images(value: Any, images: list[dict[str, str]]) -> None:
    """In every list named `containers` or `initContainers`, at any depth, as kustomize does for kinds it does not know."""
    if isinstance(value, list):
        for inner in value:
            _set_images(inner, images)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key in ("containers", "initContainers"):
                for container in inner:
                    container["image"] = _renamed(container["image"], images)
            _set_images(inner, images)


def _renamed(image: str, images: list[dict[str, str]]) -> str:
    name, _, tag = image.partition(":")
    for each in images:
        if each["name"] == name:
            return f"{each['newName']}:{each.get('newTag', tag)}"
    return image


def _refuse_duplicates(objects: list[Manifest]) -> None:
    seen: set[tuple[str, str]] = set()
    for each in objects:
        if identity(each) in seen:
            raise KustomizeError(f"{' '.join(identity(each))} is there twice")
        seen.add(identity(each))
