"""One request from admission to its last token: tokenize, plan, run a session for each choice, and say what happened.

The events are the values that clients see (`paceline.generation`). Knows nothing of gRPC.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Literal

import structlog

from orchestrator.admission import Admission
from orchestrator.controller import SessionController
from orchestrator.deployment import Deployment
from orchestrator.drafter_pool import DrafterPool
from orchestrator.drafter_watch import DrafterWatch
from orchestrator.drafting import DraftsWithFallback, Lookup, NoDrafts
from orchestrator.finish import Delivered, Detokenizer, EndConditions, NoText, OutputTracker
from orchestrator.fixed_planner import FixedPlanner
from orchestrator.loop import DraftSource, RoundResult, run_session
from orchestrator.remote_drafts import RemoteDrafts
from orchestrator.request_watch import OnRound, RequestWatch, SessionRounds
from orchestrator.round_trace import RoundTrace
from orchestrator.target_pool import TargetPool
from orchestrator.text import IncrementalDetokenizer, SpelledToken, Tokenizer
from paceline.errors import (
    ContextTooLong,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    PacelineError,
    TargetUnavailable,
    quoted,
)
from paceline.generation import (
    MAX_CHOICES,
    Delta,
    DeploymentStatus,
    Event,
    Finished,
    GenerationRequest,
    OrchestratorStatus,
    OutputOptions,
    Schedule,
    ServedModel,
    ServerInfo,
    SpeculationOptions,
    SpeculationUsage,
    Started,
    Usage,
)
from paceline.interleaving import interleaved
from paceline.logs import bind_session
from paceline.lookup.ngram import NgramIndex
from paceline.noise import Purpose, hashed
from paceline.rounds import TracedRounds
from paceline.settings import OrchestratorSettings
from paceline.telemetry import SpeculationMetrics
from paceline.types import (
    DraftOrigin,
    ModelInfo,
    SamplingParams,
    SessionSpec,
    SpeculationStats,
    TokenLogprobs,
    VerificationRule,
)
from paceline.version import installed_version

logger = structlog.get_logger(__name__)

# Seeds that we draw ourselves survive JSON readers that keep numbers as doubles.
_DRAWN_SEED_BITS = 53
_FIXED_FAN_OUT = 3  # with a fixed draft length, unless the request says otherwise
_LINES_A_GUESS = 3  # lines of drafted tokens for each guess at one position
_TEMPERATURE_BANDS = 2  # to a degree: sessions in one begin with what the others have seen
_MOST_CHARACTERS_A_TOKEN = 64  # of a whole prompt, far beyond any text; single tokens may be longer
_REPLAYED_AT_ONCE = 64  # tokens; between such runs other answers get their turn


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Everything decided about a request before its first round."""

    request_id: str
    specs: tuple[SessionSpec, ...]  # one a choice; they differ in session and seed alone
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]  # of an answer that is resumed, which is an only choice: what the caller has already
    ends: EndConditions
    output: OutputOptions
    schedule: Schedule
    draft_length: int | None  # tokens; None: decided round by round
    fan_out: int | None  # None: likewise
    deadline_s: float | None  # time.monotonic()
    on_round: OnRound | None  # hears of each round


class Generator:
    """Answers requests with the targets and, if there are any, the drafters; as many at once as it has places."""

    def __init__(
        self,
        settings: OrchestratorSettings,
        tokenizer: Tokenizer,
        *,
        target: TargetPool,
        drafter: DrafterPool | None,
        metrics: SpeculationMetrics,
        watch: RequestWatch,
    ) -> None:
        """`watch` is for whoever hands in requests (`door`)."""
        self._settings, self._tokenizer = settings, tokenizer
        self._target, self._drafter, self._metrics = target, drafter, metrics
        self.watch = watch
        self._drafter_watch = DrafterWatch(metrics)
        self._new_lookup = _fallback(settings)
        self._trace = RoundTrace()
        self._deployment = Deployment()
        self._admission = Admission(
            max_places=settings.max_sessions,
            max_waiting=settings.longest_queue,
            longest_wait_s=settings.queue_timeout_s,
        )

    def info(self) -> ServerInfo:
        target = self._target_info()
        if not self._target.is_connected:
            raise TargetUnavailable("No target answers; ask again in a moment.")
        return ServerInfo(
            target=target,
            drafter=self._drafter.info if self._drafter else None,
            speculation=self._speculation(),
            version=installed_version(),
            clock_unix_ms=time.time_ns() // 1_000_000,
        )

    def models(self) -> tuple[ServedModel, ...]:
        """What requests may name as their model, also while no target is connected."""
        target = self._target_info()
        served = ServedModel(
            name=target.model_id,
            target=target,
            drafter=self._drafter.info if self._drafter else None,
            speculation=self._speculation(),
            default_max_tokens=self._settings.default_max_tokens,
            max_prompt_tokens=self._longest_prompt(target),
            max_choices=min(MAX_CHOICES, self._settings.max_sessions),
        )
        return (served,)

    def spell(self, token_id: int) -> SpelledToken:
        """How a token is written by itself."""
        return self._tokenizer.spell(token_id)

    def _speculation(self) -> SpeculationOptions:
        """The defaults of this deployment."""
        return SpeculationOptions(
            rule=VerificationRule(self._settings.rule),
            draft_length=_unless_auto(self._settings.draft_length),
            schedule=Schedule(self._settings.schedule),
            fan_out=_unless_auto(self._settings.fan_out),
        )

    @property
    def running(self) -> int:
        """Answers; a request for n choices counts n times."""
        return self._admission.running

    @property
    def waiting(self) -> int:
        """Requests that wait to begin."""
        return self._admission.waiting

    @property
    def reader_timeout_s(self) -> float:
        """How long an answer waits for a caller that does not read; for the fronts, which alone see that."""
        return self._settings.stalled_reader_timeout_s

    @property
    def is_ready(self) -> bool:
        """Whether there is a target to answer with."""
        return self._target.is_connected

    def status(self) -> DeploymentStatus:
        pools = [self._target.status(), *([self._drafter.status()] if self._drafter else [])]
        return DeploymentStatus(
            pools=tuple(pools),
            orchestrator=OrchestratorStatus(
                running_answers=self.running,
                max_answers=self._settings.max_sessions,
                waiting_requests=self.waiting,
                stall_fraction=self._drafter.stall.fraction if self._drafter else None,
            ),
        )

    def round_trace(self, *, request_id: str, limit: int) -> Iterator[TracedRounds]:
        """The last rounds (0: all that are kept), of one request alone if its id is given, in pieces."""
        infos = (self._target.info, self._drafter.info if self._drafter else None)
        is_emulated = any(info is not None and info.emulated for info in infos)
        return (
            replace(piece, is_emulated=is_emulated) for piece in self._trace.read(request_id=request_id, limit=limit)
        )

    def scaling_figures(self) -> dict[str, float]:
        """What the pools are scaled by, of this orchestrator (`orchestrator.scaling`)."""
        if self._drafter is None:
            return {}
        figures = {"speculating_sessions": float(self._drafter.speculating_sessions)}
        stall_fraction = self._drafter.stall.fraction
        return figures if stall_fraction is None else figures | {"stall_fraction": stall_fraction}

    async def generate(
        self,
        request: GenerationRequest,
        *,
        timeout_s: float | None,
        share: str = "",
        on_round: OnRound | None = None,
    ) -> AsyncGenerator[Event]:
        """Stream one answer, or all choices of a request side by side; what fails one of them ends all.

        A request waits for its places in the part of the line of its `share`; till then it is only checked. `on_round` is
        told of each round with its session's id. Raises `PacelineError`: what was streamed before stays valid.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._check_model(request.model)
        self._check_sizes(request, self._target_info())
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._admission.places(request.n, share=share, deadline_s=deadline_s),
                aclosing(self._answer(self._plan(request, deadline_s, on_round))) as events,
            ):
                async for event in events:
                    yield event
        except TimeoutError:
            raise DeadlineExceeded("The time allowed for this answer is used up; allow more or ask for less.") from None

    async def _answer(self, plan: _Plan) -> AsyncGenerator[Event]:
        started_s = time.perf_counter()
        outputs = [OutputTracker(self._detokenizer(plan), plan.ends) for _ in plan.specs]
        for output in outputs:
            await _replay(plan.output_ids, output)
        yield Started(
            request_id=plan.request_id,
            seeds=tuple(spec.seed for spec in plan.specs),
            prompt_tokens=len(plan.prompt_ids),
        )
        choices = [self._choose(plan, choice, output, started_s) for choice, output in enumerate(outputs)]
        async with aclosing(interleaved(choices) if len(choices) > 1 else choices[0]) as events:
            async for event in events:
                yield event

    async def _choose(
        self, plan: _Plan, choice: int, output: OutputTracker, started_s: float
    ) -> AsyncGenerator[Delta | Finished]:
        """The tokens of one choice, and how it ended."""
        stats = SpeculationStats()
        if output.finish_reason is None:
            async with aclosing(self._continue(plan, choice, output, stats)) as deltas:
                async for delta in deltas:
                    yield delta
        self._metrics.record(stats)
        yield _finished(plan, choice, output, stats, elapsed_s=time.perf_counter() - started_s)

    async def _continue(
        self, plan: _Plan, choice: int, output: OutputTracker, stats: SpeculationStats
    ) -> AsyncGenerator[Delta]:
        """Run a session behind the tokens that are there, until the answer ends."""
        spec = plan.specs[choice]
        bind_session(spec.session_id)
        observer = self._trace.observer(spec.session_id)
        async with AsyncExitStack() as sessions:
            target = sessions.enter_context(
                self._target.session(
                    spec, verify_deadline_s=self._settings.verify_deadline_s, deadline_s=plan.deadline_s
                )
            )
            controller = self._controller(plan, spec)
            remote = self._open_drafts(plan, spec, sessions, controller)
            drafts = self._with_fallback(remote)
            committed_ids = plan.prompt_ids + plan.output_ids
            rounds = run_session(
                spec,
                committed_ids,
                controller or self._fixed_planner(plan, spec),
                target=target,
                drafts=drafts,
                output=output,
                stats=stats,
                observer=observer if plan.on_round is None else SessionRounds(spec.session_id, observer, plan.on_round),
            )
            async for result in rounds:
                delta = self._delta(result, plan.output, choice)
                if delta is not None:
                    yield delta
            if remote is not None:
                stats.num_received_draft_tokens = remote.received_tokens
            self._watch_drafters(remote, spec, stats)

    def _detokenizer(self, plan: _Plan) -> Detokenizer:
        """Makes no text where nobody would see it, and no stop string is looked for in it."""
        output = plan.output
        return IncrementalDetokenizer(self._tokenizer) if output.text or output.pieces or plan.ends.stop else NoText()

    def _delta(self, result: RoundResult[Delivered], output: OutputOptions, choice: int) -> Delta | None:
        """What the caller wants of a round; None where that is nothing."""
        delivery, text = result.delivery, result.delivery.text if output.text else ""
        if not (text or output.token_ids or output.pieces):
            return None
        return Delta(
            text=text,
            token_ids=delivery.token_ids if output.token_ids else (),
            origins=result.origins if output.token_ids else (),
            pieces=delivery.pieces if output.pieces else (),
            logprobs=tuple(map(self._spelled, result.logprobs)) if output.pieces else result.logprobs,
            choice=choice,
        )

    def _spelled(self, logprobs: TokenLogprobs) -> TokenLogprobs:
        """The same with the text of the most probable tokens."""
        return replace(logprobs, top_pieces=tuple(self._tokenizer.decode([token_id]) for token_id, _ in logprobs.top))

    def _open_drafts(
        self, plan: _Plan, spec: SessionSpec, sessions: AsyncExitStack, controller: SessionController | None
    ) -> RemoteDrafts | None:
        """The session's drafts from the drafter service; None where it decodes plainly."""
        if self._drafter is None or plan.schedule is Schedule.PLAIN:
            return None
        return sessions.enter_context(self._drafter.session(spec, meter=controller))

    def _controller(self, plan: _Plan, spec: SessionSpec) -> SessionController | None:
        """What decides round by round; None where the request, or the deployment, has decided."""
        if self._drafter is None or plan.draft_length is not None or plan.schedule is Schedule.PLAIN:
            return None
        drafters = frozenset(info.model_id for info in self._drafter.connected)
        fan_out = {} if plan.fan_out is None else {"max_fan_out": plan.fan_out}
        return SessionController(
            self._deployment,
            group=(drafters, plan.schedule, spec.effective_rule, round(_TEMPERATURE_BANDS * spec.sampling.temperature)),
            schedule=plan.schedule,
            rule=spec.effective_rule,
            **fan_out,
        )

    def _fixed_planner(self, plan: _Plan, spec: SessionSpec) -> FixedPlanner:
        fan_out = _FIXED_FAN_OUT if plan.fan_out is None else plan.fan_out
        return FixedPlanner(
            schedule=plan.schedule,
            draft_length=plan.draft_length or 0,
            rule=spec.effective_rule,
            patience_s=self._settings.draft_deadline_s,
            branches=_LINES_A_GUESS * fan_out,
            fan_out=fan_out,
        )

    def _with_fallback(self, remote: RemoteDrafts | None) -> DraftSource:
        if self._drafter is None or remote is None:
            return NoDrafts()
        return DraftsWithFallback(remote, self._new_lookup(), stall=self._drafter.stall)

    def _watch_drafters(self, remote: RemoteDrafts | None, spec: SessionSpec, stats: SpeculationStats) -> None:
        """Compare what the drafters were worth to an answer that has ended with what they should be."""
        if self._drafter is not None and remote is not None:
            connected = self._drafter.connected
            self._drafter_watch.record(spec.sampling, stats, drafters=remote.drafters, connected=connected)

    def _plan(self, request: GenerationRequest, deadline_s: float | None, on_round: OnRound | None) -> _Plan:
        target = self._target_info()
        prompt_ids = self._prompt_ids(request, target)
        stopping = request.stopping
        room = target.max_context - len(prompt_ids)
        max_tokens = self._settings.default_max_tokens if stopping.max_tokens is None else stopping.max_tokens
        if max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1.", parameter="max_tokens")
        end_token_ids = {*stopping.stop_token_ids, *request.sampling.stop_token_ids}
        if not stopping.ignore_eos:
            end_token_ids.update(target.eos_token_ids)
        # The target bans the end tokens until min_tokens are out, so it must know them.
        sampling = replace(request.sampling, stop_token_ids=tuple(sorted(end_token_ids)))
        sampling.check_vocabulary(target.vocab_size)
        _check_ids(request.output_ids, target, holder="output_ids hold", parameter="output_ids")
        options = request.speculation
        draft_length = (
            _unless_auto(self._settings.draft_length) if options.draft_length is None else options.draft_length
        )
        schedule = options.schedule or Schedule(self._settings.schedule)
        first = SessionSpec(
            session_id=_session_id(request.request_id),
            prompt_length=len(prompt_ids),
            sampling=sampling,
            seed=secrets.randbits(_DRAWN_SEED_BITS) if request.seed is None else request.seed,
            rule=self._rule(options.rule, sampling),
            vocab_size=target.vocab_size,
            logprobs=request.logprobs,
            tenant=request.tenant,
        )
        others = [
            replace(first, session_id=f"{first.session_id}-{choice}", seed=choice_seed(first.seed, choice))
            for choice in range(1, request.n)
        ]
        return _Plan(
            request_id=request.request_id or first.session_id,
            specs=(first, *others),
            prompt_ids=prompt_ids,
            output_ids=request.output_ids,
            ends=EndConditions(
                max_tokens=min(max_tokens, room),
                min_tokens=sampling.min_tokens,
                stop=stopping.stop,
                stop_token_ids=frozenset(end_token_ids),
            ),
            output=request.output,
            schedule=Schedule.PLAIN if draft_length == 0 or self._drafter is None else schedule,
            draft_length=draft_length,
            fan_out=_unless_auto(self._settings.fan_out) if options.fan_out is None else options.fan_out,
            deadline_s=deadline_s,
            on_round=on_round,
        )

    def _prompt_ids(self, request: GenerationRequest, target: ModelInfo) -> tuple[int, ...]:
        if request.token_ids is not None:
            ids = list(request.token_ids)
        elif request.messages is not None:
            ids = self._tokenizer.encode_chat([(message.role, message.content) for message in request.messages])
        else:
            ids = self._tokenizer.encode(request.text or "")
        if not ids:
            raise InvalidRequest("The prompt holds no token; give at least one.", parameter="prompt")
        _check_ids(ids, target, holder="The prompt holds", parameter="token_ids")
        longest = self._longest_prompt(target)
        if len(ids) > longest:
            raise ContextTooLong(f"The prompt has {len(ids)} tokens, but at most {longest} fit here; shorten it.")
        return tuple(ids)

    def _check_sizes(self, request: GenerationRequest, target: ModelInfo) -> None:
        """Refuse what is too long before any of it is looked at: tokenizing takes time from the answers that run."""
        limit, asked = self._settings.max_tokens_limit, request.stopping.max_tokens
        if asked is not None and asked > limit:
            raise InvalidRequest(f"max_tokens must be at most {limit} here, not {asked}.", parameter="max_tokens")
        if len(request.output_ids) > target.max_context:
            raise InvalidRequest(
                f"output_ids must hold at most {target.max_context} tokens, as the model's context does.",
                parameter="output_ids",
            )
        longest = self._longest_prompt(target)
        characters = len(request.text or "") + sum(len(message.content) for message in request.messages or ())
        if characters > longest * _MOST_CHARACTERS_A_TOKEN:
            raise ContextTooLong(
                f"The prompt has {characters} characters, and only {longest} tokens fit here; shorten it."
            )
        if len(request.token_ids or ()) > longest:
            raise ContextTooLong(
                f"The prompt has {len(request.token_ids or ())} tokens, but at most {longest} fit here; shorten it."
            )

    def _longest_prompt(self, target: ModelInfo) -> int:
        """In tokens."""
        return min(target.max_context - 1, self._settings.max_prompt_tokens)

    def _rule(self, asked: VerificationRule | None, sampling: SamplingParams) -> VerificationRule:
        rule = asked or VerificationRule(self._settings.rule)
        if sampling.is_greedy:
            return VerificationRule.GREEDY
        if rule is VerificationRule.GREEDY:
            raise InvalidRequest(
                "rule greedy needs temperature 0; ask for rejection or coupled above it.", parameter="rule"
            )
        return rule

    def _check_model(self, name: str) -> None:
        served = [model.name for model in self.models()]
        if name and name not in served:
            raise ModelNotFound(
                f"There is no model {quoted(name)} here; ask for {' or '.join(map(repr, served))}, or for none."
            )

    def _target_info(self) -> ModelInfo:
        """Who the targets are, also while none is connected: a session waits for one for a while."""
        try:
            self._target.raise_refusal()
        except PacelineError as error:
            # Not the caller's fault, nor its business: the sentence names addresses and files.
            raise TargetUnavailable("No target can be used here; `paceline status` says why.") from error
        if self._target.info is None:
            raise TargetUnavailable("No target answers; ask again in a moment.")
        return self._target.info


def _session_id(request_id: str) -> str:
    """Unlike that of any other session, also where callers, or orchestrators, have the same ids for their requests."""
    return f"{request_id}~{secrets.token_hex(6)}" if request_id else uuid.uuid4().hex


def _unless_auto(value: int | Literal["auto"]) -> int | None:
    return None if value == "auto" else value


def _fallback(settings: OrchestratorSettings) -> Callable[[], Lookup | None]:
    """What makes a session's own lookup, ready to be used."""
    match settings.fallback:
        case "none":
            return lambda: None
        case "ngram":
            return lambda: NgramIndex(
                prompt_lookup_min=settings.prompt_lookup_min, prompt_lookup_max=settings.prompt_lookup_max
            )
        case "suffix":
            # Only then is numba worth its time to load; and nothing may be compiled while answers run.
            from paceline.lookup import suffix, suffix_tree  # noqa: PLC0415

            suffix_tree.prepare()
            return suffix.SuffixIndex


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one choice of a request: of the first the request's own, of the others a mix of it and their number.

    A request for one answer with this seed gives the choice again. Mixed is as for every random number (`noise`), at
    position 0, where nothing is ever drawn, since a prompt has at least one token.
    """
    if choice == 0:
        return seed
    return hashed(seed, 0, Purpose.TARGET_SAMPLE, choice) >> (64 - _DRAWN_SEED_BITS)


def _check_ids(ids: Sequence[int], target: ModelInfo, *, holder: str, parameter: str) -> None:
    wrong = next((token_id for token_id in ids if not 0 <= token_id < target.vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(
            f"{holder} token id {wrong}, but the model's ids are 0 to {target.vocab_size - 1}.", parameter=parameter
        )


async def _replay(output_ids: Sequence[int], output: OutputTracker) -> None:
    """Bring `output` to where the caller is; what it delivers on the way, the caller has.

    Raises `InvalidRequest` if the ids go on behind the end of the answer.
    """
    for start in range(0, len(output_ids), _REPLAYED_AT_ONCE):
        output.accept(output_ids[start : start + _REPLAYED_AT_ONCE])
        await asyncio.sleep(0)
    if output.output_length < len(output_ids):
        raise InvalidRequest(
            f"output_ids hold {len(output_ids)} tokens, but the answer ends with number {output.output_length} of them; "
            "it is complete.",
            parameter="output_ids",
        )


def _finished(
    plan: _Plan, choice: int, output: OutputTracker, stats: SpeculationStats, *, elapsed_s: float
) -> Finished:
    assert output.finish_reason is not None, "the rounds end with the answer"
    return Finished(
        finish_reason=output.finish_reason,
        text=output.finish() if plan.output.text else "",
        usage=Usage(prompt_tokens=len(plan.prompt_ids), completion_tokens=output.output_length),
        resumed_tokens=len(plan.output_ids),
        speculation=SpeculationUsage(
            num_drafts=stats.num_drafts,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            num_accepted_tokens_per_pos=tuple(stats.accepted_per_position),
            num_draft_tokens_per_pos=tuple(stats.drafted_per_position),
            acceptance_rate=stats.acceptance_rate,
            mean_acceptance_length=stats.mean_acceptance_length,
            per_token_acceptance=stats.per_token_acceptance,
            rounds=stats.rounds,
            plain_rounds=stats.plain_rounds,
            fallback_rounds=stats.fallback_rounds,
            ahead_rounds=stats.rounds_by_origin[DraftOrigin.AHEAD],
            branch_rounds=stats.rounds_by_origin[DraftOrigin.BRANCH],
            redraft_rounds=stats.rounds_by_origin[DraftOrigin.REDRAFT],
            num_rejections=stats.num_rejections,
            branch_hits=stats.branch_hits,
            num_received_draft_tokens=stats.num_received_draft_tokens,
            target_busy_s=stats.target_busy_s,
            draft_wait_s=stats.draft_wait_s,
            elapsed_s=elapsed_s,
            rule=plan.specs[choice].rule,
            schedule=plan.schedule,
        ),
        choice=choice,
    )
