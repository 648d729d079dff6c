"""The model of emulated devices: an ordinary checkpoint, uncertain as a language model is, that never loops; and drafters
of it with the acceptance asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from paceline.engine.interface import Extension
from paceline.engine.model import CausalModel
from paceline.engine.tiny_model import noise_for, write_tiny_model
from paceline.sampling import TokenHistory, draw_draft_token
from paceline.types import SamplingParams, VerificationRule
from tests.fakes import FakeModel, counting_logits

TEXTS = 8
TOKENS = 240


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads, and lose much where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def load(folder: Path, *, logit_noise: float = 0.0) -> CausalModel:
    return CausalModel.load(str(folder), dtype="float32", device="cpu", logit_noise=logit_noise)


def chosen(rows: Tensor, *, position: int, temperature: float) -> list[int]:
    """What each of the sessions draws from its row; their seeds are 1000, 1001, ..."""
    rule = VerificationRule.COUPLED if temperature else VerificationRule.GREEDY
    params = SamplingParams(temperature=temperature)
    return [
        draw_draft_token(
            row, params=params, rule=rule, history=TokenHistory(()), drafted=(), seed=1000 + number, position=position
        )[0]
        for number, row in enumerate(rows)
    ]


def rows_of(model: CausalModel, ids: Sequence[Sequence[int]]) -> Tensor:  # [tokens, texts, vocab_size]
    """The logits behind each token of each text."""
    caches = [model.new_cache() for _ in ids]
    rows = model.step([Extension(cache, text, len(text)) for cache, text in zip(caches, ids, strict=True)])
    for cache in caches:
        model.release(cache)
    return torch.stack(rows, dim=1)


def written(model: CausalModel, *, temperature: float) -> list[list[int]]:
    """`TEXTS` texts of `TOKENS` tokens, each from a token of its own."""
    texts = [[7 * number + 1] for number in range(TEXTS)]
    caches = [model.new_cache() for _ in texts]
    for position in range(1, TOKENS):
        rows = torch.cat(
            model.step([Extension(cache, text[-1:], 1) for cache, text in zip(caches, texts, strict=True)])
        )
        for text, token_id in zip(texts, chosen(rows, position=position, temperature=temperature), strict=True):
            text.append(token_id)
    for cache in caches:
        model.release(cache)
    return texts


@pytest.fixture(scope="module", params=[0.0, 1.0])
def target(request: pytest.FixtureRequest, folder: Path) -> tuple[CausalModel, float, list[list[int]]]:
    """The model, a temperature, and what it writes at that."""
    model = load(folder)
    return model, request.param, written(model, temperature=request.param)


def test_distributions_are_as_uncertain_as_a_language_models(
    target: tuple[CausalModel, float, list[list[int]]],
) -> None:
    """About 2 nats on average, over 1,920 tokens of its own, some of them near 0 and some far above.

    The weights are fixed, so there are no false alarms.
    """
    model, _, texts = target
    probs = rows_of(model, texts).softmax(-1)
    entropies = torch.special.entr(probs).sum(-1).flatten()
    assert 1.8 < float(entropies.mean()) < 2.2
    assert float(entropies.quantile(0.02)) < 1.0
    assert float(entropies.quantile(0.98)) > 2.8


def test_text_does_not_repeat_itself(target: tuple[CausalModel, float, list[list[int]]]) -> None:
    """Not at temperature 0 either: hardly any four tokens come twice, and most of the vocabulary is used."""
    _, _, texts = target
    runs = [tuple(text[start : start + 4]) for text in texts for start in range(TOKENS - 3)]
    assert len(set(runs)) > 0.99 * len(runs)
    assert len({token_id for text in texts for token_id in text}) > 200


@pytest.mark.parametrize(
    "acceptance", [0.7, *(pytest.param(other, marks=pytest.mark.slow) for other in (0.1, 0.4, 0.95))]
)
def test_noisy_copy_drafts_with_the_acceptance_asked_for(
    target: tuple[CausalModel, float, list[list[int]]], folder: Path, acceptance: float
) -> None:
    """As the services load it and draw from it, on 1,912 tokens of texts that the search has not seen.

    The acceptance found and the one searched for, on 2,048 tokens, have standard errors of at most 0.0115 each: 0.06 is
    3.7 of both together, a false alarm in 4,000 texts. Texts and noise are fixed, so a run that passes once passes always.
    """
    model, temperature, texts = target
    deviation = noise_for(model, acceptance=acceptance, temperature=temperature, texts=8)
    rows = rows_of(load(folder, logit_noise=deviation), texts)
    drafted = [chosen(rows[n], position=n + 1, temperature=temperature) for n in range(TOKENS - 1)]
    agreed = [
        draft == text[n + 1] for n, drafts in enumerate(drafted) for draft, text in zip(drafts, texts, strict=True)
    ]
    assert sum(agreed) / len(agreed) == pytest.approx(acceptance, abs=0.06)


def test_same_seed_gives_the_same_model_and_another_seed_another(folder: Path, tmp_path: Path) -> None:
    """Two services on two machines have the same model, as the files are the same to the byte."""
    same, other = write_tiny_model(tmp_path / "same"), write_tiny_model(tmp_path / "other", seed=1)
    weights = [(place / "model.safetensors").read_bytes() for place in (folder, same, other)]
    assert weights[0] == weights[1] != weights[2]


def test_plain_text_is_read_and_written_as_it_is(folder: Path) -> None:
    """Every id is text, so any answer can be shown; what is no printable character is read as a question mark."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Hello, world!\n  ~2 riders (one behind) & a line: the wind's {strength}"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("a\u00e9b")) == "a?b"
    assert tokenizer.encode("the rider") == [
        tokenizer.get_vocab()[token] for token in ("t", "he", " ", "ri", "de", "r")
    ]
    assert all(str(tokenizer.decode([token_id])).isascii() for token_id in range(len(tokenizer)))
    assert load(folder).vocab_size == len(tokenizer)
    assert load(folder).eos_token_ids == ()
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "user: hi\n"


@pytest.mark.parametrize("acceptance", [0.0, 0.04, 1.0])
def test_acceptance_that_noise_cannot_set_is_refused(acceptance: float) -> None:
    """Of all noise some tokens are right by chance, and of the least noise some are wrong."""
    with pytest.raises(ValueError, match="cannot be set"):
        noise_for(FakeModel(counting_logits(8), vocab_size=8), acceptance=acceptance)
