"""The files that a run leaves: everything as JSON, a line for each cell as CSV, and what they were measured on."""

from __future__ import annotations

import csv
import io
import json
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from paceline.bench.figures import Cell, ConditionResult
from paceline.bench.plan import Condition, Plan
from paceline.bench.stack import StackSettings
from paceline.generation import ServerInfo

REPORT, CELLS = "report.json", "cells.csv"
EMULATED = "every model step is held to a set time, so no speed is a measurement of a model"
_PACKAGES = ("paceline", "torch", "transformers", "grpcio", "protobuf")


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@dataclass(kw_only=True)
class Report:
    """A run so far; `add` replaces what was known of the same condition."""

    plan: Plan
    stack: StackSettings
    machine: str  # before anything is pinned
    server: ServerInfo | None = None
    results: list[ConditionResult] = field(default_factory=list)

    def add(self, result: ConditionResult) -> None:
        if self.results and self.results[-1].condition == result.condition:
            self.results.pop()
        self.results.append(result)

    def write(self, folder: Path) -> None:
        """Both files, whole at any moment: a reader, or a run that is cut short, never sees half of one."""
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / REPORT, json.dumps(self.as_dict(), indent=1) + "\n")
        _write(folder / CELLS, self._cells())

    def as_dict(self) -> dict[str, object]:
        described = asdict(self.plan) | {"prompts": [prompt.id for prompt in self.plan.prompts]}
        return {
            "command": f"paceline {shlex.join(sys.argv[1:])}",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "emulated": self.stack.is_emulated,
            "machine": self.machine,
            "python": platform.python_version(),
            "versions": _versions(),
            "stack": {name: value for name, value in asdict(self.stack).items() if name != "folders"},
            "models": asdict(self.server) if self.server else None,
            "plan": described,
            "conditions": [_condition_as_dict(result) for result in self.results],
        }

    def _cells(self) -> str:
        """As CSV."""
        lines = [cell_line(result, cell, is_emulated=self.stack.is_emulated) for result, cell in cells_of(self.results)]
        names = list(dict.fromkeys(name for line in lines for name in line))
        text = io.StringIO()
        writer = csv.DictWriter(text, names)
        writer.writeheader()
        writer.writerows(lines)
        return text.getvalue()


def cells_of(results: Iterable[ConditionResult]) -> Iterable[tuple[ConditionResult, Cell]]:
    return ((result, cell) for result in results for cell in result.cells)


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8", newline="")  # CSV brings its own line ends
    partial.replace(path)


def _condition_as_dict(result: ConditionResult) -> dict[str, object]:
    whole = asdict(result)
    for entry, cell in zip(whole["cells"], result.cells, strict=True):
        entry["name"] = str(cell.setting)
        entry["figures"]["limit_share"]["total"] = cell.figures.limit_share.total
    return {"name": str(result.condition), **whole}


def cell_line(result: ConditionResult, cell: Cell, *, is_emulated: bool) -> dict[str, object]:
    """One line of the table of cells: numbers alone, times in milliseconds."""
    figures, share, costs = cell.figures, cell.figures.limit_share, result.costs
    line: dict[str, object] = {
        "emulated": str(is_emulated).lower(),
        **_condition_columns(result.condition),
        "delay_ms": result.delay_s * 1e3,
        "setting": str(cell.setting),
        "tokens": figures.tokens,
        "tokens_per_second": figures.tokens_per_second,
        "slowest_repeat": figures.slowest_repeat,
        "fastest_repeat": figures.fastest_repeat,
        "ratio_to_plain": figures.ratio_to_plain,
        "ratio_to_sequential": figures.ratio_to_sequential,
        "limit_tokens_per_second": result.limit.tokens_per_second,
        "limit_draft_length": result.limit.draft_length,
        "limit_share": share.total,
        "limit_share_busy": share.busy,
        "limit_share_tokens": share.tokens,
        "limit_share_step_time": share.step_time,
        "predicted_tokens_per_second": figures.predicted_tokens_per_second,
        "first_token_ms": figures.first_token_s * 1e3,
        **_percentiles("delivery_gap_ms", figures.delivery_gap_s),
        "acceptance": figures.acceptance,
        "tokens_per_round": figures.tokens_per_round,
        "mean_draft_length": figures.mean_draft_length,
        "rejections": figures.rejections,
        "hit_rate": figures.hit_rate,
        "target_busy": figures.target_busy,
        "draft_wait": figures.draft_wait,
        "verified_in_vain": figures.verified_in_vain,
        "drafted_in_vain": figures.drafted_in_vain,
        "same_text": figures.same_text,
        "plain_step_ms": costs.plain_step_s * 1e3,
        "draft_step_ms": costs.draft_step_s * 1e3,
        "round_trip_ms": None if costs.round_trip_s is None else costs.round_trip_s * 1e3,
        "condition_acceptance": costs.acceptance,
    }
    line |= {f"verify_{tokens}_ms": seconds * 1e3 for tokens, seconds in costs.verify_s.items()}
    line |= {f"rounds_{origin}": share for origin, share in figures.rounds_by_origin.items()}
    line |= {f"bytes_per_token_{name}": count for name, count in figures.link_bytes_per_token.items()}
    return line | {f"cpu_ms_per_token_{name}": spent * 1e3 for name, spent in figures.cpu_s_per_token.items()}


def _condition_columns(condition: Condition) -> dict[str, object]:
    return {
        "temperature": condition.temperature,
        "rule": condition.rule.value,
        "concurrency": condition.concurrency,
        "logit_noise": condition.drafter.logit_noise,
        "acceptance_asked_for": condition.drafter.acceptance,
        "delay": str(condition.delay),
    }


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    return {f"{name}_p{percent}": value * 1e3 for percent, value in zip((50, 90, 99), seconds, strict=True)}
