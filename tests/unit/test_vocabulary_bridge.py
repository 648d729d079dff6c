"""A drafter of another tokenizer: what it reads, what it proposes, and that its caches stay those of the target's ids."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from structlog.testing import capture_logs
from torch import Tensor

from drafter_service.methods.draft_model import DraftModelMethod
from orchestrator.fixed_planner import FixedPlanner
from orchestrator.loop import run_session
from paceline.engine.interface import Extension
from paceline.engine.vocabulary import Vocabulary
from paceline.engine.vocabulary_bridge import BridgedCache, IntersectedModel, VocabularyMap, intersected
from paceline.errors import PacelineError, StartupFailed
from paceline.generation import Schedule
from paceline.sampling import TokenHistory, draw_draft_token
from paceline.settings import DrafterSettings
from paceline.types import SamplingParams, SpeculationStats, VerificationRule
from tests.checkpoints import save_markov_checkpoint
from tests.exactness.chi_square import SIGNIFICANCE, conditional_p_value
from tests.fakes import (
    CountingOutput,
    FakeCache,
    FakeModel,
    LocalDrafts,
    LocalTarget,
    hashed_logits,
    markov_logits,
    spec_of,
    target_alone,
)


def vocabulary(*tokens: str, start: str = "", end: str = "", unknown: str = "", fingerprint: str = "") -> Vocabulary:
    """One token an id; those in angle brackets are markers."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    return Vocabulary(
        {token_id: token.encode() for token, token_id in ids.items()},
        frozenset(token_id for token, token_id in ids.items() if token[0] + token[-1] == "<>"),
        start_id=ids.get(start),
        end_id=ids.get(end),
        unknown_id=ids.get(unknown),
        tokenizer_sha256=fingerprint,
    )


DRAFTER = vocabulary("<unk>", "<s>", "</s>", "a", "b", "c", "bc", "x", start="<s>", end="</s>", unknown="<unk>")
TARGET = vocabulary(
    "c", "abc", "<|end|>", "b", "bca", "é", "a", "abcabcabc", "<|begin|>", start="<|begin|>", end="<|end|>"
)
C, ABC, END, B, BCA, ACCENT, A, LONG, BEGIN = range(9)


def map_between(drafter: Vocabulary = DRAFTER, target: Vocabulary = TARGET) -> VocabularyMap:
    return VocabularyMap.between(drafter, target, draft_vocab_size=drafter.size)


def fed(shared: VocabularyMap, ids: Sequence[int]) -> list[int]:
    """What the drafter reads for a session's tokens from the first on."""
    return list(itertools.chain.from_iterable(shared.spell(ids, position=0, extra=0)))


# ---- what is read ---------------------------------------------------------------------------------------------------


def test_a_token_that_both_have_is_read_as_itself_and_others_as_their_longest_pieces() -> None:
    """What has no piece at all is the unknown token; ids that the tokenizer lacks are, too."""
    pieces = map_between().pieces
    assert [pieces[token_id] for token_id in (C, B, A)] == [(5,), (4,), (3,)]
    assert (pieces[ABC], pieces[BCA]) == ((3, 6), (6, 3))
    assert pieces[ACCENT] == (0,)
    assert fed(map_between(), [A, 9, 10_000]) == [1, 3, 0, 0]


def test_markers_are_no_pieces_of_text() -> None:
    """A text that spells one does not become one."""
    drafter = vocabulary("<s>", "<", "s", ">")
    target = vocabulary("x<s>", "<s>")
    assert map_between(drafter, target).pieces == [(1, 2, 3), (0,)]


def test_an_end_of_another_name_is_read_and_proposed_as_the_drafters_end() -> None:
    """Also where only one of the two has any."""
    shared = map_between()
    assert shared.pieces[END] == (2,)
    assert shared.proposed_by[END] == 2
    without = map_between(vocabulary("a", "b"))
    assert without.proposed_by[END] == without.draft_vocab_size


def test_an_end_that_is_another_token_of_the_target_stays_that_token() -> None:
    """No token of the drafter is proposed under two ids."""
    drafter = vocabulary("a", "<turn>", end="<turn>")
    target = vocabulary("<turn>", "<stop>", "a", end="<stop>")
    assert map_between(drafter, target).proposed_by.tolist() == [1, 2, 0]


@pytest.mark.parametrize("prompt", [(BEGIN, A, B), (A, B), (ABC, A, B)])
def test_exactly_one_start_token_stands_in_the_drafters_context(prompt: tuple[int, ...]) -> None:
    """C48: the target's is read as the drafter's, and one is put before a prompt without any; later ones are none."""
    assert fed(map_between(), [*prompt, BEGIN, A]).count(1) == 1
    assert fed(map_between(), prompt)[0] == 1


def test_without_a_start_token_of_its_own_the_drafter_reads_an_end() -> None:
    """Or the same marker, where it has that; nothing is put before a text that has none."""
    assert fed(map_between(vocabulary("a", "</s>", end="</s>")), [BEGIN, A]) == [1, 0]
    assert fed(map_between(vocabulary("a", "<|begin|>", "</s>", end="</s>")), [BEGIN, A]) == [1, 0]
    assert fed(map_between(vocabulary("a", "</s>", end="</s>")), [A]) == [0]


@pytest.mark.parametrize("length", [1, 3, 40, 400])
def test_what_is_read_is_longer_by_a_bounded_share(length: int) -> None:
    """Past it a token is read as its longest piece; the bound holds for every prefix, and is used up."""
    shared = map_between()
    pieces = list(shared.spell([LONG] * length, position=0, extra=0))
    ends = list(itertools.accumulate(len(each) for each in pieces))
    assert all(end <= count + 8 + count // 4 for count, end in enumerate(ends, start=1))
    assert length < 3 or ends[-1] >= length + length // 4
    assert set(pieces[1:]) <= {shared.pieces[LONG], shared.pieces[LONG][:1]}


def test_what_is_read_for_a_prefix_does_not_depend_on_what_follows_or_on_how_it_is_divided() -> None:
    """So caches may be cut and shared: 50 texts of 60 tokens, each divided at random."""
    shared, drawn = map_between(), random.Random(1)
    for _ in range(50):
        ids = [drawn.randrange(TARGET.size) for _ in range(60)]
        cut = drawn.randrange(60)
        first = list(shared.spell(ids[:cut], position=0, extra=0))
        extra = sum(len(pieces) - 1 for pieces in first)
        rest = list(shared.spell(ids[cut:], position=cut, extra=extra))
        assert first + rest == list(shared.spell(ids, position=0, extra=0))


# ---- what is proposed -----------------------------------------------------------------------------------------------


def test_a_reduced_draft_vocabulary_lands_on_its_target_ids() -> None:
    """C49: tokens 7, 2 and 5 of the target, best index 0: token 7 is proposed, and no other has any probability."""
    target = vocabulary(*"abcdefghij")
    shared = map_between(vocabulary("h", "c", "f"), target)
    (row,) = shared.spread(torch.tensor([[3.0, 1.0, 2.0]]))
    assert {token_id: float(row[token_id]) for token_id in (7, 2, 5)} == {7: 3.0, 2: 1.0, 5: 2.0}
    drawn = {
        rule: draw_draft_token(
            row, params=SamplingParams(), rule=rule, history=TokenHistory(()), drafted=(), seed=3, position=4
        )
        for rule in VerificationRule
    }
    assert drawn[VerificationRule.GREEDY] == (7, None)
    token_id, distribution = drawn[VerificationRule.REJECTION]
    assert distribution is not None
    assert token_id in (7, 2, 5)
    assert set(distribution.shares) == {7, 2, 5}
    assert math.isclose(sum(distribution.shares.values()), 1.0)
    assert {token_id for token_id in range(10) if row[token_id] > -math.inf} == {7, 2, 5}


def test_of_two_ids_for_the_same_bytes_one_is_proposed_and_both_are_read() -> None:
    """Twice would count its probability twice. The last one goes: the first may be a byte without a token."""
    target = Vocabulary({0: b"a", 1: b"b", 2: b"a"})
    shared = map_between(Vocabulary({0: b"b", 1: b"b", 2: b"a"}), target)
    assert shared.pieces == [(2,), (1,), (2,)]
    assert shared.proposed_by.tolist() == [3, 1, 2]


def test_tokens_that_the_drafters_network_lacks_are_not_shared() -> None:
    """Its tokenizer may know more."""
    shared = VocabularyMap.between(DRAFTER, TARGET, draft_vocab_size=4)
    assert (shared.shared_count, shared.pieces[B]) == (2, (0,))  # "a" and the end


# ---- the model ------------------------------------------------------------------------------------------------------

DRAFT_LOGITS = hashed_logits(DRAFTER.size)


def model_of(**options: int) -> tuple[IntersectedModel[FakeCache], FakeModel]:
    inner = FakeModel(DRAFT_LOGITS, vocab_size=DRAFTER.size, **options)
    return IntersectedModel(inner, map_between()), inner


def rows_from_scratch(ids: Sequence[int], rows: int) -> Tensor:
    """The logits behind each of the last `rows` tokens."""
    lengths = range(len(ids) - rows + 1, len(ids) + 1)
    logits = torch.tensor([DRAFT_LOGITS(fed(map_between(), ids[:length])) for length in lengths])
    return map_between().spread(logits.reshape(rows, DRAFTER.size))


@pytest.mark.parametrize("block_size", [1, 4])
def test_rows_are_those_of_the_whole_text_whatever_was_fed_cut_and_shared_before(block_size: int) -> None:
    """500 random operations on four sessions with common beginnings, one of which may go on as another's fork.

    Every row, and memory in the end as before.
    """
    model, inner = model_of(num_blocks=800 // block_size, block_size=block_size)
    drawn = random.Random(block_size)
    texts = [[drawn.randrange(TARGET.size) for _ in range(20)] * 5 for _ in range(2)]
    caches = [model.new_cache() for _ in range(4)]
    reused = 0
    for _ in range(500):
        number = drawn.randrange(4)
        cache, text = caches[number], texts[number % 2]
        match drawn.randrange(7):
            case 0:
                model.truncate(cache, drawn.randrange(cache.length + 1))
            case 1 if drawn.random() < 0.3:
                model.release(cache)
            case 2:
                before = cache.length
                reused += model.reuse_prefix(cache, text) - before
            case 3:
                model.share_prefix(cache, text[: drawn.randrange(100)])
            case 4:
                model.release(caches[number - 2])  # the other one with this text
                caches[number - 2] = model.fork(cache, drawn.randrange(cache.length + 1))
            case _:
                count = min(drawn.randrange(1, 9), len(text) - cache.length)
                if count and model.reserve(cache, cache.length + count):
                    start, rows = cache.length, drawn.randrange(count + 1)
                    (got,) = model.step([Extension(cache, text[start : start + count], rows)])
                    assert torch.equal(got, rows_from_scratch(text[: start + count], rows))
        assert inner.ids_of(cache.inner) == cache.fed == fed(map_between(), text[: cache.length])
        inner.memory.check()
    assert reused > 0
    for cache in caches:
        model.release(cache)
    assert inner.memory.held_tokens == 0


def test_no_more_is_shared_than_was_named() -> None:
    """The tokens behind are drafted ones, which nobody else may reuse."""
    model, _ = model_of(block_size=4)
    text = [A, ABC] * 20
    first, second = model.new_cache(), model.new_cache()
    assert model.reserve(first, len(text))
    model.step([Extension(first, text, 0)])
    model.share_prefix(first, text[:16])
    assert 12 < model.reuse_prefix(second, text) <= 16


def test_sessions_of_one_step_get_their_own_rows() -> None:
    """A prompt, a block and a single token, whose pieces differ in number."""
    model, inner = model_of()
    batch = [Extension(model.new_cache(), ids, rows) for ids, rows in (((ABC, LONG, A), 0), ((ABC, BCA), 2), ((A,), 1))]
    for extension, rows in zip(batch, model.step(batch), strict=True):
        assert torch.equal(rows, rows_from_scratch(extension.ids, extension.rows))
    assert inner.steps == 1


def test_room_that_was_reserved_suffices_up_to_the_longest_session() -> None:
    """Tokens of many pieces, in a memory that holds no more; one token more is refused."""
    model, inner = model_of(num_blocks=64, block_size=1)
    cache = model.new_cache()
    while cache.length < model.max_context:
        assert model.reserve(cache, cache.length + 1)
        held = inner.memory.held_tokens
        model.step([Extension(cache, [LONG], 1)])
        assert inner.memory.held_tokens == held
    assert model.max_context == 44
    assert not model.reserve(cache, 2 * model.max_context)


def test_a_step_that_fails_leaves_every_session_as_it_was() -> None:
    """Tried again it gives what it would have given."""

    class FailsOnce(FakeModel):
        def step(self, batch: Sequence[Extension[FakeCache]]) -> list[Tensor]:
            if self.steps == 1:
                self.steps += 1
                raise PacelineError("Once.")
            return super().step(batch)

    model = IntersectedModel(FailsOnce(DRAFT_LOGITS, vocab_size=DRAFTER.size), map_between())
    cache: BridgedCache[FakeCache] = model.new_cache()
    model.step([Extension(cache, (A,), 1)])
    for is_second in (False, True):
        if not is_second:
            with pytest.raises(PacelineError):
                model.step([Extension(cache, (ABC,), 1)])
            assert (cache.length, cache.inner.length) == (1, 2)
        else:
            (rows,) = model.step([Extension(cache, (ABC,), 1)])
            assert torch.equal(rows, rows_from_scratch((A, ABC), 1))


# ---- drafting -------------------------------------------------------------------------------------------------------

LAW = [
    [0.4, 0.2, 0.1, 0.3],
    [0.1, 0.5, 0.2, 0.2],
    [0.3, 0.0, 0.4, 0.3],
    [0.6, 0.1, 0.1, 0.2],
]
LAW_TARGET = vocabulary("a", "b", "ab", "c")
LAW_DRAFTER = vocabulary("x", "c", "b", "a")  # lacks "ab", and has one that the target lacks
DRAFT_LAW = [[0.4, 0.3, 0.2, 0.1], [0.1, 0.3, 0.1, 0.5], [0.2, 0.2, 0.4, 0.2], [0.1, 0.3, 0.2, 0.4]]


async def drafted_answer(
    rule: VerificationRule, *, seed: int, max_tokens: int, schedule: Schedule = Schedule.PIPELINED
) -> tuple[list[int], SpeculationStats]:
    """An answer of the Markov target behind token 0, with drafts by the chain of the other tokenizer."""
    spec = spec_of(prompt_length=1, vocab_size=LAW_TARGET.size, rule=rule, seed=seed)
    inner = FakeModel(markov_logits(DRAFT_LAW), vocab_size=LAW_DRAFTER.size)
    model = IntersectedModel(inner, map_between(LAW_DRAFTER, LAW_TARGET))
    drafts = LocalDrafts(DraftModelMethod(model, distribution_entries=64), spec)
    target = FakeModel(markov_logits(LAW), vocab_size=LAW_TARGET.size)
    ids, stats = list[int](), SpeculationStats()
    async for result in run_session(
        spec,
        (0,),
        FixedPlanner(schedule=schedule, draft_length=3, rule=spec.effective_rule),
        target=LocalTarget(target, spec, meanwhile=lambda: drafts.work(4)),
        drafts=drafts,
        output=CountingOutput(max_tokens),
        stats=stats,
    ):
        ids += result.delivery.token_ids
    assert (drafts.stalls, drafts.failures) == (0, [])
    return ids, stats


@pytest.mark.parametrize("rule", [VerificationRule.GREEDY, VerificationRule.COUPLED])
@pytest.mark.parametrize("schedule", [Schedule.SEQUENTIAL, Schedule.PIPELINED])
async def test_the_text_is_that_of_the_target_alone(rule: VerificationRule, schedule: Schedule) -> None:
    """Token for token, at temperature 0 and coupled, though the drafter lacks a token that the target uses."""
    spec = spec_of(prompt_length=1, vocab_size=LAW_TARGET.size, rule=rule, seed=5)
    expected = target_alone(markov_logits(LAW), spec, (0,), 60)
    ids, stats = await drafted_answer(rule, seed=5, max_tokens=60, schedule=schedule)
    assert ids == expected
    assert rule is VerificationRule.GREEDY or 2 in ids
    assert stats.num_accepted_tokens > 10


async def test_under_rejection_the_output_has_the_law_of_the_target() -> None:
    """Sample: 750 tokens in 5 answers; the odds of a false alarm are 1e-4, once: the seeds are fixed.

    The test has power: a token that the drafter cannot propose, emitted less than half as often as it should, would show.
    """
    counts = torch.zeros(4, 4, dtype=torch.float64)
    accepted = 0
    for seed in range(5):
        ids, stats = await drafted_answer(VerificationRule.REJECTION, seed=seed, max_tokens=150)
        accepted += stats.num_accepted_tokens
        for last, following in itertools.pairwise([0, *ids]):
            counts[last, following] += 1
    law = torch.tensor(LAW, dtype=torch.float64)
    assert accepted > 200
    assert conditional_p_value(counts, law) > SIGNIFICANCE
    without = law.clone()
    without[:, 2] *= 0.4
    assert conditional_p_value(counts, without / without.sum(dim=1, keepdim=True)) < SIGNIFICANCE


# ---- settings and checkpoints ---------------------------------------------------------------------------------------


def chain(folder: Path, *words: str) -> str:
    uniform = [[1 / len(words)] * len(words)] * len(words)
    return str(save_markov_checkpoint(folder, uniform, vocab=words))


def test_a_checkpoint_is_made_to_speak_the_targets_ids(tmp_path: Path) -> None:
    """Its size and fingerprint are those of the target's tokenizer, and the log says how much the two share."""
    drafter = chain(tmp_path / "drafter", "c", "a", "x", "y")
    target = chain(tmp_path / "target", "a", "b", "c")
    with capture_logs() as logs:
        model = intersected(FakeModel(hashed_logits(4), vocab_size=4), drafter=drafter, target=target)
    assert (model.vocab_size, len(model.tokenizer_sha256)) == (3, 64)
    assert {"shared": 2, "of_drafter": 0.5, "of_target": 0.667}.items() <= logs[-1].items()


@pytest.mark.parametrize("shared", [(), ("t0",)])
def test_too_few_shared_tokens_are_refused_with_the_figure(shared: tuple[str, ...], tmp_path: Path) -> None:
    """None, and one of six, which is less than a fifth of the smaller vocabulary."""
    drafter = chain(tmp_path / "drafter", *shared, *(f"u{number}" for number in range(6 - len(shared))))
    target = chain(tmp_path / "target", *(f"t{number}" for number in range(7)))
    figures = f"only {len(shared)} of the drafter's 6 and the target's 7 tokens"
    with pytest.raises(StartupFailed, match=figures):
        intersected(FakeModel(hashed_logits(6), vocab_size=6), drafter=drafter, target=target)


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """There is nothing to compare."""
    drafter, target = chain(tmp_path / "drafter", "a"), chain(tmp_path / "target", "a")
    for file in Path(target).glob("tokenizer*"):
        file.unlink()
    with pytest.raises(StartupFailed, match="has no tokenizer"):
        intersected(FakeModel(hashed_logits(1), vocab_size=1), drafter=drafter, target=target)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_heterogeneous_vocab": True}, "give both, or none"),
        ({"target_tokenizer": "target"}, "give both, or none"),
        ({"use_heterogeneous_vocab": True, "target_tokenizer": ""}, "give both, or none"),
        ({"use_heterogeneous_vocab": True, "target_tokenizer": "target", "method": "ngram"}, "any tokenizer"),
        ({"use_heterogeneous_vocab": True, "target_tokenizer": "target", "method": "suffix"}, "any tokenizer"),
    ],
)
def test_the_switch_and_the_targets_tokenizer_go_together(settings: dict[str, Any], words: str) -> None:
    """Half of it, or all of it where it would be of no use, is refused rather than ignored."""
    with pytest.raises(ValidationError, match=words):
        DrafterSettings(**settings)
