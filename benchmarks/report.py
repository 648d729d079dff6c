"""Where benchmark reports go, and what every one of them says about its circumstances."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from paceline.bench.machine import machine

RESULTS = Path(__file__).parent / "results"


def write_report(name: str, body: dict[str, object]) -> Path:
    """Write `results/NAME.json` with the exact command, date, machine and versions beside the figures."""
    report = {
        "command": f"python -m benchmarks.{name} {shlex.join(sys.argv[1:])}".strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in ("torch", "transformers", "grpcio", "protobuf")},
        **body,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path
