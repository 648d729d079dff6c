"""`paceline bench` as a whole: real services and emulated devices, from the command to the files."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.command_line import started


@pytest.mark.slow
def test_emulated_devices_are_measured_through_real_services(tmp_path: Path) -> None:
    """Two delays, three settings, a prompt each: every cell is there, says emulated, and has the text of plain decoding;
    a plain step takes what it is held to, and rounds with drafts give more tokens than plain ones."""
    options = (
        "--limit",
        "1",
        "--max-tokens",
        "32",
        "--temperatures",
        "0",
        "--draft-lengths",
        "4",
        "--delays-ms",
        "0,5",
    )
    command = ("bench", "--emulated", "--repeats", "1", "--no-plots", *options, "--output", str(tmp_path))
    with started(*command) as process:
        output, errors = process.communicate(timeout=280)
    assert process.returncode == 0, output + errors
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["emulated"] is True
    assert len(report["conditions"]) == 2
    for condition in report["conditions"]:
        assert condition["costs"]["plain_step_s"] >= 0.030
        assert [cell["name"] for cell in condition["cells"]] == ["plain", "sequential 4", "pipelined 4"]
        assert all(cell["figures"]["same_text"] == 1.0 for cell in condition["cells"])
        plain, *drafted = (cell["figures"] for cell in condition["cells"])
        assert all(figures["tokens_per_round"] > plain["tokens_per_round"] for figures in drafted)
        assert drafted[1]["hit_rate"] is not None
    near, far = (condition["costs"]["round_trip_s"] for condition in report["conditions"])
    assert far >= near + 0.008
    assert len(list(csv.DictReader((tmp_path / "cells.csv").open()))) == 6
