"""The pair of an emulated run: a tiny target, and how noisy copies of it must be for each acceptance asked for."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

from paceline.bench.plan import DrafterVariant

TINY = "tiny-model"


def write_pair(
    folder: Path, *, acceptances: Sequence[float], temperatures: Sequence[float]
) -> tuple[DrafterVariant, ...]:
    """Write the target into `folder`; gives a drafter for each acceptance at each temperature.

    In a process of its own, because whatever loads a model has no place in one whose answers are timed. Raises
    `ValueError` for an acceptance that noise cannot give.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as elsewhere:
        return elsewhere.submit(_write_pair, folder, tuple(acceptances), tuple(temperatures)).result()


def _write_pair(
    folder: Path, acceptances: tuple[float, ...], temperatures: tuple[float, ...]
) -> tuple[DrafterVariant, ...]:
    from paceline.engine.model import CausalModel  # noqa: PLC0415 - loads torch, in this process only
    from paceline.engine.tiny_model import noise_for, write_tiny_model  # noqa: PLC0415

    target = CausalModel.load(str(write_tiny_model(folder)), dtype="float32", device="cpu")
    return tuple(
        DrafterVariant(
            logit_noise=noise_for(target, acceptance=acceptance, temperature=temperature),
            acceptance=acceptance,
            temperature=temperature,
        )
        for acceptance, temperature in product(acceptances, temperatures)
    )
