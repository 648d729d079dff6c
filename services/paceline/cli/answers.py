"""One answer on its way to standard output: streamed as it comes, or whole as JSON."""

from __future__ import annotations

import json
from contextlib import aclosing
from dataclasses import asdict

from paceline.cli.show import ORIGIN_STYLES
from paceline.cli.terminal import Terminal
from paceline.client import Completion, Delta, Finished, GenerationClient, GenerationRequest
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
    """Write an answer while it comes, with `show_drafts` token by token in the colours of their origins."""
    builder = CompletionBuilder()
    try:
        async with aclosing(client.generate(request, timeout_s=timeout_s)) as events:
            async for event in events:
                builder.add(event)
                match event:
                    case Delta() if show_drafts:
                        _write_coloured(event, terminal)
                    case Delta() | Finished() if not show_drafts:
                        terminal.write(event.text)
    finally:
        # Whatever follows, an error too, begins on a line of its own.
        terminal.write("\n")
    return builder.build()


def _write_coloured(delta: Delta, terminal: Terminal) -> None:
    for piece, origin in zip(delta.pieces, delta.origins, strict=True):
        terminal.write(piece, ORIGIN_STYLES[origin])


def completion_as_json(completion: Completion) -> str:
    """One JSON object on one line, in ASCII, so that no locale can spoil it."""
    return json.dumps(
        {
            "text": completion.text,
            "ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "seed": completion.seed,
            "usage": asdict(completion.usage) | {"total_tokens": completion.usage.total_tokens},
            "speculation": asdict(completion.speculation),
            "tokens_per_second": completion.tokens_per_second,
        }
    )


def error_as_json(error: PacelineError) -> str:
    """What stands in the place of an answer that failed."""
    return json.dumps({"error": {"reason": error.reason, "message": error.message}})
