"""The gated delta rule, lightning attention and the RG-LRU, over the products of `gemm`."""

from __future__ import annotations

from torch import Tensor

from quire.ops.contracts.operands import GatedDeltaWeights, LightningWeights, RgLruWeights, StateMetadata
from quire.ops.reference.gemm import linear
from quire.ops.shared import gated_recurrence
from quire.ops.threads import one_thread


@one_thread()
def gated_delta(
    projected: Tensor,
    weights: GatedDeltaWeights,
    states: Tensor,
    metadata: StateMetadata,
    *,
    gates: Tensor | None = None,
    times: Tensor | None = None,
) -> Tensor:
    """See `Ops.gated_delta`."""
    out = gated_recurrence.gated_delta(projected, weights, states, metadata, gates, times)
    return out.to(projected.dtype)


@one_thread()
def lightning_attention(
    projected: Tensor, weights: LightningWeights, states: Tensor, metadata: StateMetadata
) -> Tensor:
    """See `Ops.lightning_attention`."""
    return gated_recurrence.lightning_attention(projected, weights, states, metadata).to(projected.dtype)


@one_thread()
def rg_lru(x: Tensor, gate: Tensor, weights: RgLruWeights, states: Tensor, metadata: StateMetadata) -> Tensor:
    """See `Ops.rg_lru`."""
    return gated_recurrence.rg_lru(x, gate, weights, states, metadata, linear=linear).to(x.dtype)
