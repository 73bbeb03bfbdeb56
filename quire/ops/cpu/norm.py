"""Norms; `csrc/cpu/norm.cpp`."""

from __future__ import annotations

from torch import Tensor

from quire.ops.cpu.library import check, load
from quire.ops.cpu.runtime.dtypes import DTYPES
from quire.ops.cpu.runtime.memory import empty

lib = load()


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> Tensor:
    """See `Ops.rms_norm`."""
    out = empty(x.shape, x.dtype)
    rows, cols = x.shape
    check(
        lib.qr_rms_norm(
            out.data_ptr(),
            DTYPES[out.dtype],
            x.data_ptr(),
            DTYPES[x.dtype],
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            rows,
            cols,
            eps,
        )
    )
    return out


def rms_norm_columns(x: Tensor, weight: Tensor, eps: float, *, first: int) -> None:
    """See `Ops.rms_norm_columns`. The kernel takes whole rows, so each row's columns are a call of their own."""
    rows, width = x.shape
    dtype, item, start = DTYPES[x.dtype], x.element_size(), x.data_ptr()
    for row in range(rows):
        columns = start + (row * width + first) * item
        check(lib.qr_rms_norm(columns, dtype, columns, dtype, None, weight.data_ptr(), 1, weight.shape[0], eps))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See `Ops.layer_norm`."""
    out = empty(x.shape, x.dtype)
    rows, cols = x.shape
    check(
        lib.qr_layer_norm(
            out.data_ptr(),
            DTYPES[out.dtype],
            x.data_ptr(),
            DTYPES[x.dtype],
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            rows,
            cols,
            eps,
        )
    )
    return out


def layer_norm_heads(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, first: int, num_heads: int) -> None:
    """See `Ops.layer_norm_heads`. The heads of a row that share a weight are the rows of one call."""
    rows, width = x.shape
    num_weights, size = weight.shape
    dtype, item = DTYPES[x.dtype], x.element_size()
    heads_at_once = num_heads // num_weights
    for row in range(rows):
        for index in range(num_weights):
            heads = x.data_ptr() + (row * width + first + index * size) * item
            check(
                lib.qr_layer_norm(
                    heads,
                    dtype,
                    heads,
                    dtype,
                    weight[index].data_ptr(),
                    None if bias is None else bias[index].data_ptr(),
                    heads_at_once,
                    size,
                    eps,
                )
            )
