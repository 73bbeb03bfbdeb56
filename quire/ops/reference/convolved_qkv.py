"""Convolved queries and keys over the products of `gemm`."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.contracts.operands import ConvolvedQkvWeights, StateMetadata
from quire.ops.reference.gemm import linear
from quire.ops.shared.convolved_qkv import fill_heads, fill_taps, num_features, taps_shape


def convolved_qkv(projected: Tensor, weights: ConvolvedQkvWeights, states: Tensor, metadata: StateMetadata) -> Tensor:
    """See `Ops.convolved_qkv`."""
    taps = projected.new_empty(taps_shape(projected, weights))
    qkv = projected.new_empty(projected.shape[0], num_features(weights))
    places = metadata.query_start, metadata.reads, metadata.writes
    fill_taps(taps, qkv, projected, *places, weights=weights, states=states)
    mixed = [
        linear(rows, weight, bias, out_dtype=torch.float32)
        for rows, weight, bias in zip(taps, weights.joint, weights.joint_bias, strict=True)
    ]
    fill_heads(qkv, projected, torch.stack(mixed), weights.temperatures)
    return qkv
