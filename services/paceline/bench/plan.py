"""What is measured, as values: settings that are compared side by side, under conditions that are gone through in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from paceline.bench.prompts import BenchPrompt
from paceline.generation import GenerationRequest, Schedule, SpeculationOptions, StopConditions
from paceline.types import SamplingParams, VerificationRule

AUTO = "auto"

SettingT = TypeVar("SettingT")


@dataclass(frozen=True, slots=True)
class Setting:
    """How an answer is drafted; None leaves a choice to the controller."""

    schedule: Schedule
    draft_length: int | None = None  # tokens
    fan_out: int | None = None  # guesses at one position; 0: no branches

    def __str__(self) -> str:
        if self.schedule is Schedule.PLAIN:
            return self.schedule.value
        words = [self.schedule.value, AUTO if self.draft_length is None else str(self.draft_length)]
        if self.fan_out is not None:
            words.append(f"fan-out {self.fan_out}" if self.fan_out else "no branches")
        return " ".join(words)

    @property
    def options(self) -> SpeculationOptions:
        is_plain = self.schedule is Schedule.PLAIN
        draft_length = 0 if is_plain else self.draft_length
        return SpeculationOptions(schedule=self.schedule, draft_length=draft_length, fan_out=self.fan_out)


PLAIN = Setting(Schedule.PLAIN)


def settings_of(
    schedules: Sequence[Schedule], draft_lengths: Sequence[int | None], fan_outs: Sequence[int | None]
) -> tuple[Setting, ...]:
    """Plain decoding first, for it is what the others are compared with; only a pipeline has branches."""
    settings = [PLAIN]
    if Schedule.SEQUENTIAL in schedules:
        settings += [Setting(Schedule.SEQUENTIAL, length) for length in draft_lengths]
    if Schedule.PIPELINED in schedules:
        settings += [Setting(Schedule.PIPELINED, *pair) for pair in product(draft_lengths, fan_outs)]
    return tuple(settings)


def in_rotation(settings: Sequence[SettingT], turn: int) -> list[SettingT]:
    """All settings, beginning with another one each turn, so that what the machine does meanwhile happens to all."""
    first = turn % len(settings)
    return [*settings[first:], *settings[:first]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Of the drafter link, one way: in milliseconds or in plain target steps."""

    milliseconds: float = 0.0
    steps: float = 0.0

    def seconds(self, plain_step_s: float) -> float:
        return self.milliseconds / 1000 + self.steps * plain_step_s

    def __str__(self) -> str:
        return f"{self.steps:g} steps" if self.steps else f"{self.milliseconds:g} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterVariant:
    """A drafter made worse on purpose: noise on its logits, and the acceptance that was aimed at with it."""

    logit_noise: float = 0.0  # standard deviation
    acceptance: float | None = None  # None: whatever comes of it
    temperature: float | None = None  # the only one at which it has that acceptance; None: it serves all

    def __str__(self) -> str:
        """What tells it from others; empty for a drafter as it comes."""
        if self.acceptance is not None:
            return f"acceptance {self.acceptance:g}"
        return f"noise {self.logit_noise:g}" if self.logit_noise else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What all settings of a comparison share."""

    drafter: DrafterVariant
    temperature: float
    rule: VerificationRule
    delay: Delay
    concurrency: int  # answers at a time

    def __str__(self) -> str:
        words = [f"temperature {self.temperature:g}", self.rule.value, f"delay {self.delay}"]
        if self.concurrency > 1:
            words.append(f"{self.concurrency} at a time")
        return ", ".join(filter(None, (*words, str(self.drafter))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All of it."""

    prompts: tuple[BenchPrompt, ...]
    settings: tuple[Setting, ...]
    drafters: tuple[DrafterVariant, ...]
    temperatures: tuple[float, ...]
    rules: tuple[VerificationRule, ...]  # above temperature 0
    delays: tuple[Delay, ...]
    concurrencies: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool
    repeats: int

    def conditions(self, drafter: DrafterVariant) -> Iterator[Condition]:
        temperatures = self.temperatures if drafter.temperature is None else (drafter.temperature,)
        for delay, concurrency, temperature in product(self.delays, self.concurrencies, temperatures):
            for rule in self.rules if temperature else (VerificationRule.GREEDY,):
                yield Condition(
                    drafter=drafter, temperature=temperature, rule=rule, delay=delay, concurrency=concurrency
                )

    def waves(self, concurrency: int) -> list[tuple[BenchPrompt, ...]]:
        """Prompts that are answered at the same time, always as many as asked for, each prompt at least once."""
        count = -(-len(self.prompts) // concurrency)
        in_turn = [self.prompts[number % len(self.prompts)] for number in range(count * concurrency)]
        return [tuple(in_turn[start : start + concurrency]) for start in range(0, len(in_turn), concurrency)]

    def measured_waves(self) -> int:
        """How often a wave is run in all, over drafters, conditions, settings and repeats."""
        per_setting = sum(
            len(self.waves(condition.concurrency))
            for drafter in self.drafters
            for condition in self.conditions(drafter)
        )
        return per_setting * len(self.settings) * self.repeats


def request_for(
    prompt: BenchPrompt, plan: Plan, condition: Condition, setting: Setting, *, seed: int, tenant: str
) -> GenerationRequest:
    """One answer; under `greedy` and `coupled` its tokens are the same whatever the setting."""
    options = setting.options
    return GenerationRequest(
        messages=prompt.messages,
        sampling=SamplingParams(temperature=condition.temperature),
        stopping=StopConditions(max_tokens=plan.max_tokens, ignore_eos=plan.ignore_eos),
        speculation=SpeculationOptions(
            rule=condition.rule,
            schedule=options.schedule,
            draft_length=options.draft_length,
            fan_out=options.fan_out,
        ),
        seed=seed,
        tenant=tenant,
    )
