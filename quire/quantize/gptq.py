"""GPTQ (Frantar et al., arXiv 2210.17323): rounds column by column and corrects the columns that are left.

Columns are taken in order of the size of their inputs, while groups keep their places and their scales are those of the
original weight ("static groups"): readers need no order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.quantize.grid import Grid

DAMPING = 0.01
"""Of the Hessian's mean diagonal, added to its diagonal."""
MAX_DAMPING = 1.0
BLOCK = 128
"""Columns whose corrections are gathered before they reach the others."""


def gptq(weight: Tensor, gram: Tensor, grid: Grid) -> Tensor:
    """Values of the grid whose products with inputs of this Gram matrix are near those of the weight.

    Shapes: weight [N, M] float32, gram [M, M] -> [N, M] float32.
    """
    diagonal = gram.diagonal()
    order = torch.argsort(diagonal, descending=True, stable=True)
    rest = weight[:, order]  # what is left to round, corrected for what was rounded
    factor = inverse_factor(gram[order][:, order])
    values = torch.empty_like(weight)
    for start in range(0, rest.shape[1], BLOCK):
        end = min(start + BLOCK, rest.shape[1])
        errors = torch.empty(rest.shape[0], end - start)
        for column in range(start, end):
            index = int(order[column])
            values[:, index], rounded = grid.column(index).round(rest[:, column])
            error = (rest[:, column] - rounded) / factor[column, column]
            rest[:, column:end] -= error[:, None] * factor[column, column:end]
            errors[:, column - start] = error
        rest[:, end:] -= errors @ factor[start:end, end:]
    return values


def inverse_factor(gram: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped Hessian.

    Shapes: [M, M] -> [M, M] float32.
    Raises: ConfigError when numbers are not finite.
    """
    diagonal = gram.diagonal()
    hessian = gram.clone()
    hessian.diagonal()[diagonal == 0] = diagonal.mean()
    damping = DAMPING
    while damping <= MAX_DAMPING:
        damped = hessian.clone()
        damped.diagonal().add_(damping * diagonal.mean())
        lower, has_failed = torch.linalg.cholesky_ex(damped)
        upper: Tensor
        if not has_failed:
            upper, has_failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not has_failed:
                return upper
        damping *= 10
    raise ConfigError(
        "GPTQ: the inputs of a layer give no usable Hessian, even with the whole of its mean diagonal added; give more "
        "calibration text (--calibration FILE), or use --method rtn"
    )
