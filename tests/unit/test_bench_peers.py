"""transformers as the peer: what it answers, what it counts, and how its process ends. Tiny random models throughout."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.bench.peer_process import PeerPair, serve
from paceline.bench.peers import AssistantSettings, Peer, PeerAnswer, PeerFailure, PeerModels, PeerQuestion, PeerReady
from paceline.engine.checkpoint import load_network
from paceline.errors import InvalidRequest, ModelMismatch, ModelUnavailable, PacelineError, StartupFailed
from paceline.generation import ChatMessage
from tests.checkpoints import save_tiny_checkpoint, tiny_tokenizer
from tests.unit.test_shallow_drafter import write as write_drafter

ASKED = (ChatMessage("user", "abcabcabcabc"),)
TOKENS = 16


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads, and lose much where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target`, which recommends odd settings, `twin` of the same weights, `drafter` trained for the target."""
    folder = tmp_path_factory.mktemp("peers")
    for name in ("target", "twin"):
        save_tiny_checkpoint(folder / name, seed=1, layers=4)
    (folder / "target" / "generation_config.json").write_text('{"repetition_penalty": 9.0, "top_k": 2}')
    write_drafter(folder / "drafter", folder / "target")
    return folder


@lru_cache(maxsize=8)
def load(folder: Path, drafter: str | None = None) -> PeerPair:
    """The target of the folder with one of its drafters; the same pair for all who ask for it."""
    name = str(folder / drafter) if drafter else None
    return PeerPair(PeerModels(target=str(folder / "target"), drafter=name, dtype="float32"))


def asked(kind: str, **changed: Any) -> PeerQuestion:
    return PeerQuestion(kind=kind, messages=ASKED, **{"max_tokens": TOKENS, "ignore_eos": True, **changed})


def prompt_ids() -> list[int]:
    conversation = [{"role": message.role, "content": message.content} for message in ASKED]
    return list(tiny_tokenizer().apply_chat_template(conversation, add_generation_prompt=True, return_dict=False))


@lru_cache(maxsize=8)
def greedy_ids(target: Path, length: int) -> tuple[int, ...]:
    """The most probable tokens, by whole passes without a cache."""
    ids = prompt_ids()
    network, start = load_network(target, dtype=torch.float32), len(ids)
    with torch.inference_mode():
        while len(ids) < start + length:
            ids.append(int(network(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[start:])


@pytest.mark.parametrize("drafter", ["twin", "drafter"])
def test_every_kind_answers_with_the_targets_tokens(drafter: str, folder: Path) -> None:
    """Whoever drafts, and however, at temperature 0 the answer is the target's most probable tokens, whatever settings
    its checkpoint recommends; a trained drafter is an assistant too."""
    pair, expected = load(folder, drafter), greedy_ids(folder / "target", TOKENS)
    assert pair.answer(asked("plain")).token_ids == expected
    assert pair.answer(asked("prompt_lookup")).token_ids == expected
    for settings in (AssistantSettings(), AssistantSettings(num_assistant_tokens=3, confidence_threshold=0.0)):
        assert pair.answer(asked("assisted", assistant=settings)).token_ids == expected


def test_rounds_and_drafted_tokens_are_counted(folder: Path) -> None:
    """A twin's drafts of three are all kept: four tokens a round, the first of which stand behind the prompt."""
    settings = AssistantSettings(num_assistant_tokens=3, confidence_threshold=0.0)
    answer = load(folder, "twin").answer(asked("assisted", assistant=settings))
    assert (answer.rounds, answer.drafted, answer.kept, answer.first_length) == (4, 12, 12, 4)
    plain = load(folder).answer(asked("plain"))
    assert (plain.rounds, plain.drafted, plain.kept, plain.first_length) == (TOKENS, 0, 0, 1)
    assert plain.tokens_per_second == (TOKENS - 1) / plain.decode_s
    assert plain.first_token_s > 0
    assert load(folder).answer(asked("plain", max_tokens=1)).tokens_per_second == 0


def test_schedule_decides_how_long_drafts_are(folder: Path) -> None:
    """The heuristic goes on in the next answer from the length it has reached, and starts anew under other settings."""
    pair = load(folder, "twin")
    heuristic = AssistantSettings(num_assistant_tokens=2, schedule="heuristic", confidence_threshold=0.0)
    constant = AssistantSettings(num_assistant_tokens=2, confidence_threshold=0.0)
    lengths = [
        pair.answer(asked("assisted", assistant=settings)).first_length
        for settings in (heuristic, heuristic, constant, heuristic)
    ]
    assert lengths[0] == lengths[2] == lengths[3] == 3
    assert lengths[1] > 3


def test_end_token_ends_an_answer_unless_ignored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer ends with the first of the model's end tokens, also where that was drafted."""
    expected = greedy_ids(folder / "target", TOKENS)
    end = expected[5]
    pair = load(folder, "twin")
    monkeypatch.setattr(pair, "_end_ids", (end,))
    for kind in ("plain", "assisted", "prompt_lookup"):
        assert pair.answer(asked(kind, ignore_eos=False)).token_ids == expected[: expected.index(end) + 1]
        assert pair.answer(asked(kind)).token_ids == expected


def test_sampling_follows_the_seed_and_is_from_the_whole_distribution(folder: Path) -> None:
    """At a high temperature all tokens are about equally likely: that each of 16 is among the fifty most probable ones
    of over 300, or that two answers are equal, has odds below 1e-12."""
    pair = load(folder, "twin")
    first, again, another = (pair.answer(asked("assisted", temperature=1e6, seed=seed)).token_ids for seed in (1, 1, 2))
    assert first == again != another
    ids = torch.tensor([[*prompt_ids(), *first]])
    with torch.inference_mode():
        rows = load_network(folder / "target", dtype=torch.float32)(ids).logits[0, -TOKENS - 1 : -1]
    ranks = (rows > rows.gather(1, torch.tensor(first)[:, None])).sum(1)
    assert ranks.max() >= 50


@pytest.mark.parametrize(
    ("question", "words"),
    [(asked("assisted"), "needs a drafter"), (asked("beam"), "no kind 'beam'")],
)
def test_what_cannot_be_answered_is_said(question: PeerQuestion, words: str, folder: Path) -> None:
    """In a sentence that names what to change."""
    with pytest.raises(InvalidRequest, match=words):
        load(folder).answer(question)


def test_pair_that_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    """Other numbers for the same tokens, another size of the vocabulary, and a drafter in the target's place."""
    save_tiny_checkpoint(tmp_path / "swapped", seed=3, swapped_ids=(300, 301))
    with pytest.raises(ModelMismatch, match="number their tokens differently"):
        load(folder, str(tmp_path / "swapped"))
    save_tiny_checkpoint(tmp_path / "padded", seed=3, vocab_size=512)
    with pytest.raises(ModelMismatch, match="has logits for 512"):
        load(folder, str(tmp_path / "padded"))
    with pytest.raises(ModelUnavailable, match="is a drafter"):
        PeerPair(PeerModels(target=str(folder / "drafter")))


def test_questions_are_served_until_nobody_asks(folder: Path) -> None:
    """First the models are named, then come questions; one that cannot be answered does not end it, a closed end does."""
    ours, theirs = Pipe()
    with ThreadPoolExecutor(1) as thread:
        served = thread.submit(serve, theirs)
        with ours:
            ours.send(PeerModels(target=str(folder / "target"), dtype="float32"))
            assert ours.recv() == PeerReady("float32")
            ours.send(asked("beam"))
            failure = ours.recv()
            assert isinstance(failure, PeerFailure)
            assert failure.reason == "INVALID_ARGUMENT"
            ours.send(asked("plain", max_tokens=8))
            answer = ours.recv()
            assert isinstance(answer, PeerAnswer)
            assert answer.token_ids == greedy_ids(folder / "target", TOKENS)[:8]
        assert served.result() is None


def test_models_that_cannot_be_loaded_are_told() -> None:
    """In the sentence of whoever could not load them, and that is the end."""
    ours, theirs = Pipe()
    with ours:
        ours.send(PeerModels(target="./absent"))
        serve(theirs)
        failure = ours.recv()
    assert isinstance(failure, PeerFailure)
    assert failure.reason == "MODEL_UNAVAILABLE"
    assert "There is no folder './absent'" in failure.message


@pytest.mark.slow
def test_process_answers_until_it_ends(folder: Path) -> None:
    """A failure leaves it running, a process that is gone is reported, and outside of its block there is none."""
    target, twin = str(folder / "target"), str(folder / "twin")
    with Peer(target, twin, dtype="float32", threads=1) as peer:
        assert peer.dtype == "float32"
        with pytest.raises(PacelineError, match="no kind 'beam'"):
            peer.answer("beam", ASKED)
        answer = peer.answer("assisted", ASKED, max_tokens=8, ignore_eos=True)
        assert answer.token_ids == greedy_ids(folder / "target", TOKENS)[:8]
        assert peer._process is not None
        peer._process.kill()
        with pytest.raises(StartupFailed, match="ended with status -9"):
            peer.answer("plain", ASKED)
    with pytest.raises(StartupFailed, match="not running"):
        peer.answer("plain", ASKED)


@pytest.mark.slow
def test_process_that_cannot_start_says_why() -> None:
    """The sentence is that of whoever could not load the model; too slow a one is ended."""
    with pytest.raises(PacelineError, match="There is no folder"), Peer("./absent"):
        pass
    with pytest.raises(StartupFailed, match=r"took longer than 0\.01 s"), Peer("./absent", start_timeout_s=0.01):
        pass
