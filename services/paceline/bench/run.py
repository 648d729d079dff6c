"""The measurement itself: one condition after another, all settings side by side within each, kept as they come."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from paceline.bench.figures import (
    ConditionResult,
    draft_step_seconds,
    result_of,
    rounds_of,
    step_samples,
)
from paceline.bench.measure import Wave, run_wave
from paceline.bench.peer_figures import PeerRun, PeerSource
from paceline.bench.plan import PLAIN, Condition, Delay, DrafterVariant, Plan, Setting, in_rotation, request_for
from paceline.bench.prompts import BenchPrompt
from paceline.bench.stack import BenchStack, Deployment
from paceline.bench.step_costs import StepSample, adjusted, step_costs
from paceline.client import GenerationClient
from paceline.generation import Schedule, ServerInfo
from paceline.types import VerificationRule

_WARM_UP_TOKENS = 8
_PROBE_TOKENS = 24
_PROBED_LENGTHS = (1, 2, 3, 4, 6, 8, 12)  # draft lengths, for the verify time of one session
_PROBED_TOGETHER = (2, 6)  # likewise, for that of many
_USUAL_LENGTH = 4  # for the drafter's steps alone
_SEEDS_A_REPEAT = 1000

ResultReport = Callable[[ConditionResult], None]
"""Called with what a condition has come to so far, after each of its repeats; the last call is the final one."""


class BenchProgress(Protocol):
    """Hears how it goes on."""

    def begin(self, description: str) -> None:
        """One of `Plan.measured_waves` begins."""

    def prepare(self, description: str) -> None:
        """Something begins that is not among them."""


class Bench:
    """Runs a plan against a stack."""

    def __init__(
        self,
        plan: Plan,
        stack: BenchStack,
        *,
        peer: PeerSource | None = None,
        on_result: ResultReport,
        progress: BenchProgress,
    ) -> None:
        self._plan, self._stack, self._peer = plan, stack, peer
        self._on_result, self._progress = on_result, progress
        self._samples: list[StepSample] = []  # of the target, which is the same all the time
        self.server: ServerInfo | None = None  # as the orchestrator describes it, once there is one

    async def run(self) -> None:
        """All of the plan. Raises `PacelineError` if a service fails; what was reported before stays valid."""
        for variant in self._plan.drafters:
            with self._stack.deployed(variant) as deployment:
                async with GenerationClient(deployment.endpoint) as client:
                    self.server = await client.server_info()
                    comparison = _Comparison(
                        self._plan, client, deployment, self._samples, peer=self._peer, progress=self._progress
                    )
                    await comparison.run(variant, self._on_result)


class _Comparison:
    """All conditions of one deployment."""

    def __init__(
        self,
        plan: Plan,
        client: GenerationClient,
        deployment: Deployment,
        samples: list[StepSample],
        *,
        peer: PeerSource | None,
        progress: BenchProgress,
    ) -> None:
        """`samples` are the target's steps so far, which are probed where there are none."""
        self._plan, self._client, self._deployment = plan, client, deployment
        self._samples, self._peer, self._progress = samples, peer, progress
        self._draft_steps_s: list[float] = []

    async def run(self, variant: DrafterVariant, on_result: ResultReport) -> None:
        self._deployment.link.delay(0.0)
        await self._probe(variant)
        for condition in self._plan.conditions(variant):
            delay_s = condition.delay.seconds(step_costs(self._samples).seconds(1, 1))
            self._deployment.link.delay(delay_s)
            await self._compare(condition, delay_s, on_result)

    # ---- what things cost

    async def _probe(self, variant: DrafterVariant) -> None:
        """Let both services read every prompt, then measure target steps by tokens and sessions, and drafter steps."""
        alone = self._greedy(variant, concurrency=1)
        for prompt in self._plan.prompts:
            self._progress.prepare(f"reading {prompt.id}")
            await self._wave((prompt,), alone, Setting(Schedule.SEQUENTIAL, 1), max_tokens=_WARM_UP_TOKENS)
        if self._samples:  # by the drafter before this one
            await self._probe_costs(alone, [Setting(Schedule.SEQUENTIAL, _USUAL_LENGTH)])
            return
        for concurrency in sorted({1, *self._plan.concurrencies}):
            lengths = _PROBED_LENGTHS if concurrency == 1 else _PROBED_TOGETHER
            settings = [PLAIN, *(Setting(Schedule.SEQUENTIAL, length) for length in lengths)]
            await self._probe_costs(self._greedy(variant, concurrency=concurrency), settings)

    async def _probe_costs(self, condition: Condition, settings: Sequence[Setting]) -> None:
        prompts = self._plan.waves(condition.concurrency)[0]
        for setting in settings:
            self._progress.prepare(f"costs of {setting}, {condition.concurrency} at a time")
            rounds = rounds_of([[await self._wave(prompts, condition, setting, max_tokens=_PROBE_TOKENS)]])
            self._samples += step_samples(rounds)
            if condition.concurrency == 1:
                self._draft_steps_s += draft_step_seconds(rounds)

    @staticmethod
    def _greedy(variant: DrafterVariant, *, concurrency: int) -> Condition:
        return Condition(
            drafter=variant,
            temperature=0.0,
            rule=VerificationRule.GREEDY,
            delay=Delay(),
            concurrency=concurrency,
        )

    # ---- one condition

    async def _compare(self, condition: Condition, delay_s: float, on_result: ResultReport) -> None:
        waves, usual = self._plan.waves(condition.concurrency), step_costs(self._samples)
        results: dict[Setting, list[list[Wave]]] = {setting: [] for setting in self._plan.settings}
        peers = PeerRun(self._peer, condition)
        await self._warm_up(condition, waves[0])
        await peers.warm_up(waves[0])
        seen: list[StepSample] = []
        for repeat in range(self._plan.repeats):
            peers.begin_repeat()
            of_repeat: dict[Setting, list[Wave]] = defaultdict(list)
            for number, prompts in enumerate(waves):
                for setting in in_rotation(self._plan.settings, number + repeat):
                    self._progress.begin(f"{condition}: {setting}")
                    of_repeat[setting].append(await self._wave(prompts, condition, setting, repeat=repeat))
                await peers.answer(prompts, self._plan, turn=number + repeat)
            for setting, measured in of_repeat.items():
                results[setting].append(measured)
                seen += step_samples(rounds_of([measured]))
            on_result(
                replace(
                    result_of(
                        condition,
                        results,
                        adjusted(usual, seen),
                        delay_s=delay_s,
                        usual_draft_step_s=statistics.median(self._draft_steps_s) if self._draft_steps_s else 0.0,
                    ),
                    peers=peers.figures(),
                )
            )

    async def _warm_up(self, condition: Condition, prompts: Sequence[BenchPrompt]) -> None:
        """The controller gets to know the delay and the load; the others have nothing to learn."""
        for setting in self._plan.settings:
            if setting != PLAIN and setting.draft_length is None:
                self._progress.prepare(f"{condition}: {setting}, warming up")
                await self._wave(prompts, condition, setting)

    async def _wave(
        self,
        prompts: Sequence[BenchPrompt],
        condition: Condition,
        setting: Setting,
        *,
        repeat: int = 0,
        max_tokens: int | None = None,
    ) -> Wave:
        """What one setting's answers teach a drafter is kept from the others, and each answer has its own seed."""
        plan = self._plan if max_tokens is None else replace(self._plan, max_tokens=max_tokens, ignore_eos=True)
        requests = [
            request_for(
                prompt,
                plan,
                condition,
                setting,
                seed=1 + number + _SEEDS_A_REPEAT * repeat,
                tenant=f"{condition} {setting} {repeat}",
            )
            for number, prompt in enumerate(prompts)
        ]
        return await run_wave(self._client, self._deployment, requests)
