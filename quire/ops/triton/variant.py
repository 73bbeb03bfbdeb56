"""One way to compile a kernel, for checks that it compiles where no GPU is at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.ops.triton.kernels.dependent import FLAG
from quire.ops.triton.tiles import Tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A kernel with the types and constants that it is launched with."""

    kernel: Any
    """What `triton.jit` made."""
    signature: Mapping[str, str]
    """Parameter -> Triton's type, such as "*bf16", "i32" or "fp32"; all but those in `constants`."""
    constants: Mapping[str, object]
    """Parameter -> its value; None for a pointer that is not given."""
    num_warps: int = 4
    num_stages: int = 3
    enable_fp_fusion: bool = True
    """Whether the compiler may contract a product and a sum to one rounding."""
    targets: tuple[str, ...] | None = None
    """Those that it is launched on, as `sm_90`; None for all."""
    aligned: frozenset[str] | None = None
    """Parameters that are multiples of 16, as pointers mostly are; None for all pointers."""


def parameters(kernel: Any) -> list[str]:
    """Those that a launch names: all but the one that says how the kernel is launched."""
    return [name for name in kernel.arg_names if name != FLAG]


def variant_of(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, object],
    *,
    absent: Sequence[str] = (),
    tile: Tile | None = None,
) -> Variant:
    """A kernel whose parameters are of these types, "i32" where none is named, but for those that are not given."""
    fixed: dict[str, object] = dict.fromkeys(absent) | dict(constants)
    return Variant(
        kernel=kernel,
        signature={name: types.get(name, "i32") for name in parameters(kernel) if name not in fixed},
        constants=fixed,
        num_warps=4 if tile is None else tile.num_warps,
        num_stages=3 if tile is None else tile.num_stages,
    )
