"""The gated delta rule, lightning attention and the RG-LRU, over the packed products of `gemm`; as in `states`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from quire.ops import gated_recurrence
from quire.ops.cpu.calls import run_or_note
from quire.ops.cpu.gemm import linear
from quire.ops.cpu.memory import empty
from quire.ops.operands import GatedDeltaWeights, LightningWeights, RgLruWeights, StateMetadata


def gated_delta(projected: Tensor, weights: GatedDeltaWeights, states: Tensor, metadata: StateMetadata) -> Tensor:
    """See `functional.gated_delta`."""
    compute = partial(gated_recurrence.gated_delta, weights=weights, states=states, metadata=metadata)
    return _called(compute, weights.decay.shape[0] * weights.norm.shape[0], projected)


def lightning_attention(
    projected: Tensor, weights: LightningWeights, states: Tensor, metadata: StateMetadata
) -> Tensor:
    """See `functional.lightning_attention`."""
    compute = partial(gated_recurrence.lightning_attention, weights=weights, states=states, metadata=metadata)
    return _called(compute, weights.norm.shape[0], projected)


def rg_lru(x: Tensor, gate: Tensor, weights: RgLruWeights, states: Tensor, metadata: StateMetadata) -> Tensor:
    """See `functional.rg_lru`."""
    compute = partial(gated_recurrence.rg_lru, weights=weights, states=states, metadata=metadata, linear=linear)
    return _called(compute, x.shape[1], x, gate)


def _called(compute: Callable[..., Tensor], width: int, *inputs: Tensor) -> Tensor:
    """What a function gives of its inputs, now or whenever the graph that is being recorded is replayed."""
    out = empty((inputs[0].shape[0], width), inputs[0].dtype)
    run_or_note(partial(_fill, compute), out, *inputs)
    return out


def _fill(compute: Callable[..., Tensor], out: Tensor, *inputs: Tensor) -> None:
    out.copy_(compute(*inputs))
