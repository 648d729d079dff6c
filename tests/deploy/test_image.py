"""The image is built from what the project pins, holds what the manifests expect, and its health script tells the truth."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
import tomllib
from pathlib import Path

import ray.serve._private.constants as serve_constants

from paceline.rpc import Server
from tests.deploy.files import DEPLOY, ROOT, read_yaml

DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
HEALTH = DEPLOY / "docker" / "health.py"
TEXT = DOCKERFILE.read_text(encoding="utf-8")
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NOTHING_LISTENS = "127.0.0.1:1"


def instructions(name: str) -> list[str]:
    """The arguments of every instruction of that name, continued lines joined, comments left out."""
    lines = [line for line in TEXT.split("\n") if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [line.removeprefix(name).strip() for line in joined.split("\n") if line.startswith(f"{name} ")]


def copied() -> list[str]:
    """What is copied out of the build context."""
    sources = [shlex.split(each) for each in instructions("COPY") if not each.startswith("--from")]
    return [source for each in sources for source in each[:-1]]


async def health_status(address: str) -> int | None:
    """The exit status of the script, which has nothing to say beside it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(HEALTH), address, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert output == b""
    return process.returncode


def test_python_is_the_one_that_the_pins_were_resolved_on() -> None:
    """constraints.txt names it."""
    resolved_on = re.search(r"resolved together on Python (\S+)", (ROOT / "constraints.txt").read_text("utf-8"))
    assert resolved_on is not None
    assert "PYTHON_VERSION=" + resolved_on[1] in instructions("ARG")
    assert all(each.startswith("python:${PYTHON_VERSION}-") for each in instructions("FROM"))


def test_every_package_is_pinned() -> None:
    """No installation without the constraints."""
    commands = [command for each in instructions("RUN") for command in each.split("&&") if "pip install" in command]
    assert commands
    assert all("-c constraints.txt" in command for command in commands)


def test_the_build_context_holds_what_is_copied() -> None:
    """Each source exists, and .dockerignore lets it through and nothing that is not needed."""
    assert all((ROOT / source).exists() for source in copied())
    assert IGNORED[1] == "*"
    assert {line.removeprefix("!") for line in IGNORED if line.startswith("!")} == set(copied())


def test_all_of_the_project_is_in_the_image() -> None:
    """Every package of the wheel, with the generated code in it, and the files that the wheel is described by."""
    packages = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {Path(package).parts[0] for package in packages} <= set(copied())
    assert PYPROJECT["project"]["readme"] in copied()
    assert set(PYPROJECT["project"]["license-files"]) <= set(copied())


def test_the_image_runs_as_the_user_that_kubernetes_expects() -> None:
    """A number, so that `runAsNonRoot` can be checked; the same in the manifests."""
    service = read_yaml(DEPLOY / "kuberay" / "base" / "rayservice.yaml")
    security = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["securityContext"]
    assert instructions("USER") == [f"{security['runAsUser']}:{security['runAsGroup']}"]


def test_ray_knows_the_variables_that_are_set_for_it() -> None:
    """A misspelt one would be passed over in silence."""
    known = Path(serve_constants.__file__).read_text(encoding="utf-8")
    (environment,) = [each for each in instructions("ENV") if "RAY_" in each]
    variables = re.findall(r"\b(RAY_SERVE_\w+)=", environment)
    assert len(variables) == 3
    assert all(f'"{variable}"' in known for variable in variables)


async def test_a_serving_service_is_healthy() -> None:
    """Until it begins to drain: then nothing new is sent its way."""
    server = Server(host="127.0.0.1", port=0)
    await server.start("paceline.v1.TargetService")
    try:
        assert await health_status(server.address) == 0
        await server.begin_draining()
        assert await health_status(server.address) == 1
    finally:
        await server.stop(0)


async def test_nothing_is_not_healthy() -> None:
    """No one listens: the answer is no, not an exception."""
    assert await health_status(NOTHING_LISTENS) == 1
