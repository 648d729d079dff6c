"""What is known of one round of one session once it is over, as values: when, how much, and why so.

It holds lengths and times alone: no text, no token ids. Knows nothing of gRPC, models or how it is shown.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.types import DraftOrigin, request_id_of


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyTime:
    """What a verdict took, in its parts: `2 * way_s + queue_s + step_s`. All in seconds."""

    way_s: float  # in each direction
    queue_s: float  # at the target
    step_s: float  # of its model


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One round of one session, as its orchestrator saw it.

    Moments are seconds of the orchestrator's monotonic clock (`time.perf_counter`); `began_s`, `draft_s`, `verdict_s` and
    `ended_s` come in this order. A round that the target was not asked for ahead begins when the client has taken what the
    last one gave, so what lies between `ended_s` and the next `began_s` is then the client's; the verdict of one that it was
    asked for ahead may wait for the client, between `verdict_s` and `ended_s`. Durations are those that target and drafter
    measured themselves.
    Lengths are in tokens.
    """

    # of which session
    session_id: str  # REQUEST, or REQUEST-CHOICE for all choices but the first
    number: int  # of the round in its session, from 0 on
    committed_length: int  # prompt and output, when the round began
    # when
    began_s: float  # the last verdict is handled, or the session open
    draft_s: float  # the draft is in hand, or there is none, and the target is asked
    verdict_s: float  # the target's answer is here
    ended_s: float  # its tokens are committed
    # the target, as it says itself
    queue_time_s: float = 0.0  # from arrival there to the start of the first step
    step_time_s: float = 0.0  # of the model steps that the draft took part in
    step_sessions: int = 0  # how many sessions the last of them took
    step_tokens: int = 0  # how many tokens it fed
    # the draft
    draft_origin: DraftOrigin = DraftOrigin.NONE
    draft_arrived_s: float | None = None  # moment when its first tokens came from a drafter; None: it has none of one
    draft_time_s: float = 0.0  # model time that the drafter spent on the proposal which they came with
    draft_steps: int = 0  # of the drafter's model
    available: int = 0  # drafted tokens that were here for the committed ones
    draft_length: int = 0  # of them verified
    kept_length: int = 0  # of them accepted
    emitted: int = 0  # tokens that the round added to the answer
    has_continuation: bool | None = None  # at a rejection: whether a draft behind the correction was here; else None
    # what the drafter had been told, and why this was verified
    ordered_draft_length: int = 0  # tokens of one draft; 0: none wanted
    credit: int = 0  # tokens beyond the committed ones that might be drafted
    branches: int = 0  # most lines besides the likeliest one
    fan_out: int = 0  # most guesses at one position
    reason: str = ""  # a word or two, and figures

    @property
    def request_id(self) -> str:
        """As `Started` reports it."""
        return request_id_of(self.session_id)

    @property
    def choice(self) -> int:
        """Which of the request's answers it belongs to, from 0 on."""
        return int(self.session_id.partition("-")[2] or 0)

    @property
    def draft_wait_s(self) -> float:
        return self.draft_s - self.began_s

    @property
    def commit_s(self) -> float:
        """What the orchestrator did with the verdict, and how long that waited for the client before."""
        return self.ended_s - self.verdict_s

    @property
    def round_s(self) -> float:
        return self.ended_s - self.began_s

    @property
    def verify_time(self) -> VerifyTime:
        """The target's own figures within the time that the orchestrator saw.

        The two machines have no clock in common, so what the target does not account for is shared equally by the way
        there and the way back.
        """
        whole_s = self.verdict_s - self.draft_s
        step_s = min(self.step_time_s, whole_s)
        queue_s = min(self.queue_time_s, whole_s - step_s)
        return VerifyTime(way_s=(whole_s - step_s - queue_s) / 2, queue_s=queue_s, step_s=step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRounds:
    """Rounds of one orchestrator, those that ended last at the end."""

    records: tuple[RoundRecord, ...]
    dropped: int = 0  # rounds since its start that made room for newer ones
    clock_offset_s: float = 0.0  # unix time = a record's moment + this
    is_emulated: bool = False  # a model's steps are held to a set time: no time in here is a measurement of a model
    orchestrator_id: str = ""  # in the control plane's words; "": there is none
