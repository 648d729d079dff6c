"""A drafter whose tokenizer is not the target's, as a service beside it, built as its settings say.

Refused unless it was asked for; then the text is the target's, whatever the two have in common.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from drafter_service.registry import build_method
from paceline.errors import ModelMismatch
from paceline.generation import Schedule
from paceline.process import Serve
from paceline.settings import DrafterSettings
from paceline.types import SamplingParams, VerificationRule
from tests.checkpoints import TINY_VOCAB_SIZE, save_markov_checkpoint, save_tiny_checkpoint
from tests.end_to_end import systems
from tests.exactness.chi_square import SIGNIFICANCE, conditional_p_value
from tests.harness import System, complete_all, drafter_of, request, system

TARGET_WORDS = ("a", "b", "ab", "c")
DRAFTER_WORDS = ("x", "c", "b", "a", "y")
# The most probable words go round: a, b, ab, c; the drafter would say the same, but for the one it does not have.
TARGET_LAW = [[0.2, 0.4, 0.1, 0.3], [0.1, 0.2, 0.5, 0.2], [0.3, 0.0, 0.2, 0.5], [0.6, 0.1, 0.1, 0.2]]
DRAFTER_LAW = [
    [0.2, 0.3, 0.2, 0.1, 0.2],
    [0.1, 0.1, 0.1, 0.6, 0.1],
    [0.2, 0.4, 0.2, 0.2, 0.0],
    [0.1, 0.2, 0.4, 0.3, 0.0],
    [0.2, 0.2, 0.2, 0.2, 0.2],
]
_TEXT = "a pace line is a row of riders; the first of them takes the wind, and each takes a turn at the front of it."

pytestmark = pytest.mark.asyncio(loop_scope="module")


def drafter(folder: Path, **settings: Any) -> Serve:
    options = {"model": str(folder), "dtype": "float32", "device": "cpu", "max_sessions": 16, **settings}
    built = build_method(DrafterSettings(**options))
    return drafter_of(built.method, built.info)


def other_drafter(folder: Path, target: Path) -> Serve:
    return drafter(folder, use_heterogeneous_vocab=True, target_tokenizer=str(target))


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and drafter, Markov chains over words of which they share three."""
    folder = tmp_path_factory.mktemp("chains")
    return (
        save_markov_checkpoint(folder / "target", TARGET_LAW, vocab=TARGET_WORDS),
        save_markov_checkpoint(folder / "drafter", DRAFTER_LAW, vocab=DRAFTER_WORDS),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(chains: tuple[Path, Path]) -> AsyncIterator[System]:
    target, other = chains
    services = (systems.target(target), other_drafter(other, target), str(target))
    async with system(*services, fallback="none", draft_deadline_s=60) as running:
        yield running


async def test_another_tokenizer_is_refused_unless_it_was_asked_for(chains: tuple[Path, Path]) -> None:
    """C46: the pairing fails with both fingerprints, and the message names the way out."""
    target, other = chains
    with pytest.raises(ModelMismatch) as failure:
        async with system(systems.target(target), drafter(other), str(target)):
            pass
    for folder in chains:
        assert systems.load(folder).tokenizer_sha256[:16] in failure.value.message
    assert "--use-heterogeneous-vocab --target-tokenizer NAME" in failure.value.message


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_text_is_that_of_the_target_alone(pair: System, temperature: float) -> None:
    """Greedy and coupled, in every schedule, with drafts that are kept in part."""
    plain, *others = [
        await pair.client.complete(
            request((2, 0), temperature=temperature, schedule=schedule, draft_length=3, max_tokens=24)
        )
        for schedule in (Schedule.PLAIN, Schedule.SEQUENTIAL, Schedule.PIPELINED)
    ]
    assert 2 in plain.token_ids
    for answer in others:
        assert answer.token_ids == plain.token_ids
        assert 0 < answer.speculation.num_accepted_tokens < answer.speculation.num_draft_tokens


async def test_where_no_allowed_token_is_shared_the_answer_is_the_targets(pair: System) -> None:
    """The drafter has nothing to offer then, and that is all."""
    sampling = SamplingParams(allowed_token_ids=(TARGET_WORDS.index("ab"),))
    answer = await pair.client.complete(request((0,), sampling=sampling, max_tokens=12))
    assert answer.token_ids == (2,) * 12
    after = await pair.client.complete(request((0,), max_tokens=12))
    assert after.speculation.num_draft_tokens > 0


@pytest.mark.slow
async def test_under_rejection_the_output_has_the_law_of_the_target(pair: System) -> None:
    """Sample: 3,000 tokens in 30 answers, through wire and services; the odds of a false alarm are 1e-4."""
    options = {"rule": VerificationRule.REJECTION, "draft_length": 3, "max_tokens": 100}
    requests = [request((seed % 4,), seed=seed, **options) for seed in range(30)]  # type: ignore[arg-type]
    answers = await complete_all(pair.client, requests)
    counts = torch.zeros(4, 4, dtype=torch.float64)
    for seed, answer in enumerate(answers):
        for last, following in itertools.pairwise((seed % 4, *answer.token_ids)):
            counts[last, following] += 1
    assert sum(answer.speculation.num_accepted_tokens for answer in answers) > 500
    law = torch.tensor(TARGET_LAW, dtype=torch.float64)
    assert conditional_p_value(counts, law) > SIGNIFICANCE
    without = law.clone()
    without[:, 2] *= 0.6
    assert conditional_p_value(counts, without / without.sum(dim=1, keepdim=True)) < SIGNIFICANCE


def other_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, with merges of its own and a start token before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB_SIZE - 10,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )


async def test_a_network_with_a_start_token_of_its_own_drafts_for_one_without(
    tiny_target: Path, tmp_path: Path
) -> None:
    """C48: byte-level tokenizers of other merges; the text at temperature 0 is that of the target alone."""
    other = save_tiny_checkpoint(tmp_path / "other", seed=1)
    other_tokenizer().save_pretrained(other)
    drafting = other_drafter(other, tiny_target)
    async with system(systems.target(tiny_target), drafting, str(tiny_target), fallback="none") as running:
        plain, *others = [
            await running.client.complete(
                request(tuple(range(250, 290)), temperature=0, schedule=schedule, max_tokens=10)
            )
            for schedule in (Schedule.PLAIN, Schedule.SEQUENTIAL, Schedule.PIPELINED)
        ]
        for answer in others:
            assert answer.token_ids == plain.token_ids
            assert answer.speculation.num_draft_tokens > 0
