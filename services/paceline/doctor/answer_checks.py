"""What is answered, and how: the model, a short answer plain and drafted, the way to the drafter. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from paceline.doctor.findings import Finding, failed, ok, skipped, warning
from paceline.doctor.looks import AnswerLook
from paceline.errors import DeadlineExceeded, Draining, PacelineError, QueueFull, RateLimited, TargetUnavailable
from paceline.generation import ServedModel
from paceline.rounds import RoundRecord
from paceline.types import DraftOrigin, ModelInfo

MODEL, ANSWER, DISTANCE = "model", "answer", "drafter distance"

DRAFT_LENGTH = 4
"""Tokens of a draft in the answer that is asked for."""

SLOW_S = 5.0
"""A first token that takes longer, to a prompt of a few tokens, is late by any measure."""

FAR_STEPS = float(DRAFT_LENGTH)
"""Plain steps of the target that a draft saves at most: whoever waits longer for one has lost time in any case."""

NEAR_S = 0.010
"""A shorter way is not held against anybody: a target whose steps are that short gains nothing by drafts anyhow."""

_EXACT_DTYPE = "float32"


def check_model(models: Sequence[ServedModel], *, wanted: str) -> Iterator[Finding]:
    """Whether the model that is wanted is served ("": any will do), and whether its figures mean anything."""
    names = " or ".join(repr(model.name) for model in models)
    chosen = next((model for model in models if wanted in ("", model.name)), None)
    if chosen is None:
        yield failed(
            MODEL, f"There is no model {wanted!r} here.", f"Ask for {names}, or start a target with {wanted!r}."
        )
        return
    emulated = [info.model_id for info in (chosen.target, chosen.drafter) if info is not None and info.emulated]
    if emulated:
        yield warning(
            MODEL,
            f"Every step of {' and '.join(emulated)} is held to a set time: no speed here is that of a model.",
            "Start it without --emulated-step-ms and its like, unless it is to stand for other hardware.",
        )
    drafter, context = chosen.drafter, chosen.target.max_context
    if drafter is not None and drafter.max_context < context:
        yield warning(
            MODEL,
            f"The drafter {drafter.model_id} takes {drafter.max_context} tokens, the target {context}: longer answers "
            "are decoded plainly.",
            "Choose a drafter with as long a context, or raise its --max-context, --memory-fraction or "
            "--kv-budget-tokens.",
        )
    if not emulated:
        dtype = f" in {chosen.target.dtype}" if chosen.target.dtype else ""
        yield ok(MODEL, f"{chosen.name} answers{dtype}, with a context of {context} tokens.")


def check_answers(plain: AnswerLook, drafted: AnswerLook, model: ServedModel) -> Iterator[Finding]:
    """Whether both have the same tokens, as they must at temperature 0, and how soon the first one came."""
    if plain.token_ids != drafted.token_ids:
        yield _differing(model.target)
    elif plain.first_token_s > SLOW_S:
        yield warning(
            ANSWER,
            f"The first token of a short answer took {plain.first_token_s:.1f} s.",
            "See by `paceline status` whether targets are full or many requests wait; add targets, or free their "
            "machines of other work.",
        )
    else:
        with_drafts = "plainly and with drafts" if model.drafter else "plainly"
        yield ok(
            ANSWER,
            f"{len(plain.token_ids)} tokens come {with_drafts}, the first after {plain.first_token_s * 1000:.0f} ms.",
        )


def _differing(target: ModelInfo) -> Finding:
    sentence = (
        f"With drafts another text comes than without, at temperature 0 and in {target.dtype or 'unknown'} arithmetic."
    )
    if target.dtype == _EXACT_DTYPE:
        return failed(ANSWER, sentence, "Decode plainly (--schedule plain) until it is mended, and please report it.")
    return warning(
        ANSWER,
        sentence,
        "Start the target with --dtype float32 and look again: a near tie of two tokens explains it, and is none "
        "there.",
    )


def check_refusal(error: PacelineError) -> Finding:
    """A short answer that was asked for and did not come."""
    remedies: dict[str, str] = {
        QueueFull.reason: "Try again later; if it stays so, add targets or raise --max-sessions.",
        RateLimited.reason: "Try again in a minute, or with a token that may ask for more.",
        TargetUnavailable.reason: "Start a target; `paceline status` shows those that are known.",
        Draining.reason: "Try again in a moment: another one takes its place.",
        DeadlineExceeded.reason: "See by `paceline status` how many requests wait, and whether a target hangs; "
        "--timeout allows more.",
    }
    remedy = remedies.get(
        error.reason, f"Look up {error.reason} in docs/errors.md, and look into the orchestrator's log."
    )
    return failed(ANSWER, f"A short answer failed: {error.message} [{error.reason}]", remedy)


def check_distance(drafted: AnswerLook, rounds: Sequence[RoundRecord], drafter: ModelInfo | None) -> Finding:
    """Whether the way from orchestrator to drafter is short enough for drafts that are waited for to pay.

    `rounds` are those of the drafted answer, each of which waited for a whole draft.
    """
    if drafter is None:
        return skipped(DISTANCE, "No drafter is connected.")
    waited = [(way_s, record.step_time_s) for record in rounds if (way_s := _way_s(record)) is not None]
    if not waited:
        usage = drafted.usage
        if drafter.has_model and usage.num_drafts == usage.fallback_rounds:
            return warning(
                DISTANCE,
                f"A drafter is connected ({drafter.model_id}), and no draft of it came in time for a short answer.",
                "Look into its log and at how busy it is (`paceline status`), or start it nearer; drafts later than "
                "--draft-deadline-s are dropped.",
            )
        return skipped(DISTANCE, "No draft was waited for, so nothing is known of the way to the drafter.")
    way_s, step_s = min(way_s for way_s, _ in waited), median(step_s for _, step_s in waited)
    figures = f"to the drafter and back takes {way_s * 1000:.0f} ms, a step of the target {step_s * 1000:.0f} ms"
    if way_s > max(NEAR_S, FAR_STEPS * step_s):
        return warning(
            DISTANCE,
            f"The way {figures}: a draft that is waited for comes dearer than all the steps it can save.",
            "Start a drafter nearer to the orchestrator, on its machine or in its zone, or decode plainly (--schedule "
            "plain).",
        )
    return ok(DISTANCE, f"The way {figures}.")


def _way_s(record: RoundRecord) -> float | None:
    """There and back, and what the drafter did besides computing; None for a round that did not wait for its draft."""
    if record.draft_origin is not DraftOrigin.REDRAFT or record.draft_arrived_s is None or not record.step_time_s:
        return None
    return max(0.0, record.draft_arrived_s - record.began_s - record.draft_time_s)
