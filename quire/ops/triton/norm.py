"""Norms. A program normalises one row, or one head of it, in one pass; its sums see nothing else."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.alignment import aligned, in_models
from quire.ops.triton.kernels.arithmetic import narrowed
from quire.ops.triton.kernels.dependent import await_inputs, dependent
from quire.ops.triton.variant import Variant


@dependent
def rms_norm_kernel(
    x,
    weight,
    residual,
    out,
    eps,
    num_columns,
    x_stride,
    residual_stride,
    out_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """`Ops.rms_norm` of `num_columns` columns. out may be x."""
    await_inputs(PDL)
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_inside = columns < num_columns
    value = tl.load(x + row * x_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    mean = tl.sum(value * value, axis=0) / num_columns
    value = value * tl.rsqrt(mean + eps) * tl.load(weight + columns, mask=is_inside, other=0.0)
    if residual is not None:
        value += tl.load(residual + row * residual_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, narrowed(value, out.dtype.element_ty), mask=is_inside)


@dependent
def layer_norm_kernel(
    x,
    weight,
    bias,
    out,
    eps,
    num_columns,
    x_stride,
    weight_stride,
    out_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """`Ops.layer_norm` of each head: program (row, head), heads lie behind each other. out may be x.

    weight_stride: between the weights and biases of two heads; 0 where all have the same.
    """
    await_inputs(PDL)
    row, head, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    is_inside = columns < num_columns
    first = head * num_columns
    value = tl.load(x + row * x_stride + first + columns, mask=is_inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, axis=0) / num_columns
    centred = tl.where(is_inside, value - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / num_columns
    own = head * weight_stride + columns
    value = centred * tl.rsqrt(variance + eps) * tl.load(weight + own, mask=is_inside, other=0.0)
    if bias is not None:
        value += tl.load(bias + own, mask=is_inside, other=0.0)
    tl.store(out + row * out_stride + first + columns, narrowed(value, out.dtype.element_ty), mask=is_inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> Tensor:
    """See `Ops.rms_norm`."""
    x, out = aligned(x), torch.empty_like(x)
    _fill_rms_norm(out, x, weight, eps, residual)
    return out


def rms_norm_columns(x: Tensor, weight: Tensor, eps: float, *, first: int) -> None:
    """See `Ops.rms_norm_columns`."""
    columns = x[:, first : first + weight.shape[0]]
    _fill_rms_norm(columns, columns, weight, eps, None)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See `Ops.layer_norm`."""
    x, out = aligned(x), torch.empty_like(x)
    _fill_layer_norm(out, x, weight.view(1, -1), bias, eps, num_heads=1)
    return out


def layer_norm_heads(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, first: int, num_heads: int) -> None:
    """See `Ops.layer_norm_heads`."""
    heads = x[:, first : first + num_heads * weight.shape[1]]
    _fill_layer_norm(heads, heads, weight, bias, eps, num_heads=num_heads)


def _fill_rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> None:
    rows, size = x.shape
    if rows:
        block = triton.next_power_of_2(size)
        rms_norm_kernel[(rows,)](
            x,
            weight,
            residual,
            out,
            eps,
            size,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            out.stride(0),
            BLOCK=block,
            num_warps=_num_warps(block),
        )


def _fill_layer_norm(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, num_heads: int
) -> None:
    num_weights, size = weight.shape
    if x.shape[0]:
        block = triton.next_power_of_2(size)
        layer_norm_kernel[(x.shape[0], num_heads)](
            x,
            weight,
            bias,
            out,
            eps,
            size,
            x.stride(0),
            0 if num_weights == 1 else size,
            out.stride(0),
            BLOCK=block,
            num_warps=_num_warps(block),
        )


def _num_warps(block: int) -> int:
    """So that a thread holds some eight elements."""
    return min(16, max(1, block // 256))


def _variants(dtype: str, block: int) -> tuple[Variant, Variant]:
    rms, layer = (
        {"x": dtype, "weight": "*fp32", other: kind, "out": dtype, "eps": "fp32"}
        for other, kind in (("residual", dtype), ("bias", "*fp32"))
    )
    sizes = dict.fromkeys(("num_columns", "x_stride", "out_stride"), "i32")
    constants, num_warps = {"BLOCK": block}, _num_warps(block)
    return (
        Variant(
            kernel=rms_norm_kernel,
            signature=rms | sizes | {"residual_stride": "i32"},
            constants=constants,
            num_warps=num_warps,
        ),
        Variant(
            kernel=layer_norm_kernel,
            signature=layer | sizes | {"weight_stride": "i32"},
            constants=constants,
            num_warps=num_warps,
        ),
    )


VARIANTS: tuple[Variant, ...] = in_models(
    variant
    for dtype in ("*bf16", "*fp16", "*fp32")
    for block in (128, 4096, 16384)
    for variant in _variants(dtype, block)
)
