"""Events as OpenAI's objects: text that no block cuts through, exact usage, and both forms of log-probabilities."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.finish import EndConditions, OutputTracker
from orchestrator.openai_answers import (
    Answer,
    ChatAnswer,
    CompletionAnswer,
    TextOffsets,
    combined,
    fingerprint,
    model_object,
)
from orchestrator.openai_requests import parse_chat, parse_completion
from orchestrator.text import IncrementalDetokenizer, Tokenizer
from paceline.generation import (
    Delta,
    Event,
    Finished,
    Schedule,
    ServedModel,
    SpeculationOptions,
    SpeculationUsage,
    Started,
    Usage,
)
from paceline.types import FinishReason, ModelInfo, Origin, TokenLogprobs, VerificationRule
from tests.checkpoints import tiny_tokenizer

TOKENIZER = Tokenizer(tiny_tokenizer())
SERVED = ServedModel(
    name="m",
    target=ModelInfo(
        model_id="m", vocab_size=320, max_context=64, tokenizer_sha256="t", incarnation="1", dtype="float32"
    ),
    drafter=None,
    speculation=SpeculationOptions(),
    default_max_tokens=256,
    max_prompt_tokens=63,
    max_choices=16,
)
KINDS: dict[type[Answer], Any] = {
    CompletionAnswer: parse_completion,
    ChatAnswer: lambda body: parse_chat(body, max_tokens=9),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def answer_of(kind: type[Answer], **parameters: Any) -> Answer:
    prompt: dict[str, Any] = (
        {"prompt": "x"} if kind is CompletionAnswer else {"messages": [{"role": "user", "content": "x"}]}
    )
    body = {"model": "m", **prompt, **parameters}
    return kind(KINDS[kind](json.dumps(body).encode()), SERVED, TOKENIZER.spell)


def events(
    blocks: Sequence[Sequence[int]], *, stop: tuple[str, ...] = (), choice: int = 0, logprobs: bool = False
) -> Iterator[Delta | Finished]:
    """Of one choice, as the generator makes them of committed tokens."""
    count = sum(map(len, blocks))
    tracker = OutputTracker(IncrementalDetokenizer(TOKENIZER), EndConditions(max_tokens=count, stop=stop))
    for block in blocks:
        given = tracker.accept(block)
        entries = tuple(TokenLogprobs(token_id, -0.5, ((token_id, -0.5), (65, -1.0))) for token_id in given.token_ids)
        if given.token_ids:
            yield Delta(
                text=given.text,
                token_ids=given.token_ids,
                origins=(Origin.PLAIN,) * len(given.token_ids),
                pieces=(),
                logprobs=entries if logprobs else (),
                choice=choice,
            )
    text = tracker.finish()
    assert tracker.finish_reason is not None
    yield Finished(
        finish_reason=tracker.finish_reason,
        text=text,
        usage=Usage(prompt_tokens=3, completion_tokens=tracker.output_length),
        speculation=SpeculationUsage(),
        choice=choice,
    )


def started(*seeds: int) -> Started:
    return Started(request_id="r1", seeds=seeds or (7,), prompt_tokens=3)


def chunks_of(answer: Answer, *all_events: Event) -> list[dict[str, Any]]:
    chunks = [chunk for event in all_events for chunk in answer.chunks(0, event)]
    last = answer.last_chunk()
    return chunks + ([last] if last else [])


def text_in(chunk: dict[str, Any]) -> str:
    (choice,) = chunk["choices"]
    return str(choice["text"] if "text" in choice else choice["delta"].get("content", ""))


def splits(ids: Sequence[int]) -> Iterator[list[list[int]]]:
    """Every way to cut the tokens into blocks."""
    for cuts in itertools.product([False, True], repeat=len(ids) - 1):
        blocks = [[ids[0]]]
        for token_id, is_cut in zip(ids[1:], cuts, strict=True):
            if is_cut:
                blocks.append([])
            blocks[-1].append(token_id)
        yield blocks


# ---------------------------------------------------------------------------------------------------------------------
# Text


@kinds
@pytest.mark.parametrize("text", ["👩‍👧a", "你好吗", "é नि", "🇩🇪!"])
def test_every_split_streams_whole_characters(kind: type[Answer], text: str) -> None:
    """Emoji, CJK and combining text, cut into blocks in every way: the chunks join to the text, none holds half of one."""
    ids = TOKENIZER.encode(text)
    assert len(ids) > len(text), "characters of several tokens"
    for blocks in splits(ids):
        chunks = chunks_of(answer_of(kind), started(), *events(blocks))
        assert "".join(map(text_in, chunks)) == text
        assert not any("\ufffd" in text_in(chunk) for chunk in chunks)


@kinds
def test_stop_string_is_cut_out_of_every_split(kind: type[Answer]) -> None:
    """Not one chunk holds any of it, also where its tokens come in several blocks."""
    ids = TOKENIZER.encode("Hi 你END.")
    for blocks in splits(ids):
        chunks = chunks_of(answer_of(kind), started(), *events(blocks, stop=("END",)))
        assert "".join(map(text_in, chunks)) == "Hi 你"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@kinds
def test_whole_answer_says_what_the_stream_says(kind: type[Answer]) -> None:
    ids = TOKENIZER.encode("Hello 🙂")
    answer = answer_of(kind)
    for event in (started(), *events([ids])):
        answer.add(0, event)
    (choice,) = answer.whole()["choices"]
    streamed = chunks_of(answer_of(kind), started(), *events([ids]))
    assert (choice["text"] if "text" in choice else choice["message"]["content"]) == "".join(map(text_in, streamed))
    assert choice["finish_reason"] == streamed[-1]["choices"][0]["finish_reason"] == "length"


# ---------------------------------------------------------------------------------------------------------------------
# Shape


def test_chat_stream_has_openais_shape() -> None:
    """First the role, then text, last the reason, each with the same frame; nothing of usage unless it is asked for."""
    first, second, last = chunks_of(answer_of(ChatAnswer), started(), *events([TOKENIZER.encode("Hi")]))
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None, "seed": 7}
    ]
    assert second["choices"][0]["delta"] == {"content": "Hi"}
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length", "seed": 7}
    for chunk in (first, second, last):
        assert (chunk["id"], chunk["object"], chunk["model"]) == ("chatcmpl-r1", "chat.completion.chunk", "m")
        assert "usage" not in chunk
        assert chunk["created"] == first["created"]
        assert chunk["system_fingerprint"] == fingerprint(SERVED.target)


@kinds
def test_usage_comes_in_a_last_chunk_of_its_own_if_asked_for(kind: type[Answer]) -> None:
    """With no choices; it is null in all others."""
    answer = answer_of(kind, stream=True, stream_options={"include_usage": True})
    *others, last = chunks_of(answer, started(), *events([TOKENIZER.encode("Hi")]))
    assert [chunk["usage"] for chunk in others] == [None] * len(others)
    assert last["choices"] == []
    usage = last["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 2, 5)
    assert usage["speculation"]["rounds"] == 0


@kinds
def test_choices_have_their_own_seeds_and_share_the_prompt(kind: type[Answer]) -> None:
    """Usage counts the prompt once and every choice's tokens."""
    answer = answer_of(kind, n=2)
    for event in (started(7, 9), *events([[65, 66]]), *events([[67]], choice=1)):
        answer.add(0, event)
    whole = answer.whole()
    assert [(choice["index"], choice["seed"]) for choice in whole["choices"]] == [(0, 7), (1, 9)]
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (3, 3)


def test_prompts_have_their_answers_one_behind_the_other() -> None:
    """Choice 1 of prompt 1 is number 3; usage counts both prompts."""
    answer = answer_of(CompletionAnswer, prompt=["a", "b"], n=2, echo=True)
    for prompt in (1, 0):
        for event in (started(prompt, prompt + 10), *events([[65]]), *events([[66]], choice=1)):
            answer.add(prompt, event)
    whole = answer.whole()
    assert [(choice["index"], choice["text"][0], choice["seed"]) for choice in whole["choices"]] == [
        (0, "a", 0),
        (1, "a", 10),
        (2, "b", 1),
        (3, "b", 11),
    ]
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (6, 4)


def test_echo_comes_first_in_a_stream() -> None:
    chunks = chunks_of(answer_of(CompletionAnswer, echo=True), started(), *events([TOKENIZER.encode("yz")]))
    assert list(map(text_in, chunks)) == ["x", "yz", ""]


def test_fingerprint_is_that_of_what_answers_depend_on() -> None:
    """Another start of the same model is none of that; other arithmetic is."""
    target = SERVED.target
    assert fingerprint(target).startswith("fp_")
    assert fingerprint(target) == fingerprint(replace(target, incarnation="2"))
    for other in (
        replace(target, dtype="bfloat16"),
        replace(target, model_id="n"),
        replace(target, tokenizer_sha256="u"),
    ):
        assert fingerprint(other) != fingerprint(target)


def test_models_say_how_long_they_listen() -> None:
    entry = model_object(SERVED, created_s=5)
    assert entry == {"id": "m", "object": "model", "created": 5, "owned_by": "paceline", "max_model_len": 64}


# ---------------------------------------------------------------------------------------------------------------------
# Log-probabilities


def test_log_probabilities_of_completions_have_the_legacy_shape() -> None:
    """Four lists of one length, over all chunks too; offsets are characters, tokens within one begin where it does."""
    ids = TOKENIZER.encode("a你b")
    lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in chunks_of(
        answer_of(CompletionAnswer, logprobs=2), started(), *events([ids[:2], ids[2:]], logprobs=True)
    ):
        found = chunk["choices"][0]["logprobs"]
        for name in lists if found else ():
            lists[name] += found[name]
    assert lists["tokens"] == ["a", "bytes:\\xe4", "bytes:\\xbd", "bytes:\\xa0", "b"]
    assert lists["text_offset"] == [0, 1, 1, 1, 2]
    assert lists["token_logprobs"] == [-0.5] * 5
    assert lists["top_logprobs"][1] == {"bytes:\\xe4": -0.5, TOKENIZER.spell(65).text: -1.0}


def test_bytes_of_chat_log_probabilities_join_to_the_text() -> None:
    """Also of tokens that are no characters by themselves; the end token adds none, and has its name."""
    ids = [*TOKENIZER.encode("a你🙂"), 0]
    answer = answer_of(ChatAnswer, logprobs=True, top_logprobs=2)
    for event in (started(), *events([ids], logprobs=True)):
        answer.add(0, event)
    (choice,) = answer.whole()["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == len(ids) == answer.whole()["usage"]["completion_tokens"]
    assert (
        bytes(itertools.chain.from_iterable(entry["bytes"] for entry in content)).decode()
        == choice["message"]["content"]
    )
    assert content[-1]["token"] == "<|end|>"
    assert content[0]["top_logprobs"][0] == {"token": "a", "logprob": -0.5, "bytes": [97]}


@pytest.mark.parametrize(("kind", "asked"), [(CompletionAnswer, {"logprobs": 1}), (ChatAnswer, {"logprobs": True})])
def test_impossible_tokens_have_a_number(kind: type[Answer], asked: dict[str, Any]) -> None:
    """JSON knows no infinity; OpenAI says -9999."""
    answer = answer_of(kind, **asked)
    delta, _ = events([[65]])
    assert isinstance(delta, Delta)
    chunk = chunks_of(answer, started(), replace(delta, logprobs=(TokenLogprobs(65, -math.inf),)))[-1]
    assert "-9999.0" in json.dumps(chunk, allow_nan=False)


def test_offsets_count_bytes_that_are_no_characters_as_marks() -> None:
    """As the text shows them: one mark for each longest beginning of a character."""
    offsets = TextOffsets()
    assert [offsets.of_next(utf8) for utf8 in (b"\xe4", b"\xe4\xbd", b"a", b"", b"b")] == [0, 1, 2, 3, 3]


# ---------------------------------------------------------------------------------------------------------------------
# Speculation of several answers


def test_figures_of_several_answers_are_those_of_their_sums() -> None:
    """Counts are added position by position, rates are those of the sums, and they ran side by side."""
    one = SpeculationUsage(
        num_drafts=2,
        num_draft_tokens=6,
        num_accepted_tokens=3,
        num_accepted_tokens_per_pos=(2, 1),
        num_draft_tokens_per_pos=(2, 2, 2),
        num_rejections=2,
        rounds=3,
        target_busy_s=1.0,
        elapsed_s=4.0,
        rule=VerificationRule.COUPLED,
        schedule=Schedule.PIPELINED,
    )
    other = replace(one, num_accepted_tokens=6, num_accepted_tokens_per_pos=(2, 2, 2), num_rejections=0, elapsed_s=3.0)
    both = combined([one, other])
    assert (both.num_drafts, both.num_draft_tokens, both.num_accepted_tokens, both.rounds) == (4, 12, 9, 6)
    assert (both.num_accepted_tokens_per_pos, both.num_draft_tokens_per_pos) == ((4, 3, 2), (4, 4, 4))
    assert (both.acceptance_rate, both.mean_acceptance_length, both.per_token_acceptance) == (0.75, 3.25, 9 / 11)
    assert (both.elapsed_s, both.target_busy_s, both.rule) == (4.0, 2.0, VerificationRule.COUPLED)
    assert combined([SpeculationUsage(), SpeculationUsage()]) == SpeculationUsage()
    assert combined([one]) is one


def test_reasons_are_openais() -> None:
    assert [reason.value for reason in FinishReason] == ["stop", "length"]
