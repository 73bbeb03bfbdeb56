"""Linear layers over quantised weights; `csrc/cpu/kernels/quantized/`.

Activations are quantised to int8 on the way in, each group of a row by its largest magnitude. Products are summed as
integers within a group and as float32 over groups. Where scales are nested, a block of 256 inputs is such a group.
Beside float8 weights, activations stay as they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.config.gguf.tensor_types import QUANTIZED
from quire.config.memory.weights.formats import NESTED_BLOCK, Codes, Shift, WeightFormat, native_format
from quire.errors import ConfigError
from quire.ops.contracts.operands import BlockRows, LinearWeight, NestedScales, QuantizedRows, StoredRows
from quire.ops.cpu.library import UNSUPPORTED, check, load
from quire.ops.cpu.products.blocks import pack_blocks, range_of_blocks
from quire.ops.cpu.products.packing import pack_linear
from quire.ops.cpu.runtime.dtypes import ACTIVATIONS, DTYPES
from quire.ops.cpu.runtime.memory import empty, weight_zeros
from quire.ops.cpu.runtime.rows import readable_rows
from quire.ops.cpu.runtime.weights import CODES, written
from quire.ops.shared.blocks import LEVELS, unpack_blocks
from quire.ops.shared.dequantize import with_integer_levels, with_integers
from quire.utils.math import cdiv

lib = load()
PANEL = 32
"""Output features that are stored together."""
INT8, INT4 = CODES[Codes.INT8], CODES[Codes.INT4]
FORMATS = {
    "int8": (INT8, 0),
    "int4_g32": (INT4, 32),
    "int4_g64": (INT4, 64),
    "int4_g128": (INT4, 128),
}
"""What numbers are quantised to: name -> (`qr_format`, input features that share a scale; 0: all)."""
MOST_CODE = 63
"""Of nested scales where groups have two."""
MOST_PARTS = 16
"""Weights side by side that one call computes."""
HALF_BITS = 15
"""Scales of a weight are brought below 2^15: float16 ends at 2^16, and has all of its precision down to 2^-14."""


def quantize_linear(parts: Sequence[Tensor], *, format: str) -> LinearWeight:
    """Concatenate weights [N_i, M] along N and quantise each output feature, or each group of it, symmetrically.

    int8: scale = largest magnitude / 127. int4: the element of largest magnitude becomes -8, so that the sixteen values
    -8 .. 7 are all used; its sign goes to the scale.
    """
    code, group = FORMATS[format]
    out_features, in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
    packed = weight_zeros(lib.qr_quantized_bytes(code, out_features, in_features))
    scales = _panels_of(
        out_features, cdiv(in_features, group) if group else 1, torch.float16 if group else torch.float32
    )
    offset = 0
    for part in parts:
        for rows in readable_rows(part):
            check(
                lib.qr_quantize_linear(
                    packed.data_ptr(),
                    scales.data_ptr(),
                    code,
                    group,
                    out_features,
                    in_features,
                    rows.data_ptr(),
                    DTYPES[rows.dtype],
                    rows.shape[0],
                    rows.stride(0),
                    offset,
                )
            )
            offset += rows.shape[0]
    return LinearWeight(
        out_features=out_features,
        in_features=in_features,
        format=format,
        tensors={"packed": packed, "scales": scales},
    )


def pack_quantized(parts: Sequence[StoredRows | Tensor]) -> LinearWeight:
    """See `Ops.pack_quantized`. Neighbours of one format become one weight; several weights, a mixed one."""
    ready = [part if isinstance(part, Tensor) else _with_integers(part) for part in parts]
    weights = [_pack_alike(list(alike)) for _, alike in itertools.groupby(ready, _Kind())]
    if len(weights) == 1:
        return weights[0]
    if len(weights) > MOST_PARTS:
        raise ConfigError(f"{len(weights)} weights of different formats side by side; the kernels take {MOST_PARTS}")
    out_features = sum(weight.out_features for weight in weights)
    in_features = weights[0].in_features
    return LinearWeight(
        out_features=out_features, in_features=in_features, format="mixed", tensors={}, parts=tuple(weights)
    )


def _with_integers(part: StoredRows) -> StoredRows:
    """Levels of int8; 8-bit floats, blocks and nested scales only in groups that the kernels have."""
    if isinstance(part, QuantizedRows) and part.nested and not format_of(part).is_nested:
        part = replace(part, nested=())
    if isinstance(part, QuantizedRows):
        is_float8 = part.values.dtype == torch.float8_e4m3fn
        return with_integers(part) if is_float8 and format_of(part).codes is Codes.INT8 else with_integer_levels(part)
    return part if format_of(part).group == QUANTIZED[part.type_name].group_size else unpack_blocks(part)


class _Kind:
    """Of parts in turn: equal for those that can be one weight, which have one format and one order of inputs."""

    def __init__(self) -> None:
        self._orders: list[Tensor | None] = []

    def __call__(self, part: StoredRows | Tensor) -> tuple[object, int]:
        if isinstance(part, Tensor):
            return part.dtype, 0
        order = part.order if isinstance(part, QuantizedRows) else None
        number = next((i for i, known in enumerate(self._orders) if _are_same(known, order)), len(self._orders))
        if number == len(self._orders):
            self._orders.append(order)
        return (format_of(part), _levels_of(part)), number


def _are_same(order: Tensor | None, other: Tensor | None) -> bool:
    return order is other or (order is not None and other is not None and torch.equal(order, other))


def _levels_of(part: StoredRows) -> tuple[float, ...] | None:
    return part.levels if isinstance(part, QuantizedRows) else LEVELS.get(part.type_name)


def _pack_alike(parts: Sequence[StoredRows | Tensor]) -> LinearWeight:
    quantized = [part for part in parts if not isinstance(part, Tensor)]
    dense = [part for part in parts if isinstance(part, Tensor)]
    return pack_linear(dense, dtype=dense[0].dtype) if dense else _pack_rows(quantized)


def _pack_rows(parts: Sequence[StoredRows]) -> LinearWeight:
    """Of one format."""
    first, (rows, columns) = parts[0], (sum(part.shape[0] for part in parts), parts[0].shape[1])
    format = format_of(first)
    groups, unit = cdiv(columns, format.group) if format.group else 1, _unit(format, parts)
    has_floats = format.group == 0 or format.codes is Codes.FLOAT8
    tensors = {
        "packed": weight_zeros(lib.qr_quantized_bytes(CODES[format.codes], rows, columns)),
        "scales": _panels_of(rows, groups, torch.float32 if has_floats else torch.float16),
    }
    if format.is_nested:
        tensors["scales"] = torch.zeros(
            cdiv(rows, PANEL), columns // NESTED_BLOCK, PANEL * format.nested_bytes, dtype=torch.int8
        )
    if format.shift is Shift.ZERO_POINTS:
        tensors["zero_points"] = _panels_of(rows, groups, torch.int8)
    if format.shift is Shift.OFFSETS and not format.is_nested:
        tensors["offsets"] = _panels_of(rows, groups, torch.float16)
    offset = 0
    for part in parts:
        if isinstance(part, BlockRows):
            pack_blocks(tensors, part, unit=unit, out_features=rows, offset=offset)
        else:
            _put(tensors, part, format, unit=unit, out_features=rows, offset=offset)
        offset += part.shape[0]
    if unit != 1.0:
        tensors["unit"] = torch.tensor(unit, dtype=torch.float64)
    levels = _levels_of(first)
    if levels is not None:
        tensors["levels"] = torch.tensor([int(level) for level in levels], dtype=torch.int8)
    if isinstance(first, QuantizedRows) and first.order is not None:
        tensors["order"] = _checked_order(first.order, columns)
    return LinearWeight(out_features=rows, in_features=columns, format=format.name, tensors=tensors)


def _put(
    tensors: dict[str, Tensor],
    part: QuantizedRows,
    format: WeightFormat,
    *,
    unit: float,
    out_features: int,
    offset: int,
) -> None:
    """Lay rows out in a weight of `out_features`, from row `offset` on. Mutates: tensors."""
    _pack_values(tensors["packed"], format, out_features, part.values, offset)
    if format.is_nested:
        _place_nested(tensors["scales"], part.nested, format, unit, offset)
    else:
        _place(tensors["scales"], part.scales / unit, format.group, part, offset)
    if part.zero_points is not None:
        _place(tensors["zero_points"], part.zero_points, format.group, part, offset)
    if "offsets" in tensors and part.offsets is not None:
        _place(tensors["offsets"], part.offsets / unit, format.group, part, offset)


def format_of(rows: StoredRows) -> WeightFormat:
    """What the kernels keep it in.

    Raises: ConfigError where they have nothing.
    """
    if isinstance(rows, BlockRows):
        format = _format_of_blocks(rows)
        assert format is not None, "each type that is read has a format"
        return format
    format = native_format(
        bits=rows.bits,
        group_size=rows.group_size,
        in_features=rows.shape[1],
        has_zero_points=rows.zero_points is not None,
        has_offsets=rows.offsets is not None,
        has_levels=rows.levels is not None,
        is_float8=rows.values.dtype == torch.float8_e4m3fn,
        is_nested=bool(rows.nested),
    )
    is_known = rows.values.dtype in (torch.int8, torch.float8_e4m3fn)
    if format is None or not is_known or (format.codes is Codes.FLOAT8 and rows.order is not None):
        raise ConfigError(
            f"the kernels have no product with weights of {describe(rows)}. --dequantize makes plain weights of them, "
            "which takes more memory."
        )
    return format


def _format_of_blocks(rows: BlockRows) -> WeightFormat | None:
    kind = QUANTIZED[rows.type_name]
    return native_format(
        bits=kind.bits,
        group_size=kind.group_size,
        in_features=rows.shape[1],
        has_offsets=kind.has_offsets,
        has_levels=kind.has_levels,
        is_nested=kind.has_nested_scales,
    )


def describe(rows: QuantizedRows) -> str:
    """For messages."""
    traits = (("zero points", rows.zero_points), ("offsets", rows.offsets), ("levels", rows.levels))
    extras = [name for name, part in (*traits, ("an order of inputs", rows.order)) if part is not None]
    with_extras = f" with {', '.join(extras)}" if extras else ""
    return f"{rows.bits} bits ({rows.values.dtype}) in groups of {rows.group_size}{with_extras}"


def quantized_linear(
    out: Tensor,
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    *,
    activation: str | None,
    residual: Tensor | None,
) -> None:
    """`Ops.linear` where weight.format is not dense. Mutates: out."""
    rows, in_features = x.shape
    check(
        lib.qr_linear_quantized(
            out.data_ptr(),
            DTYPES[out.dtype],
            x.data_ptr(),
            DTYPES[x.dtype],
            *written(weight),
            rows,
            weight.out_features,
            in_features,
            None if bias is None else bias.data_ptr(),
            ACTIVATIONS[activation],
            None if residual is None else residual.data_ptr(),
        )
    )


def quantized_gated_linear(x: Tensor, weight: LinearWeight, bias: Tensor | None, *, activation: str) -> Tensor:
    """`Ops.gated_linear` where weight.format is not dense."""
    rows, in_features = x.shape
    half = weight.out_features // 2
    out = empty((rows, half), x.dtype)
    check(
        lib.qr_gated_linear_quantized(
            out.data_ptr(),
            x.data_ptr(),
            DTYPES[x.dtype],
            *written(weight),
            rows,
            half,
            in_features,
            None if bias is None else bias.data_ptr(),
            ACTIVATIONS[activation],
        )
    )
    return out


def _pack_values(packed: Tensor, format: WeightFormat, out_features: int, values: Tensor, offset: int) -> None:
    if values.stride(1) != 1:
        values = values.contiguous()
    status = lib.qr_pack_quantized(
        packed.data_ptr(),
        CODES[format.codes],
        out_features,
        values.shape[1],
        values.data_ptr(),
        values.shape[0],
        values.stride(0),
        offset,
    )
    if status == UNSUPPORTED:
        raise ConfigError(
            f"a quantised weight has a value that {format.codes} does not have (NaN, or more than its bits): "
            "the checkpoint is damaged, or its format is not what its config says"
        )
    check(status)


def _unit(format: WeightFormat, parts: Sequence[StoredRows]) -> float:
    """The power of two that scales and offsets are multiples of, so that float16 holds them; 1 where it does anyway."""
    ranges = [range_of_blocks(part) if isinstance(part, BlockRows) else _range_of(part) for part in parts]
    if not all(math.isfinite(largest) for largest, _ in ranges):
        raise ConfigError("a quantised weight has a scale or an offset that is not finite: the checkpoint is damaged")
    largest = max(largest for largest, _ in ranges)
    if format.group == 0 or format.codes is Codes.FLOAT8 or largest == 0 or all(fits for _, fits in ranges):
        return 1.0
    return 2.0 ** max(math.frexp(largest)[1] - HALF_BITS, -126)


def _range_of(part: QuantizedRows) -> tuple[float, bool]:
    """See `range_of_blocks`."""
    kept: list[Tensor | None] = [nested.units for nested in part.nested]
    kept = kept or [part.scales, part.offsets]
    numbers = [tensor for tensor in kept if tensor is not None and tensor.numel()]
    if not all(bool(tensor.isfinite().all()) for tensor in numbers):
        return math.nan, False
    largest = max((float(tensor.abs().max()) for tensor in numbers), default=0.0)
    return largest, all(torch.equal(tensor.half().float(), tensor.float()) for tensor in numbers)


def _checked_order(order: Tensor, columns: int) -> Tensor:
    if order.shape != (columns,) or not torch.equal(order.long().sort().values, torch.arange(columns)):
        raise ConfigError(f"the order of a quantised weight's {columns} inputs does not name each of them once")
    return order.to(torch.int32).contiguous()


def _panels_of(out_features: int, groups: int, dtype: torch.dtype) -> Tensor:
    """What each group of a weight has one of. Shapes: [panels, groups, 32]"""
    return torch.zeros(cdiv(out_features, PANEL), groups, PANEL, dtype=dtype)


def _place_nested(
    target: Tensor, nested: Sequence[NestedScales], format: WeightFormat, unit: float, offset: int
) -> None:
    """Put nested scales of rows into their panels; `qr_weight` says how they lie there.

    Shapes: target [panels, blocks, bytes].
    """
    if len(nested) == 2 and not all(bool(((part.codes >= 0) & (part.codes <= MOST_CODE)).all()) for part in nested):
        raise ConfigError(f"nested scales and offsets have codes that are not 0 to {MOST_CODE}")
    panels, blocks, _ = target.shape
    count, of_block = len(nested), NESTED_BLOCK // format.group
    halves, codes = target[:, :, : count * 2 * PANEL], target[:, :, count * 2 * PANEL :]
    units_at = halves.view(torch.float16).view(panels, blocks, count, PANEL)
    codes_at = codes.view(panels, blocks, of_block, count, PANEL)
    rows = torch.arange(offset, offset + nested[0].codes.shape[0])
    for kind, part in enumerate(nested):
        units_at[rows // PANEL, :, kind, rows % PANEL] = (part.units / unit).half()
        codes_at[rows // PANEL, :, :, kind, rows % PANEL] = part.codes.view(-1, blocks, of_block)


def _place(target: Tensor, values: Tensor, group: int, part: QuantizedRows, offset: int) -> None:
    """Put what a part has for each of its groups, [rows, M / G], into the panels of its rows, which begin at `offset`.

    The kernels' groups may be smaller: several have the same number then.
    """
    rows, columns = part.shape
    if group and values.shape[1] == 1:
        values = values.expand(rows, target.shape[1])
    elif group and part.group_size != group:
        values = values.repeat_interleave(part.group_size // group, dim=1)[:, : cdiv(columns, group)]
    whole = rows // PANEL if offset % PANEL == 0 else 0
    if whole:
        panels = values[: whole * PANEL].view(whole, PANEL, -1)
        target[offset // PANEL : offset // PANEL + whole] = panels.transpose(1, 2)
    others = torch.arange(offset + whole * PANEL, offset + rows)
    target[others // PANEL, :, others % PANEL] = values[whole * PANEL :].to(target.dtype)
