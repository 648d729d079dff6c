"""Text that is hard to cut, cut in every way that rounds can be, over gRPC and both endpoints of HTTP: field cases K and F.

The models write a text byte by byte, or in tokens that end in the middle of one character and go on in the next. A prompt of
two letters says which text, and at which of its tokens the drafter is wrong; with the draft length that makes the blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from orchestrator.finish import EndConditions
from orchestrator.text import REPLACEMENT_MARK, Tokenizer
from paceline.generation import Delta, Finished, GenerationRequest, SpeculationOptions, StopConditions
from paceline.types import FinishReason, SamplingParams
from tests.checkpoints import CHAT_TEMPLATE
from tests.fakes import FakeModel, fake_info
from tests.harness import System, model_drafter_of, system, target_of
from tests.unit.test_finish import expected_answer
from tests.unit.test_text import byte_level_tokenizer

TOKENIZER = Tokenizer(byte_level_tokenizer())
VOCAB_SIZE = TOKENIZER.vocab_size
(END_ID,) = TOKENIZER.encode("</s>")
IDS = {TOKENIZER.spell(token_id).utf8: token_id for token_id in reversed(range(VOCAB_SIZE))}
CHAT_HEAD, TAIL = b"<|user|>", b"\n<|assistant|>"

TEXTS = {
    "family": "👩‍👩‍👧‍👦 ok",
    "flags": "🇩🇪🇫🇷!",
    "skin tone": "so 👍🏽, 🤷🏾‍♀️",
    "Hangul": "한국어 \u1112\u1161\u11ab",
    "Devanagari": "क्षत्रिय नि",
    "combining": "e\u0301o\u0302\u0323 naïve",
    "right to left": "שלום مرحبا",
    "CJK": "你好、世界",
    "variations": "1️⃣❤️",
    "outside the plane": "𝒳𠜎",
}
SCRIPTS: dict[str, tuple[int, ...]] = {name: tuple(text.encode()) for name, text in TEXTS.items()} | {
    # Each token but one begins or ends in the middle of a character, or goes over the end of one.
    "across": tuple(IDS[run] for run in (b"\xf0\x9f", b"\x98\x80!", b"END", "你".encode(), b"\xe1", b"\x80\x80")),
    "unfinished": (*b"ab", 0xF0, 0x9F),
}
NAMES = tuple(SCRIPTS)
shared = pytest.mark.asyncio(loop_scope="module")


def one_hot(token_id: int) -> list[float]:
    return [30.0 if other == token_id else 0.0 for other in range(VOCAB_SIZE)]


ROWS = [one_hot(token_id) for token_id in range(VOCAB_SIZE)]


def place(ids: Sequence[int]) -> tuple[tuple[int, ...], int, int]:
    """The script that is written, the pattern, and how much of the script there is."""
    is_chat = tuple(ids[: len(CHAT_HEAD)]) == tuple(CHAT_HEAD)
    start = len(CHAT_HEAD) if is_chat else 0
    script, pattern = SCRIPTS[NAMES[ids[start] - ord("A")]], ids[start + 1]
    return script, pattern, len(ids) - start - 2 - (len(TAIL) if is_chat else 0)


def target_logits(ids: Sequence[int]) -> Sequence[float]:
    script, _, written = place(ids)
    return ROWS[script[written] if written < len(script) else END_ID]


def drafter_logits(ids: Sequence[int]) -> Sequence[float]:
    _, pattern, written = place(ids)
    return ROWS[0] if hash((pattern, written)) % 3 == 0 else target_logits(ids)


def prompt(name: str, pattern: str) -> str:
    return chr(ord("A") + NAMES.index(name)) + pattern


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    folder = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    target = FakeModel(target_logits, vocab_size=VOCAB_SIZE)
    drafter = model_drafter_of(FakeModel(drafter_logits, vocab_size=VOCAB_SIZE))
    async with system(
        target_of(target, fake_info(target, eos=(END_ID,))), drafter, str(folder), http_port=0
    ) as running:
        yield running


def save_tokenizer(folder: Path) -> Path:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(services: System) -> AsyncIterator[openai.AsyncOpenAI]:
    url = services.orchestrator.lifetime.details["http"]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as connected:
        yield connected


@dataclass(frozen=True)
class Told:
    """What a caller was told of one choice."""

    parts: tuple[str, ...]  # of its text, as they came
    reason: str
    tokens: int  # its usage, or that of all choices
    spelled: bytes = b""  # what the entries of its log-probabilities spell

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass(frozen=True)
class Way:
    """How an answer is asked for."""

    wire: str
    pattern: str
    draft_length: int
    n: int = 1
    has_logprobs: bool = False


WIRES = ("gRPC", "completions", "chat")
WAYS = [Way("", "a", 1), Way("", "b", 3), Way("", "a", 8)]
"""With two patterns of the drafter's slips, and drafts of so many tokens."""


async def ask(services: System, client: openai.AsyncOpenAI, name: str, way: Way, ends: EndConditions) -> list[Told]:
    """The answer with its choices, streamed."""
    if way.wire == "gRPC":
        return await ask_over_grpc(services, name, way, ends)
    body: dict[str, Any] = {
        "model": "fake",
        "max_tokens": ends.max_tokens,
        "temperature": 0,
        "stop": list(ends.stop),
        "n": way.n,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {"speculation": {"draft_length": way.draft_length, "fan_out": 0}},
    }
    if way.wire == "chat":
        messages = [{"role": "user", "content": prompt(name, way.pattern)}]
        return await ask_chat(client, body | {"messages": messages, "logprobs": way.has_logprobs}, way)
    logprobs = {"logprobs": 2} if way.has_logprobs else {}
    return await ask_completions(client, body | {"prompt": prompt(name, way.pattern)} | logprobs, way)


async def ask_over_grpc(services: System, name: str, way: Way, ends: EndConditions) -> list[Told]:
    asked = GenerationRequest(
        text=prompt(name, way.pattern),
        sampling=SamplingParams(temperature=0.0),
        stopping=StopConditions(max_tokens=ends.max_tokens, stop=ends.stop),
        speculation=SpeculationOptions(draft_length=way.draft_length, fan_out=0),
        n=way.n,
        logprobs=2 if way.has_logprobs else None,
    )
    told = [Told((), "", 0)] * way.n
    async with aclosing(services.client.generate(asked)) as events:
        async for event in events:
            if isinstance(event, Delta):
                assert event.text == "".join(event.pieces)
                assert len(event.pieces) == len(event.token_ids)
                spelled = b"".join(TOKENIZER.spell(entry.token_id).utf8 for entry in event.logprobs)
                so_far = told[event.choice]
                told[event.choice] = replace(
                    so_far, parts=(*so_far.parts, event.text), spelled=so_far.spelled + spelled
                )
            elif isinstance(event, Finished):
                so_far = told[event.choice]
                told[event.choice] = replace(
                    so_far,
                    parts=(*so_far.parts, event.text),
                    reason=event.finish_reason.value,
                    tokens=way.n * event.usage.completion_tokens,
                )
    return told


async def ask_completions(client: openai.AsyncOpenAI, body: dict[str, Any], way: Way) -> list[Told]:
    told, tokens = [Told((), "", 0)] * way.n, 0
    async for chunk in await client.completions.create(**body):
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        for choice in chunk.choices:
            so_far, entries = told[choice.index], choice.logprobs.tokens or [] if choice.logprobs else []
            told[choice.index] = replace(
                so_far,
                parts=(*so_far.parts, choice.text),
                reason=choice.finish_reason or so_far.reason,
                spelled=so_far.spelled + b"".join(map(unspelled, entries)),
            )
    return [replace(each, tokens=tokens) for each in told]


def unspelled(token: str) -> bytes:
    """The bytes that a token of a completion's log-probabilities stands for."""
    if token.startswith("bytes:"):
        return bytes(int(digits, 16) for digits in token.removeprefix("bytes:").split("\\x")[1:])
    return b"" if token == "</s>" else token.encode()


async def ask_chat(client: openai.AsyncOpenAI, body: dict[str, Any], way: Way) -> list[Told]:
    told, tokens = [Told((), "", 0)] * way.n, 0
    async for chunk in await client.chat.completions.create(**body):
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        for choice in chunk.choices:
            so_far, entries = told[choice.index], choice.logprobs.content or [] if choice.logprobs else []
            told[choice.index] = replace(
                so_far,
                parts=(*so_far.parts, choice.delta.content or ""),
                reason=choice.finish_reason or so_far.reason,
                spelled=so_far.spelled + b"".join(bytes(entry.bytes or ()) for entry in entries),
            )
    return [replace(each, tokens=tokens) for each in told]


def in_ways(wire: str, **changes: Any) -> list[Way]:
    return [replace(way, wire=wire, **changes) for way in WAYS]


# ---------------------------------------------------------------------------------------------------------------------
# Whole texts


@shared
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", [*TEXTS, "across"])
async def test_text_streams_cleanly_however_it_is_cut(
    services: System, client: openai.AsyncOpenAI, name: str, wire: str
) -> None:
    """Three ways to cut it: the parts join to it, none holds a mark, and the usage counts each token and the end."""
    text, ends = TOKENIZER.decode(SCRIPTS[name]), EndConditions(max_tokens=100)
    ways = in_ways(wire)
    answers = await asyncio.gather(*(ask(services, client, name, way, ends) for way in ways))
    for way, (told,) in zip(ways, answers, strict=True):
        assert (told.text, told.reason, told.tokens) == (text, "stop", len(SCRIPTS[name]) + 1), way
        assert not any(REPLACEMENT_MARK in part for part in told.parts), way
    assert wire != "gRPC" or len({told.parts for (told,) in answers}) > 1, "the ways are different ones"


@shared
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", ["family", "Devanagari", "across"])
async def test_choices_and_log_probabilities_take_nothing_from_the_text(
    services: System, client: openai.AsyncOpenAI, name: str, wire: str
) -> None:
    """Three answers side by side: each is the text, and its entries spell it byte for byte."""
    text, ends = TOKENIZER.decode(SCRIPTS[name]), EndConditions(max_tokens=100)
    ways = in_ways(wire, n=3, has_logprobs=True)[::2]
    for way in ways:
        answers = await ask(services, client, name, way, ends)
        for told in answers:
            assert (told.text, told.reason, told.tokens) == (text, "stop", 3 * (len(SCRIPTS[name]) + 1)), way
            assert told.spelled == text.encode(), way
            assert not any(REPLACEMENT_MARK in part for part in told.parts), way


# ---------------------------------------------------------------------------------------------------------------------
# Stop strings

STOPS: list[tuple[str, tuple[str, ...]]] = [
    ("family", ("👧",)),  # in the middle of what looks like one character
    ("family", ("👩‍👦", "\u200d👧\u200d", "👩‍👧")),  # of which two lie over one another, and one only begins
    ("flags", ("🇪🇫",)),  # the second half of one flag and the first of the next
    ("flags", ("🇷?", "!?")),  # both begin, neither ends: held back to the last
    ("skin tone", ("🏾‍♀️",)),
    ("Hangul", ("\u1161\u11ab",)),
    ("Devanagari", ("्ष्", "ष", "त्रx")),
    ("combining", ("\u0301",)),  # the accent, without its letter
    ("combining", ("\u0302\u0323 x", "o\u0302\u0323 n", "\u0323")),
    ("right to left", ("ם م",)),
    ("CJK", ("、世界。", "好、世", "世")),  # the one that begins first
    ("CJK", ("界。",)),
    ("variations", ("\u20e3",)),
    ("outside the plane", ("𠜏", "𠜎")),  # alike but for the last byte
    ("across", ("!EN",)),
    ("across", ("D你က", "END你x")),
    ("across", ("က",)),  # with the last token
]


@shared
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("name", "stop"), STOPS)
async def test_stop_string_cuts_the_text_however_it_lies_in_the_blocks(
    services: System, client: openai.AsyncOpenAI, name: str, stop: tuple[str, ...], wire: str
) -> None:
    """Text, reason and usage are those of the definition, which decodes everything again behind each token."""
    ends = EndConditions(max_tokens=100, stop=stop, stop_token_ids=frozenset({END_ID}))
    expected = expected_answer(TOKENIZER, (*SCRIPTS[name], END_ID), ends)
    ways = in_ways(wire)
    answers = await asyncio.gather(*(ask(services, client, name, way, ends) for way in ways))
    for way, (told,) in zip(ways, answers, strict=True):
        assert (told.text, told.reason, told.tokens) == (expected.text, "stop", expected.output_length), way
        assert not any(REPLACEMENT_MARK in part for part in told.parts), way


@shared
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ((), f"ab{REPLACEMENT_MARK}", FinishReason.LENGTH),
        ((f"b{REPLACEMENT_MARK}",), "a", FinishReason.STOP),  # complete with the very last of the text
        (("bc",), f"ab{REPLACEMENT_MARK}", FinishReason.LENGTH),  # held back, and no stop string after all
    ],
)
async def test_character_that_the_limit_cuts_is_one_mark_at_the_end(
    services: System, client: openai.AsyncOpenAI, wire: str, stop: tuple[str, ...], text: str, reason: FinishReason
) -> None:
    """It comes with the end of the answer, and a stop string may end in it."""
    ends = EndConditions(max_tokens=4, stop=stop)
    for way in in_ways(wire):
        (told,) = await ask(services, client, "unfinished", way, ends)
        assert (told.text, told.reason, told.tokens) == (text, reason.value, 4), way
        assert not any(REPLACEMENT_MARK in part for part in told.parts[:-2]), way
