"""How one weight of a checkpoint is quantised: what its tensors are called, and what is in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from quire.config.memory.weights.formats import native_format
from quire.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Header:
    """Of a tensor in a file."""

    dtype: str
    """As safetensors spells it."""
    shape: tuple[int, ...]
    read: Callable[[], tuple[int, ...]] | None = field(default=None, compare=False)
    """Its few numbers, of a tensor that says how another is stored."""


Headers = Callable[[str], Header | None]
"""By the name of a tensor; None for one that the checkpoint has not."""


class Packing(StrEnum):
    """How a weight's values lie in its tensors."""

    GPTQ = "GPTQ"
    AWQ = "AWQ"
    PACKED = "compressed-tensors pack-quantized"
    INT8 = "compressed-tensors int-quantized"
    FLOAT8 = "FP8"
    TORCHAO = "torchao"
    MXFP4 = "MXFP4"
    FLOAT4 = "MXFP4 or NVFP4"
    BITLINEAR = "BitLinear"
    AUTOBITLINEAR = "AutoBitLinear"
    ROUNDED = "AutoBitLinear, rounded while it is read"
    BNB_4BIT = "bitsandbytes 4 bits"
    BNB_8BIT = "bitsandbytes 8 bits"
    GGUF = "GGUF"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """A quantised weight [N, M] as its headers describe it."""

    name: str
    """What it would be called if it were not quantised."""
    packing: Packing
    tensors: Mapping[str, str]
    """Role -> name of a tensor."""
    shape: tuple[int, ...]
    """(N, M), or (X, N, M) for experts in one tensor."""
    bits: int
    group_size: int
    """Columns that share a scale; M where a row has one."""
    block_rows: int = 1
    """Rows that share the scales of a row, where they are of blocks."""
    has_zero_points: bool = False
    has_offsets: bool = False
    has_levels: bool = False
    has_nested_scales: bool = False
    has_order: bool = False
    is_float8: bool = False
    is_ternary: bool = False
    """With one scale for all; what such a weight multiplies is rounded a row at a time."""
    is_v1: bool = False
    """Zero points are stored less one, as the first version of GPTQ's format has them."""

    @property
    def kept_bits(self) -> int:
        """What a value takes once it is unpacked: its bits, but four for one bit, eight for seven, and four for two
        where a row that is not ternary has one scale."""
        if self.is_ternary or self.packing is Packing.GGUF:
            return self.bits
        two = 2 if self.group_size < self.shape[-1] else 4
        return {1: 4, 2: two, 7: 8}.get(self.bits, self.bits)

    @property
    def kept_as(self) -> str | None:
        """The name of the format that the native kernels keep it in; None where they have none."""
        if self.is_float8 and self.has_order:
            return None
        kept = native_format(
            bits=self.kept_bits,
            group_size=self.group_size,
            in_features=self.shape[-1],
            has_zero_points=self.has_zero_points,
            has_offsets=self.has_offsets,
            has_levels=self.has_levels,
            is_float8=self.is_float8,
            is_nested=self.has_nested_scales,
        )
        return None if kept is None else kept.name

    def __str__(self) -> str:
        traits = {
            "zero points": self.has_zero_points,
            "offsets": self.has_offsets,
            "levels": self.has_levels,
            "an order of inputs (desc_act)": self.has_order,
        }
        extras = " and ".join(name for name, is_there in traits.items() if is_there)
        group = "a scale for each row" if self.group_size == self.shape[-1] else f"groups of {self.group_size}"
        kind = "8-bit floats" if self.is_float8 else f"{self.bits} bits"
        return f"{self.packing} ({kind}, {group}{f', {extras}' if extras else ''})"


def refuse(name: str, problem: str) -> CheckpointError:
    """The error for one weight."""
    return CheckpointError(f"{name} {problem}; weights or config.json are damaged or belong to another model")
