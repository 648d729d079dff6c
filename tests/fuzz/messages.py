"""Messages of the protocol as bytes: sensible ones, with some fields gone wrong, and damaged ones.

What is wrong with a message is drawn from its descriptor, so a new field is tried from the day it is there. A sensible
message and a senseless one are put one behind the other: protobuf reads that as one message in which the later fields
count, which also gives duplicated fields and several members of one oneof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from paceline.v1 import drafter_service_pb2 as drafter_pb
from paceline.v1 import generation_service_pb2 as generation_pb
from paceline.v1 import session_pb2 as session_pb
from paceline.v1 import target_service_pb2 as target_pb
from tests.checkpoints import TINY_VOCAB_SIZE

MAX_CONTEXT = 96
"""Tokens, of the models that are asked."""

TEXTS = (
    "",
    "a",
    "Why?",
    "\0",
    "\n\n",
    "naïve 你好 👩‍👩‍👧 é 🇩🇪 नि",
    "\u202eright to left\u202c שלום",
    "\ufeff\ufffd\u2028",
    "<|end|>" * 3,
    "e" + "\u0301" * 300,
    "x" * 5000,
    " " * 100_000,
)
"""Texts that are easy, and texts that have broken somebody's software."""

NAME_MARK = "~~~~~~"
"""Stands in names of sessions; whoever sends the bytes puts six digits there that no other batch has."""


# ---------------------------------------------------------------------------------------------------------------------
# Values of single fields, sensible or not

_NUMBERS = (0, 1, 2, 16, 17, 64, 65, MAX_CONTEXT, MAX_CONTEXT + 1, 256, 257, TINY_VOCAB_SIZE - 1, TINY_VOCAB_SIZE)
_uint32s = st.sampled_from([*_NUMBERS, 2**31 - 1, 2**31, 2**32 - 1]) | st.integers(0, TINY_VOCAB_SIZE + 1)
_uint64s = st.sampled_from([*_NUMBERS, 2**53, 2**63, 2**64 - 1])
_floats = st.sampled_from(
    [0.0, -0.0, 0.5, 1.0, -1.0, 1.5, 100.0, 101.0, 1000.0, -1000.0, 1e-6, 5e-324, 3e38, 1e308]
) | (st.sampled_from([math.nan, math.inf, -math.inf]))
_texts = st.sampled_from(TEXTS) | st.text(max_size=8)
_binaries = st.binary(max_size=16)
_COUNTS = (1, 1, 2, 3, 20)
_COUNTS_OF_NUMBERS = (*_COUNTS, 1025, 5_000)

_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_UINT32: _uint32s,
    FieldDescriptor.TYPE_UINT64: _uint64s,
    FieldDescriptor.TYPE_FIXED64: _uint64s,
    FieldDescriptor.TYPE_FLOAT: _floats,
    FieldDescriptor.TYPE_DOUBLE: _floats,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: _texts,
    FieldDescriptor.TYPE_BYTES: _binaries,
    FieldDescriptor.TYPE_ENUM: st.sampled_from([0, 1, 2, 3, 4, 99, -1, 2**31 - 1]),
}
"""By the type of a field; the protocol has no others, and one that gets one has to be put here."""


@st.composite
def senseless(draw: st.DrawFn, kind: type[Message], most_fields: int) -> Message:
    """A message with up to so many fields set to anything at all."""
    message = kind()
    fields = kind.DESCRIPTOR.fields
    indices = draw(st.lists(st.integers(0, len(fields) - 1), max_size=most_fields, unique=True)) if fields else []
    for index in indices:
        _set(draw, message, fields[index])
    return message


def _set(draw: st.DrawFn, message: Message, field: Any) -> None:
    value = _value(draw, field)
    if field.is_repeated:
        is_number = field.cpp_type not in (FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE)
        count = draw(st.sampled_from(_COUNTS_OF_NUMBERS if is_number else _COUNTS))
        others = [_value(draw, field) for _ in range(min(count, 3) - 1)]
        getattr(message, field.name).extend([value] * (count - len(others)) + others)
    elif field.message_type is not None:
        getattr(message, field.name).SetInParent()
        getattr(message, field.name).CopyFrom(value)
    else:
        setattr(message, field.name, value)


def _value(draw: st.DrawFn, field: Any) -> Any:
    if field.message_type is not None:
        return draw(senseless(message_factory.GetMessageClass(field.message_type), 3))
    return draw(_SCALARS[field.type])


# ---------------------------------------------------------------------------------------------------------------------
# Sensible messages

_ids = st.integers(0, TINY_VOCAB_SIZE - 1)
_some_ids = st.lists(_ids, min_size=1, max_size=6)
_few_ids = st.just(()) | st.lists(_ids, max_size=3)
_off = st.none()

_samplings = st.builds(
    session_pb.SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 1.0, 0.7, 100.0, 1e-6]) | _off,
    top_k=st.sampled_from([0, 0, 1, 40, 2**32 - 1]),
    top_p=st.sampled_from([1.0, 0.9, 1e-300]) | _off,
    min_p=st.sampled_from([0.0, 0.0, 0.1, 0.999999]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 100.0, 0.01]) | _off,
    presence_penalty=st.sampled_from([0.0, 0.0, 2.0, -100.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -2.0, 100.0]),
    logit_bias=st.just(())
    | st.lists(
        st.builds(session_pb.LogitBias, token_id=_ids, bias=st.sampled_from([5.0, -1000.0, 1000.0])), max_size=3
    ),
    banned_token_ids=_few_ids,
    allowed_token_ids=_off | _off | st.builds(session_pb.TokenIds, ids=_some_ids),
    min_tokens=st.sampled_from([0, 0, 0, 2]),
    stop_token_ids=_few_ids,
)
_speculations = st.builds(
    generation_pb.SpeculationOptions,
    rule=st.sampled_from([0, 0, 2, 3]),
    draft_length=_off | st.sampled_from([0, 1, 4, 64]),
    schedule=st.sampled_from([0, 1, 2, 3]),
    fan_out=_off | st.sampled_from([0, 2, 16]),
)
_prompts: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(lambda text: {"text": text}, st.sampled_from(TEXTS[1:-2])),
    st.builds(lambda ids: {"token_ids": session_pb.TokenIds(ids=ids)}, _some_ids),
    st.builds(
        lambda role, text: {
            "chat": generation_pb.ChatMessages(messages=[generation_pb.ChatMessage(role=role, content=text)])
        },
        st.sampled_from(["user", "system", "assistant"]),
        st.sampled_from(TEXTS[:6]),
    ),
)
_requests = st.builds(
    lambda prompt, others: generation_pb.GenerateRequest(**prompt, **others),
    _prompts,
    st.fixed_dictionaries(
        {
            "sampling": _samplings,
            "stopping": st.builds(
                generation_pb.StopConditions,
                max_tokens=st.sampled_from([1, 3, 8, 12]),
                stop=st.just(()) | st.lists(st.sampled_from(["a", "th", "é", "👩‍👩‍👧", " "]), max_size=3),
                stop_token_ids=_few_ids,
                ignore_eos=st.booleans(),
            ),
            "speculation": _speculations,
            "seed": _off | st.integers(0, 2**64 - 1),
            "output_ids": st.sampled_from([(), (), (), (3,), (3, 4)]),
            "logprobs": st.sampled_from([None, None, 0, 5, 20]),
            "n": st.sampled_from([None, None, 1, 2, 3]),
            "tenant": st.sampled_from(["", "somebody"]),
            "model": st.sampled_from(["", "fake"]),
            "output": st.just(None)
            | st.builds(generation_pb.OutputOptions, text=st.booleans(), token_ids=st.just(True), pieces=st.booleans()),
        }
    ),
)

_names = st.sampled_from([f"{NAME_MARK}a", f"{NAME_MARK}a", f"{NAME_MARK}b"])
_epochs = st.sampled_from([1, 1, 1, 2])


@st.composite
def _openings(draw: st.DrawFn) -> session_pb.OpenSession:
    sampling, ids = draw(_samplings), draw(_some_ids)
    rule: Any = 1 if sampling.HasField("temperature") and sampling.temperature == 0.0 else draw(st.sampled_from([2, 3]))
    return session_pb.OpenSession(
        committed_ids=ids,
        prompt_length=draw(st.integers(1, len(ids))),
        sampling=sampling,
        seed=draw(st.integers(0, 2**64 - 1)),
        rule=rule,
        vocab_size=TINY_VOCAB_SIZE,
        logprobs=draw(st.sampled_from([None, 0, 20])),
    )


_closings = st.builds(lambda: {"close": session_pb.CloseSession()})
_verifications = st.builds(
    target_pb.VerifyDraft,
    base_length=st.integers(1, 8),
    committed_ids=_few_ids,
    draft_ids=_few_ids,
    draft_distributions=st.just(()) | st.lists(_binaries, max_size=3),
    budget_ms=st.sampled_from([0, 0, 1, 2**32 - 1]),
)
_commits = st.builds(
    drafter_pb.Commit,
    base_length=st.integers(1, 8),
    committed_ids=_few_ids,
    draft_length=st.sampled_from([0, 1, 4, 64]),
    credit=st.sampled_from([0, 1, 4, 12]),
    branches=st.sampled_from([0, 0, 4]),
    fan_out=st.sampled_from([0, 2, 16]),
    acceptance=st.sampled_from([0.0, 0.5, 1.0]),
    resend=st.booleans(),
)


def _commands(kind: Callable[..., Message], *others: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[Any]:
    """Several items, the first of which opens a session."""
    command = st.one_of(st.builds(lambda opening: {"open": opening}, _openings()), *others, _closings)

    def listed(opening: session_pb.OpenSession, rest: Sequence[tuple[str, int, dict[str, Any]]]) -> list[Message]:
        first = kind(session_id=f"{NAME_MARK}a", epoch=1, open=opening)
        return [first, *(kind(session_id=name, epoch=epoch, **content) for name, epoch, content in rest)]

    return st.builds(listed, _openings(), st.lists(st.tuples(_names, _epochs, command), max_size=4))


def any_message(kind: type[Message]) -> st.SearchStrategy[bytes]:
    """With some fields set to anything at all."""
    return senseless(kind, 4).map(lambda message: message.SerializeToString())


def _spoiled(sensible: st.SearchStrategy[Any], kind: type[Message]) -> st.SearchStrategy[bytes]:
    return st.builds(
        lambda message, more: message.SerializeToString() + more.SerializeToString(),
        sensible,
        st.just(kind()) | senseless(kind, 2),
    )


generate_requests = _spoiled(_requests, generation_pb.GenerateRequest) | any_message(generation_pb.GenerateRequest)
"""For Generate."""

target_items = _spoiled(
    st.builds(
        lambda commands: target_pb.VerifyRequest(commands=commands),
        _commands(target_pb.TargetCommand, st.builds(lambda value: {"verify": value}, _verifications)),
    ),
    target_pb.VerifyRequest,
)
"""For Verify."""

drafter_items = _spoiled(
    st.builds(
        lambda commands: drafter_pb.DraftRequest(commands=commands),
        _commands(drafter_pb.DrafterCommand, st.builds(lambda value: {"commit": value}, _commits)),
    ),
    drafter_pb.DraftRequest,
)
"""For Draft."""


# ---------------------------------------------------------------------------------------------------------------------
# Bytes that need not be a message

_HALF_A_PAIR = "\ud800".encode(errors="surrogatepass")
_SPLINTERS = st.sampled_from([b"", b"\0", b"\xff" * 10, b"\x80" * 10, _HALF_A_PAIR, b"\x0a\xff\xff\xff\xff\x0f"])


def damaged(whole: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """With a piece left out, and another put in its place."""
    return st.builds(
        lambda data, start, length, splinter: (
            data[: start % (len(data) + 1)] + splinter + data[start % (len(data) + 1) + length :]
        ),
        whole,
        st.integers(0, 2**16),
        st.integers(0, 4),
        _SPLINTERS | st.binary(max_size=4),
    )


def any_bytes(sensible: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.binary(max_size=64) | damaged(sensible) | damaged(damaged(sensible))
