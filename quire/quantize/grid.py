"""The numbers that quantised weights can be: scales and zero points of groups of columns, and rounding to them.

Shape letters: N rows (outputs), M columns (inputs), G columns of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.quantize.formats import TargetFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Which numbers each group of a weight may be."""

    target: TargetFormat
    group_size: int
    """G; M where a row has one scale."""
    scales: Tensor
    """[N, M / G] float32, each a number of the dtype that it is stored in."""
    zero_points: Tensor | None
    """[N, M / G] float32, whole numbers."""

    def round(self, weight: Tensor) -> Tensor:
        """The nearest values. Shapes: [N, M] -> [N, M] float32."""
        return self._rounded(weight, *self._wide())

    def dequantize(self, values: Tensor) -> Tensor:
        """The weight that values stand for. Shapes: [N, M] -> [N, M] float32."""
        scales, zero_points = self._wide()
        return (values if zero_points is None else values - zero_points) * scales

    def column(self, index: int) -> ColumnGrid:
        """The grid of one column."""
        group = index // self.group_size
        zero_points = None if self.zero_points is None else self.zero_points[:, group]
        return ColumnGrid(self, self.scales[:, group], zero_points)

    def _wide(self) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point of each column. Shapes: -> [N, M] twice."""
        scales = self.scales.repeat_interleave(self.group_size, dim=1)
        if self.zero_points is None:
            return scales, None
        return scales, self.zero_points.repeat_interleave(self.group_size, dim=1)

    def _rounded(self, weight: Tensor, scales: Tensor, zero_points: Tensor | None) -> Tensor:
        least, most = self.target.limits
        values = weight / scales
        if self.target.is_float:
            return values.clamp_(least, most).to(torch.float8_e4m3fn).to(torch.float32)
        values = values.round_()
        return (values if zero_points is None else values.add_(zero_points)).clamp_(least, most)


@dataclass(frozen=True, slots=True)
class ColumnGrid:
    """The numbers that one column may be."""

    grid: Grid
    scales: Tensor
    """[N]"""
    zero_points: Tensor | None
    """[N]"""

    def round(self, column: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest values and the weights that they stand for. Shapes: [N] -> [N], [N]."""
        values = self.grid._rounded(column, self.scales, self.zero_points)
        return values, (values if self.zero_points is None else values - self.zero_points) * self.scales


def grid_of(weight: Tensor, target: TargetFormat, scale_dtype: torch.dtype, shrink: Tensor | float = 1.0) -> Grid:
    """The grid that spans the weights of each group, or that part of their range that `shrink` says.

    Shapes: weight [N, M] float32; shrink [N, M / G].
    """
    num_rows, num_columns = weight.shape
    group_size = target.group_size or num_columns
    groups = weight.view(num_rows, num_columns // group_size, group_size)
    if target.symmetric:
        scales = _stored(groups.abs().amax(dim=2) * shrink / target.num_steps, scale_dtype)
        return Grid(target=target, group_size=group_size, scales=scales, zero_points=None)
    least, most = target.limits
    low, high = (groups.amin(dim=2).clamp(max=0) * shrink, groups.amax(dim=2).clamp(min=0) * shrink)
    scales = _stored((high - low) / (most - least), scale_dtype)
    zero_points = (least - low / scales).round_().clamp_(least, most)
    return Grid(target=target, group_size=group_size, scales=scales, zero_points=zero_points)


def _stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as they come back from the checkpoint; those of groups of zeros, and of smaller than any, are 1."""
    rounded = scales.to(dtype).to(torch.float32)
    return torch.where(rounded == 0, 1.0, rounded)
