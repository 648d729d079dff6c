"""The life of one session: draft, verify, walk, commit, until the answer ends.

Runs against two small Protocols. `sequential` and `pipelined` are the same loop: they differ in how far ahead of the
verdict the drafter may go. Knows nothing of gRPC, text or models.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from paceline.generation import Schedule
from paceline.noise import Purpose, uniform
from paceline.prefix import TokenPrefix, extend_digest
from paceline.rejection import emitted_logprobs, walk
from paceline.types import (
    Draft,
    FinishReason,
    Origin,
    SessionSpec,
    SpeculationStats,
    TokenLogprobs,
    Verdict,
    VerdictRows,
    VerificationRule,
)


@dataclass(frozen=True, slots=True)
class OfferedDraft:
    """A draft for one round, and whether the orchestrator's own lookup had to stand in for the drafter."""

    draft: Draft = field(default_factory=Draft)
    is_fallback: bool = False


class Target(Protocol):
    """The session's target."""

    async def verify(self, prefix: TokenPrefix, draft: Draft) -> VerdictRows:
        """Rows for a draft that continues the committed tokens; raises `PacelineError` if there is no verdict."""


class DraftSource(Protocol):
    """Where the session's drafts come from. Never raises: a drafter that is gone costs speed alone."""

    def commit(self, prefix: TokenPrefix, *, draft_length: int, credit: int) -> None:
        """Say what is committed, and how many tokens beyond that may be drafted."""

    async def draft(self, prefix: TokenPrefix, max_length: int) -> OfferedDraft:
        """A draft that continues the committed tokens; empty if none comes in time."""

    def continues(self, digest: int) -> bool:
        """Whether a draft is there already for the prefix with that digest."""


class Delivery(Protocol):
    """What the output made of a run of tokens (`finish.Delivered`)."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def finish_reason(self) -> FinishReason | None: ...


DeliveryT = TypeVar("DeliveryT", bound=Delivery)
DeliveryT_co = TypeVar("DeliveryT_co", bound=Delivery, covariant=True)


class Output(Protocol[DeliveryT_co]):
    """Decides token by token where the answer ends (`finish.OutputTracker`)."""

    @property
    def remaining(self) -> int: ...

    def accept(self, token_ids: Sequence[int]) -> DeliveryT_co: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult(Generic[DeliveryT]):
    """What one round added to the answer."""

    delivery: DeliveryT
    origins: tuple[Origin, ...]  # one a delivered token
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a delivered token; empty where the session asks for none


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationPlan:
    """How one session speculates."""

    schedule: Schedule
    draft_length: int

    def draft_length_for(self, remaining: int) -> int:
        """Tokens worth drafting: the round adds one more by itself, and nothing beyond the answer's end is needed."""
        if self.schedule is Schedule.PLAIN:
            return 0
        return max(0, min(self.draft_length, remaining - 1))

    def credit_for(self, remaining: int, rule: VerificationRule) -> int:
        """How far the drafter may go beyond the committed tokens.

        Pipelined, that is the draft in flight and the one behind it. Where the bonus token is emitted and compared with
        the first token of the draft behind, that draft is one longer, so that as many are left to verify.
        """
        draft_length = self.draft_length_for(remaining)
        if self.schedule is not Schedule.PIPELINED or draft_length == 0:
            return draft_length
        ahead = draft_length if rule is VerificationRule.REJECTION else draft_length + 1
        return min(draft_length + ahead, remaining - 1)


async def run_session(
    spec: SessionSpec,
    prompt_ids: Sequence[int],
    plan: SpeculationPlan,
    *,
    target: Target,
    drafts: DraftSource,
    output: Output[DeliveryT],
    stats: SpeculationStats,
) -> AsyncIterator[RoundResult[DeliveryT]]:
    """Rounds until the output says that the answer has ended; counts them in `stats`.

    Raises what `target.verify` raises, and `PayloadInvalid` for a verdict that does not fit the draft or the session:
    everything yielded before is committed and stays valid.
    """
    rule = spec.effective_rule
    prefix = TokenPrefix(prompt_ids)
    # The first round has no draft: the first token never waits for a drafter, which reads the prompt meanwhile.
    offered = OfferedDraft()
    while True:
        drafts.commit(
            prefix,
            draft_length=plan.draft_length_for(output.remaining),
            credit=plan.credit_for(output.remaining, rule),
        )
        if len(prefix) > len(prompt_ids):
            offered = await _next_draft(plan, prefix, drafts, output, stats)
        draft = offered.draft
        verdict_rows = await target.verify(prefix, draft)
        verdict = walk(
            draft.ids,
            verdict_rows.rows,
            accept_uniform=lambda position: uniform(spec.seed, position, Purpose.ACCEPT),
            base_length=len(prefix),
            bonus_is_drafted=rule is VerificationRule.REJECTION and _has_next(plan, prefix, draft, drafts, output),
        )
        stats.record_round(len(draft), verdict.kept_length, is_fallback=offered.is_fallback)
        stats.target_busy_s += verdict_rows.step_time_s
        logprobs = () if spec.logprobs is None else emitted_logprobs(draft.ids, verdict_rows.rows, verdict)
        result = _deliver(output, draft, verdict, logprobs)
        prefix.extend(result.delivery.token_ids)
        yield result
        if result.delivery.finish_reason is not None:
            return


async def _next_draft(
    plan: SpeculationPlan,
    prefix: TokenPrefix,
    drafts: DraftSource,
    output: Output[DeliveryT],
    stats: SpeculationStats,
) -> OfferedDraft:
    draft_length = plan.draft_length_for(output.remaining)
    if draft_length == 0:
        return OfferedDraft()
    started_s = time.perf_counter()
    offered = await drafts.draft(prefix, draft_length)
    stats.draft_wait_s += time.perf_counter() - started_s
    return offered


def _has_next(
    plan: SpeculationPlan, prefix: TokenPrefix, draft: Draft, drafts: DraftSource, output: Output[DeliveryT]
) -> bool:
    """Whether the draft behind this one is there and would be verified: then it stands in for the bonus token.

    Depends on what has arrived, never on the value of any token that is drawn.
    """
    if not draft.ids or plan.draft_length_for(output.remaining - len(draft)) == 0:
        return False
    digest = prefix.digest()
    for token_id in draft.ids:
        digest = extend_digest(digest, token_id)
    return drafts.continues(digest)


def _deliver(
    output: Output[DeliveryT], draft: Draft, verdict: Verdict, logprobs: tuple[TokenLogprobs, ...]
) -> RoundResult[DeliveryT]:
    ids = list(draft.ids[: verdict.kept_length])
    origins = [Origin.DRAFT] * len(ids)
    if verdict.next_token is not None:
        ids.append(verdict.next_token)
        origins.append(verdict.next_origin)
    delivery = output.accept(ids)
    delivered = len(delivery.token_ids)
    return RoundResult(delivery=delivery, origins=tuple(origins[:delivered]), logprobs=logprobs[:delivered])
