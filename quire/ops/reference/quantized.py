"""Weights that a checkpoint brings quantised, as the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.ops.contracts.operands import LinearWeight, StoredRows
from quire.ops.shared.dequantize import dequantize


def pack_quantized(parts: Sequence[StoredRows | Tensor]) -> LinearWeight:
    """See `Ops.pack_quantized`. Layout: [N, M] float32, row by row."""
    weight = torch.cat([part.float() if isinstance(part, Tensor) else dequantize(part) for part in parts])
    return LinearWeight(
        out_features=weight.shape[0], in_features=weight.shape[1], format="dense", tensors={"weight": weight}
    )
