"""Linear layers over packed weights; `csrc/cpu/products/gemm.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.contracts.operands import LinearWeight
from quire.ops.cpu.library import check, load
from quire.ops.cpu.products.quantized import quantized_gated_linear, quantized_linear
from quire.ops.cpu.runtime.dtypes import ACTIVATIONS, DTYPES, WEIGHT_DTYPES
from quire.ops.cpu.runtime.memory import empty
from quire.ops.cpu.runtime.weights import written

lib = load()


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
    out = empty((x.shape[0], weight.out_features), out_dtype or x.dtype)
    linear_into(out, x, weight, bias, activation=activation, residual=residual)
    return out


def linear_into(
    out: Tensor,
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> None:
    """`linear`, written to `out`."""
    if weight.format != "dense":
        quantized_linear(out, x, weight, bias, activation=activation, residual=residual)
        return
    rows, in_features = x.shape
    packed = weight.tensors["packed"]
    check(
        lib.qr_linear(
            out.data_ptr(),
            DTYPES[out.dtype],
            x.data_ptr(),
            DTYPES[x.dtype],
            packed.data_ptr(),
            WEIGHT_DTYPES[packed.dtype],
            rows,
            weight.out_features,
            in_features,
            None if bias is None else bias.data_ptr(),
            ACTIVATIONS[activation],
            None if residual is None else residual.data_ptr(),
        )
    )


def linear_max(
    x: Tensor, weight: LinearWeight, bias: Tensor | None = None, *, soft_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """See `Ops.linear_max`."""
    rows, in_features = x.shape
    values, ids = empty((rows,), torch.float32), empty((rows,), torch.int64)
    address, count = written(weight)
    check(
        lib.qr_linear_max(
            values.data_ptr(),
            ids.data_ptr(),
            x.data_ptr(),
            DTYPES[x.dtype],
            address,
            count,
            rows,
            weight.out_features,
            in_features,
            None if bias is None else bias.data_ptr(),
            soft_cap or 0.0,
        )
    )
    return values, ids


def gated_linear(x: Tensor, weight: LinearWeight, bias: Tensor | None = None, *, activation: str) -> Tensor:
    """See `Ops.gated_linear`."""
    if weight.format != "dense":
        return quantized_gated_linear(x, weight, bias, activation=activation)
    rows, in_features = x.shape
    half = weight.out_features // 2
    out = empty((rows, half), x.dtype)
    packed = weight.tensors["packed"]
    check(
        lib.qr_gated_linear(
            out.data_ptr(),
            DTYPES[out.dtype],
            x.data_ptr(),
            DTYPES[x.dtype],
            packed.data_ptr(),
            WEIGHT_DTYPES[packed.dtype],
            rows,
            half,
            in_features,
            None if bias is None else bias.data_ptr(),
            ACTIVATIONS[activation],
        )
    )
    return out
