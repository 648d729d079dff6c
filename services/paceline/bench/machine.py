"""What measurements are made on, in words."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from paceline.bench.cores import allowed_cores


def machine() -> str:
    """The hardware in a few words."""
    return f"{len(allowed_cores()) or os.cpu_count()} cores, {_processor()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
