"""Convolved queries and keys: plain torch around the library's products."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from quire.ops.contracts.operands import ConvolvedQkvWeights, StateMetadata
from quire.ops.cpu.products.gemm import linear_into
from quire.ops.cpu.runtime.calls import run_or_note
from quire.ops.cpu.runtime.memory import empty
from quire.ops.shared.convolved_qkv import fill_heads, fill_taps, num_features, taps_shape


def convolved_qkv(projected: Tensor, weights: ConvolvedQkvWeights, states: Tensor, metadata: StateMetadata) -> Tensor:
    """See `Ops.convolved_qkv`."""
    heads, tokens, _ = shape = taps_shape(projected, weights)
    qkv = empty((tokens, num_features(weights)), projected.dtype)
    taps = empty((heads * tokens, shape[2]), projected.dtype).view(shape)
    places = metadata.query_start, metadata.reads, metadata.writes
    run_or_note(partial(fill_taps, weights=weights, states=states), taps, qkv, projected, *places)
    mixed = empty((heads * tokens, weights.head_size), torch.float32).view(heads, tokens, -1)
    for out, rows, weight, bias in zip(mixed, taps, weights.joint, weights.joint_bias, strict=True):
        linear_into(out, rows, weight, bias)
    run_or_note(fill_heads, qkv, projected, mixed, weights.temperatures)
    return qkv
