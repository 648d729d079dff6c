"""Validation against Kubernetes' own schemas, without a cluster or network."""

from __future__ import annotations

from typing import Any

import kubernetes_validate

from tests.deploy.files import Manifest

VERSION = "1.34"


def validate(manifest: Manifest) -> None:
    """Raises `kubernetes_validate.ValidationError` for a wrong type, a missing field or an unknown one."""
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def validate_pod_template(template: dict[str, Any]) -> None:
    """A template that stands within a foreign kind."""
    validate({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "template"}, "template": template})


def validate_container(container: dict[str, Any]) -> None:
    pod = {"metadata": {"name": "pod"}, "spec": {"containers": [{"name": "container", **container}]}}
    validate({"apiVersion": "v1", "kind": "Pod", **pod})
