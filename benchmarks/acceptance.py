"""Acceptance of a drafter by temperature and position on the held-out prompts, many answers at a time: no speeds."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import write_report
from benchmarks.workloads import load_workload
from paceline.bench.prompts import BenchPrompt
from paceline.client import GenerationClient
from paceline.generation import GenerationRequest, Schedule, SpeculationOptions, StopConditions
from paceline.local_stack import LocalStack, LocalStackSettings
from paceline.types import SamplingParams, SpeculationStats

PROMPTS = Path(__file__).parent / "prompts" / "held_out.jsonl"
AT_ONCE = 16


async def measure(
    endpoint: str, prompts: Sequence[BenchPrompt], temperature: float, *, draft_length: int
) -> SpeculationStats:
    """What was drafted and kept over one answer of up to 128 tokens to each prompt, added up."""
    total, places = SpeculationStats(), asyncio.Semaphore(AT_ONCE)
    total.drafted_per_position, total.accepted_per_position = [0] * draft_length, [0] * draft_length

    async def answer(number: int, prompt: BenchPrompt) -> None:
        request = GenerationRequest(
            messages=prompt.messages,
            sampling=SamplingParams(temperature=temperature),
            stopping=StopConditions(max_tokens=128),
            speculation=SpeculationOptions(draft_length=draft_length, schedule=Schedule.SEQUENTIAL),
            seed=number,
        )
        async with places:
            used = (await client.complete(request, timeout_s=600)).speculation
        total.num_drafts += used.num_drafts
        total.num_draft_tokens += used.num_draft_tokens
        total.num_accepted_tokens += used.num_accepted_tokens
        total.num_rejections += used.num_rejections
        for position, (drafted, kept) in enumerate(
            zip(used.num_draft_tokens_per_pos, used.num_accepted_tokens_per_pos, strict=True)
        ):
            total.drafted_per_position[position] += drafted
            total.accepted_per_position[position] += kept

    async with GenerationClient(endpoint) as client, asyncio.TaskGroup() as answers:
        for number, prompt in enumerate(prompts):
            answers.create_task(answer(number, prompt))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafter", default="smollm2-drafter")
    parser.add_argument("--draft-length", type=int, default=4)
    options = parser.parse_args()
    prompts = load_workload(PROMPTS).prompts
    figures = []
    with LocalStack(LocalStackSettings(drafter=options.drafter)) as stack:
        for temperature in (0.0, 0.7, 1.0):
            stats = asyncio.run(measure(stack.endpoint, prompts, temperature, draft_length=options.draft_length))
            by_position = [
                kept / drafted if drafted else 0.0
                for kept, drafted in zip(stats.accepted_per_position, stats.drafted_per_position, strict=True)
            ]
            figures.append(
                {
                    "temperature": temperature,
                    "drafts": stats.num_drafts,
                    "acceptance": round(stats.per_token_acceptance, 3),
                    "mean_acceptance_length": round(stats.mean_acceptance_length, 3),
                    "kept_up_to_position": [round(share, 3) for share in by_position],
                }
            )
            print(figures[-1], flush=True)
    write_report(
        "acceptance",
        {"drafter": options.drafter, "draft_length": options.draft_length, "prompts": len(prompts), "figures": figures},
    )


if __name__ == "__main__":
    main()
