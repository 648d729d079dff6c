"""The drafter benchmark's prompts, its order of measuring, and its arithmetic: a wrong ratio would look like any other."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from rich.console import Console

from benchmarks import drafters
from benchmarks.drafters import (
    PLAIN,
    Answer,
    Case,
    Plan,
    Result,
    Setting,
    acceptance_table,
    best_by_temperature,
    checks_of,
    cores_of,
    draw,
    figures_of,
    measure,
    results_of,
    speed_table,
)
from benchmarks.workloads import FOLDER, Workload, load_workload
from paceline.bench.cores import pinned
from paceline.bench.prompts import BenchPrompt
from paceline.errors import InvalidRequest
from paceline.generation import ChatMessage, GenerationRequest, Schedule, SpeculationUsage
from paceline.types import FinishReason, Origin, SpeculationStats, VerificationRule
from tests.fake_generation import FakeGenerationService, serving

SEQUENTIAL = Setting(Schedule.SEQUENTIAL, 4)
PIPELINED = Setting(Schedule.PIPELINED, 4)


def prompt_of(kind: str, number: int) -> BenchPrompt:
    return BenchPrompt(f"{kind}-{number}", (ChatMessage("user", f"{kind} {number}?"),), kind)


WORKLOAD = Workload("small", tuple(prompt_of(kind, number) for kind in ("chat", "code") for number in range(3)))
PLAN = Plan(
    workloads=(WORKLOAD.limited(4),),
    temperatures=(0.0, 0.7),
    schedules=(Schedule.SEQUENTIAL, Schedule.PIPELINED),
    draft_lengths=(4,),
    rule=VerificationRule.COUPLED,
    max_tokens=16,
    ignore_eos=False,
    repeats=2,
)


def answer_of(
    decode_s: float,
    *,
    kind: str = "chat",
    token_ids: tuple[int, ...] = tuple(range(11)),
    usage: SpeculationUsage | None = None,
    ended: bool = False,
) -> Answer:
    """Tokens of which the first came alone."""
    return Answer(
        prompt=f"{kind}-0",
        kind=kind,
        decode_s=decode_s,
        decoded_tokens=len(token_ids) - 1,
        token_ids=token_ids,
        origins=(Origin.PLAIN, *[Origin.DRAFT] * (len(token_ids) - 1)),
        finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
        speculation=usage or SpeculationUsage(),
    )


def usage_of(rounds: list[tuple[int, int]], *, fallback_rounds: int = 0) -> SpeculationUsage:
    """What a server says of rounds, each a draft length and a kept length."""
    stats = SpeculationStats()
    for draft_length, kept_length in rounds:
        stats.record_round(draft_length, kept_length)
    return SpeculationUsage(
        num_drafts=stats.num_drafts,
        num_accepted_tokens=stats.num_accepted_tokens,
        num_accepted_tokens_per_pos=tuple(stats.accepted_per_position),
        num_draft_tokens_per_pos=tuple(stats.drafted_per_position),
        num_rejections=stats.num_rejections,
        rounds=stats.rounds,
        plain_rounds=stats.plain_rounds,
        fallback_rounds=fallback_rounds,
        draft_wait_s=0.5,
        elapsed_s=2.0,
    )


def result_of(
    method: str, workload: str, speed_up: float, *, temperature: float = 0.0, setting: Setting = PIPELINED
) -> Result:
    figures = figures_of([answer_of(1.0 / speed_up, usage=usage_of([(0, 0), (4, 2), (4, 4)]))], [answer_of(1.0)])
    return Result(Case(method, workload, temperature, setting), figures, {"chat": figures})


# ---------------------------------------------------------------------------------------------------------------------
# Prompts


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("held_out", {"chat": 16, "code": 12, "summary": 12}),
        ("repetitive", {"code_edit": 4, "quote": 4, "agent": 4}),
    ],
)
def test_the_committed_prompts_are_all_there_and_can_be_asked(name: str, kinds: dict[str, int]) -> None:
    """Each file holds so many prompts of each kind, and every one makes a valid request that waits for an answer."""
    workload = load_workload(FOLDER / f"{name}.jsonl")
    assert Counter(prompt.kind for prompt in workload.prompts) == kinds
    for prompt in workload.prompts:
        GenerationRequest(messages=prompt.messages)
        assert prompt.messages[-1].role == "user", prompt.id


def test_every_summary_brings_its_own_passage() -> None:
    """What is to be summarised stands in the prompt, 100 to 180 words of it."""
    for prompt in load_workload(FOLDER / "held_out.jsonl").prompts:
        if prompt.kind == "summary":
            _, passage = prompt.messages[-1].content.split("\n\n", 1)
            assert 100 <= len(passage.split()) <= 180, prompt.id


def test_few_prompts_stand_for_all_kinds() -> None:
    """A limit takes the kinds in turn; 0 takes everything."""
    assert [prompt.id for prompt in WORKLOAD.limited(3).prompts] == ["chat-0", "code-0", "chat-1"]
    assert WORKLOAD.limited(0) == WORKLOAD
    assert Counter(WORKLOAD.limited(99).prompts) == Counter(WORKLOAD.prompts)


@pytest.mark.parametrize(
    "line", ['{"id": "b", "kind": "chat"}', "no JSON", '{"id": "a", "kind": "chat", "messages": []}']
)
def test_a_bad_prompt_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    """A line without messages, one that is no JSON, and one with an id that is taken are refused."""
    path = tmp_path / "bad.jsonl"
    good = {"id": "a", "kind": "chat", "messages": [{"role": "user", "content": "hello"}]}
    path.write_text(f"{json.dumps(good)}\n{line}\n")
    with pytest.raises(InvalidRequest, match="line 2"):
        load_workload(path)


# ---------------------------------------------------------------------------------------------------------------------
# The order of measuring


def test_plain_decoding_is_measured_beside_every_setting() -> None:
    """Settings are all pairs of schedule and draft length, behind plain decoding; without a length, the method's own."""
    assert PLAN.settings("ngram") == (PLAIN, SEQUENTIAL, PIPELINED)
    usual = replace(PLAN, draft_lengths=())
    assert {setting.draft_length for setting in usual.settings("suffix")[1:]} == {16}
    assert usual.settings("somebody_elses")[1].draft_length > 0


async def test_every_prompt_is_answered_under_every_setting_and_no_answer_teaches_another_setting() -> None:
    """All cases hold one answer a prompt and repeat, in the same order; a tenant never gets a prompt twice."""
    service, begun = FakeGenerationService(), list[str]()
    with serving(service) as endpoint:
        answers = await measure(endpoint, "ngram", PLAN, on_answer=begun.append)
    expected = [prompt.id for prompt in PLAN.workloads[0].prompts for _ in range(PLAN.repeats)]
    assert {case.setting for case in answers} == set(PLAN.settings("ngram"))
    assert {case.temperature for case in answers} == set(PLAN.temperatures)
    assert all([answer.prompt for answer in of_case] == expected for of_case in answers.values())
    assert len(begun) == sum(map(len, answers.values())) == PLAN.answers("ngram")
    asked = Counter((request.tenant, request.chat.messages[-1].content) for request in service.requests)
    assert set(asked.values()) == {1}
    assert all(request.tenant for request in service.requests)


async def test_the_first_token_is_no_part_of_the_speed() -> None:
    """The clock runs from the first token, which comes alone, to the last; so five of six tokens count."""
    with serving(FakeGenerationService()) as endpoint:
        answers = await measure(endpoint, "ngram", replace(PLAN, repeats=1), on_answer=lambda _: None)
    for answer in (each for of_case in answers.values() for each in of_case):
        assert (len(answer.token_ids), answer.decoded_tokens) == (6, 5)
        assert answer.decode_s > 0


# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic


def test_speed_ups_are_of_sums_and_of_single_answers() -> None:
    """Together: all tokens over all seconds; one by one: the median of the ratios."""
    plain = [answer_of(1.0), answer_of(1.0), answer_of(4.0)]
    figures = figures_of([answer_of(0.5), answer_of(0.5), answer_of(4.0)], plain)
    assert (figures.tokens_per_second, figures.plain_tokens_per_second) == (30 / 5, 30 / 6)
    assert figures.speed_up == pytest.approx(6 / 5)
    assert figures.median_speed_up == pytest.approx(2.0)


def test_an_answer_of_one_round_has_no_speed() -> None:
    """Nothing came behind the first token, so the answer counts in no ratio, and nothing is divided by zero."""
    one_token = answer_of(0.0, token_ids=(7,))
    assert figures_of([one_token], [one_token]).speed_up == 0.0
    figures = figures_of([one_token, answer_of(0.5)], [one_token, answer_of(1.0)])
    assert (figures.speed_up, figures.median_speed_up) == (2.0, 2.0)


def test_acceptance_is_pooled_over_all_answers() -> None:
    """`a` is accepted / (accepted + rejections); positions count the drafts that reached them."""
    usages = [usage_of([(0, 0), (4, 4), (4, 1)], fallback_rounds=1), usage_of([(2, 0), (0, 0)])]
    answers = [answer_of(1.0, usage=usage, ended=number == 0) for number, usage in enumerate(usages)]
    figures = figures_of(answers, [answer_of(1.0), answer_of(1.0, token_ids=(1, 2, 3))])
    assert figures.acceptance == pytest.approx(5 / 7)
    assert figures.mean_acceptance_length == pytest.approx(1 + 5 / 3)
    assert figures.drafts_by_position == (3, 3, 2, 2)
    assert figures.acceptance_by_position == pytest.approx((2 / 3, 1 / 3, 1 / 2, 1 / 2))
    assert figures.rounds_by_origin == pytest.approx({"drafter": 0.4, "fallback": 0.2, "none": 0.4})
    assert figures.tokens_by_origin == pytest.approx({"plain": 2 / 22, "draft": 20 / 22})
    assert (figures.waiting_share, figures.same_text_share, figures.ended_share) == (0.25, 0.5, 0.5)


def test_each_case_is_compared_with_its_own_plain_answers() -> None:
    """Plain decoding at the same temperature is the measure, as a whole and for each kind of prompt."""
    answers = {}
    for temperature, plain_s in ((0.0, 1.0), (0.7, 3.0)):
        chat, code = answer_of(plain_s), answer_of(plain_s, kind="code")
        answers[Case("ngram", "small", temperature, PLAIN)] = [chat, code]
        answers[Case("ngram", "small", temperature, PIPELINED)] = [replace(chat, decode_s=0.5), code]
    cold, warm = results_of(answers)
    assert (cold.case.temperature, warm.case.temperature) == (0.0, 0.7)
    assert {kind: figures.speed_up for kind, figures in cold.by_kind.items()} == {"chat": 2.0, "code": 1.0}
    assert {kind: figures.speed_up for kind, figures in warm.by_kind.items()} == {"chat": 6.0, "code": 1.0}
    assert cold.figures.speed_up == pytest.approx(2.0 / 1.5)


# ---------------------------------------------------------------------------------------------------------------------
# Limits and pictures


@pytest.mark.parametrize(
    ("method", "workload", "passing", "failing"),
    [("draft_model", "held_out", 1.5, 1.49), ("suffix", "repetitive", 2.0, 1.99), ("suffix", "held_out", 0.98, 0.97)],
)
def test_a_missed_limit_fails(method: str, workload: str, passing: float, failing: float) -> None:
    """Each limit holds at its value and not below; the two others were not measured and fail nothing."""
    for speed_up, passes in ((passing + 1e-9, True), (failing, False)):
        checks = checks_of([result_of(method, workload, speed_up)])
        assert [check.passes for check in checks if check.value is not None] == [passes]
        assert len(checks) == 3


def test_gains_are_the_best_settings_and_losses_any_settings() -> None:
    """The drafter's gain is that of its better schedule; suffix decoding must not lose under either."""
    slow, fast = 0.9, 2.5
    results = [
        result_of(method, workload, speed_up, setting=setting)
        for method, workload in (("draft_model", "held_out"), ("suffix", "repetitive"), ("suffix", "held_out"))
        for speed_up, setting in ((slow, SEQUENTIAL), (fast, PIPELINED))
    ]
    assert [check.passes for check in checks_of(results)] == [True, True, False]
    hot = [result_of("draft_model", "held_out", fast, temperature=0.7)]
    assert all(check.value is None for check in checks_of(hot))


def test_the_report_can_be_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables name every case, and the figure is drawn in both formats, of the better setting of each method."""
    monkeypatch.setattr(drafters, "FIGURE", tmp_path / "drafters.svg")
    results = [
        result_of(method, "held_out", speed_up, setting=setting)
        for method in ("draft_model", "suffix")
        for speed_up, setting in ((1.25, SEQUENTIAL), (1.75, PIPELINED))
    ]
    assert {result.case.setting for result in best_by_temperature(results).values()} == {PIPELINED}
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(speed_table("held_out", results), acceptance_table("held_out", results))
    text = console.export_text()
    assert text.count("suffix") == 4
    assert "1.25" in text
    draw(results, caption="tiny")
    assert {path.name for path in tmp_path.iterdir() if path.stat().st_size} == {"drafters.svg", "drafters.png"}


# ---------------------------------------------------------------------------------------------------------------------
# Cores


def test_pinning_ends_with_its_block() -> None:
    """Inside, one core; afterwards, those from before."""
    before = os.sched_getaffinity(0)
    core = max(before)
    with pinned([core]):
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("text", ["{0}", "{0},{0},{0}", "{0},99999", "{0},x"])
def test_target_and_drafter_need_two_cores(text: str) -> None:
    """One core or three, one that is not there, and what is no number are refused; a core may be named twice."""
    core = min(os.sched_getaffinity(0))
    assert cores_of(f"{core},{core}") == (core, core)
    with pytest.raises(typer.BadParameter):
        cores_of(text.format(core))
