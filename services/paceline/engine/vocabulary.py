"""What the ids of a tokenizer stand for, in bytes, so that the tokens of different tokenizers can be compared.

Families spell the same token differently: byte-level BPE (GPT-2, Llama 3, Qwen) gives each byte a printable character
and so writes " the" as "Ġthe"; SentencePiece (Llama 2, Gemma, Mistral) writes "▁the", and "<0x0A>" for a byte that is
no token by itself. Knows nothing of models, files or transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SENTENCEPIECE: Mapping[str, Any] = {
    "type": "Sequence",
    "decoders": [{"type": "Metaspace"}, {"type": "ByteFallback"}],
}
"""How its tokenizers are decoded, in the terms of a `tokenizer.json`."""

_SPACE_MARK = "▁"
_FALLBACK_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_PRINTABLE_BYTES = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_FIRST_STAND_IN = 0x100  # the characters for all other bytes, in their order


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of one tokenizer.

    `spellings`: by id, the bytes that a token stands for; of a marker, those of its name. `markers`: ids of special
    tokens, such as the end of a text or a turn in a chat, which are no text. `start_id` is the token that the tokenizer
    puts before every text, if it does; `end_id` ends one, `unknown_id` stands for what has no token.
    """

    spellings: Mapping[int, bytes]
    markers: frozenset[int] = frozenset()
    start_id: int | None = None
    end_id: int | None = None
    unknown_id: int | None = None
    tokenizer_sha256: str = ""

    @property
    def size(self) -> int:
        """One more than the highest id."""
        return max(self.spellings, default=-1) + 1

    def below(self, limit: int) -> Vocabulary:
        """Without the ids from the limit on."""
        if self.size <= limit:
            return self
        roles = (self.start_id, self.end_id, self.unknown_id)
        start_id, end_id, unknown_id = (None if role is None or role >= limit else role for role in roles)
        return Vocabulary(
            {token_id: spelling for token_id, spelling in self.spellings.items() if token_id < limit},
            frozenset(token_id for token_id in self.markers if token_id < limit),
            start_id=start_id,
            end_id=end_id,
            unknown_id=unknown_id,
            tokenizer_sha256=self.tokenizer_sha256,
        )


def speller(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """A function from the string of an ordinary token to the bytes it stands for.

    `decoder` is the entry of that name in a `tokenizer.json`; None: a token is written as it is.
    """
    steps = list(_steps(decoder))
    if any(step.get("type") == "ByteLevel" for step in steps):
        return _byte_level
    marks_spaces = any(_replaces_space_mark(step) for step in steps)
    has_fallback = any(step.get("type") == "ByteFallback" for step in steps)

    def spell(token: str) -> bytes:
        if has_fallback and (match := _FALLBACK_BYTE.fullmatch(token)):
            return bytes.fromhex(match[1])
        return spell_plainly(token.replace(_SPACE_MARK, " ") if marks_spaces else token)

    return spell


def spell_plainly(token: str) -> bytes:
    """UTF-8, and whatever else a vocabulary may hold."""
    return token.encode("utf-8", "surrogatepass")


def _steps(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The decoder, and what it consists of."""
    if decoder is not None:
        yield decoder
        for part in decoder.get("decoders", ()):
            yield from _steps(part)


def _replaces_space_mark(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "Metaspace":
        return bool(step.get("replacement", _SPACE_MARK) == _SPACE_MARK)
    return step.get("type") == "Replace" and step.get("pattern") == {"String": _SPACE_MARK}


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:  # a token that was added to the vocabulary in plain writing
        return spell_plainly(token)


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet (Radford et al. 2019): printable bytes stand for themselves, the others take the characters from
    U+0100 on."""
    others = [byte for byte in range(0x100) if byte not in _PRINTABLE_BYTES]
    stand_ins = {chr(_FIRST_STAND_IN + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in _PRINTABLE_BYTES} | stand_ins


_BYTE_OF_CHARACTER = _byte_of_character()
