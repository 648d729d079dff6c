"""Functions that numba compiles: at their first call, or read from the disk where they were compiled before.

Knows nothing of what they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import numba

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def compiled(
    *, fastmath: Collection[str] = ()
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """A decorator; what it makes runs without the interpreter's lock, and divides by zero as IEEE 754 says.

    `fastmath` names what LLVM may do to floating-point arithmetic, by its own flags; by default nothing, so that
    results are the same, to the bit, on every host.
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        compile_with = partial(numba.njit, nogil=True, error_model="numpy", fastmath=set(fastmath))
        try:
            result = compile_with(cache=True)(function)
        except RuntimeError:  # no directory to write to
            result = compile_with()(function)
        return cast(Callable[_Parameters, _Result], result)

    return decorate


def c_function(function: Callable[[Any], None]) -> Any:
    """The function as `void function(void *data)`; its `address` is what others can call."""
    compile_with = partial(numba.cfunc, numba.types.void(numba.types.voidptr))
    try:
        return compile_with(cache=True)(function)
    except RuntimeError:  # no directory to write to
        return compile_with()(function)
