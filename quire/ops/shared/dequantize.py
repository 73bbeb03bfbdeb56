"""Quantised rows as the numbers that they stand for."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.ops.contracts.operands import BlockRows, QuantizedRows, StoredRows
from quire.ops.shared.blocks import unpack_blocks


def dequantize(stored: StoredRows) -> Tensor:
    """Shapes: -> [N, M] float32, in the order of the input's features."""
    rows = unpack_blocks(stored) if isinstance(stored, BlockRows) else stored
    values = rows.values.to(torch.float32)
    if rows.levels is not None:
        levels = torch.tensor(rows.levels, dtype=torch.float32).to(values.device, non_blocking=True)
        values = levels[rows.values.long()]
    out = values * _by_column(rows, rows.scales)
    if rows.zero_points is not None:
        out -= _by_column(rows, rows.zero_points * rows.scales)
    if rows.offsets is not None:
        out += _by_column(rows, rows.offsets)
    if rows.order is None:
        return out
    in_order = torch.empty_like(out)
    in_order[:, rows.order.long()] = out
    return in_order


def with_integer_levels(rows: QuantizedRows) -> QuantizedRows:
    """The rows with levels of int8: where they are none, the nearest 127ths of the largest."""
    if rows.levels is None or all(level == int(level) and -128 <= level <= 127 for level in rows.levels):
        return rows
    unit = max(map(abs, rows.levels)) / 127
    levels = tuple(round(level / unit) for level in rows.levels)
    return replace(rows, levels=levels, scales=rows.scales * unit, nested=())


def with_integers(rows: QuantizedRows) -> QuantizedRows:
    """8-bit floats as integers: the nearest 127ths of the largest of each group."""
    groups, size = rows.scales.shape[1], rows.group_size
    numbers = torch.nn.functional.pad(rows.values.to(torch.float32), (0, groups * size - rows.shape[1]))
    numbers = numbers.view(-1, groups, size)
    units = numbers.abs().amax(2) / 127
    integers = torch.where(units.unsqueeze(2) > 0, numbers / units.unsqueeze(2), 0).round_().to(torch.int8)
    return replace(rows, values=integers.flatten(1)[:, : rows.shape[1]].contiguous(), scales=rows.scales * units)


def _by_column(rows: QuantizedRows, of_groups: Tensor) -> Tensor:
    """A group's number for each of its columns. Shapes: of_groups [N, M / G] -> [N, M] float32."""
    _, columns = rows.shape
    return of_groups.to(torch.float32).repeat_interleave(rows.group_size, dim=1)[:, :columns]
