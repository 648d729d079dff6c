"""Text to token ids and back: the model's own tokenizer, and decoding token by token.

The only module of the orchestrator that knows of transformers. Knows nothing of when an answer ends (`finish.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from paceline.engine.checkpoint import tokenizer_fingerprint
from paceline.errors import InvalidRequest, ModelUnavailable
from paceline.generation import ROLES

REPLACEMENT_MARK = "\ufffd"
"""What a decoder writes for bytes that are no character, or not one yet."""

# A template is a program that came with the model; besides its own errors it raises whatever its expressions raise.
_TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_FALLBACK_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_SPACE_BYTE = 0x20
_SENTENCEPIECE_SPACE = "\u2581"

# An unfinished character has at most three bytes, a visible token at least one: the last three tokens hold it whole.
_CONTEXT_LENGTH = 3
_LONGEST_WINDOW = 2 * _CONTEXT_LENGTH  # shortened only this often: each time costs one decode


@dataclass(frozen=True, slots=True)
class SpelledToken:
    """One token by itself."""

    text: str  # of a special token its name, of bytes that are no characters `bytes:\\xf0\\x9f`: never ambiguous
    utf8: bytes  # what it adds to the text; empty: nothing


class Tokenizer:
    """The tokenizer of one model. Immutable but for a cache of what it found out about single tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self._vocab_size = max(vocabulary.values(), default=-1) + 1
        self._unused_ids = frozenset(range(self._vocab_size)).difference(vocabulary.values())
        self._is_visible: dict[int, bool] = {}
        self._own_texts: dict[int, str | None] = {}
        self._fallback_bytes = {
            token_id: int(token[1:5], 16)
            for token, token_id in vocabulary.items()
            if _FALLBACK_BYTE.fullmatch(token) and self.decode([token_id]) != token
        }
        self._drops_first_space = any(
            byte == _SPACE_BYTE and not self.decode([token_id]) for token_id, byte in self._fallback_bytes.items()
        )

    @classmethod
    def load(cls, name_or_folder: str) -> Tokenizer:
        """The tokenizer of a model by its hub name or local folder; never runs code that came with it.

        Raises ModelUnavailable.
        """
        try:
            return cls(AutoTokenizer.from_pretrained(name_or_folder, trust_remote_code=False))
        # A damaged file surfaces as any error at all: the library behind transformers raises bare `Exception`.
        except Exception as error:
            raise ModelUnavailable(
                f"The tokenizer of {name_or_folder!r} cannot be loaded; give the name of a model on the hub or a folder "
                f"that holds its tokenizer files ({_first_line(error)})."
            ) from error

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id the tokenizer knows; a model may have further, unused rows."""
        return self._vocab_size

    @property
    def eos_token_id(self) -> int | None:
        eos_token_id: int | None = self._tokenizer.eos_token_id
        return eos_token_id

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the id-to-string map; equal for tokenizers that number their tokens alike."""
        return tokenizer_fingerprint(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """The ids of a plain prompt, with the special tokens that the model expects around one.

        A start token that the text already spells out is not added a second time. Raises InvalidRequest.
        """
        ids = self._encode(text, add_special_tokens=True)
        if ids[:1] == [self._tokenizer.bos_token_id]:
            bare_ids = self._encode(text, add_special_tokens=False)
            if bare_ids[:1] == ids[:1] and ids[1 : 1 + len(bare_ids)] == bare_ids:
                return ids[1:]
        return ids

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """The ids of a conversation of (role, content) in the model's chat template, up to where the answer begins.

        Raises InvalidRequest.
        """
        _check_messages(messages)
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                "The model has no chat template; send a plain prompt (--raw) instead.", parameter="messages"
            )
        conversation = [{"role": role, "content": content} for role, content in messages]
        try:
            ids = self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                f"The model's chat template refuses this conversation: {_first_line(error)}", parameter="messages"
            ) from error
        return list(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids exactly as they spell it, without special tokens and ids that the tokenizer lacks."""
        return self._decode(ids, skip_special_tokens=True)

    def is_visible(self, token_id: int) -> bool:
        """Whether `decode` takes notice of the token: false for special tokens and for ids that the tokenizer lacks."""
        if token_id not in self._is_visible:
            without_special = self.decode([token_id])
            is_special = without_special != self._decode([token_id], skip_special_tokens=False)
            self._is_visible[token_id] = self._has(token_id) and not is_special
        return self._is_visible[token_id]

    def fallback_byte(self, token_id: int) -> int | None:
        """The byte that the token stands for, if the vocabulary spells unknown characters byte by byte (`<0x0A>`)."""
        return self._fallback_bytes.get(token_id)

    def spell(self, token_id: int) -> SpelledToken:
        """How the token is written by itself."""
        if not self.is_visible(token_id):
            name = self._tokenizer.convert_ids_to_tokens(token_id) if self._has(token_id) else None
            return SpelledToken(name if isinstance(name, str) else f"<{token_id}>", b"")
        spelled = self._bytes_of(token_id)
        try:
            return SpelledToken(spelled.decode(), spelled)
        except UnicodeDecodeError:
            return SpelledToken("bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled), spelled)

    def _bytes_of(self, token_id: int) -> bytes:
        """What a visible token adds to the text, also where it is part of a character."""
        byte = self.fallback_byte(token_id)
        if byte is not None:
            return bytes([byte])
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        assert isinstance(token, str), "one id, one token"
        steps = self._decoder_steps
        if steps == ["ByteLevel"] and all(character in _BYTE_LEVEL_BYTES for character in token):
            return bytes(_BYTE_LEVEL_BYTES[character] for character in token)
        if steps[:3] == ["Replace", "ByteFallback", "Fuse"]:
            return token.replace(_SENTENCEPIECE_SPACE, " ").encode()
        text = self.own_text(token_id)  # behind another: by itself it may lose its space
        return (self.decode([token_id]) if text is None else text).encode()

    @cached_property
    def _decoder_steps(self) -> list[str]:
        return [step["type"] for step in _decoder_steps(self._tokenizer)]

    def own_text(self, token_id: int) -> str | None:
        """The text of a token behind any other that leaves no character unfinished, whatever comes next.

        None if its neighbours have a say in it: it holds no whole characters, or is not visible, or the decoder looks at
        more than one token at a time.
        """
        if token_id not in self._own_texts:
            self._own_texts[token_id] = self._find_own_text(token_id)
        return self._own_texts[token_id]

    @property
    def drops_first_space(self) -> bool:
        """Whether a fallback byte loses its space at the beginning of the text."""
        return self._drops_first_space

    def _find_own_text(self, token_id: int) -> str | None:
        before_id = self._whole_id
        if before_id is None or not self.is_visible(token_id) or self.fallback_byte(token_id) is not None:
            return None
        text = self.decode([before_id, token_id])[len(self.decode([before_id])) :]
        return None if REPLACEMENT_MARK in text else text

    @cached_property
    def _whole_id(self) -> int | None:
        """A token of whole characters, for others to stand behind; None where texts depend on their neighbours."""
        if not _decodes_token_by_token(self._tokenizer):
            return None
        texts = (
            (token_id, self.decode([token_id])) for token_id in range(self._vocab_size) if self.is_visible(token_id)
        )
        return next((token_id for token_id, text in texts if text and REPLACEMENT_MARK not in text), None)

    def _has(self, token_id: int) -> bool:
        return token_id < self._vocab_size and token_id not in self._unused_ids

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        # A model may have more ids than its tokenizer, and not every tokenizer takes them.
        known = [token_id for token_id in ids if self._has(token_id)]
        text = self._tokenizer.decode(
            known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str), "one sequence of ids, one text"
        return text

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except (TypeError, UnicodeError) as error:
            raise InvalidRequest(
                "The prompt is not valid Unicode text; remove unpaired surrogates.", parameter="prompt"
            ) from error


def _decodes_token_by_token(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the text behind the first token is that of the single tokens, but for bytes that form a character.

    True for the decoders of most models: byte-level ones, and SentencePiece's with fallback bytes, which may strip the
    beginning of the text. Any other may do as it likes (that of CLIP leaves the last space out).
    """
    steps = _decoder_steps(tokenizer)
    match [step["type"] for step in steps]:
        case ["ByteLevel"] | ["Replace", "ByteFallback", "Fuse"]:
            return True
        case ["Replace", "ByteFallback", "Fuse", "Strip"]:
            return bool(steps[-1]["start"] <= 1 and steps[-1]["stop"] == 0)
        case _:
            return False


def _decoder_steps(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """What the decoder does, one step after the other; none if it does not say."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return []
    description: dict[str, Any] = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = description.get("decoders", [description])
    return steps


def _byte_level_bytes() -> dict[str, int]:
    """From the characters in which byte-level vocabularies write bytes: printable ones as themselves, others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_LEVEL_BYTES = _byte_level_bytes()


def _check_messages(messages: Sequence[tuple[str, str]]) -> None:
    if not messages:
        raise InvalidRequest("The conversation is empty; send at least one message.", parameter="messages")
    for role, _ in messages:
        if role not in ROLES:
            raise InvalidRequest(
                f"The role of a message must be one of {', '.join(ROLES)}, not {role!r}.", parameter="messages"
            )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


class IncrementalDetokenizer:
    """Decodes an answer token by token; what `push` and `flush` return joins to exactly `Tokenizer.decode` of all ids.

    A piece never ends inside a character, nor in a replacement mark, which the next token may turn into a character.
    Decodes a window of the last few tokens only, and none where a token's text is known to be its own
    (`Tokenizer.own_text`). Two facts about decoders make that exact:

    * Everywhere but at the first token, the text of a token depends on its neighbours only where bytes form a
      character, and bytes that form none give one mark for each longest beginning of a character among them (Unicode
      standard, section 3.9, substitution of maximal subparts). So only the very last mark of a text can still change,
      and two windows that end alike have texts that end alike.
    * The exception are fallback bytes, as SentencePiece vocabularies have them: one invalid byte turns the whole
      uninterrupted run of them into marks, one a byte. So the text of a run is given out when the run is over.

    Invariant: text given out + held-back marks + text of `_run` or `_last_mark` = full decode.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the last few visible tokens that are not part of `_run`
        self._settled_length = 0  # characters of the window's text that nothing can change any more
        self._last_mark = ""  # the mark behind them that the next token may still change
        self._held_marks = 0  # settled marks that were not given out, because nothing else came behind them
        self._run = bytearray()  # the run of fallback bytes that is not over yet
        self._last_run_id = 0
        self._is_settled = False  # there is text, all of it given out, and nothing can change any of it

    def push(self, token_id: int) -> str:
        """The text that is certain with this token, often that of earlier tokens too, or empty. Constant time."""
        if self._is_settled:
            text = self._tokenizer.own_text(token_id)
            if text is not None:
                return text  # the window stays: any settled text is as good a context for what comes next
        if not self._tokenizer.is_visible(token_id):
            return ""
        piece = self._decode(token_id)
        self._is_settled = not (self._run or self._last_mark or self._held_marks)
        return piece

    def _decode(self, token_id: int) -> str:
        byte = self._tokenizer.fallback_byte(token_id)
        if byte is None:
            return self._release(self._end_run() + self._extend_window(token_id))
        self._held_marks += len(self._last_mark)
        self._last_mark = ""
        self._run.append(byte)
        self._last_run_id = token_id
        return ""

    @property
    def pending(self) -> str:
        """Whole characters that are held back: what `flush` would return now, less the marks at its end."""
        if not self._run:
            return ""
        return (REPLACEMENT_MARK * self._held_marks + self._run_text()).rstrip(REPLACEMENT_MARK)

    def flush(self) -> str:
        """All text held back, an unfinished character as a replacement mark; nothing may be pushed behind it."""
        text = REPLACEMENT_MARK * self._held_marks + self._end_run() + self._last_mark
        self._held_marks = 0
        self._last_mark = ""
        return text

    def _extend_window(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        self._last_mark = REPLACEMENT_MARK if text.endswith(REPLACEMENT_MARK) else ""
        settled = text[: len(text) - len(self._last_mark)]
        fresh = settled[self._settled_length :]
        self._settled_length = len(settled)
        if len(self._window) > _LONGEST_WINDOW:
            self._restart_window(self._window[-_CONTEXT_LENGTH:])
        return fresh

    def _restart_window(self, ids: list[int]) -> None:
        """Go on from fewer tokens: their text may begin differently, but ends with the same unsettled mark."""
        self._window = ids
        self._settled_length = len(self._tokenizer.decode(ids)) - len(self._last_mark)

    def _end_run(self) -> str:
        """The text of the run, which is over. Leaves its last token as the context of the next one."""
        if not self._run:
            return ""
        text = self._run_text()
        self._run.clear()
        self._restart_window([self._last_run_id])
        return text

    def _run_text(self) -> str:
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT_MARK * len(self._run)
        opens_the_text = not self._window
        return text.removeprefix(" ") if opens_the_text and self._tokenizer.drops_first_space else text

    def _release(self, settled: str) -> str:
        """The settled text together with the marks held before it, but for the marks at its end, which are held."""
        body = settled.rstrip(REPLACEMENT_MARK)
        marks = len(settled) - len(body)
        if not body:
            self._held_marks += marks
            return ""
        piece = REPLACEMENT_MARK * self._held_marks + body
        self._held_marks = marks
        return piece
