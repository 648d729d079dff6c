"""When an answer ends, and what of it is given out: token by token, with one boundary for text, ids and counts.

A round may commit many tokens at once. They are looked at one by one, the stop before the length, and nothing behind
the token that ends the answer exists: not in the text, not in the ids, not in the usage. How the tokens are spread over
calls makes no difference: what has been given out with the first n tokens depends on those tokens alone. So an answer
that was interrupted goes on once a fresh tracker has seen them again. Pure; knows nothing of tokenizers, rounds or
models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.errors import InvalidRequest
from paceline.generation import MAX_STOP_STRINGS
from paceline.types import FinishReason

MAX_STOP_LENGTH = 256  # characters


class Detokenizer(Protocol):
    """Turns tokens into text; the pieces and the flush join to the full decode."""

    def push(self, token_id: int) -> str:
        """The text that is certain with this token."""
        ...

    @property
    def pending(self) -> str:
        """Whole characters that are held back, because a later token could still change them."""
        ...

    def flush(self) -> str:
        """The rest of the text; no token comes any more."""
        ...


class NoText:
    """For an answer whose text nobody wants (`Detokenizer`)."""

    pending = ""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndConditions:
    """What ends an answer. A value out of range raises InvalidRequest.

    `min_tokens` counts like the sampling parameter of that name, which bans the stop tokens: that many tokens come
    before the one that ends the answer, be it a stop token or the one that completes a stop string.
    """

    max_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()  # with the model's own end tokens, unless the request ignores them

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", f"must be at least 1, not {self.max_tokens}")
        _require(self.min_tokens >= 0, "min_tokens", f"must not be negative, but is {self.min_tokens}")
        _require(
            self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"must not exceed the most tokens that may come, {self.max_tokens}, but is {self.min_tokens}",
        )
        _require(
            len(self.stop) <= MAX_STOP_STRINGS,
            "stop",
            f"may hold at most {MAX_STOP_STRINGS} strings, not {len(self.stop)}",
        )
        _require(all(self.stop), "stop", "holds an empty string; leave it out")
        longest = max(map(len, self.stop), default=0)
        _require(
            longest <= MAX_STOP_LENGTH,
            "stop",
            f"holds a string of {longest} characters; at most {MAX_STOP_LENGTH} are allowed",
        )


def _require(condition: bool, parameter: str, complaint: str) -> None:
    if not condition:
        raise InvalidRequest(f"{parameter} {complaint}.", parameter=parameter)


@dataclass(frozen=True, slots=True)
class Delivered:
    """What of the accepted tokens reaches the client now.

    `pieces` holds the text that each token of `token_ids` made certain, often with that of tokens before it; it is
    empty where text is held back. The pieces join to `text`. `finish_reason` is None while the answer goes on.
    """

    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    finish_reason: FinishReason | None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class OutputTracker:
    """One answer: how long it is, what of its text may be sent, and whether it is over.

    The token that ends the answer is part of the ids and of `output_length`; a stop token shows no text, and a stop
    string cuts the text in front of its first character (of several, the one that begins first). Text that may be the
    beginning of a stop string is held back until it is known to be none.

    Invariant: the texts delivered, then that of `finish`, join to the full decode of the ids delivered, less the stop.
    """

    def __init__(self, detokenizer: Detokenizer, conditions: EndConditions) -> None:
        self._detokenizer = detokenizer
        self._conditions = conditions
        self._output_length = 0
        self._sent_length = 0  # characters
        self._held_text = ""  # follows them, but is not sent yet
        self._exempt_length = 0  # characters at the front: a stop string that ends within them came before `min_tokens`
        self._finish_reason: FinishReason | None = None

    @property
    def output_length(self) -> int:
        """Tokens delivered so far: the usage."""
        return self._output_length

    @property
    def remaining(self) -> int:
        """Tokens that may still come at most."""
        return self._conditions.max_tokens - self._output_length

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._finish_reason

    def accept(self, token_ids: Sequence[int]) -> Delivered:
        """Take committed tokens, in order; says which of them, and what text, the client gets.

        What comes behind the end of the answer is dropped.
        """
        pieces: list[str] = []
        for token_id in token_ids:
            if self._finish_reason is not None:
                break
            pieces.append(self._take(token_id))
        return Delivered(tuple(token_ids[: len(pieces)]), tuple(pieces), self._finish_reason)

    def finish(self) -> str:
        """The text held back until the end, once. An answer that nothing has ended yet is ended, as by its length."""
        if self._finish_reason is None:
            self._end(FinishReason.LENGTH)
        text, self._held_text = self._held_text, ""
        return text

    def _take(self, token_id: int) -> str:
        """Count one token and return the text it lets through."""
        self._output_length += 1
        if token_id in self._conditions.stop_token_ids and self._may_stop:
            self._end(FinishReason.STOP)
            return ""
        piece = self._detokenizer.push(token_id)
        if self._conditions.stop:
            self._held_text += piece
            if self._cut_at_stop(self._held_text + self._detokenizer.pending):
                return self.finish()
            piece = self._release()
        if self.remaining == 0:
            self._end(FinishReason.LENGTH)
        return piece

    def _end(self, reason: FinishReason) -> None:
        """No token comes any more; the last text of the detokenizer may still complete a stop string."""
        self._finish_reason = reason
        self._held_text += self._detokenizer.flush()
        self._cut_at_stop(self._held_text)

    def _cut_at_stop(self, text: str) -> bool:
        """Whether a stop string ends the answer in `text`, all that is known and not sent; if so, only what comes
        before it is left of it."""
        if not self._may_stop:
            self._exempt_length = self._sent_length + len(text)
            return False
        exempt_length = self._exempt_length - self._sent_length
        starts = [text.find(stop, max(0, exempt_length - len(stop) + 1)) for stop in self._conditions.stop]
        cut = min((start for start in starts if start >= 0), default=None)
        if cut is None:
            return False
        self._finish_reason = FinishReason.STOP
        self._held_text = text[:cut]
        return True

    @property
    def _may_stop(self) -> bool:
        """Whether the latest token may end the answer other than by length."""
        return self._output_length > self._conditions.min_tokens

    def _release(self) -> str:
        """The held text up to where a stop string may begin."""
        held_length = max((_overlap(self._held_text, stop) for stop in self._conditions.stop), default=0)
        sent_length = len(self._held_text) - held_length
        piece, self._held_text = self._held_text[:sent_length], self._held_text[sent_length:]
        self._sent_length += sent_length
        return piece


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
