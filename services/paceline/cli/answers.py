"""Answers on their way to standard output: streamed as they come, or whole as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict

from paceline.cli.show import ORIGIN_STYLES
from paceline.cli.terminal import Terminal
from paceline.client import (
    Completion,
    Delta,
    Event,
    Finished,
    GenerationClient,
    GenerationRequest,
    Started,
    TokenLogprobs,
)
from paceline.errors import PacelineError
from paceline.generation import CompletionBuilder


async def stream_answer(
    client: GenerationClient,
    request: GenerationRequest,
    terminal: Terminal,
    *,
    show_drafts: bool,
    timeout_s: float,
) -> Completion:
    """Write the answer while it comes, with `show_drafts` token by token in the colours of their origins."""
    (completion,) = await stream_choices(client, request, terminal, show_drafts=show_drafts, timeout_s=timeout_s)
    return completion


async def stream_choices(
    client: GenerationClient,
    request: GenerationRequest,
    terminal: Terminal,
    *,
    show_drafts: bool,
    timeout_s: float,
) -> tuple[Completion, ...]:
    """Write the answers one below the other: the first unfinished one while it comes, those behind it in their turn."""
    builder = CompletionBuilder()
    writer = _Writer(terminal, choices=request.n, show_drafts=show_drafts)
    try:
        async with aclosing(client.generate(request, timeout_s=timeout_s)) as events:
            async for event in events:
                builder.add(event)
                writer.add(event)
    finally:
        # Whatever follows, an error too, begins on a line of its own.
        terminal.write("\n")
    return builder.build_choices()


class _Writer:
    """Writes the events of several choices, which come mixed, choice by choice. Invariant: nothing of a choice is on the
    terminal before the end of the one before it."""

    def __init__(self, terminal: Terminal, *, choices: int, show_drafts: bool) -> None:
        self._terminal, self._show_drafts = terminal, show_drafts
        self._waiting: list[list[Delta | Finished]] = [[] for _ in range(choices)]
        self._seeds: tuple[int, ...] = ()
        self._current = 0

    def add(self, event: Event) -> None:
        if isinstance(event, Started):
            self._seeds = event.seeds
            self._begin()
            return
        self._waiting[event.choice].append(event)
        while self._current < len(self._waiting) and self._write_current():
            self._current += 1
            if self._current < len(self._waiting):
                self._terminal.write("\n")
                self._begin()

    def _begin(self) -> None:
        if len(self._waiting) > 1:
            self._terminal.say(f"choice {self._current}, seed {self._seeds[self._current]}:", "bold")

    def _write_current(self) -> bool:
        """Write what has come of the current choice; whether that was its end."""
        events = self._waiting[self._current]
        self._waiting[self._current] = []
        for event in events:
            if not self._show_drafts:
                self._terminal.write(event.text)
            elif isinstance(event, Delta):
                _write_coloured(event, self._terminal)
        return bool(events) and isinstance(events[-1], Finished)


def _write_coloured(delta: Delta, terminal: Terminal) -> None:
    for piece, origin in zip(delta.pieces, delta.origins, strict=True):
        terminal.write(piece, ORIGIN_STYLES[origin])


def answer_as_json(choices: Sequence[Completion]) -> str:
    """One JSON object on one line, in ASCII, so that no locale can spoil it; of several choices `choices` lists them."""
    objects = [_as_object(completion) for completion in choices]
    return json.dumps(objects[0] if len(objects) == 1 else {"choices": objects})


def _as_object(completion: Completion) -> dict[str, object]:
    """The same keys for each answer; `logprobs` comes where it was asked for."""
    fields: dict[str, object] = {
        "text": completion.text,
        "ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "usage": asdict(completion.usage) | {"total_tokens": completion.usage.total_tokens},
        "speculation": asdict(completion.speculation),
        "tokens_per_second": completion.tokens_per_second,
    }
    if completion.logprobs:
        fields["logprobs"] = [_logprobs_as_object(entry) for entry in completion.logprobs]
    return fields


def _logprobs_as_object(logprobs: TokenLogprobs) -> dict[str, object]:
    top = [
        {"id": token_id, "piece": piece, "logprob": logprob}
        for (token_id, logprob), piece in zip(logprobs.top, logprobs.top_pieces, strict=True)
    ]
    return {"id": logprobs.token_id, "logprob": logprobs.logprob, "top": top}


def error_as_json(error: PacelineError) -> str:
    """What stands in the place of an answer that failed."""
    return json.dumps({"error": {"reason": error.reason, "message": error.message}})
