"""torch's own threads: how many there are, and compiled functions on them.

torch computes on a pool of OpenMP threads, which wait busily between two of its operations. Other threads would have to
compete with those for the cores; so work that stands between torch's operations is handed to the same pool, through the
entry point that compilers use for a parallel region. Knows nothing of what is computed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch


def use_threads(threads: int) -> int:
    """Set the number of threads for arithmetic (0: one for each core this process may use) and return it."""
    chosen = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(chosen)
    return chosen


@lru_cache(maxsize=1)
def _parallel_region() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel(function, data, threads, flags)` of the runtime that torch itself is linked with; None if unknown.

    LLVM's and Intel's OpenMP runtimes offer it as well, on Linux.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        region = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    region.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    region.restype = None
    return region


def available_threads() -> int:
    """How many threads `run` can use: torch's, or one where its runtime cannot be reached."""
    return torch.get_num_threads() if _parallel_region() is not None else 1


def run(
    function: int,  # address of a C function `void function(void *data)`
    data: int,  # address of what it is given
    threads: int,
) -> None:
    """Call the function once on each of `threads` threads (of those available) at the same time, the caller's among them.

    Returns when all are done. The interpreter is free for others meanwhile, also for a call of theirs.
    """
    region = _parallel_region()
    assert region is not None, "more threads than are available"
    region(function, data, threads, 0)
