"""What kernels keep quantised weights in: names, and bytes once packed. Knows no torch and no checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from quire.utils.math import cdiv, round_up

PANEL = 32
"""Output features that are stored together."""
GROUPS = (128, 64, 32, 16)
"""Input features that may share a scale."""
FLOAT8_GROUP = 128
NESTED_BLOCK = 256
"""Input features whose groups have nested scales under one float16."""
COMPACT_ISAS = ("avx512_bf16", "amx")
"""Instruction sets on which weights of bfloat16 take 12 bits where they can."""
FLOAT4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of e2m1 (OCP Microscaling Formats 1.0, section 5.3.3)."""


class Codes(StrEnum):
    """What a stored value is."""

    INT8 = "int8"
    INT6 = "int6"
    INT5 = "int5"
    INT4 = "int4"
    INT3 = "int3"
    INT2 = "int2"
    """-1 .. 2."""
    LEVELS = "levels"
    """Four bits that stand for one of sixteen values of int8."""
    FLOAT8 = "float8"


BITS = {
    Codes.INT8: 8,
    Codes.INT6: 6,
    Codes.INT5: 5,
    Codes.INT4: 4,
    Codes.INT3: 3,
    Codes.INT2: 2,
    Codes.LEVELS: 4,
    Codes.FLOAT8: 8,
}
"""Of a stored value."""
INTEGERS = {1: Codes.INT4, 2: Codes.INT2, 3: Codes.INT3, 4: Codes.INT4, 5: Codes.INT5, 6: Codes.INT6}
"""By the bits that values need; those of seven have eight."""
GROUPS_OF: Mapping[Codes, tuple[int, ...]] = {
    Codes.INT6: (32, 16),
    Codes.INT5: (32, 16),
    Codes.INT3: (128, 64, 32),
    Codes.INT2: (128, 64, 32),
}
"""With scales that are not nested, where they are not all of `GROUPS`."""
WHOLE_ROWS = (Codes.INT8, Codes.INT2)
"""Integers that may have one scale for an output feature."""


class Shift(StrEnum):
    """What a group has beside its scale."""

    NONE = ""
    ZERO_POINTS = "zeros"
    OFFSETS = "offsets"


NESTED = (
    (Codes.INT6, 16, Shift.NONE),
    (Codes.INT5, 32, Shift.OFFSETS),
    (Codes.INT4, 32, Shift.OFFSETS),
    (Codes.INT3, 16, Shift.NONE),
    (Codes.INT2, 16, Shift.OFFSETS),
    (Codes.LEVELS, 32, Shift.NONE),
)
"""Formats with nested scales: those of GGUF's blocks of 256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """One of the formats of `quire.ops.cpu.products.quantized`."""

    codes: Codes
    group: int
    """Input features that share a scale; 0 where an output feature has one."""
    shift: Shift = Shift.NONE
    is_nested: bool = False
    """Scales, and what offsets are made of, are codes of 8 bits under a float16 for each `NESTED_BLOCK`."""

    @property
    def name(self) -> str:
        """As `LinearWeight.format` has it: int8, int4_g128, int4_g32_zeros, float8_g128, int6_g16_nested, ..."""
        group, nested = f"g{self.group}" if self.group else "", "nested" if self.is_nested else ""
        return "_".join(part for part in (self.codes, group, self.shift, nested) if part)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Of a packed weight, with scales and what else its groups have, but without an order of inputs."""
        outputs = round_up(out_features, PANEL)
        depth = round_up(in_features, PANEL if self.codes is Codes.FLOAT8 else 64)
        values = outputs * depth // 8 * BITS[self.codes]
        return values + outputs * self._scale_bytes(in_features) + self._levels_bytes

    def _scale_bytes(self, in_features: int) -> int:
        """Of an output feature, with what else its groups have."""
        if self.is_nested:
            return cdiv(in_features, NESTED_BLOCK) * self.nested_bytes
        shifts = {Shift.NONE: 0, Shift.ZERO_POINTS: 1, Shift.OFFSETS: 2}[self.shift]
        has_floats = self.group == 0 or self.codes is Codes.FLOAT8
        return (cdiv(in_features, self.group) if self.group else 1) * ((4 if has_floats else 2) + shifts)

    @property
    def num_nested(self) -> int:
        """Codes that a group has under as many float16; 0 where scales are not nested."""
        return (2 if self.shift is Shift.OFFSETS else 1) if self.is_nested else 0

    @property
    def nested_bytes(self) -> int:
        """Of the scales of an output feature and `NESTED_BLOCK` input features."""
        return self.num_nested * (2 + NESTED_BLOCK // self.group)

    @property
    def _levels_bytes(self) -> int:
        return 16 if self.codes is Codes.LEVELS else 0

    def num_bytes_on_gpu(self, out_features: int, in_features: int) -> int:
        """As `num_bytes`, of a weight that the Triton kernels packed: five and six bits take a byte, scales four.

        Two and three bits take four. Nested scales become such scales.
        """
        has_halves = self.codes in (Codes.INT4, Codes.INT3, Codes.INT2, Codes.LEVELS)
        step = 2 * gpu_step(self.group)
        values = out_features * (round_up(in_features, step) // 2 if has_halves else in_features)
        groups = out_features * (cdiv(in_features, self.group) if self.group else 1)
        shifts = {Shift.NONE: 0, Shift.ZERO_POINTS: 1, Shift.OFFSETS: 4}[self.shift]
        return values + groups * (4 + shifts) + self._levels_bytes


def gpu_step(group: int) -> int:
    """Input features that a step of the Triton kernels' sums takes: those of one group at most."""
    return 16 if group % 32 else 32 if group % 64 else 64


def native_format(
    *,
    bits: int,
    group_size: int,
    in_features: int,
    has_zero_points: bool = False,
    has_offsets: bool = False,
    has_levels: bool = False,
    is_float8: bool = False,
    is_nested: bool = False,
) -> WeightFormat | None:
    """The format that the native kernels keep such a weight in; None where they have none.

    A group may become several smaller ones with the same scale. 8-bit floats in small groups become integers. Nested
    scales become plain ones where inputs are not whole blocks. Two and three bits take four in groups that they lack.
    bits, group_size: as in `ops.operands.QuantizedRows`.
    """
    has_row_scale = group_size >= in_features
    shift = Shift.ZERO_POINTS if has_zero_points else Shift.OFFSETS if has_offsets else Shift.NONE
    if is_float8 and (shift is not Shift.NONE or has_levels):
        return None
    if is_float8 and (has_row_scale or group_size % FLOAT8_GROUP == 0):
        return WeightFormat(codes=Codes.FLOAT8, group=0 if has_row_scale else FLOAT8_GROUP)
    if not 1 <= bits <= 8 or (has_levels and bits > 4) or (has_zero_points and (has_offsets or has_levels)):
        return None
    codes = Codes.LEVELS if has_levels else INTEGERS.get(bits, Codes.INT8)
    if codes in WHOLE_ROWS and has_row_scale and shift is Shift.NONE:
        return WeightFormat(codes=codes, group=0)
    nested = WeightFormat(codes=codes, group=group_size, shift=shift, is_nested=True)
    if is_nested and in_features % NESTED_BLOCK == 0 and nested.name in BY_NAME:
        return nested
    group = _native_group(codes, group_size, in_features)
    if group is None and codes in (Codes.INT2, Codes.INT3):
        codes, group = Codes.INT4, _native_group(Codes.INT4, group_size, in_features)
    return None if group is None else WeightFormat(codes=codes, group=group, shift=shift)


def _native_group(codes: Codes, group_size: int, in_features: int) -> int | None:
    """The groups that `codes` have in place of those of `group_size`; None where there are none."""
    groups = GROUPS_OF.get(codes, GROUPS)
    same = next((group for group in (group_size, *groups) if group in groups and group_size % group == 0), None)
    return next(iter(groups), None) if same is None and group_size >= in_features else same


def parse(name: str) -> WeightFormat | None:
    """The format of this name; None where there is none."""
    return BY_NAME.get(name)


BY_NAME = {
    format.name: format
    for format in (
        *(WeightFormat(codes=codes, group=0) for codes in WHOLE_ROWS),
        WeightFormat(codes=Codes.FLOAT8, group=0),
        WeightFormat(codes=Codes.FLOAT8, group=FLOAT8_GROUP),
        *(
            WeightFormat(codes=codes, group=group, shift=shift)
            for codes in (Codes.INT8, *INTEGERS.values(), Codes.LEVELS)
            for group in GROUPS_OF.get(codes, GROUPS)
            for shift in Shift
            if not (codes is Codes.LEVELS and shift is Shift.ZERO_POINTS)
        ),
        *(WeightFormat(codes=codes, group=group, shift=shift, is_nested=True) for codes, group, shift in NESTED),
    )
}
