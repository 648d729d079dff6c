"""The checked-in gRPC code is what the protocol files give, byte for byte."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTO = ROOT / "proto"
CHECKED_IN = ROOT / "services" / "paceline" / "v1"


def read_folder(folder: Path) -> dict[str, bytes]:
    """Contents by file name, of everything protoc could have made."""
    return {path.name: path.read_bytes() for path in folder.glob("*_pb2*.py*") if path.is_file()}


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the protocol files give now."""
    out = tmp_path_factory.mktemp("generated")
    protocol = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTO)]
        + [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
        + protocol,
        check=True,
        timeout=60,
    )
    return read_folder(out / "paceline" / "v1")


def test_each_protocol_file_has_its_generated_modules(generated: dict[str, bytes]) -> None:
    """No module is missing, and none is left over from a protocol file that is gone."""
    assert sorted(read_folder(CHECKED_IN)) == sorted(generated), "run `make proto`"


def test_generated_code_is_up_to_date(generated: dict[str, bytes]) -> None:
    """Generating again, with the pinned grpcio-tools, gives the same bytes."""
    checked_in = read_folder(CHECKED_IN)
    stale = [name for name, content in generated.items() if checked_in.get(name) != content]
    assert not stale, "run `make proto`; never edit generated code"
