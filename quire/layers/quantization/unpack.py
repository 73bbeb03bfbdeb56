"""From the tensors of a quantised weight to its rows, by packing; `config.quantized.find` says which there are.

Values keep their integers. Scales become float32. GGUF's blocks stay whole: ops take them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from quire.config.memory.weights.formats import FLOAT4_LEVELS
from quire.config.quantized.find import SCALES, WORD_BITS
from quire.config.quantized.stored import Packing, StoredFormat, refuse
from quire.errors import CheckpointError
from quire.layers.quantization.bits import along_columns, along_rows, shuffled_along_rows, signed
from quire.layers.quantization.bitsandbytes import unpack_bnb_4bit, unpack_bnb_8bit
from quire.layers.quantization.ternary import round_to_ternary, unpack_autobitlinear, unpack_bitlinear
from quire.ops.contracts.operands import BlockRows, QuantizedRows, StoredRows

Stored = Mapping[str, Tensor]
"""The tensors of a weight, by role."""
Unpack = Callable[[StoredFormat, Stored], StoredRows]
AWQ_PLACES = MappingProxyType({4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)})
"""Bits of a value -> which field of a word has each of its columns."""


def _gptq(format: StoredFormat, stored: Stored) -> QuantizedRows:
    bits = format.bits
    values = signed(along_columns(stored["qweight"], bits), bits)
    zeros = along_rows(stored["qzeros"], bits) if not format.is_v1 else _one_more(stored["qzeros"], bits)
    scales = stored["scales"].t().to(torch.float32)
    values, order = _in_groups(format, values, stored.get("g_idx"))
    zeros = signed(zeros.t(), bits)
    _check_version(format, zeros)
    return _grouped(format, values, scales, zeros, order)


def _check_version(format: StoredFormat, zeros: Tensor) -> None:
    """Refuse zero points that config.json denies and that are none in the other version of the format.

    Raises: CheckpointError.
    """
    said, other = ("gptq", "gptq_v2") if format.is_v1 else ("gptq_v2", "gptq")
    if not format.has_zero_points and bool((zeros == (1 if format.is_v1 else -1)).all()):
        raise CheckpointError(
            f"{format.name} is symmetric as {other} stores it, but config.json says {said}: set checkpoint_format "
            f"to {other!r} there"
        )


def _one_more(words: Tensor, bits: int) -> Tensor:
    """Zero points that are stored less one, as GPTQModel and AutoRound take it off: from a whole word.

    Below a zero point of 0 lie the largest value and one borrowed from the next in the word. Those of 3 bits, which
    cross words, borrow nothing.
    Shapes: words [R, K] int32 -> [R, K * 32 / bits] uint8.
    """
    if bits == 3:
        return along_rows(words, bits) + 1 & 7
    ones = sum(1 << place for place in range(0, WORD_BITS, bits))
    return along_rows((words.to(torch.int64) + ones).to(torch.int32), bits)


def _awq(format: StoredFormat, stored: Stored) -> QuantizedRows:
    bits, places = format.bits, AWQ_PLACES[format.bits]
    values = signed(shuffled_along_rows(stored["qweight"], bits, places), bits)
    zeros = None
    if "qzeros" in stored:
        zeros = signed(shuffled_along_rows(stored["qzeros"], bits, places), bits)
    return _grouped(format, values, stored["scales"].t().to(torch.float32), zeros)


def _packed(format: StoredFormat, stored: Stored) -> QuantizedRows:
    bits, columns = format.bits, format.shape[1]
    values = signed(along_rows(stored["weight_packed"], bits), bits)[:, :columns]
    zeros = stored.get("weight_zero_point")
    if zeros is not None:
        whole = zeros.dtype == torch.int8
        zeros = _of_rows(format, zeros) if whole else signed(along_columns(zeros, bits), bits).t()[: format.shape[0]]
    values, order = _in_groups(format, values, stored.get("weight_g_idx"))
    return _grouped(format, values, _of_rows(format, stored["weight_scale"].to(torch.float32)), zeros, order)


def _int8(format: StoredFormat, stored: Stored) -> QuantizedRows:
    zeros = stored.get("weight_zero_point")
    scales = _of_rows(format, _numbers(stored["weight_scale"]))
    if zeros is not None:
        zeros = _of_rows(format, zeros)
    return _grouped(format, stored["weight"], scales, zeros)


def _float8(format: StoredFormat, stored: Stored) -> QuantizedRows:
    scales = next(stored[role] for role in SCALES if role in stored)
    return _grouped(format, stored["weight"], _of_rows(format, _numbers(scales)), None)


def _torchao(format: StoredFormat, stored: Stored) -> QuantizedRows:
    return _float8(format, stored) if format.is_float8 else _int8(format, stored)


def _of_rows(format: StoredFormat, stored: Tensor) -> Tensor:
    """One for each row and group, from one for all, for each row, for groups, or for blocks. Shapes: -> [N, M / G]."""
    rows = format.shape[0]
    if stored.numel() == 1:
        return stored.view(1, 1).expand(rows, 1)
    stored = stored.view(stored.shape[0], -1)
    return stored if stored.shape[0] == rows else stored.repeat_interleave(format.block_rows, dim=0)[:rows]


def _mxfp4(format: StoredFormat, stored: Stored) -> QuantizedRows:
    """Of one expert."""
    values = along_rows(stored["blocks"].flatten(1), 4).to(torch.int8)
    return _floats4(format, values, _powers(stored["scales"]))


def _float4(format: StoredFormat, stored: Stored) -> QuantizedRows:
    codes = stored["weight_packed"] if "weight_packed" in stored else stored["weight"]
    scales = _numbers(stored["weight_scale"] if "weight_scale" in stored else stored["scale"])
    values = along_rows(codes.view(torch.uint8), 4).to(torch.int8)
    if "weight_global_scale" in stored:
        scales = scales / stored["weight_global_scale"].to(torch.float32).view(1, 1)
    if "weight_scale_2" in stored:
        scales = scales * stored["weight_scale_2"].to(torch.float32).view(1, 1)
    return _floats4(format, values, scales)


def _numbers(scales: Tensor) -> Tensor:
    """In float32. Bytes stand for powers of two (e8m0)."""
    return _powers(scales) if scales.dtype == torch.uint8 else scales.to(torch.float32)


def _powers(exponents: Tensor) -> Tensor:
    """Two to the power of bytes less 127."""
    exponents = exponents.to(torch.int32) - 127
    return torch.ldexp(torch.ones(exponents.shape), exponents)


def _floats4(format: StoredFormat, values: Tensor, scales: Tensor) -> QuantizedRows:
    return QuantizedRows(values=values, bits=4, scales=scales / 2, group_size=format.group_size, levels=FLOAT4_LEVELS)


def _grouped(
    format: StoredFormat, values: Tensor, scales: Tensor, zero_points: Tensor | None, order: Tensor | None = None
) -> QuantizedRows:
    """Zero points that config.json denies are none if all are zero.

    Values of two bits, -2 .. 1, are negated, as their scales are, for kernels take -1 .. 2.
    """
    if zero_points is not None and not format.has_zero_points and not zero_points.any():
        zero_points = None
    if format.kept_bits == 2:
        values, scales, zero_points = -values, -scales, None if zero_points is None else -zero_points
    return QuantizedRows(
        values=values,
        bits=format.kept_bits,
        scales=scales,
        group_size=format.group_size,
        zero_points=zero_points,
        order=order,
    )


def _in_groups(format: StoredFormat, values: Tensor, groups: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The columns of each group side by side, and which input feature each of them multiplies.

    Shapes: values [N, M], groups [M]: the group of each column, or -1 throughout, which compressed-tensors leaves where
    nothing was reordered. Raises: CheckpointError where groups differ in size.
    """
    if groups is None or bool((groups == -1).all()):
        return values, None
    columns = format.shape[1]
    expected = torch.arange(columns, dtype=torch.int64) // format.group_size
    groups = groups.to(torch.int64)
    if torch.equal(groups, expected):
        return values, None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], expected):
        raise refuse(format.name, f"has groups of other sizes than {format.group_size}, as its g_idx says")
    return values[:, order], order.to(torch.int32)


def _blocks(format: StoredFormat, stored: Stored) -> BlockRows:
    """The role of the one tensor is the type of its blocks."""
    ((type_name, blocks),) = stored.items()
    return BlockRows(type_name=type_name, blocks=blocks)


UNPACK: Mapping[Packing, Unpack] = MappingProxyType(
    {
        Packing.GPTQ: _gptq,
        Packing.AWQ: _awq,
        Packing.PACKED: _packed,
        Packing.INT8: _int8,
        Packing.FLOAT8: _float8,
        Packing.TORCHAO: _torchao,
        Packing.MXFP4: _mxfp4,
        Packing.FLOAT4: _float4,
        Packing.BITLINEAR: unpack_bitlinear,
        Packing.AUTOBITLINEAR: unpack_autobitlinear,
        Packing.ROUNDED: round_to_ternary,
        Packing.BNB_4BIT: unpack_bnb_4bit,
        Packing.BNB_8BIT: unpack_bnb_8bit,
        Packing.GGUF: _blocks,
    }
)
