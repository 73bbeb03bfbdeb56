"""Quantised weights: how they are packed for `quantized_products`, and their launches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from quire.config.memory.weights.formats import BITS, Codes, Shift, WeightFormat, gpu_step
from quire.errors import ConfigError
from quire.ops.contracts.operands import BlockRows, LinearWeight, QuantizedRows, StoredRows
from quire.ops.shared.blocks import unpack_blocks
from quire.ops.shared.dequantize import with_integer_levels
from quire.ops.triton.alignment import aligned
from quire.ops.triton.kernels.arithmetic import ACTIVATION_CODES
from quire.ops.triton.kernels.quantized import (
    SUMS,
    constants_of,
    dequantize_kernel,
    quantized_kernel,
    step_sums_kernel,
)
from quire.ops.triton.tiles import stages, widened_tiles
from quire.utils.math import round_up

FORMATS = {
    "int8": WeightFormat(codes=Codes.INT8, group=0),
    "int4_g32": WeightFormat(codes=Codes.INT4, group=32),
    "int4_g64": WeightFormat(codes=Codes.INT4, group=64),
    "int4_g128": WeightFormat(codes=Codes.INT4, group=128),
}
"""What numbers are quantised to, by name."""
FLOAT8_UNIT = 256.0
"""What scales of float8 are multiplied by; see `quantized_products`."""
FLOAT8_NAN = 0x7F
LEAST_GROUP = 16
"""Inputs of a group: those of a step of a product, at least."""
ROUNDED_NUMBERS = 1 << 20
"""So many are rounded at a time: each takes some 30 bytes meanwhile."""
WHOLE_GROUP = 32
"""A group of all inputs is made a multiple of it, for longer steps."""


def quantize_linear(parts: Sequence[Tensor], *, format: str, device: torch.device | None = None) -> LinearWeight:
    """See `Ops.quantize_linear`. The result is on `device`; None for that of the first part.

    int8: scale = largest magnitude / 127. int4: the element of largest magnitude becomes -8, so that the sixteen values
    -8 .. 7 are all used; its sign goes to the scale.
    """
    made, place = FORMATS[format], device or parts[0].device
    slices = [rows for part in parts for rows in part.split(max(1, ROUNDED_NUMBERS // part.shape[1]))]
    return _pack([_rounded(rows.to(place), made) for rows in slices], made, device)


def pack_quantized(parts: Sequence[StoredRows | Tensor], *, device: torch.device | None = None) -> LinearWeight:
    """See `Ops.pack_quantized`. Neighbours of one format become one weight; several weights, a mixed one.

    The result is on `device`; None for that of the first part. Raises: ConfigError for groups that are no multiples of
    16, and for float8 with anything beside its scales.
    """
    rows = [part if isinstance(part, Tensor) else _with_integers(part) for part in parts]
    weights = [_pack_alike(list(alike), device) for _, alike in itertools.groupby(rows, _Kind())]
    if len(weights) == 1:
        return weights[0]
    return LinearWeight(
        out_features=sum(weight.out_features for weight in weights),
        in_features=weights[0].in_features,
        format="mixed",
        tensors={},
        parts=tuple(weights),
    )


def format_of(rows: QuantizedRows) -> WeightFormat:
    """What the kernels keep it in. Values of five to seven bits have eight.

    Raises: ConfigError where they have nothing.
    """
    is_float8, (_, num_inputs) = rows.values.dtype == torch.float8_e4m3fn, rows.shape
    shift = Shift.OFFSETS if rows.offsets is not None else Shift.NONE if rows.zero_points is None else Shift.ZERO_POINTS
    codes = Codes.FLOAT8 if is_float8 else Codes.INT4 if rows.bits <= 4 else Codes.INT8
    if rows.levels is not None:
        codes = Codes.LEVELS
    has_row_scale = rows.group_size >= num_inputs
    group = 0 if has_row_scale and shift is Shift.NONE else rows.group_size
    if has_row_scale:
        group = round_up(group, WHOLE_GROUP)  # one group, whose end may be past the last column
    has_too_much = (is_float8 and (shift is not Shift.NONE or rows.levels is not None)) or (
        rows.zero_points is not None and (rows.offsets is not None or rows.levels is not None)
    )
    if has_too_much or group % LEAST_GROUP or rows.values.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise ConfigError(f"the GPU kernels have no product with weights of {_describe(rows)}")
    return WeightFormat(codes=codes, group=group, shift=shift)


def quantized_product(
    out: Tensor,
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    *,
    gated: bool,
) -> None:
    """`Ops.linear` or, gated, `Ops.gated_linear`. Mutates: out."""
    tensors, order, format = weight.tensors, weight.tensors.get("order"), format_named(weight.format)
    x = aligned(x) if order is None else x.index_select(1, order)
    codes, scales, sums = tensors["codes"], tensors["scales"], step_sums(x, format)
    num_rows, num_features = out.shape
    tile = widened_tiles(x.dtype).of(num_rows, num_features)
    quantized_kernel[(triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_features, tile.features),)](
        x,
        sums,
        codes,
        scales,
        tensors.get("zero_points"),
        tensors.get("offsets"),
        tensors.get("levels"),
        bias,
        residual,
        out,
        num_rows,
        num_features,
        weight.in_features,
        codes.shape[1],
        x.stride(0),
        0 if sums is None else sums.stride(0),
        scales.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        ACTIVATION=ACTIVATION_CODES[activation],
        GATED=gated,
        BLOCK_ROWS=tile.rows,
        BLOCK_FEATURES=tile.features,
        num_warps=tile.num_warps,
        num_stages=stages(tile),
        **constants_of(format),
    )


def step_sums(x: Tensor, format: WeightFormat) -> Tensor | None:
    """The sums of x over each step of a product, where weights of a format have offsets. Shapes: -> [T, steps].

    By a kernel of their own, one way for all rows: within a product a row would be summed as its tile is laid out.
    """
    if format.shift is not Shift.OFFSETS:
        return None
    step = gpu_step(format.group)
    num_steps = round_up(triton.cdiv(x.shape[1], step), 2)  # of two values in a byte, the upper may be past the end
    sums = x.new_empty(len(x), num_steps, dtype=torch.float32)
    step_sums_kernel[(len(x), triton.cdiv(num_steps, SUMS))](
        x, sums, x.shape[1], num_steps, x.stride(0), INPUTS=step, STEPS=SUMS
    )
    return sums


def dequantized(weight: LinearWeight, dtype: torch.dtype) -> Tensor:
    """The weight in a type of activations, in the order of the input's features. Shapes: -> [N, M]."""
    tensors, constants = weight.tensors, constants_of(format_named(weight.format))
    codes, scales = tensors["codes"], tensors["scales"]
    out = torch.empty(weight.out_features, weight.in_features, dtype=dtype, device=codes.device)
    dequantize_kernel[(weight.out_features, triton.cdiv(codes.shape[1], constants["BLOCK_INPUTS"]))](
        codes,
        scales,
        tensors.get("zero_points"),
        tensors.get("offsets"),
        tensors.get("levels"),
        out,
        weight.in_features,
        codes.shape[1],
        scales.stride(0),
        **constants,
    )
    order = tensors.get("order")
    return out if order is None else torch.empty_like(out).index_copy_(1, order.long(), out)


def format_named(name: str) -> WeightFormat:
    """The format of a weight that `pack_quantized` or `quantize_linear` gave."""
    codes, *others = name.split("_")
    group = next((int(part[1:]) for part in others if part.startswith("g")), 0)
    return WeightFormat(codes=Codes(codes), group=group, shift=Shift(next((p for p in others if p[0] != "g"), "")))


def _with_integers(part: StoredRows) -> QuantizedRows:
    """A byte for each value, and levels of int8."""
    return with_integer_levels(unpack_blocks(part) if isinstance(part, BlockRows) else part)


class _Kind:
    """Of parts in turn: equal for those that can be one weight, which have one format and one order of inputs."""

    def __init__(self) -> None:
        self._orders: list[Tensor | None] = []

    def __call__(self, part: QuantizedRows | Tensor) -> tuple[object, int]:
        if isinstance(part, Tensor):
            return part.dtype, 0
        number = next((i for i, order in enumerate(self._orders) if _are_same(order, part.order)), len(self._orders))
        if number == len(self._orders):
            self._orders.append(part.order)
        return (format_of(part), part.levels), number


def _are_same(order: Tensor | None, other: Tensor | None) -> bool:
    return order is other or (order is not None and other is not None and torch.equal(order, other))


def _pack_alike(parts: Sequence[QuantizedRows | Tensor], device: torch.device | None) -> LinearWeight:
    quantized = [part for part in parts if not isinstance(part, Tensor)]
    if quantized:
        return _pack(quantized, format_of(quantized[0]), device)
    weight = torch.cat([part for part in parts if isinstance(part, Tensor)])
    return LinearWeight(
        out_features=weight.shape[0],
        in_features=weight.shape[1],
        format="dense",
        tensors={"weight": weight.to(device or weight.device)},
    )


def _pack(parts: Sequence[QuantizedRows], format: WeightFormat, device: torch.device | None) -> LinearWeight:
    """Of one format."""
    values, scales = torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts])
    if format.codes is Codes.FLOAT8:
        scales = scales * FLOAT8_UNIT
    tensors = {"codes": _codes(values, format), "scales": scales.t().contiguous()}
    zero_points = [part.zero_points for part in parts if part.zero_points is not None]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    for name, found in (("zero_points", zero_points), ("offsets", offsets)):
        if found:
            tensors[name] = torch.cat(found).t().contiguous()
    if not all(bool(tensors[name].isfinite().all()) for name in ("scales", "offsets") if name in tensors):
        raise ConfigError("a quantised weight has a scale or an offset that is not finite: the checkpoint is damaged")
    if parts[0].levels is not None:
        tensors["levels"] = torch.tensor(parts[0].levels, dtype=torch.int8)
    if parts[0].order is not None:
        tensors["order"] = _checked_order(parts[0].order)
    return LinearWeight(
        out_features=values.shape[0],
        in_features=values.shape[1],
        format=format.name,
        tensors={name: tensor.to(device or values.device) for name, tensor in tensors.items()},
    )


def _codes(values: Tensor, format: WeightFormat) -> Tensor:
    """The layout of `quantized_products`. Raises: ConfigError for values that the format does not have."""
    if format.codes is Codes.INT8:
        return values.contiguous()
    if format.codes is Codes.FLOAT8:
        codes = values.view(torch.uint8)
        is_wrong = (codes & FLOAT8_NAN) == FLOAT8_NAN
    else:
        codes = values if format.codes is Codes.LEVELS else values + 8
        is_wrong = (codes < 0) | (codes > 15)
    if bool(is_wrong.any()):
        raise ConfigError(
            f"a quantised weight has a value that {format.codes} does not have (NaN, or more than its bits): "
            "the checkpoint is damaged, or its format is not what its config says"
        )
    if format.codes is Codes.FLOAT8:
        return codes.contiguous()
    step = gpu_step(format.group)
    raised = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (2 * step))).to(torch.uint8)
    lower, upper = raised.view(codes.shape[0], -1, 2, step).unbind(2)
    return (lower | (upper << 4)).flatten(1)


def _rounded(part: Tensor, format: WeightFormat) -> QuantizedRows:
    """The nearest numbers that a format has."""
    wide = part.float()
    rows, columns = wide.shape
    group = format.group or columns
    grouped = torch.nn.functional.pad(wide, (0, -columns % group)).view(rows, -1, group)
    if format.codes is Codes.INT4:
        scales = grouped.gather(-1, grouped.abs().argmax(dim=-1, keepdim=True)) / -8
        low, high = -8, 7
    else:
        scales = grouped.abs().amax(dim=-1, keepdim=True) / 127
        low, high = -127, 127
    values = torch.where(scales == 0, 0.0, grouped / scales).round().clamp(low, high).to(torch.int8)
    return QuantizedRows(
        values=values.flatten(1)[:, :columns],
        bits=BITS[format.codes],
        scales=scales.squeeze(-1),
        group_size=group,
    )


def _checked_order(order: Tensor) -> Tensor:
    if not torch.equal(order.long().sort().values, torch.arange(len(order), device=order.device)):
        raise ConfigError(f"the order of a quantised weight's {len(order)} inputs does not name each of them once")
    return order.to(torch.int32).contiguous()


def _describe(rows: QuantizedRows) -> str:
    traits = (("zero points", rows.zero_points), ("offsets", rows.offsets), ("levels", rows.levels))
    extras = [name for name, part in traits if part is not None]
    with_extras = f" with {' and '.join(extras)}" if extras else ""
    return f"{rows.bits} bits ({rows.values.dtype}) in groups of {rows.group_size}{with_extras}"
