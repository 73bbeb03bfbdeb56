"""A mixture of experts over the packed products of `gemm`.

Which experts a step touches is known only when it runs, so a graph cannot hold it as native ops: it holds a call of
this function between two runs of them.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from quire.config.experts import Routing
from quire.ops.cpu.gemm import gated_linear, linear
from quire.ops.cpu.library import is_recording, note_call
from quire.ops.cpu.memory import empty, untracked
from quire.ops.functional import MixtureWeights
from quire.ops.mixture import mix
from quire.ops.threads import one_thread


def mixture_of_experts(
    x: Tensor, weights: MixtureWeights, routing: Routing, *, activation: str, residual: Tensor | None = None
) -> Tensor:
    """See `functional.mixture_of_experts`."""
    out = empty((x.shape[0], weights.experts[0].down.out_features), x.dtype)
    if not is_recording():
        _compute(out, x, residual, weights, routing, activation)
        return out
    given = untracked(out), untracked(x), None if residual is None else untracked(residual)
    call = partial(_compute, *given, weights, routing, activation)
    note_call(call, [tensor.data_ptr() for tensor in given if tensor is not None])
    return out


def _compute(
    out: Tensor, x: Tensor, residual: Tensor | None, weights: MixtureWeights, routing: Routing, activation: str
) -> None:
    with one_thread(), torch.inference_mode():
        total = mix(
            x, weights, routing, activation=activation, residual=residual, linear=linear, gated_linear=gated_linear
        )
        out.copy_(total)
