"""Blocks of GGUF's quantised types as `QuantizedRows`. Their layouts: ggml, src/ggml-common.h and ggml-quants.c.

What the native kernels do with blocks is specified here. A block is read as a few whole-tensor operations over its
bytes, some thousand rows of them at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from quire.config.gguf.tensor_types import BY_NAME, QUANTIZED
from quire.config.memory.weights.formats import FLOAT4_LEVELS, NESTED_BLOCK
from quire.ops.contracts.operands import BlockRows, NestedScales, QuantizedRows

CHUNK_BYTES = 4 << 20
"""Blocks that are read at a time: what lies between them and the result takes a few times as much."""
NIBBLES = (0, 4)
PAIRS = (0, 2, 4, 6)
NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of IQ4_NL and IQ4_XS stand for."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What blocks hold. Shapes: n blocks of S elements in groups of G."""

    values: Tensor
    """[n, S] int8 or uint8"""
    scales: Tensor
    """[n, S / G] float32"""
    offsets: Tensor | None = None
    """[n, S / G] float32"""
    nested: tuple[NestedScales, ...] = ()


def unpack_blocks(stored: BlockRows) -> QuantizedRows:
    """The rows with a byte for each value."""
    type_name, rows = stored.type_name, stored.blocks
    kind, block, read = QUANTIZED[type_name], BY_NAME[type_name], PARTS[type_name]
    num_rows, row_bytes = rows.shape
    columns = row_bytes // block.block_bytes * block.block_size
    values = torch.empty(num_rows, columns, dtype=torch.int8, device=rows.device)
    scales = torch.empty(num_rows, columns // kind.group_size, device=rows.device)
    offsets = torch.empty_like(scales) if kind.has_offsets else None
    nested = tuple(
        NestedScales(
            codes=torch.empty_like(scales, dtype=torch.int8),
            units=scales.new_empty(num_rows, columns // NESTED_BLOCK),
        )
        for _ in range((1 + kind.has_offsets) * kind.has_nested_scales)
    )
    step = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, num_rows, step):
        chunk = slice(start, start + step)
        parts = read(rows[chunk].contiguous().view(-1, block.block_bytes))
        values[chunk] = parts.values.view(-1, columns)
        scales[chunk] = parts.scales.view(-1, scales.shape[1])
        if offsets is not None and parts.offsets is not None:
            offsets[chunk] = parts.offsets.view(-1, scales.shape[1])
        for whole, part in zip(nested, parts.nested, strict=True):
            whole.codes[chunk] = part.codes.view(-1, scales.shape[1])
            whole.units[chunk] = part.units.view(-1, whole.units.shape[1])
    return QuantizedRows(
        values=values,
        bits=kind.bits,
        scales=scales,
        group_size=kind.group_size,
        offsets=offsets,
        levels=LEVELS.get(type_name),
        nested=nested,
    )


def _cut(blocks: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """The fields of blocks, in order. Shapes: blocks [n, bytes] -> [n, size] each."""
    return torch.split(blocks, list(sizes), dim=1)


def _halves(field: Tensor) -> Tensor:
    """Numbers of two bytes. Shapes: field [n, 2k] uint8 -> [n, k] float32."""
    return field.contiguous().view(torch.float16).to(torch.float32)


def _unpacked(field: Tensor, shifts: tuple[int, ...], width: int, mask: int) -> Tensor:
    """Codes of a few bits: of each run of `width` bytes first those of the lowest bits, then those of the next.

    Shapes: field [n, k] uint8 -> [n, k * len(shifts)] uint8.
    """
    runs = field.reshape(field.shape[0], -1, width)
    # One shift at a time: torch shifts by a number several times as fast as by a tensor that it broadcasts.
    return torch.stack([(runs >> shift) & mask for shift in shifts], dim=2).flatten(1)


def _signed(codes: Tensor, zero: int) -> Tensor:
    """Shapes: codes [n, k] uint8 -> [n, k] int8."""
    return codes.to(torch.int8) - zero


def _fifth_bits(field: Tensor) -> Tensor:
    """A bit for each element, in order, as 16. Shapes: field [n, 4] uint8 -> [n, 32] uint8."""
    return _unpacked(field, tuple(range(8)), 1, 1) << 4


def _nested(values: Tensor, zero: int, *fields: tuple[Tensor, Tensor]) -> Parts:
    """Of blocks whose groups have codes under a number of two bytes: (number, codes) of scales, and of least values.

    zero: what was taken off values, the least of which is zero in the file.
    """
    nested = tuple(NestedScales(codes=codes.to(torch.int8), units=_halves(unit)) for unit, codes in fields)
    scales, *least = [part.numbers(values.shape[1] // part.codes.shape[1]) for part in nested]
    return Parts(values, scales, zero * scales - least[0] if least else None, nested)


def _q4_0(blocks: Tensor) -> Parts:
    scale, codes = _cut(blocks, 2, 16)
    return Parts(_signed(_unpacked(codes, NIBBLES, 16, 15), 8), _halves(scale))


def _q4_1(blocks: Tensor) -> Parts:
    scale, least, codes = _cut(blocks, 2, 2, 16)
    scales = _halves(scale)
    return Parts(_signed(_unpacked(codes, NIBBLES, 16, 15), 8), scales, _halves(least) + 8 * scales)


def _q5_0(blocks: Tensor) -> Parts:
    scale, high, codes = _cut(blocks, 2, 4, 16)
    return Parts(_signed(_unpacked(codes, NIBBLES, 16, 15) | _fifth_bits(high), 16), _halves(scale))


def _q5_1(blocks: Tensor) -> Parts:
    scale, least, high, codes = _cut(blocks, 2, 2, 4, 16)
    scales = _halves(scale)
    values = _signed(_unpacked(codes, NIBBLES, 16, 15) | _fifth_bits(high), 16)
    return Parts(values, scales, _halves(least) + 16 * scales)


def _q8_0(blocks: Tensor) -> Parts:
    scale, values = _cut(blocks, 2, 32)
    return Parts(values.contiguous().view(torch.int8), _halves(scale))


def _q2_k(blocks: Tensor) -> Parts:
    both, codes, scale, least = _cut(blocks, 16, 64, 2, 2)
    values = _signed(_unpacked(codes, PAIRS, 32, 3), 1)
    return _nested(values, 1, (scale, both & 15), (least, both >> 4))


def _q3_k(blocks: Tensor) -> Parts:
    high, codes, packed, scale = _cut(blocks, 32, 64, 12, 2)
    values = _unpacked(codes, PAIRS, 32, 3) | (_unpacked(high, tuple(range(8)), 32, 1) << 2)
    low, rest = _cut(packed, 8, 4)
    scales = _unpacked(low, NIBBLES, 8, 15) | (_unpacked(rest, PAIRS, 4, 3) << 4)
    return _nested(_signed(values, 4), 4, (scale, _signed(scales, 32)))


def _scales_and_mins(field: Tensor) -> tuple[Tensor, Tensor]:
    """Of Q4_K and Q5_K: numbers of six bits. Shapes: field [n, 12] uint8 -> [n, 8] each.

    The first four of each have a byte of their own. The others have their low bits in the last four bytes and their
    high ones above the first four.
    """
    first, second, last = _cut(field, 4, 4, 4)
    scales = torch.cat([first & 63, (last & 15) | ((first >> 2) & 48)], dim=1)
    mins = torch.cat([second & 63, (last >> 4) | ((second >> 2) & 48)], dim=1)
    return scales, mins


def _q4_k(blocks: Tensor) -> Parts:
    scale, least, packed, codes = _cut(blocks, 2, 2, 12, 128)
    scales, mins = _scales_and_mins(packed)
    return _nested(_signed(_unpacked(codes, NIBBLES, 32, 15), 8), 8, (scale, scales), (least, mins))


def _q5_k(blocks: Tensor) -> Parts:
    scale, least, packed, high, codes = _cut(blocks, 2, 2, 12, 32, 128)
    scales, mins = _scales_and_mins(packed)
    values = _unpacked(codes, NIBBLES, 32, 15) | (_unpacked(high, tuple(range(8)), 32, 1) << 4)
    return _nested(_signed(values, 16), 16, (scale, scales), (least, mins))


def _q6_k(blocks: Tensor) -> Parts:
    low, high, packed, scale = _cut(blocks, 128, 64, 16, 2)
    values = _unpacked(low, NIBBLES, 64, 15) | (_unpacked(high, PAIRS, 32, 3) << 4)
    return _nested(_signed(values, 32), 32, (scale, packed.contiguous().view(torch.int8)))


def _iq4_nl(blocks: Tensor) -> Parts:
    scale, codes = _cut(blocks, 2, 16)
    return Parts(_unpacked(codes, NIBBLES, 16, 15), _halves(scale))


def _iq4_xs(blocks: Tensor) -> Parts:
    scale, high, low, codes = _cut(blocks, 2, 2, 4, 128)
    scales = _unpacked(low, NIBBLES, 1, 15) | (_unpacked(high, PAIRS, 1, 3) << 4)
    return _nested(_unpacked(codes, NIBBLES, 16, 15), 0, (scale, _signed(scales, 32)))


def _mxfp4(blocks: Tensor) -> Parts:
    """Scales are powers of two (E8M0), 2 ** (exponent - 127), here halved because of `FLOAT4_LEVELS`.

    Those of exponents 0 and 1 are subnormal.
    """
    exponent, codes = _cut(blocks, 1, 16)
    exponent = exponent.to(torch.int32)
    bits = torch.where(exponent < 2, torch.tensor(1 << 21) << exponent, (exponent - 1) << 23)
    return Parts(_unpacked(codes, NIBBLES, 16, 15), bits.to(torch.int32).view(torch.float32))


def _tq1_0(blocks: Tensor) -> Parts:
    """Bytes are fractions of 256, whose digits in base 3 are the values and 1."""
    *fields, scale = _cut(blocks, 32, 16, 4, 2)
    digits = [_digits(field, count) for field, count in zip(fields, (5, 5, 4), strict=True)]
    return Parts(_signed(torch.cat(digits, dim=1), 1), _ternary_scales(scale))


def _digits(field: Tensor, count: int) -> Tensor:
    """Of all bytes the first digit, then of all the second. Shapes: field [n, k] uint8 -> [n, k * count] uint8."""
    left = [field * 3**place for place in range(count)]
    return torch.cat([(rest.to(torch.int16) * 3 >> 8).to(torch.uint8) for rest in left], dim=1)


def _tq2_0(blocks: Tensor) -> Parts:
    codes, scale = _cut(blocks, 64, 2)
    return Parts(_signed(_unpacked(codes, PAIRS, 32, 3), 1), _ternary_scales(scale))


def _ternary_scales(scale: Tensor) -> Tensor:
    """Both groups of a block have its scale. Shapes: scale [n, 2] uint8 -> [n, 2] float32."""
    return _halves(scale).repeat(1, 2)


PARTS: Mapping[str, Callable[[Tensor], Parts]] = MappingProxyType(
    {
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
        "IQ4_NL": _iq4_nl,
        "IQ4_XS": _iq4_xs,
        "MXFP4": _mxfp4,
        "TQ1_0": _tq1_0,
        "TQ2_0": _tq2_0,
    }
)
"""How the blocks [n, bytes] uint8 of each type are read."""
LEVELS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"IQ4_NL": NON_LINEAR, "IQ4_XS": NON_LINEAR, "MXFP4": FLOAT4_LEVELS}
)
"""What codes stand for, of types whose codes are no numbers."""
