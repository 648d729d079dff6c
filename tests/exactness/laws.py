"""The law vectors of `laws.json`: small exact cases of the verification rules, read into values.

A prefix here is what one vector emits from its first position on: `()`, or the one token before the second position.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.sampling import SparseDistribution, TokenHistory, target_log_probs
from paceline.types import SamplingParams, VerificationRule

Prefix = tuple[int, ...]

NO_HISTORY = TokenHistory(())


@dataclass(frozen=True, slots=True)
class Siblings:
    """Draft tokens for one position, what each was drawn from, and how probable it is that these are drawn."""

    ids: Sequence[int]
    distributions: Sequence[SparseDistribution]
    probability: float = 1.0


@dataclass(frozen=True, slots=True)
class LawVector:
    """One case: the rows of target and drafter before their filters, how drafts come about, and what must come out."""

    id: str
    rule: str
    shape: str  # "single", "chain2", "tree2"
    vocab_size: int
    target_rows: Mapping[Prefix, Tensor]  # [vocab_size] float64 logits
    target_params: SamplingParams
    filtered_target_probs: Mapping[Prefix, Tensor]  # [vocab_size] float64
    draft_rows: Mapping[Prefix, Tensor]  # [vocab_size] float64 logits; empty if drafts are given
    draft_params: SamplingParams
    filtered_draft_probs: Mapping[Prefix, Tensor]  # [vocab_size] float64
    draft: Mapping[str, Any]
    expected_law: Tensor  # [vocab_size], or [vocab_size, vocab_size] for two positions
    expected_accept: Mapping[str, float]
    expected_accept_coupled: Mapping[str, float]
    bug_law: Tensor  # as expected_law
    bug_distance: float  # total variation

    @property
    def served_rule(self) -> VerificationRule:
        return VerificationRule.COUPLED if self.rule == "sample_match" else VerificationRule.REJECTION

    @property
    def is_sampled(self) -> bool:
        return bool(self.draft["kind"] == "sampled")

    @property
    def draft_length(self) -> int:
        return int(self.draft.get("length", 1))

    def target_probs(self, prefix: Prefix) -> Tensor:
        """The target distribution behind a prefix, as the services compute it; [vocab_size] float64."""
        return target_log_probs(self.target_rows[prefix], self.target_params, NO_HISTORY, prefix).exp()

    def draft_probs(self, prefix: Prefix) -> Tensor:
        """The drafter's distribution behind a prefix, exact, before any rounding for the wire; [vocab_size] float64."""
        return target_log_probs(self.draft_rows[prefix], self.draft_params, NO_HISTORY, prefix).exp()

    def given_siblings(self, prefix: Prefix) -> Sequence[int]:
        """The fixed draft tokens behind a prefix, if the drafter keeps to them all along it."""
        draft = self.draft
        tokens: list[int] = draft.get("tokens", [draft.get("token")])
        if self.rule == "tree_siblings":
            children: dict[str, list[int]] = draft.get("children", {})
            return children.get(str(prefix[0]), []) if prefix else tokens
        return tokens[len(prefix) : len(prefix) + 1] if prefix == tuple(tokens[: len(prefix)]) else []

    def possible_siblings(self, prefix: Prefix) -> list[Siblings]:
        """Every outcome of drafting for the position behind `prefix`; no siblings at all where nothing is drafted."""
        if not self.is_sampled:
            ids = self.given_siblings(prefix)
            return [Siblings(ids, [SparseDistribution.one_hot(token_id) for token_id in ids])]
        if len(prefix) >= self.draft_length:
            return [Siblings([], [])]
        outcomes = [Siblings([], [])]
        for _ in range(self.draft.get("siblings", 1)):
            outcomes = [drawn for before in outcomes for drawn in self._with_one_more(before, self.draft_probs(prefix))]
        return outcomes

    def _with_one_more(self, before: Siblings, probs: Tensor) -> list[Siblings]:
        distribution = exact_distribution(self.left_to_draw(probs, before.ids))
        return [
            Siblings([*before.ids, token_id], [*before.distributions, distribution], before.probability * share)
            for token_id, share in distribution.shares.items()
        ]

    def left_to_draw(self, probs: Tensor, drawn_ids: Sequence[int]) -> Tensor:
        """The row the next sibling is drawn from; [vocab_size], not normalised."""
        if self.draft.get("replacement", True):
            return probs
        return probs.index_fill(0, torch.tensor(drawn_ids, dtype=torch.int64), 0.0)


def exact_distribution(probs: Tensor) -> SparseDistribution:
    """The draft distribution with every possible token and no rounding."""
    ids = probs.nonzero().flatten()
    return SparseDistribution(ids, probs[ids])


def load() -> list[LawVector]:
    """All vectors, in the order of the file."""
    content = json.loads(Path(__file__).with_name("laws.json").read_text())
    return [_vector(entry) for entry in content["vectors"]]


def _vector(entry: Mapping[str, Any]) -> LawVector:
    target_probs, draft_probs = _rows(entry["target_probs"]), _rows(entry["draft_probs"])
    return LawVector(
        id=entry["id"],
        rule=entry["rule"],
        shape=entry["shape"],
        vocab_size=entry["vocab"],
        target_rows=_logits(_rows(entry["target_raw_probs"]) if "target_raw_probs" in entry else target_probs),
        target_params=_params(entry.get("target_filter")),
        filtered_target_probs=target_probs,
        draft_rows=_logits(_rows(entry["draft_raw_probs"]) if "draft_raw_probs" in entry else draft_probs),
        draft_params=_params(entry.get("draft_filter")),
        filtered_draft_probs=draft_probs,
        draft=entry["draft"],
        expected_law=_tensor(entry["expected_law"]),
        expected_accept={name: each["decimal"] for name, each in entry["expected_accept"].items()},
        expected_accept_coupled={
            name: each["decimal"] for name, each in entry.get("expected_accept_coupled", {}).items()
        },
        bug_law=_tensor(entry["bug"]["law"]),
        bug_distance=entry["bug"]["total_variation"]["decimal"],
    )


def _rows(entry: Mapping[str, Any] | None) -> dict[Prefix, Tensor]:
    if entry is None:
        return {}
    if "first" not in entry:
        return {(): _tensor(entry)}
    return {() if name == "first" else (int(name.removeprefix("after_")),): _tensor(row) for name, row in entry.items()}


def _tensor(entry: Mapping[str, Any]) -> Tensor:
    return torch.tensor(entry["decimal"], dtype=torch.float64)


def _logits(rows: Mapping[Prefix, Tensor]) -> dict[Prefix, Tensor]:
    return {prefix: probs.log() for prefix, probs in rows.items()}


def _params(filter_: str | None) -> SamplingParams:
    if filter_ is None:
        return SamplingParams()
    name, value = filter_.split("=")
    settings: dict[str, Any] = {name: int(value) if name == "top_k" else float(value)}
    return SamplingParams(**settings)
