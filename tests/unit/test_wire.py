"""Values to messages and back: what was sent is what arrives, and what a peer got wrong fails its own session alone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from drafter_service.drafter import Command as DrafterWork
from drafter_service.drafter import Drafter, Entry
from drafter_service.methods.draft_model import DraftModelMethod
from drafter_service.servicer import DrafterServicer
from drafter_service.session import Commit
from paceline.errors import (
    InvalidRequest,
    PacelineError,
    PayloadInvalid,
    QueueFull,
    SessionNotFound,
    StaleEpoch,
)
from paceline.packing import pack_distribution
from paceline.sampling import SparseDistribution
from paceline.sessions import Address, Event, Open, SessionTable
from paceline.telemetry import ServiceMetrics
from paceline.types import (
    MAX_BRANCHES,
    MAX_CREDIT,
    MAX_FAN_OUT,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_TENANT_LENGTH,
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
from paceline.wire import (
    SESSION_ERRORS,
    check_ids,
    draft_from_proto,
    failure_from_proto,
    failure_to_proto,
    info_from_proto,
    info_to_proto,
    open_from_proto,
    open_to_proto,
    proposal_from_proto,
    proposal_to_proto,
    sampling_from_proto,
    sampling_to_proto,
    verdict_from_proto,
    verdict_to_proto,
)
from target_service.scheduler import Command as TargetWork
from target_service.scheduler import Judge, Scheduler
from target_service.servicer import TargetServicer
from target_service.verifier import TargetSession
from tests.fakes import FakeCache, FakeModel, fake_info, hashed_logits

VOCAB_SIZE = 10
OUTSIDE = [VOCAB_SIZE, 2**31 - 1, 2**32 - 1]  # the last is the filler -1 in 32 bits

ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6)
some_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6)
sampling = st.builds(
    SamplingParams,
    temperature=st.just(0.0) | st.floats(1e-6, 100),
    top_k=st.integers(0, 2**32 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1, exclude_max=True),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-100, 100),
    frequency_penalty=st.floats(-100, 100),
    logit_bias=st.lists(st.tuples(st.integers(0, 9), st.floats(-1000, 1000, width=32)), max_size=3).map(tuple),
    banned_token_ids=st.lists(st.integers(0, 8), max_size=3).map(tuple),
    allowed_token_ids=st.none() | st.just((9,)) | st.just((9, 1)),
    min_tokens=st.integers(0, 2**32 - 1),
    stop_token_ids=st.lists(st.integers(0, 8), max_size=3).map(tuple),
)
rules = st.sampled_from(VerificationRule)
log_probabilities = st.floats(max_value=0.0, width=32)
row_logprobs = st.builds(
    RowLogprobs,
    log_probabilities,
    st.none() | log_probabilities,
    st.lists(st.tuples(st.integers(0, 9), log_probabilities), max_size=MAX_LOGPROBS).map(tuple),
)
times_s = st.integers(0, 2**32 - 1).map(lambda microseconds: microseconds / 1_000_000)


# ---- round trips ----------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, derandomize=True)
@given(params=sampling)
def test_sampling_parameters_arrive_unchanged(params: SamplingParams) -> None:
    """100 drawn ones: the laws fail if drafter and target see different parameters."""
    message = session_pb.SamplingParams.FromString(sampling_to_proto(params).SerializeToString())
    assert sampling_from_proto(message) == params


def test_absent_sampling_parameters_are_off() -> None:
    """An older peer that knows fewer of them still means the plain softmax; no list differs from an empty one."""
    assert sampling_from_proto(session_pb.SamplingParams()) == SamplingParams()
    with pytest.raises(InvalidRequest, match="allowed_token_ids"):
        sampling_from_proto(session_pb.SamplingParams(allowed_token_ids=session_pb.TokenIds()))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    params=sampling,
    committed_ids=some_ids,
    prompt_share=st.floats(0, 1),
    seed=st.sampled_from([0, 1, MAX_SEED]) | st.integers(0, MAX_SEED),
    rule=rules,
    logprobs=st.none() | st.integers(0, MAX_LOGPROBS),
    tenant=st.text(max_size=MAX_TENANT_LENGTH),
)
def test_an_opening_arrives_unchanged(
    *,
    params: SamplingParams,
    committed_ids: list[int],
    prompt_share: float,
    seed: int,
    rule: VerificationRule,
    logprobs: int | None,
    tenant: str,
) -> None:
    """100 drawn sessions: seed 0 and the highest one are seeds like any other, and 0 log-probabilities are not none."""
    if rule is VerificationRule.GREEDY:
        params = replace(params, temperature=0.0)
    spec = SessionSpec(
        session_id="s",
        prompt_length=max(1, int(prompt_share * len(committed_ids))),
        sampling=params,
        seed=seed,
        rule=rule,
        vocab_size=VOCAB_SIZE,
        logprobs=logprobs,
        tenant=tenant,
    )
    data = open_to_proto(spec, committed_ids).SerializeToString()
    message = session_pb.OpenSession.FromString(data)
    assert open_from_proto("s", message, vocab_size=VOCAB_SIZE) == (spec, tuple(committed_ids))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(draft_ids=ids, base_length=st.integers(0, 2**32 - 1), digest=st.integers(0, 2**64 - 1), time_s=times_s)
def test_a_proposal_arrives_unchanged(draft_ids: list[int], base_length: int, digest: int, time_s: float) -> None:
    """100 drawn ones, each as a deterministic and as a drawn draft, with and without branches; an absent draft is an empty
    list."""
    for distributions in ((), tuple(bytes([token_id, 0xFF]) for token_id in draft_ids)):
        draft = Draft(tuple(draft_ids), distributions)
        proposal = Proposal(
            base_length=base_length,
            prefix_digest=digest,
            draft=draft,
            draft_time_s=time_s,
            draft_steps=len(draft_ids),
            branches=(Branch(digest % 2**32, base_length, draft), Branch(0, 1, Draft((1,)))) if draft_ids else (),
        )
        message = drafter_pb.Proposal.FromString(proposal_to_proto(proposal).SerializeToString())
        assert proposal_from_proto(message, vocab_size=VOCAB_SIZE) == proposal


@settings(max_examples=100, deadline=None, derandomize=True)
@given(token_ids=ids, ratios=st.lists(st.floats(0, 2**60), max_size=6), time_s=times_s, queue_time_s=times_s)
def test_a_verdict_arrives_unchanged(
    token_ids: list[int], ratios: list[float], time_s: float, queue_time_s: float
) -> None:
    """100 drawn ones: with as many leading ratios as there are, to the last bit, since both sides decide by them."""
    rows = tuple(
        Row(token_id, ratios[index] if index < len(ratios) else None) for index, token_id in enumerate(token_ids)
    )
    verdict = VerdictRows(base_length=7, rows=rows, step_time_s=time_s, queue_time_s=queue_time_s)
    message = target_pb.VerdictRows.FromString(verdict_to_proto(verdict).SerializeToString())
    assert verdict_from_proto(message, vocab_size=VOCAB_SIZE) == verdict


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rows=st.lists(st.builds(Row, st.integers(0, 9), st.none(), row_logprobs), max_size=4).map(tuple))
def test_log_probabilities_arrive_unchanged(rows: tuple[Row, ...]) -> None:
    """100 drawn verdicts: to the last bit, since they are float32 from the start."""
    verdict = VerdictRows(base_length=7, rows=rows)
    message = target_pb.VerdictRows.FromString(verdict_to_proto(verdict).SerializeToString())
    assert verdict_from_proto(message, vocab_size=VOCAB_SIZE) == verdict


def test_a_verdict_without_log_probabilities_has_not_grown() -> None:
    """Sessions that ask for none send as many bytes as ever: 3 rows in 7 bytes, the base and the ids."""
    verdict = VerdictRows(base_length=7, rows=(Row(1), Row(2), Row(3)))
    assert len(verdict_to_proto(verdict).SerializeToString()) == 7


@pytest.mark.parametrize(("seconds", "microseconds"), [(-1.0, 0), (0.0000014, 1), (1e9, 2**32 - 1)])
def test_times_beyond_the_wire_are_clipped(seconds: float, microseconds: int) -> None:
    """A clock that jumps must not make a verdict unsendable."""
    message = verdict_to_proto(VerdictRows(base_length=1, rows=(), step_time_s=seconds, queue_time_s=seconds))
    assert (message.step_time_us, message.queue_time_us) == (microseconds, microseconds)


def test_model_info_arrives_unchanged() -> None:
    """Every field of it."""
    info = ModelInfo(
        model_id="a/b",
        vocab_size=151_936,
        max_context=2**31 - 1,
        tokenizer_sha256="ab" * 32,
        incarnation="3",
        method="ngram",
        dtype="float32",
        eos_token_ids=(0, 5),
        emulated=True,
        expected_acceptance=((0.0, 0.71), (0.7, 0.5)),
    )
    assert info_from_proto(session_pb.ModelInfo.FromString(info_to_proto(info).SerializeToString())) == info


@pytest.mark.parametrize("kind", SESSION_ERRORS.values())
def test_an_error_of_a_session_keeps_its_type(kind: type[PacelineError]) -> None:
    """So the orchestrator can act on it: open the session again, or give it up."""
    error = failure_from_proto(failure_to_proto(kind("What to do.")))
    assert (type(error), error.message, error.reason) == (kind, "What to do.", kind.reason)


def test_an_error_of_a_newer_peer_keeps_its_reason() -> None:
    """A reason that this version does not know is still an error, never ignored."""
    error = failure_from_proto(session_pb.SessionFailed(reason="OUT_OF_BLOCKS", message="Wait."))
    assert (type(error), error.reason, error.message) == (PacelineError, "OUT_OF_BLOCKS", "Wait.")
    assert failure_from_proto(session_pb.SessionFailed()).reason == "INTERNAL"


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outside", [*OUTSIDE, -1])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_id_outside_the_vocabulary_is_refused_by_name(outside: int, place: int) -> None:
    """Wherever it stands (C47)."""
    checked = [0, VOCAB_SIZE - 1, 3]
    assert check_ids(checked, vocab_size=VOCAB_SIZE, what="The tokens") == tuple(checked)
    checked[place] = outside
    with pytest.raises(PayloadInvalid, match=f"The tokens hold the id {outside}, but the model's ids are 0 to 9"):
        check_ids(checked, vocab_size=VOCAB_SIZE, what="The tokens")


def opening(**changes: Any) -> session_pb.OpenSession:
    """A valid opening, with changes."""
    valid: dict[str, Any] = {
        "committed_ids": [1, 2, 3],
        "prompt_length": 2,
        "seed": 1,
        "rule": session_pb.VERIFICATION_RULE_COUPLED,
        "vocab_size": VOCAB_SIZE,
    }
    return session_pb.OpenSession(**(valid | changes))


BAD_OPENINGS = {
    "no rule": opening(rule=session_pb.VERIFICATION_RULE_UNSPECIFIED),
    "a rule of a newer protocol": opening(rule=99),
    "greedy above temperature 0": opening(rule=session_pb.VERIFICATION_RULE_GREEDY),
    "no prompt": opening(prompt_length=0),
    "a prompt longer than the tokens": opening(prompt_length=4),
    "no tokens": opening(committed_ids=[]),
    "no vocabulary": opening(vocab_size=0),
    "a vocabulary beyond all models": opening(vocab_size=2**32 - 1),
    "a temperature that is not a number": opening(sampling={"temperature": math.nan}),
    "a negative temperature": opening(sampling={"temperature": -1.0}),
    "top_p 0": opening(sampling={"top_p": 0.0}),
    "an empty list of allowed tokens": opening(sampling={"allowed_token_ids": {}}),
    "more log-probabilities than there may be": opening(logprobs=MAX_LOGPROBS + 1),
    "a tenant's name that is too long": opening(tenant="x" * (MAX_TENANT_LENGTH + 1)),
    "every token banned": opening(sampling={"banned_token_ids": list(range(VOCAB_SIZE))}),
} | {
    f"{what} {outside}": message
    for outside in OUTSIDE
    for what, message in {
        "committed id": opening(committed_ids=[1, outside]),
        "banned id": opening(sampling={"banned_token_ids": [outside]}),
        "allowed id": opening(sampling={"allowed_token_ids": {"ids": [outside]}}),
        "stop id": opening(sampling={"stop_token_ids": [outside]}),
        "biased id": opening(sampling={"logit_bias": [{"token_id": outside, "bias": 1.0}]}),
    }.items()
}


@pytest.mark.parametrize("message", BAD_OPENINGS.values(), ids=BAD_OPENINGS)
def test_a_malformed_opening_is_refused(message: session_pb.OpenSession) -> None:
    """Before anything is held for it."""
    with pytest.raises(PayloadInvalid):
        open_from_proto("s", message, vocab_size=VOCAB_SIZE)


def test_a_refused_sampling_value_is_named() -> None:
    """As a detail of the error, like on the public surface."""
    with pytest.raises(PayloadInvalid) as refusal:
        open_from_proto("s", opening(sampling={"top_p": 2.0}), vocab_size=VOCAB_SIZE)
    assert refusal.value.details == {"parameter": "top_p"}


@pytest.mark.parametrize(
    ("draft_ids", "distributions"),
    [
        *(([1, outside], []) for outside in OUTSIDE),
        ([1, 2], [b"row"]),
        ([], [b"row"]),
        ([1], [b"row", b"row"]),
        ([1] * 1000, []),
    ],
)
def test_a_malformed_draft_is_refused(draft_ids: list[int], distributions: list[bytes]) -> None:
    """Ids outside the vocabulary, a wrong number of distributions, or far too long (C47)."""
    with pytest.raises(PayloadInvalid):
        draft_from_proto(draft_ids, distributions, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize(
    "branches",
    [
        [{"draft_ids": []}],
        [{"draft_ids": [1]}, {"draft_ids": [1, VOCAB_SIZE]}],
        [{"draft_ids": [1], "draft_distributions": [b"row", b"row"]}],
        [{"draft_ids": [1] * (MAX_CREDIT + 1)}],
        [{"draft_ids": [1]}] * (MAX_BRANCHES + 1),
    ],
    ids=["empty", "outside", "distributions", "long", "many"],
)
def test_a_malformed_branch_is_refused(branches: list[dict[str, Any]]) -> None:
    """Without tokens, with ids outside the vocabulary or a wrong number of distributions, too long, or one of too many
    (C47)."""
    message = drafter_pb.Proposal(draft_ids=[1], branches=[drafter_pb.Branch(**branch) for branch in branches])
    with pytest.raises(PayloadInvalid):
        proposal_from_proto(message, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("length", [0, 1, 64, 128, MAX_CREDIT])
def test_a_draft_as_long_as_its_credit_arrives(length: int) -> None:
    """A method that drafts many tokens at once pushes them as one proposal."""
    assert len(draft_from_proto([1] * length, [], vocab_size=VOCAB_SIZE)) == length


@pytest.mark.parametrize(
    ("token_ids", "ratios"), [*(([outside], []) for outside in OUTSIDE), ([1], [0.5, 0.5]), ([], [1.0])]
)
def test_a_malformed_verdict_is_refused(token_ids: list[int], ratios: list[float]) -> None:
    """A target that is out of its mind cannot put a token into the answer that does not exist (C09)."""
    message = target_pb.VerdictRows(base_length=3, token_ids=token_ids, ratios=ratios)
    with pytest.raises(PayloadInvalid):
        verdict_from_proto(message, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize(
    "logprobs",
    [
        [],
        [{"token_logprob": 0.5}],
        [{"token_logprob": math.nan}],
        [{"draft_logprob": math.inf}],
        [{"top_ids": [1], "top_logprobs": []}],
        [{"top_ids": [VOCAB_SIZE], "top_logprobs": [-1.0]}],
        [{"top_ids": [1] * (MAX_LOGPROBS + 1), "top_logprobs": [-1.0] * (MAX_LOGPROBS + 1)}],
    ],
    ids=["fewer than rows", "positive", "no number", "infinite", "ids alone", "outside the vocabulary", "too many"],
)
def test_malformed_log_probabilities_are_refused(logprobs: list[dict[str, Any]]) -> None:
    """Of two rows the last is at fault, or is missing."""
    rows = [target_pb.RowLogprobs(token_logprob=-1.0), *(target_pb.RowLogprobs(**row) for row in logprobs)]
    with pytest.raises(PayloadInvalid):
        verdict_from_proto(target_pb.VerdictRows(base_length=3, token_ids=[1, 2], logprobs=rows), vocab_size=VOCAB_SIZE)


# ---- the servicers, which do the rest of the translation ------------------------------------------------------------


class TargetDoor:
    """A target's servicer; `submitted` is what it hands to the model thread."""

    def __init__(self, *, vocab_size: int = VOCAB_SIZE) -> None:
        self.submitted: list[TargetWork] = []
        self.servicer = TargetServicer(
            fake_info(fake_model(vocab_size)),
            submit=self.submitted.append,
            load=session_pb.LoadReport,
            metrics=ServiceMetrics(CollectorRegistry()),
            heartbeat_s=1000.0,
            orphan_grace_s=1000.0,
        )

    def serve(self, items: Sequence[target_pb.TargetCommand]) -> list[target_pb.TargetEvent]:
        """The events that one stream with these items gets; the first is a heartbeat, and left out."""
        return asyncio.run(served(self.servicer.streams, items))


class DrafterDoor:
    """A drafter's servicer; `submitted` is what it hands to the model thread."""

    def __init__(self, *, vocab_size: int = VOCAB_SIZE) -> None:
        self.submitted: list[DrafterWork] = []
        self.servicer = DrafterServicer(
            fake_info(fake_model(vocab_size)),
            submit=self.submitted.append,
            load=session_pb.LoadReport,
            metrics=ServiceMetrics(CollectorRegistry()),
            heartbeat_s=1000.0,
            orphan_grace_s=1000.0,
        )

    def serve(self, items: Sequence[drafter_pb.DrafterCommand]) -> list[drafter_pb.DrafterEvent]:
        """The events that one stream with these items gets; the first is a heartbeat, and left out."""
        return asyncio.run(served(self.servicer.streams, items))


async def served(streams: Any, items: Sequence[Any]) -> list[Any]:
    written: list[Any] = []

    async def write(events: list[Any]) -> None:
        written.extend(events)

    async def batches() -> AsyncIterator[Sequence[Any]]:
        yield items

    await streams.serve(batches(), write)
    assert written[0].WhichOneof("event") == "load"
    return written[1:]


def fake_model(vocab_size: int = VOCAB_SIZE) -> FakeModel:
    return FakeModel(hashed_logits(vocab_size), vocab_size=vocab_size, max_context=32)


def row_of(token_id: int) -> bytes:
    return pack_distribution(SparseDistribution.one_hot(token_id), vocab_size=VOCAB_SIZE)


def target_item(session_id: str = "bad", **command: Any) -> target_pb.TargetCommand:
    return target_pb.TargetCommand(session_id=session_id, epoch=3, **command)


def drafter_item(session_id: str = "bad", **command: Any) -> drafter_pb.DrafterCommand:
    return drafter_pb.DrafterCommand(session_id=session_id, epoch=3, **command)


def verify_of(**changes: Any) -> target_pb.VerifyDraft:
    valid: dict[str, Any] = {"base_length": 3, "draft_ids": [4, 5]}
    return target_pb.VerifyDraft(**(valid | changes))


def commit_of(**changes: Any) -> drafter_pb.Commit:
    return drafter_pb.Commit(**({"base_length": 3, "draft_length": 4, "credit": 8} | changes))


BAD_TARGET_ITEMS = {
    "no command": target_item(),
    "fewer distributions than tokens": target_item(verify=verify_of(draft_distributions=[row_of(4)])),
    "a distribution that is none": target_item(verify=verify_of(draft_distributions=[row_of(4), b"\xc1"])),
    "a draft that is too long": target_item(verify=verify_of(draft_ids=[1] * 1000)),
} | {
    f"{what} {outside}": item
    for outside in OUTSIDE
    for what, item in {
        "committed id": target_item(verify=verify_of(committed_ids=[1, outside])),
        "draft id": target_item(verify=verify_of(draft_ids=[1, outside])),
        "id in the opening": target_item(open=opening(committed_ids=[1, 2, outside])),
    }.items()
}

BAD_DRAFTER_ITEMS = {
    "no command": drafter_item(),
    "a draft that is too long": drafter_item(commit=commit_of(draft_length=65)),
    "too much credit": drafter_item(commit=commit_of(credit=MAX_CREDIT + 1)),
    "too many branches": drafter_item(commit=commit_of(branches=MAX_BRANCHES + 1)),
    "too many guesses": drafter_item(commit=commit_of(fan_out=MAX_FAN_OUT + 1)),
    "an acceptance above 1": drafter_item(commit=commit_of(acceptance=1.5)),
    "an acceptance below 0": drafter_item(commit=commit_of(acceptance=-0.5)),
    "an acceptance that is none": drafter_item(commit=commit_of(acceptance=math.nan)),
} | {
    f"{what} {outside}": item
    for outside in OUTSIDE
    for what, item in {
        "committed id": drafter_item(commit=commit_of(committed_ids=[1, outside])),
        "id in the opening": drafter_item(open=opening(committed_ids=[1, 2, outside])),
    }.items()
}


@pytest.mark.parametrize("item", BAD_TARGET_ITEMS.values(), ids=BAD_TARGET_ITEMS)
def test_a_bad_item_fails_its_session_at_the_target_and_no_other(item: target_pb.TargetCommand) -> None:
    """One typed error for it; the items around it are submitted, and the stream ends in order (C47)."""
    door = TargetDoor()
    good = [target_item("good", open=opening()), target_item("good", verify=verify_of())]
    (event,) = door.serve([good[0], item, good[1]])
    assert (event.session_id, event.epoch, event.failed.reason) == ("bad", 3, "PAYLOAD_INVALID")
    assert event.failed.message.endswith(".")
    assert [type(command) for command in door.submitted] == [Open, Judge]
    assert {getattr(command, "address", None) for command in door.submitted} == {Address(0, "good", 3)}


@pytest.mark.parametrize("item", BAD_DRAFTER_ITEMS.values(), ids=BAD_DRAFTER_ITEMS)
def test_a_bad_item_fails_its_session_at_the_drafter_and_no_other(item: drafter_pb.DrafterCommand) -> None:
    """The same on the other side (C47)."""
    door = DrafterDoor()
    good = [drafter_item("good", open=opening()), drafter_item("good", commit=commit_of())]
    (event,) = door.serve([good[0], item, good[1]])
    assert (event.session_id, event.epoch, event.failed.reason) == ("bad", 3, "PAYLOAD_INVALID")
    assert [type(command) for command in door.submitted] == [Open, Commit]
    assert {getattr(command, "address", None) for command in door.submitted} == {Address(0, "good", 3)}


@pytest.mark.parametrize("resend", [False, True])
def test_a_commit_reaches_the_drafter_as_it_was_sent(resend: bool) -> None:
    """Each field of it."""
    door = DrafterDoor()
    order: dict[str, Any] = {"draft_length": 4, "credit": 8, "branches": 3, "fan_out": 2, "acceptance": 0.5}
    assert door.serve([drafter_item("a", commit=commit_of(committed_ids=[1], resend=resend, **order))]) == []
    address = Address(0, "a", 3)
    assert door.submitted == [Commit(address=address, base_length=3, committed_ids=(1,), is_resend=resend, **order)]


@pytest.mark.parametrize("claimed", [VOCAB_SIZE + 1, 2**32 - 1])
def test_a_session_over_another_vocabulary_is_refused_by_the_target(claimed: int) -> None:
    """Its sampling parameters are checked against the claim, and would name rows that the model does not have."""
    door = TargetDoor()
    message = opening(vocab_size=claimed, sampling={"logit_bias": [{"token_id": VOCAB_SIZE, "bias": 1.0}]})
    (event,) = door.serve([target_item(open=message)])
    assert event.failed.reason == "PAYLOAD_INVALID"
    assert door.submitted == []


def test_a_vocabulary_beyond_all_models_is_refused_by_the_drafter() -> None:
    """It pads its rows to the target's vocabulary: four billion entries would take the memory of every session."""
    door = DrafterDoor()
    (event,) = door.serve([drafter_item(open=opening(vocab_size=2**32 - 1))])
    assert event.failed.reason == "PAYLOAD_INVALID"
    assert door.submitted == []


def test_a_drafter_takes_a_vocabulary_with_a_longer_tail() -> None:
    """Models of one tokenizer differ in unused rows at the end."""
    door = DrafterDoor()
    assert door.serve([drafter_item(open=opening(vocab_size=VOCAB_SIZE + 54))]) == []
    assert [type(command) for command in door.submitted] == [Open]


def test_a_method_without_a_vocabulary_takes_the_ids_of_the_target() -> None:
    """Prompt lookup needs no model; ids outside the target's vocabulary are refused all the same."""
    door = DrafterDoor(vocab_size=0)
    items = [
        drafter_item("good", open=opening(vocab_size=200, committed_ids=[150, 199])),
        drafter_item("good", commit=commit_of(base_length=3, committed_ids=[199])),
        drafter_item("bad", open=opening(vocab_size=200, committed_ids=[150, 200])),
    ]
    (event,) = door.serve(items)
    assert (event.session_id, event.failed.reason) == ("bad", "PAYLOAD_INVALID")
    assert [type(command) for command in door.submitted] == [Open, Commit]


def test_a_draft_reaches_the_verifier_as_it_was_sent() -> None:
    """Ids, rows, lengths; the caller's remaining time becomes a deadline, and 0 means none."""
    door = TargetDoor()
    verify = verify_of(committed_ids=[1, 2], draft_distributions=[row_of(4), row_of(5)], budget_ms=500)
    assert door.serve([target_item("a", verify=verify), target_item("b", verify=verify_of())]) == []
    first, second = door.submitted
    assert isinstance(first, Judge)
    assert isinstance(second, Judge)
    assert (first.draft.base_length, first.draft.committed_ids, first.draft.draft_ids) == (3, (1, 2), (4, 5))
    assert first.draft.distributions is not None
    assert [row.ids.tolist() for row in first.draft.distributions] == [[4], [5]]
    assert first.deadline_s == first.arrived_s + 0.5
    assert second.draft.distributions is None
    assert second.deadline_s is None


@pytest.mark.parametrize("error", [SessionNotFound("Open it again."), StaleEpoch("Let go."), QueueFull("Wait.")])
def test_an_event_for_a_peer_that_is_gone_is_dropped(error: PacelineError) -> None:
    """An ended stream means that the peer is gone; what still comes for it harms nobody."""
    target, drafter = TargetDoor(), DrafterDoor()
    target.serve([])
    drafter.serve([])
    target.servicer.on_events([Event(Address(0, "a", 1), error)])
    drafter.servicer.on_events([Event(Address(0, "a", 1), error)])


# ---- whatever comes over the wire, nothing but typed errors comes out -----------------------------------------------


def mostly(valid: st.SearchStrategy[Any], wild: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Wild values one by one among valid ones: with many at once everything would be refused at the door."""
    return st.integers(0, 11).flatmap(lambda number: wild if number == 7 else valid)


good_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3)
message_ids = mostly(good_ids, st.lists(st.integers(0, 9) | st.sampled_from(OUTSIDE), max_size=3))
wild_lengths = st.integers(0, 8) | st.sampled_from([31, 32, 33, 2**31, 2**32 - 1])
wild_sampling = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.5, 100.0, math.nan]),
        "top_k": st.sampled_from([0, 1, 2**32 - 1]),
        "top_p": st.sampled_from([1e-300, 0.5, 1.0, 2.0]),
        "min_p": st.sampled_from([0.0, 0.999, 1.0]),
        "repetition_penalty": st.sampled_from([1e-300, 1.5, 100.0]),
        "frequency_penalty": st.sampled_from([-100.0, 1.5]),
        "logit_bias": st.lists(
            st.fixed_dictionaries(
                {"token_id": st.integers(0, VOCAB_SIZE + 1), "bias": st.sampled_from([-1000.0, 1000.0, math.inf])}
            ),
            max_size=2,
        ),
        "banned_token_ids": st.lists(st.integers(0, VOCAB_SIZE + 1), max_size=12),
        "allowed_token_ids": st.fixed_dictionaries({"ids": st.lists(st.integers(0, VOCAB_SIZE), max_size=2)}),
        "min_tokens": st.sampled_from([0, 2, 2**32 - 1]),
        "stop_token_ids": st.lists(st.integers(0, VOCAB_SIZE), max_size=12),
    },
)
openings = st.builds(
    opening,
    committed_ids=mostly(
        st.just([1, 2, 3]) | st.lists(st.integers(0, 9), min_size=1, max_size=40),
        st.lists(st.integers(0, 9) | st.sampled_from(OUTSIDE), max_size=3),
    ),
    prompt_length=mostly(st.just(1), st.integers(0, 5)),
    rule=mostly(st.integers(1, 3), st.integers(0, 4)),
    vocab_size=mostly(st.just(VOCAB_SIZE), st.sampled_from([0, VOCAB_SIZE - 2, VOCAB_SIZE + 2])),
    sampling=mostly(st.just({}), wild_sampling),
)


def standing_on(message: Any, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Messages whose committed tokens mostly join on to the three of a valid opening."""
    joined = good_ids.map(lambda ids: {"base_length": 3 + len(ids), "committed_ids": ids})
    wild = st.fixed_dictionaries({"base_length": wild_lengths, "committed_ids": message_ids})
    return st.tuples(mostly(joined, wild), st.fixed_dictionaries(fields)).map(
        lambda parts: message(**parts[0], **parts[1])
    )


draft_rows = st.lists(
    mostly(st.integers(0, VOCAB_SIZE - 1).map(row_of), st.binary(max_size=20) | st.just(row_of(0)[:-1])), max_size=3
)
drafts = st.one_of(
    st.fixed_dictionaries({"draft_ids": message_ids}),
    good_ids.map(lambda ids: {"draft_ids": ids, "draft_distributions": [row_of(token_id) for token_id in ids]}),
    st.fixed_dictionaries({"draft_ids": message_ids, "draft_distributions": draft_rows}),
)
verifies = st.tuples(standing_on(verify_of, draft_ids=st.just([])), drafts).map(
    lambda parts: verify_of(base_length=parts[0].base_length, committed_ids=list(parts[0].committed_ids), **parts[1])
)
commits = standing_on(
    commit_of,
    draft_length=mostly(st.integers(0, 4), st.integers(0, 66)),
    credit=mostly(st.integers(0, 8), st.sampled_from([MAX_CREDIT, MAX_CREDIT + 1, 2**32 - 1])),
    branches=mostly(st.sampled_from([0, 0, 1, 3]), st.sampled_from([MAX_BRANCHES, MAX_BRANCHES + 1, 2**32 - 1])),
    fan_out=mostly(st.sampled_from([0, 1, 2]), st.sampled_from([MAX_FAN_OUT, 2**32 - 1])),
    acceptance=mostly(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([-1.0, 2.0, math.inf, math.nan])),
    resend=st.booleans(),
)


def streams(message: Any, **kinds: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """An opening, then items of each kind, closing and empty ones, for two sessions and epochs 1 to 3."""
    addresses = st.fixed_dictionaries(
        {"session_id": mostly(st.just("a"), st.just("b")), "epoch": mostly(st.just(1), st.integers(0, 3))}
    )
    commands: dict[str, Any] = {kind: st.fixed_dictionaries({kind: values}) for kind, values in kinds.items()}
    rare: Any = commands["open"] | st.just({"close": session_pb.CloseSession()}) | st.just({})
    asking = st.one_of(*(values for kind, values in commands.items() if kind != "open"))

    def items(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.tuples(addresses, values).map(lambda pair: message(**pair[0], **pair[1]))

    return st.tuples(items(commands["open"]), st.lists(items(mostly(asking, rare)), max_size=8)).map(
        lambda parts: [parts[0], *parts[1]]
    )


@settings(max_examples=120, deadline=None, derandomize=True)
@given(items=streams(target_pb.TargetCommand, open=openings, verify=verifies))
def test_no_item_breaks_the_target(items: list[target_pb.TargetCommand]) -> None:
    """120 drawn streams, well-formed and not, through the servicer and the model thread's worker: each item is
    submitted or answered by an error, each event has a session and is a verdict or a typed error."""
    door = TargetDoor()
    refusals = door.serve(items)
    assert len(refusals) + len(door.submitted) == len(items)
    sessions = SessionTable[TargetSession[FakeCache]](max_sessions=1, idle_ttl_s=10.0)
    scheduler = Scheduler(fake_model(), sessions, max_batch_tokens=256)
    for command in door.submitted:
        events = [*scheduler.accept(command), *(scheduler.step() if scheduler.has_work() else [])]
        assert all(event.address.session_id in "ab" for event in events)
        assert all(isinstance(event.outcome, PacelineError | VerdictRows) for event in events)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(items=streams(drafter_pb.DrafterCommand, open=openings, commit=commits))
def test_no_item_breaks_the_drafter(items: list[drafter_pb.DrafterCommand]) -> None:
    """120 drawn streams, through the servicer and the model thread's worker, and every draft back onto the wire."""
    door = DrafterDoor()
    refusals = door.serve(items)
    assert len(refusals) + len(door.submitted) == len(items)
    sessions = SessionTable[Entry[Any]](max_sessions=1, idle_ttl_s=10.0)
    drafter = Drafter(DraftModelMethod(fake_model(), distribution_entries=4), sessions)
    for command in door.submitted:
        events = list(drafter.accept(command))
        for _ in range(4):
            events += drafter.step() if drafter.has_work() else []
        door.servicer.on_events(events)
        assert all(event.address.session_id in "ab" for event in events)
