"""Matrix products and embedding rows.

Row invariance: rows are computed in zero-padded tiles of TILE_ROWS, always as a product of the same shape, on one
thread. BLAS may then choose what it likes for that shape: a row meets the same sequence of operations wherever it
stands in its tile and whatever its neighbours hold (`tests/ops/test_gemm.py` compares bits).

A deviation in speed, not in value: 16-bit weights are widened to float32 in panels that fit the cache, because torch's
own bfloat16 product rounds before the bias and the residual are added. A tile then costs 1.3 times the float32 product
on an AVX-512 core.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.activation import ACTIVATIONS
from quire.ops.contracts.operands import BlockTable, LinearWeight
from quire.ops.reference.elementwise import soft_cap as cap_softly
from quire.ops.reference.sampling import row_max_tensors
from quire.ops.shared.dequantize import dequantize
from quire.ops.threads import one_thread
from quire.utils.math import round_up

TILE_ROWS = 8
"""Eight rows reach the speed of long products (116 GFLOP/s on one core) and waste little on a single row."""
VECTOR = 32
"""Elements that torch's elementwise loops take at a time, at most (two AVX-512 registers)."""
FEWEST_COLUMNS = 16
"""Of a product: with two or three, MKL takes rows eight at a time on some CPUs, and with less than twelve and a depth
that four does not divide on others, so that a row's bits follow its place."""
PANEL_ELEMENTS = 1 << 18
"""Weights widened at a time: 1 MiB of float32."""


def pack_linear(parts: Sequence[Tensor], *, dtype: torch.dtype) -> LinearWeight:
    """See `Ops.pack_linear`. Layout: [N, M], row by row."""
    weight = torch.empty(sum(part.shape[0] for part in parts), parts[0].shape[1], dtype=dtype)
    start = 0
    for part in parts:
        weight[start : start + part.shape[0]] = part
        start += part.shape[0]
    return LinearWeight(
        out_features=weight.shape[0], in_features=weight.shape[1], format="dense", tensors={"weight": weight}
    )


def weights_together() -> AbstractContextManager[None]:
    """See `Ops.weights_together`. torch gives each tensor memory of its own."""
    return nullcontext()


@one_thread()
def linear(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """See `Ops.linear`."""
    out = _product(x, weight)
    if bias is not None:
        out.add_(bias)
    if activation is not None:
        out = ACTIVATIONS[activation](out)
    out = out[: x.shape[0]]
    if residual is not None:
        out.add_(residual)
    return out.to(out_dtype or x.dtype).contiguous()


def linear_max(
    x: Tensor, weight: LinearWeight, bias: Tensor | None = None, *, soft_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """See `Ops.linear_max`."""
    out = linear(x, weight, bias, out_dtype=torch.float32)
    if soft_cap is not None:
        cap_softly(out, soft_cap)
    return row_max_tensors(out)


@one_thread()
def gated_linear(x: Tensor, weight: LinearWeight, bias: Tensor | None = None, *, activation: str) -> Tensor:
    """See `Ops.gated_linear`."""
    out = _product(x, weight)
    if bias is not None:
        out.add_(bias)
    gate, up = out.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate).mul_(up)[: x.shape[0]].to(x.dtype)


def embedding(token_ids: Tensor, table: Tensor | LinearWeight | BlockTable) -> Tensor:
    """See `Ops.embedding`."""
    if isinstance(table, BlockTable):
        return dequantize(table.rows[token_ids]).to(table.dtype)
    rows = table.tensors["weight"] if isinstance(table, LinearWeight) else table
    return rows.index_select(0, token_ids)


def _product(x: Tensor, weight: LinearWeight) -> Tensor:
    """x @ weight.T in float32, with rows of zeros up to a whole number of tiles.

    Each row starts a new vector (the view returned has a longer stride where N is odd), because torch computes what is
    left over at the end of a contiguous stretch with other instructions than the rest: an activation's bits would
    follow the number of rows.
    """
    rows = round_up(x.shape[0], TILE_ROWS)
    if rows == x.shape[0]:
        tiles = x.float()
    else:
        tiles = torch.zeros(rows, x.shape[1])
        tiles[: x.shape[0]] = x
    table, count = weight.tensors["weight"], weight.out_features
    out = torch.empty(rows, round_up(count + FEWEST_COLUMNS, VECTOR))
    step = count if table.dtype == torch.float32 else max(1, PANEL_ELEMENTS // weight.in_features)
    for first in range(0, count, step):
        panel = _columns(table[first : first + step])
        for start in range(0, rows, TILE_ROWS):
            tile = out[start : start + TILE_ROWS, first : first + panel.shape[1]]
            torch.mm(tiles[start : start + TILE_ROWS], panel, out=tile)
    return out[:, :count]


def _columns(rows: Tensor) -> Tensor:
    """In float32, with columns of zeros up to `FEWEST_COLUMNS`. Shapes: rows [N, M] -> [M, N or more]."""
    missing = max(0, FEWEST_COLUMNS - rows.shape[0])
    return functional.pad(rows.float(), (0, 0, 0, missing)).t() if missing else rows.float().t()
