"""Another implementation's answers to the same prompts, in the same rotation, and what they come to."""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.bench.peers import ASSISTED, PLAIN, PROMPT_LOOKUP, AssistantSettings, PeerAnswer
from paceline.bench.plan import Condition, Plan, in_rotation
from paceline.bench.prompts import BenchPrompt
from paceline.generation import ChatMessage


@dataclass(frozen=True, slots=True)
class PeerSetting:
    """One way in which the peer decodes."""

    name: str
    kind: str
    assistant: AssistantSettings | None = None  # None: transformers' own defaults


# Assisted generation as it comes, and with drafts that suit a drafter which is not much cheaper than its target better:
# at fixed lengths, and from five tokens on as long as they are kept. The best of them is what the peer can do with this
# pair.
PEER_SETTINGS = (
    PeerSetting("plain", PLAIN),
    PeerSetting("assisted", ASSISTED),
    *(
        PeerSetting(
            f"assisted {length}", ASSISTED, AssistantSettings(num_assistant_tokens=length, confidence_threshold=0.0)
        )
        for length in (2, 4)
    ),
    PeerSetting(
        "assisted from 5",
        ASSISTED,
        AssistantSettings(num_assistant_tokens=5, schedule="heuristic", confidence_threshold=0.4),
    ),
    PeerSetting("prompt lookup", PROMPT_LOOKUP),
)


class PeerSource(Protocol):
    """A peer that answers (`peers.Peer`); blocks while it does."""

    def answer(
        self,
        kind: str,
        messages: Sequence[ChatMessage],
        *,
        max_tokens: int,
        ignore_eos: bool,
        temperature: float,
        assistant: AssistantSettings | None,
    ) -> PeerAnswer: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFigures:
    """What one way of decoding came to at the peer."""

    name: str
    tokens: int
    tokens_per_second: float  # behind the first tokens, on all cores of the run; the median repeat
    first_token_s: float  # median
    tokens_per_round: float


class PeerRun:
    """A peer's answers under one condition.

    It takes part where nothing but its own speed counts: one answer at a time, temperature 0, no delay.
    """

    def __init__(self, peer: PeerSource | None, condition: Condition) -> None:
        takes_part = condition.concurrency == 1 and not condition.temperature and not condition.delay.seconds(1.0)
        self._peer = peer if takes_part else None
        self._repeats: list[dict[PeerSetting, list[PeerAnswer]]] = []

    async def warm_up(self, prompts: Sequence[BenchPrompt]) -> None:
        """A short answer of each kind: what a process does only once is not timed."""
        if self._peer is not None:
            for setting in PEER_SETTINGS:
                await self._ask(setting, prompts[0], max_tokens=8, ignore_eos=True)

    def begin_repeat(self) -> None:
        self._repeats.append(defaultdict(list))

    async def answer(self, prompts: Sequence[BenchPrompt], plan: Plan, *, turn: int) -> None:
        """Each setting once for each prompt, beginning with another one each turn; does nothing without a peer."""
        if self._peer is None:
            return
        for setting in in_rotation(PEER_SETTINGS, turn):
            for prompt in prompts:
                answer = await self._ask(setting, prompt, max_tokens=plan.max_tokens, ignore_eos=plan.ignore_eos)
                self._repeats[-1][setting].append(answer)

    def figures(self) -> tuple[PeerFigures, ...]:
        if self._peer is None:
            return ()
        return tuple(_figures_of(setting, [answers[setting] for answers in self._repeats]) for setting in PEER_SETTINGS)

    async def _ask(self, setting: PeerSetting, prompt: BenchPrompt, *, max_tokens: int, ignore_eos: bool) -> PeerAnswer:
        assert self._peer is not None, "asked only where it takes part"
        return await asyncio.to_thread(
            self._peer.answer,
            setting.kind,
            prompt.messages,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            temperature=0.0,
            assistant=setting.assistant,
        )


def _figures_of(setting: PeerSetting, repeats: Sequence[Sequence[PeerAnswer]]) -> PeerFigures:
    answers = [answer for repeat in repeats for answer in repeat]
    tokens = sum(len(answer.token_ids) for answer in answers)
    return PeerFigures(
        name=setting.name,
        tokens=tokens,
        tokens_per_second=statistics.median(map(_tokens_per_second, repeats)),
        first_token_s=statistics.median(answer.first_token_s for answer in answers),
        tokens_per_round=tokens / sum(answer.rounds for answer in answers),
    )


def _tokens_per_second(answers: Sequence[PeerAnswer]) -> float:
    decode_s = sum(answer.decode_s for answer in answers)
    tokens = sum(len(answer.token_ids) - answer.first_length for answer in answers)
    return tokens / decode_s if decode_s else 0.0
