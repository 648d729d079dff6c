"""Prompts for the benchmarks, as users ask them: one file of JSON lines is one workload (`prompts/README.md`).

Knows nothing of services or of how an answer is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.bench.prompts import BenchPrompt, limited, read_prompts

FOLDER = Path(__file__).parent / "prompts"


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts that are reported together; `name` is that of their file, without its ending."""

    name: str
    prompts: tuple[BenchPrompt, ...]

    def limited(self, most: int) -> Workload:
        """At most so many prompts, the kinds in turn; 0: as it is."""
        return Workload(self.name, limited(self.prompts, most))


def load_workload(path: Path) -> Workload:
    """The prompts in a file as `read_prompts` takes it, with whose errors."""
    return Workload(path.stem, read_prompts(path))
