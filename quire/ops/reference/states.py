"""Recurrent layers, token by token, over the products of `gemm`."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.contracts.operands import ConvWeights, Mamba2Weights, MambaWeights, StateMetadata
from quire.ops.reference.gemm import linear
from quire.ops.shared import recurrence
from quire.ops.threads import one_thread


def allocate_states(*, num_blocks: int, num_bytes: int) -> Tensor:
    """See `Ops.allocate_states`."""
    return torch.empty(2, num_blocks, num_bytes // 8)


@one_thread()
def mamba(projected: Tensor, weights: MambaWeights, states: Tensor, metadata: StateMetadata) -> Tensor:
    """See `Ops.mamba`."""
    return recurrence.mamba(projected, weights, states, metadata, linear=linear).to(projected.dtype)


@one_thread()
def mamba2(projected: Tensor, weights: Mamba2Weights, states: Tensor, metadata: StateMetadata) -> Tensor:
    """See `Ops.mamba2`."""
    return recurrence.mamba2(projected, weights, states, metadata).to(projected.dtype)


@one_thread()
def short_conv(projected: Tensor, weights: ConvWeights, states: Tensor, metadata: StateMetadata) -> Tensor:
    """See `Ops.short_conv`."""
    return recurrence.short_conv(projected, weights, states, metadata).to(projected.dtype)
