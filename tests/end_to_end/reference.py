"""What the target says by itself, computed by transformers' own `generate()`, and how to judge a difference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from paceline.engine.checkpoint import without_progress_bars

# A block and a single row differ in the last bits of float32. Where the two best scores are closer than this, either
# may be called the arg max; a larger gap at the first difference is a fault. (Measured between a block of nine and
# single rows of the default model: at most 6e-5.)
TIE_BOUND = 2e-4


class Reference:
    """The target alone, in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        with without_progress_bars():
            self._network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def generate(self, prompt: Sequence[int], *, max_tokens: int) -> tuple[int, ...]:
        """Greedy continuation; stops at the model's end token, which is part of it."""
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            output = self._network.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
            )
        return tuple(output[0, len(prompt) :].tolist())

    def gap_at(self, ids: Sequence[int]) -> float:
        """Between the two best scores of the token behind `ids`."""
        with torch.inference_mode():
            best = self._network(torch.tensor([list(ids)])).logits[0, -1].topk(2).values
        return float(best[0] - best[1])


def assert_same(reference: Reference, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int]) -> None:
    """Token for token the same; a first difference counts as a tie only below `TIE_BOUND`, and says its gap."""
    if tuple(got) == tuple(expected):
        return
    shorter = min(len(expected), len(got))
    first = next((i for i in range(shorter) if expected[i] != got[i]), shorter)
    gap = reference.gap_at([*prompt, *expected[:first]])
    assert gap < TIE_BOUND, f"token {first} differs where the best two scores are {gap:.2e} apart: {got} != {expected}"
