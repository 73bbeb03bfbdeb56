"""AWQ (Lin et al., arXiv 2306.00978): larger scales for the inputs that matter, and ranges clipped where that helps.

Both searches minimise the error of the layers' own outputs over the calibration text, which the inputs' Gram matrix
gives without running anything: |E x|^2 summed over all x is the trace of E G E^T.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.quantize.folding import balanced
from quire.quantize.formats import TargetFormat
from quire.quantize.grid import grid_of
from quire.quantize.statistics import InputStatistics

NUM_RATIOS = 20
"""Between no weight of the inputs' size in the scales, and its whole."""
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)
"""Parts of a group's range that are tried."""


def best_scales(
    weights: Sequence[Tensor], statistics: InputStatistics, target: TargetFormat, scale_dtype: torch.dtype
) -> Tensor | None:
    """Numbers to multiply the columns of weights that read the same by, before they are rounded; None where none help.

    Shapes: weights [N, M] float32 -> [M].
    """
    inputs = statistics.abs_sum / max(statistics.num_tokens, 1)
    sizes = _relative_sizes(weights, target)
    best, least = None, _error(weights, None, statistics.gram, target, scale_dtype)
    for step in range(NUM_RATIOS + 1):
        ratio = step / NUM_RATIOS
        scales = balanced(inputs.pow(ratio) / sizes.pow(1 - ratio).clamp(min=1e-4))
        error = _error(weights, scales, statistics.gram, target, scale_dtype)
        if error < least:
            best, least = scales, error
    return best


def best_shrink(weight: Tensor, gram: Tensor, target: TargetFormat, scale_dtype: torch.dtype) -> Tensor:
    """The part of each group's range to spread the grid over, groups taken by themselves.

    Shapes: weight [N, M] float32 -> [N, M / G].
    """
    group_size = target.group_size or weight.shape[1]
    count = weight.shape[1] // group_size
    blocks = torch.stack([gram[start : start + group_size, start : start + group_size] for start in
                          range(0, weight.shape[1], group_size)])  # fmt: skip
    best = torch.ones(weight.shape[0], count)
    least = torch.full_like(best, torch.inf)
    for shrink in SHRINKS:
        grid = grid_of(weight, target, scale_dtype, shrink)
        errors = (grid.dequantize(grid.round(weight)) - weight).view(-1, count, group_size)
        error = ((errors.transpose(0, 1) @ blocks).transpose(0, 1) * errors).sum(dim=2)
        better = error < least
        best[better], least[better] = shrink, error[better]
    return best


def _relative_sizes(weights: Sequence[Tensor], target: TargetFormat) -> Tensor:
    """How large each column is beside the largest weight of its group, on the mean. Shapes: -> [M]."""
    weight = torch.cat(list(weights))
    num_rows, num_columns = weight.shape
    groups = weight.abs().view(num_rows, -1, target.group_size or num_columns)
    return (groups / groups.amax(dim=2, keepdim=True).clamp(min=1e-6)).view(num_rows, num_columns).mean(dim=0)


def _error(
    weights: Sequence[Tensor],
    scales: Tensor | None,
    gram: Tensor,
    target: TargetFormat,
    scale_dtype: torch.dtype,
) -> float:
    total = 0.0
    for weight in weights:
        scaled = weight if scales is None else weight * scales
        grid = grid_of(scaled, target, scale_dtype)
        rounded = grid.dequantize(grid.round(scaled))
        error = (rounded if scales is None else rounded / scales) - weight
        total += float(((error @ gram) * error).sum())
    return total
