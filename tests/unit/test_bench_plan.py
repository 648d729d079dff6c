"""What `paceline bench` measures, in which order, and what it asks."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.bench.plan import (
    PLAIN,
    Condition,
    Delay,
    DrafterVariant,
    Plan,
    Setting,
    in_rotation,
    request_for,
    settings_of,
)
from paceline.bench.prompts import BUILT_IN, BenchPrompt, limited, read_prompts
from paceline.errors import InvalidRequest
from paceline.generation import ChatMessage, Schedule
from paceline.types import VerificationRule

BOTH = (Schedule.SEQUENTIAL, Schedule.PIPELINED)
PLAN = Plan(
    prompts=BUILT_IN[:3],
    settings=settings_of(BOTH, (None, 4), (0, 3)),
    drafters=(DrafterVariant(),),
    temperatures=(0.0, 1.0),
    rules=(VerificationRule.COUPLED, VerificationRule.REJECTION),
    delays=(Delay(), Delay(steps=0.5)),
    concurrencies=(1, 4),
    max_tokens=32,
    ignore_eos=True,
    repeats=2,
)


def test_plain_decoding_is_always_compared_with() -> None:
    """Also where it is not asked for; and only a pipeline has branches."""
    assert list(map(str, PLAN.settings)) == [
        "plain",
        "sequential auto",
        "sequential 4",
        "pipelined auto no branches",
        "pipelined auto fan-out 3",
        "pipelined 4 no branches",
        "pipelined 4 fan-out 3",
    ]
    assert settings_of((Schedule.PLAIN,), (4,), (None,)) == (PLAIN,)


def test_each_setting_comes_first_in_turn() -> None:
    """Over as many turns as there are settings, each is at each place once."""
    turns = [in_rotation(PLAN.settings, turn) for turn in range(len(PLAN.settings))]
    for place in range(len(PLAN.settings)):
        assert Counter(turn[place] for turn in turns) == Counter(PLAN.settings)


def test_rules_matter_above_temperature_zero_alone() -> None:
    """Two delays, two loads, and greedy, coupled and rejection of each."""
    conditions = list(PLAN.conditions(DrafterVariant()))
    assert len(conditions) == 2 * 2 * 3
    assert {condition.rule for condition in conditions if not condition.temperature} == {VerificationRule.GREEDY}
    assert len(set(map(str, conditions))) == len(conditions)


def test_a_drafter_made_for_one_temperature_serves_that_alone() -> None:
    """Noise gives another acceptance at another temperature."""
    conditions = PLAN.conditions(DrafterVariant(logit_noise=1.0, acceptance=0.8, temperature=1.0))
    assert {condition.temperature for condition in conditions} == {1.0}


@pytest.mark.parametrize(("concurrency", "sizes"), [(1, [1, 1, 1]), (2, [2, 2]), (3, [3]), (4, [4])])
def test_a_wave_is_always_full(concurrency: int, sizes: list[int]) -> None:
    """Three prompts: each is asked at least once, and as often as it takes to fill the last wave."""
    waves = PLAN.waves(concurrency)
    assert [len(wave) for wave in waves] == sizes
    assert {prompt.id for wave in waves for prompt in wave} == {prompt.id for prompt in PLAN.prompts}


def test_measurements_are_counted_before_they_are_made() -> None:
    """Seven settings, two repeats, two delays, three of temperature and rule: three waves alone, one of four at a time."""
    assert PLAN.measured_waves() == 7 * 2 * 2 * 3 * (3 + 1)


def test_a_delay_may_be_in_steps() -> None:
    """Half a step of 40 ms, or 15 ms as they are."""
    assert Delay(steps=0.5).seconds(0.04) == pytest.approx(0.02)
    assert Delay(milliseconds=15).seconds(0.04) == pytest.approx(0.015)
    assert (str(Delay(steps=0.5)), str(Delay(milliseconds=15)), str(Delay())) == ("0.5 steps", "15 ms", "0 ms")


def test_requests_carry_their_setting() -> None:
    """`auto` leaves the length out; plain decoding drafts nothing."""
    condition = Condition(
        drafter=DrafterVariant(),
        temperature=1.0,
        rule=VerificationRule.REJECTION,
        delay=Delay(),
        concurrency=1,
    )
    setting = Setting(Schedule.PIPELINED, None, 3)
    request = request_for(BUILT_IN[0], PLAN, condition, setting, seed=5, tenant="t")
    assert (request.seed, request.tenant, request.sampling.temperature) == (5, "t", 1.0)
    options = request.speculation
    assert (options.schedule, options.draft_length, options.fan_out) == (Schedule.PIPELINED, None, 3)
    assert options.rule is VerificationRule.REJECTION
    plain = request_for(BUILT_IN[0], PLAN, condition, PLAIN, seed=5, tenant="t")
    assert (plain.speculation.schedule, plain.speculation.draft_length) == (Schedule.PLAIN, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Prompts


def test_few_prompts_are_of_all_kinds() -> None:
    """The kinds take turns."""
    prompts = [BenchPrompt(f"{kind}{number}", (), kind) for kind in "ab" for number in range(3)]
    assert [prompt.id for prompt in limited(prompts, 3)] == ["a0", "b0", "a1"]
    assert limited(prompts, 0) == tuple(prompts)


def test_prompts_come_from_lines(tmp_path: Path) -> None:
    """A conversation a line; `kind` may be left out."""
    line = {"id": "x", "messages": [{"role": "user", "content": "Hi"}]}
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in (line, line | {"id": "y", "kind": "chat"})))
    first, second = read_prompts(path)
    assert first == BenchPrompt("x", (ChatMessage("user", "Hi"),))
    assert second == replace(first, id="y", kind="chat")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no prompt"),
        ('{"id": "x"}', "line 1"),
        ("[]", "line 1"),
        ("Hi", "line 1"),
        ('{"id": "x", "messages": []}\n' * 2, "line 2"),
    ],
)
def test_what_is_no_prompt_is_refused_by_its_line(tmp_path: Path, content: str, words: str) -> None:
    """Before anything is started."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match=words):
        read_prompts(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """As a sentence, not as an error of the system."""
    with pytest.raises(InvalidRequest, match=r"none\.jsonl cannot be read"):
        read_prompts(tmp_path / "none.jsonl")
