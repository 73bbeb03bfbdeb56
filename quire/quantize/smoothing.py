"""SmoothQuant (Xiao et al., arXiv 2211.10438): outliers of the inputs moved into the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.quantize.folding import balanced
from quire.quantize.statistics import InputStatistics


def smoothing_scales(weights: Sequence[Tensor], statistics: InputStatistics, strength: float) -> Tensor:
    """Numbers to divide inputs by: max|x|^strength / max|w|^(1 - strength) of each channel.

    Shapes: weights [N, M] float32 -> [M].
    """
    largest = torch.cat(list(weights)).abs().amax(dim=0).clamp(min=1e-5)
    return balanced(statistics.abs_max.clamp(min=1e-5).pow(strength) / largest.pow(1 - strength))
