"""Attention over paged blocks on a CPU, against torch's own over one session's tokens at a time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paceline.engine import cpu_attention, torch_threads
from paceline.engine.cpu_attention import RowPlan, attend, is_supported, plan_rows
from paceline.engine.torch_threads import available_threads, run

# Of the largest value, 1 to 4 here: float32 keeps 24 bits, and the sums are a few hundred long; bfloat16 rounds the
# result to 8 bits.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """What is compared with is too small to share, and torch's threads wait busily for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class Scene:
    """Sessions with their tokens scattered over shuffled blocks, as (tokens before, rows) each."""

    sessions: tuple[tuple[int, int], ...]
    block_size: int
    query: Tensor  # [tokens, heads, head_dim]
    keys: Tensor  # [num_slots, kv_heads, head_dim]
    values: Tensor  # [num_slots, kv_heads, head_dim]
    block_tables: np.ndarray[tuple[int, int], np.dtype[np.int32]]

    def plan(self, *chosen: int) -> RowPlan:
        """Of the chosen sessions; of all if none is named. Their rows stay where they are in the query."""
        picked = list(chosen or range(len(self.sessions)))
        context, rows = np.array(self.sessions).T
        first = np.cumsum(rows) - rows
        return plan_rows(
            self.block_tables[picked],
            first_row=first[picked],
            row_count=rows[picked],
            context_length=context[picked],
            block_size=self.block_size,
        )

    def rows_of(self, session: int) -> slice:
        first = sum(rows for _, rows in self.sessions[:session])
        return slice(first, first + self.sessions[session][1])

    def slots_of(self, session: int) -> Tensor:
        positions = np.arange(sum(self.sessions[session]))
        blocks = self.block_tables[session][positions // self.block_size].astype(np.int64)
        return torch.from_numpy(blocks * self.block_size + positions % self.block_size)


def make_scene(
    sessions: tuple[tuple[int, int], ...],
    *,
    heads: int = 9,
    kv_heads: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Scene:
    """Standard normal numbers; slots that no session owns, and unused entries of the tables, are poisonous."""
    generator = torch.Generator().manual_seed(1)
    needed = [-(-(context + rows) // block_size) for context, rows in sessions]
    order = np.random.default_rng(1).permutation(sum(needed) + 1).astype(np.int32)
    tables = np.full((len(sessions), max(needed) + 1), -1, np.int32)
    for session, count in enumerate(needed):
        begin = sum(needed[:session])
        tables[session, :count] = order[begin : begin + count]
    shape = (len(order) * block_size, kv_heads, head_dim)
    query = torch.randn((sum(rows for _, rows in sessions), heads, head_dim), generator=generator).to(dtype)
    keys, values = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    scene = Scene(sessions, block_size, query, keys, values, tables)
    for session in range(len(sessions)):
        slots = scene.slots_of(session)
        for cells in (keys, values):
            cells[slots] = torch.randn((len(slots), kv_heads, head_dim), generator=generator).to(dtype)
    return scene


def expected(scene: Scene, session: int, *, scale: float, window: int | None, softcap: float | None) -> Tensor:
    """What a session's rows get, in float64."""
    context, rows = scene.sessions[session]
    slots = scene.slots_of(session)
    query = scene.query[scene.rows_of(session)].double().transpose(0, 1)
    group = query.shape[0] // scene.keys.shape[1]
    keys, values = (
        cells[slots].double().transpose(0, 1).repeat_interleave(group, 0) for cells in (scene.keys, scene.values)
    )
    position = torch.arange(context, context + rows)[:, None]
    token = torch.arange(context + rows)
    seen = (token <= position) & (token > position - (window or context + rows))
    if softcap is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=scale).transpose(0, 1)
    scores = softcap * torch.tanh(query @ keys.transpose(1, 2) * scale / softcap)
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(0, 1)


def assert_as_expected(
    scene: Scene, *, scale: float = 0.125, window: int | None = None, softcap: float | None = None
) -> None:
    output = attend(
        scene.query, scene.keys, scene.values, scene.plan(), scale=scale, sliding_window=window, softcap=softcap
    )
    assert output.dtype == scene.query.dtype
    for session in range(len(scene.sessions)):
        right = expected(scene, session, scale=scale, window=window, softcap=softcap)
        error = (output[scene.rows_of(session)].double() - right).abs().max() / right.abs().max()
        assert error <= TOLERANCES[scene.query.dtype], (scene.sessions[session], float(error))


RAGGED = ((0, 1), (1, 1), (14, 1), (15, 1), (16, 1), (17, 3), (62, 2), (63, 1), (64, 1), (200, 9), (0, 17), (129, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(9, 3, 64), (4, 2, 8), (4, 4, 80), (8, 1, 96), (2, 2, 128), (2, 1, 256), (3, 1, 20)],
)
def test_equals_attention_over_one_session_at_a_time(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Any number of heads and dimensions, around the borders of blocks and tiles, up to 17 rows a session."""
    assert_as_expected(
        make_scene(RAGGED, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype), scale=head_dim**-0.5
    )


def test_every_number_of_rows() -> None:
    """Sessions of 1 to 17 rows, in one batch."""
    assert_as_expected(make_scene(tuple((23 * rows % 70, rows) for rows in range(1, 18))))


@pytest.mark.parametrize("block_size", [1, 5, 16, 32, 256])
def test_blocks_of_any_size(block_size: int) -> None:
    """A block may be smaller or larger than what is computed at once."""
    assert_as_expected(make_scene(RAGGED, block_size=block_size))


@pytest.mark.parametrize("window", [1, 3, 16, 50, 64, 100, 1000])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_sliding_window(window: int, softcap: float | None) -> None:
    """Rows see themselves and the tokens just before them, be the window smaller or larger than a block."""
    assert_as_expected(make_scene(RAGGED), window=window, softcap=softcap)


@pytest.mark.parametrize("softcap", [0.5, 50.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softcap(softcap: float, dtype: torch.dtype) -> None:
    """Scores are capped smoothly, before the mask."""
    assert_as_expected(make_scene(RAGGED, dtype=dtype), scale=0.25, softcap=softcap)


def test_bfloat16_is_the_rounded_float32_result() -> None:
    """All is computed in float32 and rounded once, as torch rounds."""
    narrow = make_scene(RAGGED, dtype=torch.bfloat16)
    output = attend(narrow.query, narrow.keys, narrow.values, narrow.plan(), scale=0.125)
    wide = attend(narrow.query.float(), narrow.keys.float(), narrow.values.float(), narrow.plan(), scale=0.125)
    assert torch.equal(output, wide.bfloat16())


@pytest.mark.parametrize("scale", [30.0, -30.0, 0.0])
def test_scores_of_any_size(scale: float) -> None:
    """Scores in the hundreds, of either sign, neither overflow nor vanish; the nearly one-hot result stays exact."""
    scene = make_scene(RAGGED)
    output = attend(scene.query, scene.keys, scene.values, scene.plan(), scale=scale)
    for session in range(len(RAGGED)):
        right = expected(scene, session, scale=scale, window=None, softcap=None)
        # A score of 1000 in float32 is off by up to 1e-4, and so is a weight, relatively.
        torch.testing.assert_close(output[scene.rows_of(session)].double(), right, rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_session_gets_the_same_bits_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    """Nothing of the other sessions, or of the order, leaks into the last bit."""
    scene = make_scene(RAGGED, dtype=dtype)
    together = attend(scene.query, scene.keys, scene.values, scene.plan(), scale=0.125)
    turned = attend(scene.query, scene.keys, scene.values, scene.plan(*reversed(range(len(RAGGED)))), scale=0.125)
    assert torch.equal(turned, together)
    for session in range(len(RAGGED)):
        alone = attend(scene.query, scene.keys, scene.values, scene.plan(session), scale=0.125)
        rows = scene.rows_of(session)
        assert torch.equal(alone[rows], together[rows])


@pytest.mark.parametrize("threads", [2, 3, 7, 100])
def test_same_bits_from_any_number_of_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads than there is work for are as good as one, be it a batch or a single session."""
    scene = make_scene(RAGGED)
    plans = [scene.plan(), scene.plan(9)]
    monkeypatch.setattr(cpu_attention, "_LEAST_SHARED_WORK", 0)
    monkeypatch.setattr(cpu_attention, "available_threads", lambda: 1)
    alone = [attend(scene.query, scene.keys, scene.values, plan, scale=0.125) for plan in plans]
    monkeypatch.setattr(cpu_attention, "available_threads", lambda: threads)
    split = [attend(scene.query, scene.keys, scene.values, plan, scale=0.125) for plan in plans]
    assert torch.equal(split[0], alone[0])
    assert torch.equal(split[1][scene.rows_of(9)], alone[1][scene.rows_of(9)])


def test_two_threads_attend_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models in one process do not disturb each other."""
    monkeypatch.setattr(cpu_attention, "_LEAST_SHARED_WORK", 0)
    monkeypatch.setattr(cpu_attention, "available_threads", lambda: 2)
    scenes = [make_scene(RAGGED), make_scene(RAGGED[::-1], dtype=torch.bfloat16)]
    right = [attend(scene.query, scene.keys, scene.values, scene.plan(), scale=0.125) for scene in scenes]
    same: list[bool] = []

    def work(index: int) -> None:
        scene = scenes[index]
        for _ in range(50):
            output = attend(scene.query, scene.keys, scene.values, scene.plan(), scale=0.125)
            same.append(torch.equal(output, right[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 100


@pytest.mark.parametrize(("least", "expected"), [(0, [3]), (10**12, [])])
def test_small_work_is_not_shared(least: int, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread is done before others have begun."""
    regions: list[int] = []

    def recorded(function: int, data: int, threads: int) -> None:
        regions.append(threads)
        run(function, data, threads)

    monkeypatch.setattr(cpu_attention, "_LEAST_SHARED_WORK", least)
    monkeypatch.setattr(cpu_attention, "available_threads", lambda: 3)
    monkeypatch.setattr(cpu_attention, "run", recorded)
    scene = make_scene(RAGGED)
    attend(scene.query, scene.keys, scene.values, scene.plan(), scale=0.125)
    assert regions == expected


def test_torchs_threads_can_be_reached_where_torch_computes_with_openmp() -> None:
    """Otherwise attention would use one core, and nothing but its speed would tell."""
    if "OpenMP" not in torch.__config__.parallel_info():
        pytest.skip("torch was built without OpenMP")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert available_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_one_thread_serves_where_torchs_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same result, on the caller's thread alone."""
    monkeypatch.setattr(torch_threads, "_parallel_region", lambda: None)
    monkeypatch.setattr(cpu_attention, "_LEAST_SHARED_WORK", 0)
    assert available_threads() == 1
    scene = make_scene(RAGGED)
    assert attend(scene.query, scene.keys, scene.values, scene.plan(), scale=0.125).isfinite().all()


def test_supported_types() -> None:
    """Others go elsewhere."""
    types = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    assert [is_supported(each) for each in types] == [True, True, False, False]


@pytest.mark.parametrize(
    "change",
    [
        {"block_tables": [0, 1]},
        {"row_count": [1, 1]},
        {"row_count": [-1]},
        {"context_length": [32]},
        {"block_size": 0},
        {"block_tables": [[0, -1]]},
    ],
)
def test_refuses_plans_that_cannot_be(change: dict[str, list[int] | int]) -> None:
    """Shapes, counts and tables are checked once a step: the kernel itself checks nothing."""
    good = {"block_tables": [[0, 1]], "first_row": [0], "row_count": [1], "context_length": [31], "block_size": 16}
    plan_rows(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"block|row"):
        plan_rows(**{**good, **change})  # type: ignore[arg-type]


def test_refuses_tensors_that_do_not_fit_the_plan_or_each_other() -> None:
    """No memory is read beyond its end."""
    scene = make_scene(((40, 2), (3, 1)), heads=4, kv_heads=2, head_dim=8)
    query, keys, values, plan = scene.query, scene.keys, scene.values, scene.plan()
    for wrong in [
        (query[:2], keys, values),
        (query, keys[:16], values[:16]),
        (query, keys, values[:, :1].contiguous()),
        (query[:, :3], keys, values),
        (query[..., :4], keys, values),
        (query.bfloat16(), keys, values),
        (query.double(), keys.double(), values.double()),
        (query, keys.transpose(0, 1).contiguous().transpose(0, 1), values),
    ]:
        with pytest.raises(ValueError, match=r"fit|share|types|contiguous|plan"):
            attend(*wrong, plan, scale=1.0)
    with pytest.raises(ValueError, match="sliding_window"):
        attend(query, keys, values, plan, scale=1.0, sliding_window=0)


def test_compiles_what_has_no_place_to_be_kept() -> None:
    """Where nothing can be written beside the module or at home, it is compiled for this process alone."""

    def double(number: int) -> int:
        return 2 * number

    nowhere = FunctionType(double.__code__.replace(co_filename="/nowhere/module.py"), {})
    assert cpu_attention._compile(nowhere)(21) == 42


@pytest.mark.slow
def test_starts_from_a_read_only_installation(tmp_path: Path) -> None:
    """A read-only installation of a user without a home costs start-up time, not the service."""
    copy = tmp_path / "installed.py"
    shutil.copy(cpu_attention.__file__, copy)
    # Files where the directories would be: even an administrator cannot write there.
    (tmp_path / "__pycache__").write_text("")
    (tmp_path / "home").write_text("")
    home = {"HOME": "home", "XDG_CACHE_HOME": "home", "IPYTHONDIR": "home", "NUMBA_CACHE_DIR": ""}
    program = (
        "import installed, numpy as np\n"
        "assert 'NullCache' in type(installed._whole_vectors._cache).__name__\n"
        "assert installed._whole_vectors(17) == 32\n"
    )
    environment = {**os.environ, **home, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
