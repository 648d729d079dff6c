"""The data stage: prompts, the target's answers to them, and waves that an interrupted run makes again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.engine.checkpoint import load_network, load_tokenizer
from paceline.engine.memory import MemoryLimits
from paceline.engine.model import CausalModel
from paceline.errors import StartupFailed
from paceline.training.answers import Answer, Request, answer
from paceline.training.collect import Collector
from paceline.training.corpus import Corpus, Sample
from paceline.training.prompt_file import Prompt, read_prompt_file
from paceline.training.prompts import OPENINGS, ChatFormat, text_tasks
from paceline.training.settings import TrainingSettings
from paceline.types import SamplingParams
from tests.training import sample, save_learnable_checkpoint, tiny_settings

GREEDY = SamplingParams(temperature=0.0)
STOP_ID = 279  # which some of the answers below come to


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.training.collect.TURN_TOKENS", 8)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_learnable_checkpoint(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def model(target: Path) -> CausalModel:
    return CausalModel.load(str(target), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def tokenizer(target: Path) -> Any:
    return load_tokenizer(target)


def requests(sampling: SamplingParams = GREEDY, *, count: int = 7, max_tokens: int = 9) -> list[Request]:
    prompts = [tuple((31 * number + place) % 320 for place in range(1 + 5 * number)) for number in range(count)]
    return [
        Request(prompt_ids=prompt, sampling=sampling, seed=seed, max_tokens=max_tokens, stop_ids=frozenset({STOP_ID}))
        for seed, prompt in enumerate(prompts)
    ]


def answers(model: CausalModel, asked: Sequence[Request], **options: Any) -> list[Answer]:
    """In the order of the requests."""
    got = dict(answer(model, asked, **{"max_sessions": 3, "entries": 4, **options}))
    assert sorted(got) == list(range(len(asked)))
    return [got[index] for index in range(len(asked))]


# ---- answers --------------------------------------------------------------------------------------------------------


def test_greedy_answers_are_those_of_the_network_alone(target: Path, model: CausalModel) -> None:
    """Each answer is the arg max chain of the network, to its stop token or its limit."""
    network: Any = load_network(target, dtype=torch.float32)
    got = answers(model, requests())
    assert {len(given.ids) == 9 for given in got} == {True, False}
    for request, given in zip(requests(), got, strict=True):
        ids = list(request.prompt_ids)
        with torch.inference_mode():
            while len(ids) < len(request.prompt_ids) + 9 and STOP_ID not in ids[len(request.prompt_ids) :]:
                ids.append(int(network(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        assert given.ids == tuple(ids[len(request.prompt_ids) :])


def test_rows_are_the_targets_at_temperature_1(target: Path, model: CausalModel) -> None:
    """Whatever an answer was drawn at, its rows hold the most probable tokens and their log-probabilities, descending."""
    network: Any = load_network(target, dtype=torch.float32)
    request = requests(SamplingParams(temperature=0.7))[2]
    given = answers(model, [request])[0]
    with torch.inference_mode():
        logits = network(input_ids=torch.tensor([request.prompt_ids + given.ids[:-1]])).logits[0]
    expected = logits[len(request.prompt_ids) - 1 :].log_softmax(-1).topk(4)
    assert torch.equal(given.rows.top_ids.long(), expected.indices)
    torch.testing.assert_close(given.rows.top_log_probs.float(), expected.values, atol=5e-3, rtol=2e-3)


def test_answers_do_not_depend_on_who_is_answered_beside(model: CausalModel) -> None:
    """A token is drawn from the request's own seed, so the number of sessions changes none (in float32)."""
    asked = requests(SamplingParams(temperature=1.0))
    ids = [given.ids for given in answers(model, asked, max_sessions=1)]
    assert [given.ids for given in answers(model, asked, max_sessions=7)] == ids
    assert len(set(ids)) == len(ids)


def test_memory_for_few_sessions_is_enough(target: Path, model: CausalModel) -> None:
    """More sessions than the memory holds wait for their turn, and all memory is given back."""
    limits = MemoryLimits(kv_budget_tokens=96, max_sessions=7)
    small = CausalModel.load(str(target), dtype="float32", device="cpu", limits=limits)
    asked = requests(count=8)
    got = [given.ids for given in answers(small, asked, max_sessions=7)]
    assert got == [given.ids for given in answers(model, asked, max_sessions=7)]
    assert small.memory.held_tokens == 0


def test_answer_ends_where_the_context_does(target: Path) -> None:
    """The last token is the one that would be fed next if there were room."""
    limits = MemoryLimits(max_context=64, max_sessions=1)
    small = CausalModel.load(str(target), dtype="float32", device="cpu", limits=limits)
    request = replace(requests()[0], prompt_ids=(7,) * 60, max_tokens=50, stop_ids=frozenset())
    assert len(answers(small, [request])[0].ids) == 5


# ---- prompts --------------------------------------------------------------------------------------------------------


def test_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    """Empty lines are none, and a prompt that comes again is answered once."""
    path = tmp_path / "prompts.txt"
    path.write_text("Why?\n\n{not JSON}\nWhy?\n", encoding="utf-8")
    assert read_prompt_file(path).prompts == ("Why?", "{not JSON}")


def test_jsonl_file_has_prompts_and_conversations(tmp_path: Path) -> None:
    """Both forms may stand in one file; other fields are nobody's business."""
    path = tmp_path / "prompts.jsonl"
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path.write_text("\n".join(map(json.dumps, [{"prompt": "Why?", "id": 3}, {"messages": talk}])))
    file = read_prompt_file(path)
    assert file.prompts == ("Why?", (("system", "Be brief."), ("user", "Hi")))
    path.write_text(path.read_text() + "\n")
    assert read_prompt_file(path).sha256 != file.sha256


@pytest.mark.parametrize(
    "line", ["{", '{"prompt": 3}', '{"prompt": ""}', '{"messages": []}', '{"messages": [{"role": 1}]}']
)
def test_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    """By its number, for files are long."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Why?"}\n' + line)
    with pytest.raises(StartupFailed, match="Line 2 of"):
        read_prompt_file(path)


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    """Before anything is loaded."""
    (tmp_path / "empty").write_text("\n \n")
    for name in ("empty", "missing"):
        with pytest.raises(StartupFailed, match=name):
            read_prompt_file(tmp_path / name)


def test_chat_format_is_what_the_template_spells(tokenizer: Any) -> None:
    """A prompt of one turn is, to the character, what the template makes of it."""
    turn = [{"role": "user", "content": "What is a paceline?"}]
    expected = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    assert ChatFormat.of(tokenizer).prompt("What is a paceline?") == expected


# ---- waves ----------------------------------------------------------------------------------------------------------


def collected(
    folder: Path,
    model: CausalModel,
    tokenizer: Any,
    settings: TrainingSettings,
    prompts: Sequence[Prompt] | None = None,
) -> list[Sample]:
    corpus = Corpus(folder)
    Collector(model, tokenizer, settings, stop_ids=(STOP_ID,), prompts=prompts).collect(corpus)
    return list(corpus.samples(corpus.waves))


def test_run_that_goes_on_makes_the_same_waves(
    tmp_path: Path, target: Path, model: CausalModel, tokenizer: Any
) -> None:
    """Bit for bit, wherever it was interrupted: what was half done is done again."""
    settings = tiny_settings(target, answers=22, answer_tokens=6, sessions=4)
    collected(tmp_path / "whole", model, tokenizer, settings)

    heard = 0

    def interrupt(tokens: int) -> None:
        nonlocal heard
        heard += 1
        if heard == 9:  # in the second wave of 6
            raise KeyboardInterrupt

    corpus = Corpus(tmp_path / "parts")
    with pytest.raises(KeyboardInterrupt):
        Collector(model, tokenizer, settings, stop_ids=(STOP_ID,)).collect(corpus, on_answer=interrupt)
    fresh = CausalModel.load(str(target), dtype="float32", device="cpu")
    assert corpus.waves == 1
    collected(tmp_path / "parts", fresh, tokenizer, settings)
    for number in range(4):
        assert corpus.path(number).read_bytes() == Corpus(tmp_path / "whole").path(number).read_bytes()
    assert not corpus.path(4).exists()


def test_turns_begin_with_openings_within_the_chat_format(
    tmp_path: Path, target: Path, model: CausalModel, tokenizer: Any
) -> None:
    """An instruct target writes in the user's place, and answers behind the end of the turn; another thing each time, and
    under another seed."""
    samples, others = (
        collected(tmp_path / str(seed), model, tokenizer, tiny_settings(target, answers=8, answer_tokens=4, seed=seed))
        for seed in (0, 1)
    )
    chat = ChatFormat.of(tokenizer)
    for each in samples:
        text = tokenizer.decode(each.prompt_ids.tolist())
        assert text.startswith(chat.before_turn)
        assert text.endswith(chat.before_answer)
        assert each.temperature in (0.0, 0.7, 1.0)
    texts = [tokenizer.decode(each.prompt_ids.tolist()) for each in (*samples, *others)]
    assert len(set(texts)) == 16
    beginnings = tuple(chat.before_turn + opening for opening in OPENINGS if opening)
    assert any(text.startswith(beginnings) for text in texts)


def test_tasks_are_about_earlier_answers_that_are_not_held_out(
    tmp_path: Path, target: Path, model: CausalModel, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second wave on a fifth of the turns ask about a text: a long answer of one of the last three waves, but
    none that is held out."""
    monkeypatch.setattr("paceline.training.settings.WAVE_ANSWERS", 5)
    settings = tiny_settings(target, answers=25, answer_tokens=4, held_out=7)
    texts = [f"answer {number}. " + "and the line goes on " * (5 + number % 2 * 5) for number in range(20)]
    corpus = Corpus(tmp_path)
    for wave in range(4):
        corpus.write(wave, [sample(tokenizer.encode(text)) for text in texts[5 * wave : 5 * wave + 5]])
    offered: list[str] = []

    def tasks(texts: Sequence[str], count: int, seed: int) -> list[str]:
        offered.extend(texts)
        return text_tasks(texts, count, seed)

    monkeypatch.setattr("paceline.training.collect.text_tasks", tasks)
    samples = collected(tmp_path, model, tokenizer, settings)[20:]
    assert offered == texts[7:20:2]
    prompts = [tokenizer.decode(each.prompt_ids.tolist()) for each in samples]
    assert sum(any(text.strip() in prompt for text in offered) for prompt in prompts) == 1
    assert text_tasks([], 3, 0) == []


def test_temperatures_come_in_their_shares(tmp_path: Path, target: Path, model: CausalModel, tokenizer: Any) -> None:
    """200 answers, a quarter at temperature 1: 50, give or take four standard deviations (25); odds of a false alarm
    below 1 in 10,000, and the seed is fixed."""
    settings = tiny_settings(target, answers=200, answer_tokens=1, temperatures=((0.5, 0.75), (1.0, 0.25)))
    prompts = [f"prompt {number}" for number in range(200)]
    samples = collected(tmp_path, model, tokenizer, settings, prompts)
    count = sum(each.temperature == 1.0 for each in samples)
    assert 25 < count < 75
    assert all(each.temperature in (0.5, 1.0) for each in samples)


def test_prompts_of_a_file_are_answered_in_order(
    tmp_path: Path, target: Path, model: CausalModel, tokenizer: Any
) -> None:
    """As user turns or as conversations, in the words of the chat template; long ones lose their beginning."""
    settings = tiny_settings(target, answers=9, answer_tokens=4)
    talk = (("system", "Be brief."), ("user", "Hi"))
    prompts: list[Prompt] = ["Why?", talk, "long " * 300, *(f"prompt {number}" for number in range(6))]
    samples = collected(tmp_path, model, tokenizer, settings, prompts)
    texts = [tokenizer.decode(each.prompt_ids.tolist()) for each in samples]
    assert texts[0] == "<|user|>Why?\n<|assistant|>"
    assert texts[1] == "<|system|>Be brief.\n<|user|>Hi\n<|assistant|>"
    assert len(samples[2].prompt_ids) == 500
    assert texts[2].endswith("long \n<|assistant|>")
    assert texts[8] == "<|user|>prompt 5\n<|assistant|>"


def test_target_without_template_continues_plain_text(
    tmp_path: Path, target: Path, model: CausalModel, tokenizer: Any
) -> None:
    """A base model writes its own beginnings, and prompts of a file stand as they are; conversations it cannot read."""
    base = load_tokenizer(target)
    base.chat_template = None
    settings = tiny_settings(target, answers=8, answer_tokens=4)
    samples = collected(tmp_path / "own", model, base, settings)
    assert len(samples) == 8
    assert all("<|user|>" not in base.decode(each.prompt_ids.tolist()) for each in samples)
    given = collected(tmp_path / "file", model, base, settings, ["Once upon a time", *"abcdefg"])
    assert base.decode(given[0].prompt_ids.tolist()) == "Once upon a time"
    with pytest.raises(StartupFailed, match="no chat template"):
        collected(tmp_path / "talk", model, base, settings, [(("user", "Hi"),)])


def test_answers_longer_than_the_context_are_refused(target: Path, model: CausalModel, tokenizer: Any) -> None:
    """Before the first of them."""
    with pytest.raises(StartupFailed, match="--answer-tokens 512"):
        Collector(model, tokenizer, tiny_settings(target, answer_tokens=512), stop_ids=())
