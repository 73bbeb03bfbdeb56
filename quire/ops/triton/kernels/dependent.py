"""Programmatic dependent launch: the programs of a kernel are set up while those of the one before it still run.

A step is hundreds of kernels of a few microseconds, and between two of them a GPU is idle: the last programs of the
first end, then the first ones of the second begin. From NVIDIA's Hopper on, a kernel can let the next one begin early,
which then waits, before it reads or writes anything, until the first is complete and all that it wrote can be seen.
Since each kernel waits for the one before it, what it finds is what it would find without this. It takes 2 % off a step
of one sequence (`benchmarks/gpu.md`).
See "Programmatic Dependent Launch and Synchronization" in the CUDA programming guide.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import triton
import triton.language as tl

from quire.ops.triton.hopper import is_hopper
from quire.ops.triton.kernels.arithmetic import INTERPRETED

FLAG = "PDL"
"""The parameter that says to a kernel whether it is launched so."""


@triton.jit
def await_inputs(PDL: tl.constexpr):
    """The first thing that each program of a dependent kernel does. The next kernel may be set up from here on: sooner,
    its programs would take room from those of this one."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def dependent(function: Callable[..., None] | None = None, **options: Any) -> Any:
    """`triton.jit` for a kernel that calls `await_inputs(PDL)` first, with `PDL: tl.constexpr = False` as its last
    parameter. `options` are those of `triton.jit`."""
    if function is None:
        return partial(dependent, **options)
    kernel: Any = triton.jit(function, **options)
    if not INTERPRETED.value:
        run = kernel.run
        kernel.run = lambda *args, **kwargs: run(*args, **kwargs, **_flags())
    return kernel


def _flags() -> dict[str, bool]:
    """What a launch says on this machine's GPU."""
    return {FLAG: True, "launch_pdl": True} if is_hopper() else {}
