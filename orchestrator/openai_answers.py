"""The events of an answer as OpenAI's objects: whole, or as the chunks of a stream.

Beside OpenAI's fields stand the `seed` of each choice, by which it can be replayed, and `usage.speculation`. Knows nothing
of HTTP.
"""

from __future__ import annotations

import codecs
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from orchestrator.openai_requests import Asked
from orchestrator.text import SpelledToken
from paceline.generation import (
    Completion,
    CompletionBuilder,
    Delta,
    Event,
    Finished,
    ServedModel,
    SpeculationUsage,
    Started,
)
from paceline.types import ModelInfo, TokenLogprobs
from paceline.version import installed_version

Json = dict[str, Any]

_LOWEST_LOGPROB = -9999.0  # as OpenAI has it: JSON knows no infinity


class Speller(Protocol):
    """Writes a token by itself (`Tokenizer.spell`)."""

    def __call__(self, token_id: int, /) -> SpelledToken: ...


def model_object(served: ServedModel, *, created_s: int) -> Json:
    """An entry of `/v1/models`."""
    return {
        "id": served.name,
        "object": "model",
        "created": created_s,
        "owned_by": "paceline",
        "max_model_len": served.target.max_context,
    }


def fingerprint(target: ModelInfo) -> str:
    """Of all that an answer's tokens depend on besides the request: while it is the same, so are the answers to a seed."""
    parts = (installed_version(), target.model_id, target.dtype, target.tokenizer_sha256, str(target.vocab_size))
    return f"fp_{hashlib.sha256('/'.join(parts).encode()).hexdigest()[:12]}"


class Answer(ABC):
    """One call's answer, from the events of its prompts. Each event is given once, to `chunks` or to `add`."""

    id_prefix: str
    whole_kind: str
    chunk_kind: str

    def __init__(self, asked: Asked, served: ServedModel, spell: Speller) -> None:
        self._asked, self._served, self._spell = asked, served, spell
        self._created_s, self._fingerprint = int(time.time()), fingerprint(served.target)
        self._request_id = ""
        self._builders = [CompletionBuilder() for _ in asked.requests]
        self._seeds: dict[int, int] = {}
        self._finished: list[tuple[int, Finished]] = []

    @property
    def request_id(self) -> str:
        """What logs and traces call the answer, or its first prompt's; empty until an event has come."""
        return self._request_id

    def add(self, prompt: int, event: Event) -> None:
        """Take an event of one of the prompts, for `whole`."""
        self._note(prompt, event)
        self._builders[prompt].add(event)

    def whole(self) -> Json:
        """The answer that was added. Raises `IncompleteAnswer` unless all of it was."""
        by_prompt = [builder.build_choices() for builder in self._builders]
        choices = [
            self._whole_choice(prompt, completion) for prompt, all_of in enumerate(by_prompt) for completion in all_of
        ]
        return self._frame(self.whole_kind, choices) | {"usage": self._usage()}

    def chunks(self, prompt: int, event: Event) -> Iterator[Json]:
        """What of a stream an event is."""
        self._note(prompt, event)
        match event:
            case Started():
                for choice in range(self._asked.n):
                    yield from map(self._chunk, self._opening(prompt, self._index(prompt, choice)))
            case Delta():
                if event.text or event.logprobs:
                    yield self._chunk(self._piece(self._index(prompt, event.choice), event))
            case Finished():
                yield from map(self._chunk, self._ending(self._index(prompt, event.choice), event))

    def last_chunk(self) -> Json | None:
        """What follows the last event: the usage, if it is wanted."""
        if not self._asked.include_usage:
            return None
        return self._frame(self.chunk_kind, []) | {"usage": self._usage()}

    @abstractmethod
    def _whole_choice(self, prompt: int, completion: Completion) -> Json: ...

    @abstractmethod
    def _opening(self, prompt: int, index: int) -> Iterator[Json]:
        """Choices of the chunks before the first token of the choice with that index."""

    @abstractmethod
    def _piece(self, index: int, delta: Delta) -> Json:
        """The choice of a chunk with tokens."""

    @abstractmethod
    def _ending(self, index: int, finished: Finished) -> Iterator[Json]:
        """Choices of the chunks behind the last token."""

    def _note(self, prompt: int, event: Event) -> None:
        match event:
            case Started():
                self._request_id = self._request_id or event.request_id
                for choice, seed in enumerate(event.seeds):
                    self._seeds[self._index(prompt, choice)] = seed
            case Finished():
                self._finished.append((prompt, event))

    def _index(self, prompt: int, choice: int) -> int:
        return prompt * self._asked.n + choice

    def _frame(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": f"{self.id_prefix}{self._request_id}",
            "object": kind,
            "created": self._created_s,
            "model": self._served.name,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }

    def _chunk(self, choice: Json) -> Json:
        chunk = self._frame(self.chunk_kind, [choice])
        return chunk | {"usage": None} if self._asked.include_usage else chunk

    def _choice(self, index: int, content: Json, *, logprobs: Json | None = None, reason: str | None = None) -> Json:
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason, "seed": self._seeds[index]}

    def _usage(self) -> Json:
        """Of all choices; a prompt counts once, however many answers it got."""
        prompt_tokens = {prompt: finished.usage.prompt_tokens for prompt, finished in self._finished}
        completion_tokens = sum(finished.usage.completion_tokens for _, finished in self._finished)
        return {
            "prompt_tokens": sum(prompt_tokens.values()),
            "completion_tokens": completion_tokens,
            "total_tokens": sum(prompt_tokens.values()) + completion_tokens,
            "speculation": asdict(combined([finished.speculation for _, finished in self._finished])),
        }


class CompletionAnswer(Answer):
    """Of `/v1/completions`."""

    id_prefix = "cmpl-"
    whole_kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, asked: Asked, served: ServedModel, spell: Speller) -> None:
        super().__init__(asked, served, spell)
        self._offsets: dict[int, TextOffsets] = {}

    def _whole_choice(self, prompt: int, completion: Completion) -> Json:
        index = self._index(prompt, completion.choice)
        text = self._asked.echoes[prompt] + completion.text
        logprobs = self._logprobs(index, completion.logprobs)
        return self._choice(index, {"text": text}, logprobs=logprobs, reason=completion.finish_reason.value)

    def _opening(self, prompt: int, index: int) -> Iterator[Json]:
        if self._asked.echoes[prompt]:
            yield self._choice(index, {"text": self._asked.echoes[prompt]})

    def _piece(self, index: int, delta: Delta) -> Json:
        return self._choice(index, {"text": delta.text}, logprobs=self._logprobs(index, delta.logprobs))

    def _ending(self, index: int, finished: Finished) -> Iterator[Json]:
        yield self._choice(index, {"text": finished.text}, reason=finished.finish_reason.value)

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> Json | None:
        if not entries:
            return None
        offsets = self._offsets.setdefault(index, TextOffsets())
        tokens = [self._spell(entry.token_id) for entry in entries]
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": [offsets.of_next(token.utf8) for token in tokens],
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """By their text; the token itself is always among them."""
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(self._spell(token_id).text, _finite(logprob))  # of two that are spelled alike, the likelier
        return top


class ChatAnswer(Answer):
    """Of `/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def _whole_choice(self, prompt: int, completion: Completion) -> Json:
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        return self._choice(
            self._index(prompt, completion.choice),
            {"message": message},
            logprobs=self._logprobs(completion.logprobs),
            reason=completion.finish_reason.value,
        )

    def _opening(self, prompt: int, index: int) -> Iterator[Json]:
        yield self._choice(index, {"delta": {"role": "assistant", "content": ""}})

    def _piece(self, index: int, delta: Delta) -> Json:
        return self._choice(index, {"delta": {"content": delta.text}}, logprobs=self._logprobs(delta.logprobs))

    def _ending(self, index: int, finished: Finished) -> Iterator[Json]:
        if finished.text:
            yield self._choice(index, {"delta": {"content": finished.text}})
        yield self._choice(index, {"delta": {}}, reason=finished.finish_reason.value)

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> Json | None:
        if not entries:
            return None
        content = [
            self._entry(entry.token_id, entry.logprob)
            | {"top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        token = self._spell(token_id)
        return {"token": token.text, "logprob": _finite(logprob), "bytes": list(token.utf8)}


class TextOffsets:
    """Where in a text its tokens begin, in characters; a token within a character begins where the character does."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def of_next(self, utf8: bytes) -> int:
        if utf8 and not _continues_character(utf8[0]):
            # Bytes before it that are no character yet never will be one: they show as replacement marks.
            self._characters += len(self._decoder.decode(b"", final=True))
        offset = self._characters
        self._characters += len(self._decoder.decode(utf8))
        return offset


def _continues_character(byte: int) -> bool:
    return byte & 0b1100_0000 == 0b1000_0000


def combined(usages: Sequence[SpeculationUsage]) -> SpeculationUsage:
    """Several answers' figures as one's: counts and busy times are added up, and the rates are those of the sums."""
    if len(usages) == 1:
        return usages[0]
    counts = {
        name: sum(getattr(usage, name) for usage in usages)
        for name in (
            "num_drafts",
            "num_draft_tokens",
            "num_accepted_tokens",
            "rounds",
            "plain_rounds",
            "fallback_rounds",
            "ahead_rounds",
            "branch_rounds",
            "redraft_rounds",
            "num_rejections",
            "branch_hits",
            "num_received_draft_tokens",
            "target_busy_s",
            "draft_wait_s",
        )
    }
    drafts, drafted, accepted = counts["num_drafts"], counts["num_draft_tokens"], counts["num_accepted_tokens"]
    judged = accepted + counts["num_rejections"]
    return SpeculationUsage(
        **counts,
        num_accepted_tokens_per_pos=_added([usage.num_accepted_tokens_per_pos for usage in usages]),
        num_draft_tokens_per_pos=_added([usage.num_draft_tokens_per_pos for usage in usages]),
        acceptance_rate=accepted / drafted if drafted else 0.0,
        mean_acceptance_length=1.0 + accepted / drafts if drafts else 1.0,
        per_token_acceptance=accepted / judged if judged else 0.0,
        elapsed_s=max(usage.elapsed_s for usage in usages),
        rule=usages[0].rule,
        schedule=usages[0].schedule,
    )


def _added(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    longest = max(map(len, rows))
    return tuple(sum(row[position] for row in rows if position < len(row)) for position in range(longest))


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
