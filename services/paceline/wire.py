"""Domain values to and from protobuf.

Decoding checks everything that a peer could get wrong and raises `PayloadInvalid` with a sentence; nothing behind this
module sees an id outside the vocabulary. Light: clients import it, so it loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.errors import (
    ContextTooLong,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    LengthMismatch,
    PacelineError,
    PayloadInvalid,
    QueueFull,
    SessionNotFound,
    StaleEpoch,
)
from paceline.types import (
    MAX_BRANCHES,
    MAX_CREDIT,
    MAX_LOGPROBS,
    MAX_TENANT_LENGTH,
    MAX_VOCAB_SIZE,
    Branch,
    Draft,
    ModelInfo,
    Proposal,
    Row,
    RowLogprobs,
    SamplingParams,
    SessionSpec,
    VerdictRows,
    VerificationRule,
)
from paceline.v1 import drafter_service_pb2 as drafter_pb
from paceline.v1 import session_pb2 as session_pb
from paceline.v1 import target_service_pb2 as target_pb

_MICROSECONDS = 1_000_000
_MAX_UINT32 = 2**32 - 1

SESSION_ERRORS: dict[str, type[PacelineError]] = {
    kind.reason: kind
    for kind in (
        ContextTooLong,
        DeadlineExceeded,
        Draining,
        LengthMismatch,
        PayloadInvalid,
        QueueFull,
        SessionNotFound,
        StaleEpoch,
    )
}

RULE_TO_PROTO = {
    VerificationRule.GREEDY: session_pb.VERIFICATION_RULE_GREEDY,
    VerificationRule.REJECTION: session_pb.VERIFICATION_RULE_REJECTION,
    VerificationRule.COUPLED: session_pb.VERIFICATION_RULE_COUPLED,
}
RULE_FROM_PROTO = {number: rule for rule, number in RULE_TO_PROTO.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Values both model services share.


def check_ids(ids: Sequence[int], *, vocab_size: int, what: str) -> tuple[int, ...]:
    """The ids as a tuple; raises `PayloadInvalid` if one is outside the vocabulary."""
    checked = tuple(ids)
    if checked and (max(checked) >= vocab_size or min(checked) < 0):
        wrong = next(token_id for token_id in checked if not 0 <= token_id < vocab_size)
        raise PayloadInvalid(f"{what} hold the id {wrong}, but the model's ids are 0 to {vocab_size - 1}.")
    return checked


def sampling_to_proto(params: SamplingParams) -> session_pb.SamplingParams:
    message = session_pb.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=[session_pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias],
        banned_token_ids=params.banned_token_ids,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
    )
    if params.allowed_token_ids is not None:
        message.allowed_token_ids.ids.extend(params.allowed_token_ids)
        message.allowed_token_ids.SetInParent()
    return message


def sampling_from_proto(message: session_pb.SamplingParams) -> SamplingParams:
    """Raises `InvalidRequest`, which names the parameter, for values out of range."""
    return SamplingParams(
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        banned_token_ids=tuple(message.banned_token_ids),
        allowed_token_ids=tuple(message.allowed_token_ids.ids) if message.HasField("allowed_token_ids") else None,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
    )


def open_to_proto(spec: SessionSpec, committed_ids: Iterable[int]) -> session_pb.OpenSession:
    return session_pb.OpenSession(
        committed_ids=committed_ids,
        prompt_length=spec.prompt_length,
        sampling=sampling_to_proto(spec.sampling),
        seed=spec.seed,
        rule=RULE_TO_PROTO[spec.rule],
        vocab_size=spec.vocab_size,
        logprobs=spec.logprobs,
        tenant=spec.tenant,
    )


def open_from_proto(
    session_id: str, message: session_pb.OpenSession, *, vocab_size: int
) -> tuple[SessionSpec, tuple[int, ...]]:
    """The session and its committed tokens; `vocab_size` is the receiving model's own.

    Raises `PayloadInvalid`, also for sampling parameters out of range.
    """
    if message.rule not in RULE_FROM_PROTO:
        raise PayloadInvalid("The session names no verification rule; it must be greedy, rejection or coupled.")
    if not 0 < message.prompt_length <= len(message.committed_ids):
        raise PayloadInvalid(
            f"A session of {len(message.committed_ids)} tokens cannot have a prompt of {message.prompt_length}; "
            "it needs at least one prompt token."
        )
    if not 0 < message.vocab_size <= MAX_VOCAB_SIZE:
        raise PayloadInvalid(
            f"The session must say how large the target's vocabulary is, from 1 to {MAX_VOCAB_SIZE}, "
            f"not {message.vocab_size}."
        )
    if message.logprobs > MAX_LOGPROBS:
        raise PayloadInvalid(f"A session reports at most {MAX_LOGPROBS} most probable tokens, not {message.logprobs}.")
    if len(message.tenant) > MAX_TENANT_LENGTH:
        raise PayloadInvalid(f"A tenant's name has at most {MAX_TENANT_LENGTH} characters, not {len(message.tenant)}.")
    try:
        sampling = sampling_from_proto(message.sampling)
        sampling.check_vocabulary(message.vocab_size)
        if RULE_FROM_PROTO[message.rule] is VerificationRule.GREEDY and not sampling.is_greedy:
            raise InvalidRequest("rule greedy needs temperature 0; open the session as coupled.", parameter="rule")
    except InvalidRequest as error:
        raise PayloadInvalid(error.message, details=error.details) from error
    spec = SessionSpec(
        session_id=session_id,
        prompt_length=message.prompt_length,
        sampling=sampling,
        seed=message.seed,
        rule=RULE_FROM_PROTO[message.rule],
        vocab_size=message.vocab_size,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        tenant=message.tenant,
    )
    return spec, check_ids(message.committed_ids, vocab_size=vocab_size, what="The committed tokens")


def failure_to_proto(error: PacelineError) -> session_pb.SessionFailed:
    return session_pb.SessionFailed(reason=error.reason, message=error.message)


def failure_from_proto(message: session_pb.SessionFailed) -> PacelineError:
    """The error a model service named; one it does not name among ours becomes the root error with its reason."""
    kind = SESSION_ERRORS.get(message.reason)
    return kind(message.message) if kind else PacelineError(message.message, reason=message.reason or None)


def info_to_proto(info: ModelInfo) -> session_pb.ModelInfo:
    return session_pb.ModelInfo(
        model_id=info.model_id,
        vocab_size=info.vocab_size,
        max_context=info.max_context,
        tokenizer_sha256=info.tokenizer_sha256,
        incarnation=info.incarnation,
        method=info.method,
        dtype=info.dtype,
        eos_token_ids=info.eos_token_ids,
        emulated=info.emulated,
        expected_acceptance=[
            session_pb.ExpectedAcceptance(temperature=temperature, acceptance=acceptance)
            for temperature, acceptance in info.expected_acceptance
        ],
        version=info.version,
    )


def info_from_proto(message: session_pb.ModelInfo) -> ModelInfo:
    return ModelInfo(
        model_id=message.model_id,
        vocab_size=message.vocab_size,
        max_context=message.max_context,
        tokenizer_sha256=message.tokenizer_sha256,
        incarnation=message.incarnation,
        method=message.method,
        dtype=message.dtype,
        eos_token_ids=tuple(message.eos_token_ids),
        emulated=message.emulated,
        expected_acceptance=tuple((entry.temperature, entry.acceptance) for entry in message.expected_acceptance),
        version=message.version,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Drafts, proposals and verdicts.


def proposal_to_proto(proposal: Proposal) -> drafter_pb.Proposal:
    return drafter_pb.Proposal(
        base_length=proposal.base_length,
        prefix_digest=proposal.prefix_digest,
        draft_ids=proposal.draft.ids,
        draft_distributions=proposal.draft.distributions,
        draft_time_us=_to_microseconds(proposal.draft_time_s),
        draft_steps=proposal.draft_steps,
        branches=[
            drafter_pb.Branch(
                base_length=branch.base_length,
                prefix_digest=branch.prefix_digest,
                draft_ids=branch.draft.ids,
                draft_distributions=branch.draft.distributions,
            )
            for branch in proposal.branches
        ],
    )


def proposal_from_proto(message: drafter_pb.Proposal, *, vocab_size: int) -> Proposal:
    """Raises `PayloadInvalid` for ids outside the target's vocabulary, a wrong number of distributions, too many branches
    or an empty one."""
    branches = message.branches
    if len(branches) > MAX_BRANCHES:
        raise PayloadInvalid(f"A proposal holds at most {MAX_BRANCHES} branches, not {len(branches)}.")
    return Proposal(
        base_length=message.base_length,
        prefix_digest=message.prefix_digest,
        draft=draft_from_proto(message.draft_ids, message.draft_distributions, vocab_size=vocab_size),
        draft_time_s=message.draft_time_us / _MICROSECONDS,
        draft_steps=message.draft_steps,
        branches=tuple([_branch_from_proto(branch, vocab_size=vocab_size) for branch in branches]),
    )


def _branch_from_proto(message: drafter_pb.Branch, *, vocab_size: int) -> Branch:
    if not message.draft_ids:
        raise PayloadInvalid("A branch holds at least one drafted token, but one is empty.")
    draft = draft_from_proto(message.draft_ids, message.draft_distributions, vocab_size=vocab_size)
    return Branch(message.base_length, message.prefix_digest, draft)


def draft_from_proto(
    ids: Sequence[int], distributions: Sequence[bytes], *, vocab_size: int, max_length: int = MAX_CREDIT
) -> Draft:
    """Raises `PayloadInvalid` for ids outside the vocabulary, too many of them, or a wrong number of distributions.

    A proposal may be as long as the credit is; what is sent on to be verified is at most one draft.
    """
    if len(ids) > max_length:
        raise PayloadInvalid(f"A draft holds at most {max_length} tokens here, not {len(ids)}.")
    if len(distributions) not in (0, len(ids)):
        raise PayloadInvalid(f"A draft of {len(ids)} tokens cannot carry {len(distributions)} distributions.")
    return Draft(check_ids(ids, vocab_size=vocab_size, what="The draft tokens"), tuple(distributions))


def verdict_to_proto(verdict: VerdictRows) -> target_pb.VerdictRows:
    return target_pb.VerdictRows(
        base_length=verdict.base_length,
        token_ids=[row.token_id for row in verdict.rows],
        ratios=[row.ratio for row in verdict.rows if row.ratio is not None],
        step_time_us=_to_microseconds(verdict.step_time_s),
        queue_time_us=_to_microseconds(verdict.queue_time_s),
        logprobs=[_logprobs_to_proto(row.logprobs) for row in verdict.rows if row.logprobs is not None],
        step_sessions=verdict.step_sessions,
        step_tokens=verdict.step_tokens,
    )


def verdict_from_proto(message: target_pb.VerdictRows, *, vocab_size: int) -> VerdictRows:
    """Raises `PayloadInvalid` for ids outside the vocabulary, or a wrong number of ratios or log-probabilities."""
    ids = check_ids(message.token_ids, vocab_size=vocab_size, what="The verdict's rows")
    ratios, logprobs = message.ratios, message.logprobs
    if len(ratios) > len(ids):
        raise PayloadInvalid(f"A verdict of {len(ids)} rows cannot carry {len(ratios)} ratios.")
    if len(logprobs) not in (0, len(ids)):
        raise PayloadInvalid(f"A verdict of {len(ids)} rows cannot carry {len(logprobs)} log-probabilities.")
    row_ratios: list[float | None] = [*ratios, *([None] * (len(ids) - len(ratios)))]
    row_logprobs: list[RowLogprobs | None] = [None] * len(ids)
    if logprobs:
        row_logprobs = [_logprobs_from_proto(row, vocab_size=vocab_size) for row in logprobs]
    return VerdictRows(
        base_length=message.base_length,
        rows=tuple(map(Row, ids, row_ratios, row_logprobs)),
        step_time_s=message.step_time_us / _MICROSECONDS,
        queue_time_s=message.queue_time_us / _MICROSECONDS,
        step_sessions=message.step_sessions,
        step_tokens=message.step_tokens,
    )


def _logprobs_to_proto(logprobs: RowLogprobs) -> target_pb.RowLogprobs:
    return target_pb.RowLogprobs(
        token_logprob=logprobs.sampled,
        draft_logprob=logprobs.drafted,
        top_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def _logprobs_from_proto(message: target_pb.RowLogprobs, *, vocab_size: int) -> RowLogprobs:
    drafted = message.draft_logprob if message.HasField("draft_logprob") else None
    if not len(message.top_ids) == len(message.top_logprobs) <= MAX_LOGPROBS:
        raise PayloadInvalid(
            f"A row carries at most {MAX_LOGPROBS} most probable tokens with a log-probability each, not "
            f"{len(message.top_ids)} with {len(message.top_logprobs)}."
        )
    for logprob in (message.token_logprob, 0.0 if drafted is None else drafted, *message.top_logprobs):
        if not logprob <= 0.0:
            raise PayloadInvalid(f"A log-probability is at most 0, but one is {logprob}.")
    ids = check_ids(message.top_ids, vocab_size=vocab_size, what="The most probable tokens")
    return RowLogprobs(message.token_logprob, drafted, tuple(zip(ids, message.top_logprobs, strict=True)))


def _to_microseconds(seconds: float) -> int:
    return min(_MAX_UINT32, max(0, round(seconds * _MICROSECONDS)))
