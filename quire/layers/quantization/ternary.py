"""Ternary weights, as BitNet's linear layers of transformers have them: -1, 0, and 1, with one scale for all."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from quire.config.quantized.find import TERNARY_ROWS
from quire.config.quantized.stored import StoredFormat, refuse
from quire.ops.contracts.operands import QuantizedRows

LEAST_MEAN = 1e-5
"""What transformers takes for the mean magnitude of a weight that is smaller."""
READ_ROWS = 1024
"""That are widened at a time."""


def unpack_bitlinear(format: StoredFormat, stored: Mapping[str, Tensor]) -> QuantizedRows:
    """Raises: CheckpointError for codes that are no ternary numbers, and for a scale that nothing can be divided by."""
    return _ternary(format, _unpacked(format, stored["weight"]), 1.0 / _scale(format, stored["weight_scale"]))


def unpack_autobitlinear(format: StoredFormat, stored: Mapping[str, Tensor]) -> QuantizedRows:
    """Raises: CheckpointError for what is no ternary number, and for a scale of zero."""
    weight = stored["weight"]
    values = _unpacked(format, weight) if weight.dtype == torch.uint8 else _checked(format, weight)
    return _ternary(format, values, _scale(format, stored["weight_scale"]))


def round_to_ternary(format: StoredFormat, stored: Mapping[str, Tensor]) -> QuantizedRows:
    """The nearest multiples of the mean magnitude.

    The mean is that of sums in float64, row by row: the same whatever the number of threads.
    Raises: CheckpointError where a number is not finite.
    """
    weight = stored["weight"]
    sums = [part.double().abs().sum(dim=1) for part in torch.split(weight, READ_ROWS)]
    mean = math.fsum(torch.cat(sums).tolist()) / weight.numel()
    if not math.isfinite(mean):
        raise refuse(format.name, "has a number that is not finite")
    scale = 1.0 / torch.tensor(mean, dtype=torch.float32).clamp(min=LEAST_MEAN)
    values = [(part.float() * scale).round_().clamp_(-1, 1).to(torch.int8) for part in torch.split(weight, READ_ROWS)]
    return _ternary(format, torch.cat(values), float(1.0 / scale))


def _unpacked(format: StoredFormat, packed: Tensor) -> Tensor:
    """The lowest bits of bytes are the first quarter of the rows. Shapes: packed [N / 4, M] uint8 -> [N, M] int8."""
    if any(bool((part & part >> 1 & 0b01010101).any()) for part in torch.split(packed, READ_ROWS)):
        raise refuse(format.name, "has a code of 3, which is no ternary number")
    quarters = torch.empty(TERNARY_ROWS, *packed.shape, dtype=torch.int8)
    for place, quarter in enumerate(quarters.view(torch.uint8)):
        torch.bitwise_right_shift(packed, 2 * place, out=quarter).bitwise_and_(3)
    return quarters.sub_(1).flatten(0, 1)


def _checked(format: StoredFormat, numbers: Tensor) -> Tensor:
    """Shapes: numbers [N, M] -> alike, int8."""
    if not all(bool(((part == 0) | (part.abs() == 1)).all()) for part in torch.split(numbers, READ_ROWS)):
        raise refuse(format.name, "has a number that is not -1, 0, or 1 beside a weight_scale")
    return numbers.to(torch.int8)


def _scale(format: StoredFormat, stored: Tensor) -> float:
    scale = float(stored)
    if not math.isfinite(scale) or scale == 0:
        raise refuse(format.name, f"has a weight_scale of {scale}")
    return scale


def _ternary(format: StoredFormat, values: Tensor, scale: float) -> QuantizedRows:
    """Each row has the scale, so that it may stand beside others."""
    scales = torch.full((values.shape[0], 1), scale)
    return QuantizedRows(values=values, bits=2, scales=scales, group_size=format.group_size)
