"""Weights that a checkpoint brings quantised, as the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.ops.operands import LinearWeight, QuantizedRows


def pack_quantized(parts: Sequence[QuantizedRows | Tensor]) -> LinearWeight:
    """See `functional.pack_quantized`. Layout: [N, M] float32, row by row."""
    weight = torch.cat([part.to(torch.float32) if isinstance(part, Tensor) else dequantize(part) for part in parts])
    return LinearWeight(
        out_features=weight.shape[0], in_features=weight.shape[1], format="dense", tensors={"weight": weight}
    )


def dequantize(rows: QuantizedRows) -> Tensor:
    """Shapes: -> [N, M] float32, in the order of the input's features."""
    values = rows.values.to(torch.float32)
    if rows.levels is not None:
        values = torch.tensor(rows.levels, dtype=torch.float32)[rows.values.long()]
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


def _by_column(rows: QuantizedRows, of_groups: Tensor) -> Tensor:
    """A group's number for each of its columns. Shapes: of_groups [N, M / G] -> [N, M] float32."""
    _, columns = rows.shape
    return of_groups.to(torch.float32).repeat_interleave(rows.group_size, dim=1)[:, :columns]
