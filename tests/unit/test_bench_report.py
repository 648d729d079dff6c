"""What a run of `paceline bench` leaves: files, tables and pictures, all of which say whether devices were emulated."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from paceline.bench.figures import ConditionResult, Repeats, result_of
from paceline.bench.peer_figures import PeerFigures
from paceline.bench.plan import PLAIN, Delay, DrafterVariant, Plan, Setting
from paceline.bench.plots import Album, draw_all
from paceline.bench.prompts import BUILT_IN
from paceline.bench.report import CELLS, REPORT, Report
from paceline.bench.stack import StackSettings, StepTime
from paceline.bench.tables import condition_view, differing_texts
from paceline.generation import Schedule
from paceline.types import VerificationRule
from tests.unit.test_bench_figures import CONDITION, FAST_WAVE, PLAIN_WAVE, STEPS, USAGE, answer, wave

LONG = Setting(Schedule.PIPELINED, None, 16)
RESULTS: dict[Setting, Repeats] = {
    PLAIN: [[PLAIN_WAVE]],
    Setting(Schedule.SEQUENTIAL, 2): [[FAST_WAVE]],
    LONG: [[wave(answer([1.0, 1.1, 1.3], [1, 2, 2], usage=USAGE))]],
}
RESULT = replace(
    result_of(CONDITION, RESULTS, STEPS, delay_s=0.0, usual_draft_step_s=0.02),
    peers=(PeerFigures(name="assisted 4", tokens=9, tokens_per_second=8.0, first_token_s=0.1, tokens_per_round=2.0),),
)
LATER = replace(RESULT, condition=replace(CONDITION, delay=Delay(steps=0.5)), delay_s=0.05)
BUSY = replace(RESULT, condition=replace(CONDITION, concurrency=4))
EMULATED_STEP, REAL_STEP = StepTime(step_ms=30), StepTime()


def report_of(step: StepTime, *results: ConditionResult) -> Report:
    stack = StackSettings(
        target="big",
        drafter="small",
        dtype="float32",
        threads=1,
        target_cores=(0,),
        drafter_cores=(1,),
        orchestrator_cores=(1,),
        is_colocated=False,
        target_step=step,
        drafter_step=REAL_STEP,
        max_sessions=64,
    )
    plan = Plan(
        prompts=BUILT_IN,
        settings=tuple(RESULTS),
        drafters=(DrafterVariant(),),
        temperatures=(0.0,),
        rules=(VerificationRule.COUPLED,),
        delays=(Delay(),),
        concurrencies=(1,),
        max_tokens=32,
        ignore_eos=True,
        repeats=1,
    )
    report = Report(plan=plan, stack=stack, machine="a machine")
    for result in results:
        report.add(result)
    return report


def drawn(result: ConditionResult, *, is_emulated: bool = False) -> list[str]:
    console = Console(width=80, record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(condition_view(result, is_emulated=is_emulated))
    return console.export_text().splitlines()


# ---------------------------------------------------------------------------------------------------------------------
# Files


@pytest.mark.parametrize(("step", "is_emulated"), [(EMULATED_STEP, True), (REAL_STEP, False)])
def test_files_say_whether_devices_were_emulated(tmp_path: Path, step: StepTime, is_emulated: bool) -> None:
    """In the report and in every line of the cells."""
    report_of(step, RESULT).write(tmp_path)
    report = json.loads((tmp_path / REPORT).read_text())
    assert report["emulated"] is is_emulated
    lines = list(csv.DictReader((tmp_path / CELLS).open()))
    assert [line["emulated"] for line in lines] == [str(is_emulated).lower()] * 3


def test_files_hold_every_cell(tmp_path: Path) -> None:
    """Settings by name, the share of the limit with its factors, and the peer."""
    report_of(REAL_STEP, RESULT, LATER).write(tmp_path)
    conditions = json.loads((tmp_path / REPORT).read_text())["conditions"]
    assert [condition["name"] for condition in conditions] == [str(RESULT.condition), str(LATER.condition)]
    cells = conditions[0]["cells"]
    assert [cell["name"] for cell in cells] == ["plain", "sequential 2", "pipelined auto fan-out 16"]
    share = cells[2]["figures"]["limit_share"]
    assert share["total"] == pytest.approx(share["busy"] * share["tokens"] * share["step_time"])
    assert conditions[0]["peers"][0]["name"] == "assisted 4"
    line = list(csv.DictReader((tmp_path / CELLS).open()))[-1]
    assert float(line["limit_share"]) == pytest.approx(share["total"])
    assert float(line["delay_ms"]) == pytest.approx(50)


def test_a_condition_that_is_measured_on_replaces_itself(tmp_path: Path) -> None:
    """After each repeat the whole is written; the last one counts."""
    report = report_of(REAL_STEP, RESULT, LATER)
    report.add(replace(LATER, delay_s=0.07))
    assert [result.delay_s for result in report.results] == [0.0, 0.07]
    report.write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {REPORT, CELLS}


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def test_tables_fit_into_80_columns() -> None:
    """With the longest name there is, nothing is cut off."""
    lines = drawn(RESULT)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "…" not in text
    assert "pipe. auto fan 16" in text
    assert "peer assisted 4" in text


def test_tables_say_emulated() -> None:
    """Above everything else."""
    assert any(line.startswith("EMULATED") for line in drawn(RESULT, is_emulated=True))
    assert "EMULATED" not in "\n".join(drawn(RESULT))


def test_tables_say_what_the_limit_follows_from() -> None:
    """The costs of the condition, in milliseconds."""
    text = " ".join(drawn(RESULT))
    assert "T1 100.0 ms" in text
    assert "t_v(2) 110.0" in text
    assert "limit" in text


def test_other_texts_are_named() -> None:
    """By condition and setting."""
    other = wave(answer([1.0, 1.2], [1, 2], usage=USAGE, first_id=9))
    result = result_of(CONDITION, {PLAIN: [[PLAIN_WAVE]], LONG: [[other]]}, STEPS, delay_s=0.0, usual_draft_step_s=0.02)
    assert differing_texts([RESULT]) == []
    assert differing_texts([result]) == [f"{CONDITION}: {LONG} (0% the same)"]


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


@pytest.mark.parametrize(
    ("results", "names"),
    [
        ((RESULT, LATER), {"speed_by_delay", "limit_share_by_delay"}),
        ((RESULT, BUSY), {"speed", "speed_4_sessions", "speed_by_concurrency"}),
    ],
)
def test_pictures_are_drawn_of_what_there_is(
    tmp_path: Path, results: tuple[ConditionResult, ...], names: set[str]
) -> None:
    """Lines need two places; each picture comes as PNG and SVG, and says emulated above and below."""
    album = Album(folder=tmp_path, caption="EMULATED", is_emulated=True)
    assert {path.stem for path in draw_all(results, album)} == names
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert all("emulated, temperature 0" in path.read_text() for path in tmp_path.glob("*.svg"))
