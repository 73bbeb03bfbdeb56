"""One launch of a kernel: everything that decides which code is compiled, and what it is run with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from quire.ops.triton.kernels.dependent import FLAG
from quire.ops.triton.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Sequence

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
"""Triton's names of the types that tensors have."""
ALIGNMENT = 16
"""Bytes of a pointer's alignment, or a factor of a number, that code is specialised for."""


class Parameter(Protocol):
    """What a kernel says about one of its parameters."""

    @property
    def name(self) -> str:
        """As written."""

    @property
    def do_not_specialize(self) -> bool:
        """Whether all values share one compiled kernel."""


class Kernel(Protocol):
    """What `triton.jit` makes of a function."""

    params: Sequence[Parameter]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """A function that launches so many programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A kernel, its grid and its arguments."""

    kernel: Kernel
    grid: tuple[int, ...]
    arguments: Mapping[str, object]
    """Tensors, numbers, and None for what is absent."""
    constants: Mapping[str, object] = field(default_factory=dict)
    """The arguments that are `tl.constexpr`: each set of values is compiled by itself."""
    num_warps: int = 4
    num_stages: int = 2

    @property
    def options(self) -> dict[str, int | bool]:
        """Options of compiler and launch.

        Products and sums are fused where the kernel says `tl.fma`, and nowhere else: kernels that share a formula then
        round it alike.
        """
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": False}

    def run(self) -> None:
        """Launch it. Mutates: what the kernel writes."""
        self.kernel[self.grid](**self.arguments, **self.constants, **self.options)

    def variant(self) -> Variant:
        """What `run` compiles, without a device: the tensors may be of the meta device."""
        signature, constants, aligned = dict[str, str](), dict(self.constants), set[str]()
        for parameter in self.kernel.params:
            name = parameter.name
            if name in self.constants or name == FLAG:
                continue
            value, is_specialised = self.arguments[name], not parameter.do_not_specialize
            if value is None or (is_specialised and isinstance(value, int) and value == 1):
                constants[name] = value
                continue
            signature[name] = _type_of(value)
            if is_specialised and _is_aligned(value):
                aligned.add(name)
        return Variant(
            kernel=self.kernel,
            signature=signature,
            constants=constants,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            enable_fp_fusion=False,
            aligned=frozenset(aligned),
        )


def _type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int)
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_aligned(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_meta or value.data_ptr() % ALIGNMENT == 0
    return isinstance(value, int) and value % ALIGNMENT == 0
