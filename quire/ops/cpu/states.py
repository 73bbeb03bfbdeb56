"""Recurrent layers over the packed products of `gemm`.

They are computed by torch: a graph holds a call of these functions between two runs of native ops.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quire.ops import recurrence
from quire.ops.cpu.gemm import linear
from quire.ops.cpu.library import is_recording, note_call
from quire.ops.cpu.memory import empty, untracked, zeros
from quire.ops.functional import ConvWeights, Mamba2Weights, MambaWeights, StateMetadata
from quire.ops.threads import one_thread

SLACK = 128
"""Bytes past the last page, as behind pages of keys and values."""


def allocate_states(*, num_blocks: int, num_bytes: int) -> Tensor:
    """See `functional.allocate_states`. Pages are not touched here."""
    size = num_blocks * num_bytes
    return zeros(size + SLACK)[:size].view(torch.float32).view(2, num_blocks, num_bytes // 8)


def mamba(projected: Tensor, weights: MambaWeights, states: Tensor, metadata: StateMetadata) -> Tensor:
    """See `functional.mamba`."""
    compute = partial(recurrence.mamba, weights=weights, states=states, metadata=metadata, linear=linear)
    return _called(compute, projected, weights.skip.shape[0])


def mamba2(projected: Tensor, weights: Mamba2Weights, states: Tensor, metadata: StateMetadata) -> Tensor:
    """See `functional.mamba2`."""
    compute = partial(recurrence.mamba2, weights=weights, states=states, metadata=metadata)
    return _called(compute, projected, weights.inner_size)


def short_conv(projected: Tensor, weights: ConvWeights, states: Tensor, metadata: StateMetadata) -> Tensor:
    """See `functional.short_conv`."""
    compute = partial(recurrence.short_conv, weights=weights, states=states, metadata=metadata)
    return _called(compute, projected, weights.weight.shape[0])


def _called(compute: Callable[[Tensor], Tensor], x: Tensor, width: int) -> Tensor:
    """What a function gives of x, now or, while this thread records, whenever the graph is replayed."""
    out = empty((x.shape[0], width), x.dtype)
    if not is_recording():
        _fill(out, x, compute)
        return out
    given = untracked(out), untracked(x)
    note_call(partial(_fill, *given, compute), [tensor.data_ptr() for tensor in given])
    return out


def _fill(out: Tensor, x: Tensor, compute: Callable[[Tensor], Tensor]) -> None:
    with one_thread(), torch.inference_mode():
        out.copy_(compute(x))
