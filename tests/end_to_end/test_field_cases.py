"""Faults that real systems shipped, as tests of the running system (the numbers are those of the project's field cases).

All are exact comparisons: no test of this file can fail by chance.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from drafter_service.methods.draft_model import DraftModelMethod
from drafter_service.methods.hybrid import HybridMethod
from orchestrator.loop import DraftOrder, RoundPlan
from paceline.errors import PacelineError
from paceline.generation import Completion, GenerationRequest, Schedule
from paceline.lookup.suffix import Scope, SuffixCache
from paceline.prefix import TokenPrefix
from paceline.process import Serve
from paceline.sessions import PeerGone
from paceline.types import FinishReason, SamplingParams, VerificationRule
from tests.checkpoints import save_tiny_checkpoint
from tests.end_to_end import systems
from tests.end_to_end.systems import Folders
from tests.fakes import FakeModel, LocalDrafts, fake_info, spec_of
from tests.harness import (
    System,
    complete_all,
    drafter_of,
    model_drafter_of,
    request,
    system,
    target_of,
)

PROMPT = (10, 20, 30, 40, 50)
VOCAB_SIZE = 320


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def noisy(tiny_target: Path) -> AsyncIterator[System]:
    """A target and a noisy copy of it as drafter."""
    drafter = systems.draft_model(tiny_target, logit_noise=systems.NOISE)
    async with system(systems.target(tiny_target), drafter, str(tiny_target), draft_deadline_s=60) as running:
        yield running


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def in_every_schedule(noisy: System, sampling: SamplingParams, **options: object) -> list[Completion]:
    """The same request plain, sequential and pipelined."""
    return [
        await noisy.client.complete(
            request(PROMPT, sampling=sampling, schedule=schedule, **options)  # type: ignore[arg-type]
        )
        for schedule in Schedule
    ]


async def test_seed_changes_nothing_at_temperature_zero(noisy: System) -> None:
    """C12: ten seeds, ten identical outputs."""
    answers = await complete_all(noisy.client, [request(PROMPT, temperature=0, seed=seed) for seed in range(10)])
    assert len({answer.token_ids for answer in answers}) == 1


@pytest.mark.parametrize("rule", [VerificationRule.COUPLED, VerificationRule.REJECTION])
async def test_seed_is_honoured_beside_other_sessions(noisy: System, rule: VerificationRule) -> None:
    """C13: seed 7 alone and beside seven other sessions; under `rejection` sequentially, where timing has no say."""
    asked = request(PROMPT, seed=7, rule=rule, schedule=Schedule.SEQUENTIAL)
    others = [request((seed, 3), seed=seed, rule=rule) for seed in range(100, 107)]
    alone = [await noisy.client.complete(asked) for _ in range(2)]
    beside = [(await complete_all(noisy.client, [asked, *others]))[0] for _ in range(2)]
    assert len({answer.token_ids for answer in [*alone, *beside]}) == 1


async def test_reported_seed_replays_an_answer_that_had_none(noisy: System) -> None:
    """An answer without a seed reports the one that was drawn, and that seed gives the same answer again."""
    first = await noisy.client.complete(request(PROMPT, seed=None))
    again = await noisy.client.complete(request(PROMPT, seed=first.seed))
    assert again.token_ids == first.token_ids


async def test_answer_goes_on_from_a_cut_as_if_the_block_had_ended_there(noisy: System) -> None:
    """C16: cut at any length and continued with the same seed, the tokens are those of the whole answer."""
    whole = (await noisy.client.complete(request(PROMPT, max_tokens=24, draft_length=5))).token_ids
    for cut in (1, 2, 7, 12):
        # The prompt is longer by the tokens given out already; positions are absolute, so the noise is the same.
        rest = await noisy.client.complete(request((*PROMPT, *whole[:cut]), max_tokens=24 - cut, draft_length=5))
        assert rest.token_ids == whole[cut:]


async def test_top_k_of_one_is_the_arg_max_at_any_temperature(noisy: System) -> None:
    """C06: top_k = 1 at temperature 1 gives the greedy answer, drafts or not, under both rules."""
    greedy = await noisy.client.complete(request(PROMPT, temperature=0))
    for rule in (VerificationRule.COUPLED, VerificationRule.REJECTION):
        answers = await in_every_schedule(noisy, SamplingParams(top_k=1), rule=rule)
        assert {answer.token_ids for answer in answers} == {greedy.token_ids}


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0, frequency_penalty=1.5),
        SamplingParams(temperature=0.0, presence_penalty=2.0, repetition_penalty=1.3),
        SamplingParams(temperature=0.8, frequency_penalty=0.7, top_p=0.9),
        SamplingParams(temperature=1.0, logit_bias=((15, 5.0), (16, -100.0)), top_k=20),
        SamplingParams(temperature=1.0, allowed_token_ids=tuple(range(40, 60)), banned_token_ids=(44,)),
        SamplingParams(temperature=1.2, min_p=0.1),
        SamplingParams(temperature=1.0, min_tokens=12, stop_token_ids=(5, 6)),
    ],
    ids=lambda sampling: " ".join(f"{name}" for name in ("T",) if sampling) + repr(sampling)[15:60],
)
async def test_every_sampling_parameter_acts_at_drafted_positions_too(noisy: System, sampling: SamplingParams) -> None:
    """C19, C20, C21: with drafts and without, the same tokens (`greedy` and `coupled`)."""
    answers = await in_every_schedule(noisy, sampling, max_tokens=40)
    assert len({answer.token_ids for answer in answers}) == 1
    assert answers[1].speculation.num_draft_tokens > 0


@pytest.mark.parametrize("rule", [VerificationRule.COUPLED, VerificationRule.REJECTION])
async def test_forbidden_tokens_never_appear(noisy: System, rule: VerificationRule) -> None:
    """C21: a ban and an allow-list hold at every position, drafted or not."""
    allowed = tuple(range(100, 130))
    sampling = SamplingParams(allowed_token_ids=allowed, banned_token_ids=(101, 102))
    answers = await in_every_schedule(noisy, sampling, rule=rule, max_tokens=60)
    for answer in answers:
        assert set(answer.token_ids) <= set(allowed) - {101, 102}


@pytest.mark.parametrize("draft_length", [0, 1, 3, 4, 8])
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 8])
async def test_length_limit_is_never_overshot(noisy: System, max_tokens: int, draft_length: int) -> None:
    """C26, C27: exactly `max_tokens` tokens delivered and counted, finish "length"."""
    answer = await noisy.client.complete(request(PROMPT, max_tokens=max_tokens, draft_length=draft_length))
    assert len(answer.token_ids) == answer.usage.completion_tokens == max_tokens
    assert answer.finish_reason is FinishReason.LENGTH


def counting_system() -> tuple[Serve, Serve]:
    """Target and drafter that both count upwards: every draft is kept, so that ends fall anywhere in a block."""
    rows = [
        [8.0 if token_id == (last + 1) % VOCAB_SIZE else 0.0 for token_id in range(VOCAB_SIZE)]
        for last in range(VOCAB_SIZE)
    ]
    models = [FakeModel(lambda ids: rows[ids[-1]], vocab_size=VOCAB_SIZE) for _ in range(2)]
    return target_of(models[0]), model_drafter_of(models[1], fake_info(models[1], method="draft_model"))


@pytest.mark.parametrize("stop_at", range(1, 12))
async def test_end_token_anywhere_in_a_block_ends_the_answer(tiny_target: Path, stop_at: int) -> None:
    """C23: all kept, the end token at any place of the block or as the bonus: the answer ends with it, "stop"."""
    target, drafter = counting_system()
    async with system(target, drafter, str(tiny_target)) as counting:
        answer = await counting.client.complete(
            request((100,), max_tokens=50, temperature=0, draft_length=4, stop_token_ids=(100 + stop_at,))
        )
    assert answer.token_ids == tuple(range(101, 101 + stop_at))
    assert answer.finish_reason is FinishReason.STOP
    assert answer.usage.completion_tokens == stop_at


@pytest.mark.parametrize("schedule", [Schedule.SEQUENTIAL, Schedule.PIPELINED])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_drafter_equal_to_the_target_keeps_every_draft(
    tiny_target: Path, schedule: Schedule, temperature: float
) -> None:
    """C30: acceptance 1.0 for 200 rounds, so no cache is ever cut by one too many or too few."""
    async with system(systems.target(tiny_target), systems.draft_model(tiny_target), str(tiny_target)) as same:
        answer = await same.client.complete(
            request(PROMPT, max_tokens=401, temperature=temperature, draft_length=1, schedule=schedule)
        )
    assert answer.speculation.rounds >= 200
    assert answer.speculation.acceptance_rate == 1.0


async def test_hybrid_equal_to_the_target_keeps_every_draft_of_either_kind(tiny_target: Path) -> None:
    """C30: in a text of which five tokens of six repeat themselves, repetitions and the model take turns; acceptance is
    1.0 for 200 rounds of each schedule, so that whatever the one drafted had reached the cache of the other."""
    text = [place if place < 5 else 10 + turn for turn in range(110) for place in range(6)]
    rows = [[8.0 if token_id == each else 0.0 for each in range(VOCAB_SIZE)] for token_id in range(VOCAB_SIZE)]

    def logits(ids: Sequence[int]) -> list[float]:
        return rows[text[len(ids)] if list(ids) == text[: len(ids)] else 7]

    target, drafter = (FakeModel(logits, vocab_size=VOCAB_SIZE) for _ in range(2))
    suffixes = SuffixCache(min_token_prob=0.3, max_spec_factor=4.0, max_cached_requests=0)
    method = HybridMethod(DraftModelMethod(drafter, distribution_entries=64), suffixes, min_score=1.0)
    drafting = drafter_of(method, fake_info(drafter, method="hybrid"))
    async with system(target_of(target), drafting, str(tiny_target), fallback="none") as same:
        for schedule in (Schedule.SEQUENTIAL, Schedule.PIPELINED):
            drafter.steps = 0
            answer = await same.client.complete(
                request(tuple(text[:24]), max_tokens=601, temperature=0, draft_length=2, schedule=schedule)
            )
            stats = answer.speculation
            assert stats.rounds >= 200
            assert stats.acceptance_rate == 1.0
            # No step of the model drafts more than one token.
            assert 100 <= drafter.steps < 0.9 * stats.num_draft_tokens


REPEATING = ((1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2), (3, 9), (1, 2, 3), (4, 5, 1, 2))
NOVEL = (tuple(range(50, 62)), (63, 64), (65, 66, 67), (68, 69, 70, 71))


@pytest.mark.parametrize("rule", VerificationRule)
@pytest.mark.parametrize("drafter", systems.DRAFTERS)
async def test_rounds_without_a_draft_still_reach_the_drafter(
    folders: Folders, drafter: str, rule: VerificationRule
) -> None:
    """C32: after drafts of 3, 0 and 0 tokens the fourth is that of a session which is opened with the same tokens."""
    # Neither session learns from the other.
    apart = {"enable_prefix_caching": False, "suffix_decoding_max_cached_requests": 0}
    method = systems.build_drafter(drafter, folders, **apart).method
    offers = []
    for prompt, *runs in (REPEATING, NOVEL):
        session = spec_of(prompt_length=len(prompt), vocab_size=VOCAB_SIZE, rule=rule)
        told, fresh = LocalDrafts(method, session), LocalDrafts(method, session)
        prefix = TokenPrefix(prompt)
        for draft_length, committed_ids in zip((3, 0, 0), runs, strict=True):
            told.commit(prefix, DraftOrder(draft_length=draft_length, credit=draft_length))
            told.work(8)
            prefix.extend(committed_ids)
        for drafts in (told, fresh):
            drafts.commit(prefix, DraftOrder(draft_length=3, credit=3))
            offers.append((await drafts.draft(prefix, RoundPlan(draft_length=3, enough_length=3))).draft.ids)
            assert (drafts.failures, drafts.stalls) == ([], 0)
            drafts.drafter.accept(PeerGone(0))
    assert offers[0] == offers[1]
    assert offers[2] == offers[3]
    assert offers[0]


@pytest.mark.parametrize(
    "drafter",
    ["draft model", "hybrid", *(pytest.param(name, marks=pytest.mark.slow) for name in ("other tokenizer", "trained"))],
)
async def test_drafter_with_a_short_context_falls_silent_and_the_text_stays(
    tiny_target: Path, tmp_path: Path, drafter: str
) -> None:
    """C50: the drafter holds 32 tokens, the prompt has 30: the text is that of the target alone."""
    short = save_tiny_checkpoint(tmp_path / "short", seed=1, max_context=32)
    prompt = tuple(range(30))
    drafting = systems.drafter_for(drafter, systems.tiny_folders(tmp_path, short))
    async with system(systems.target(tiny_target), drafting, str(tiny_target)) as pair:
        plain, *answers = [
            await pair.client.complete(request(prompt, schedule=schedule, max_tokens=40, draft_length=4))
            for schedule in (Schedule.PLAIN, Schedule.SEQUENTIAL, Schedule.PIPELINED)
        ]
    assert {answer.token_ids for answer in answers} == {plain.token_ids}


@pytest.mark.parametrize(
    ("drafter", "answers"),
    [("hybrid", 60), *(pytest.param(name, 300, marks=pytest.mark.slow) for name in systems.DRAFTERS)],
)
async def test_nothing_is_left_behind_by_endings_of_every_kind(folders: Folders, drafter: str, answers: int) -> None:
    """C37: after answers ended by length, stop, cancellation and error, neither service holds a session or a token."""
    ended = answers // 6
    drafting = systems.drafter_for(drafter, folders)
    async with system(systems.target(folders.target), drafting, str(folders.target)) as ending:
        requests: list[GenerationRequest] = [
            request((number % 300, 1), seed=number, max_tokens=1 + number % 12, stop=("e",) if number % 3 else ())
            for number in range(answers)
        ]
        await complete_all(ending.client, requests, concurrency=16)
        for number in range(ended):
            async for _ in ending.client.generate(request((number,), max_tokens=200)):
                break
        for number in range(ended):
            with pytest.raises(PacelineError):
                await ending.client.complete(request((number,) * 600))
        probe = await ending.client.complete(request(PROMPT))
        assert probe.finish_reason is FinishReason.LENGTH
        loads = await ending.loads()
    assert [(load.sessions, load.kv_used_tokens) for load in loads] == [(0, 0), (0, 0)]


class RecordedOutputs(SuffixCache):
    """Remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[tuple[int, ...]] = []

    def add(self, scope: Scope, output_ids: Sequence[int]) -> None:
        self.outputs.append(tuple(output_ids))
        super().add(scope, output_ids)


async def test_only_what_was_answered_is_ever_learned(folders: Folders) -> None:
    """C29, C36: whatever a later session is drafted from is the beginning of an answer: no draft that was refused, and
    nothing that was kept behind a stop."""
    suffixes, model = RecordedOutputs(), systems.load(folders.drafter)
    method = HybridMethod(DraftModelMethod(model, distribution_entries=64), suffixes, min_score=0.3)
    drafting = drafter_of(method, systems.info_of(model, method="hybrid"))
    endings: list[dict[str, Any]] = [
        {"max_tokens": 9},
        {"max_tokens": 24, "stop": ("e",)},
        {"max_tokens": 24, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 9))},
    ]
    async with system(systems.target(folders.target), drafting, str(folders.target)) as learning:
        asked = [request((seed, 1), seed=seed, draft_length=8, **ending) for ending in endings for seed in range(20)]
        answers = await complete_all(learning.client, asked, concurrency=16)
        broken_off = request((1, 1), seed=1, max_tokens=60)
        answers.append(await learning.client.complete(broken_off))
        async for _ in learning.client.generate(broken_off):
            break
        await learning.loads()
    assert sum(answer.finish_reason is FinishReason.STOP for answer in answers) > 10
    beginnings = {answer.token_ids[:length] for answer in answers for length in range(len(answer.token_ids) + 1)}
    assert len(suffixes.outputs) == len(answers) + 1
    assert set(suffixes.outputs) <= beginnings
