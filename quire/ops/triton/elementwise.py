"""Elementwise ops: kernels where torch would take several passes, torch's own where it takes one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.config.layers.experts import ClampedGate
from quire.ops.triton.alignment import in_models
from quire.ops.triton.kernels.arithmetic import ACTIVATION_CODES, activated, narrowed, sigmoid, softplus, tanh
from quire.ops.triton.kernels.dependent import await_inputs, dependent
from quire.ops.triton.variant import Variant, parameters

BLOCK = 1024
"""Columns of one row that a program computes."""


@triton.jit
def places_of(stride, num_columns, BLOCK: tl.constexpr):
    """Where this program's elements are, from the beginning of a tensor with this stride of rows, and which exist."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return tl.program_id(0).to(tl.int64) * stride + columns, columns < num_columns


@dependent
def finish_kernel(
    x, bias, residual, out, num_columns, x_stride, residual_stride, out_stride,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """What `products.finish` does to a product, where another kernel computed that.

    Shapes: x [T, N] or, GATED, [T, 2N], bias as many numbers as x has columns, residual and out [T, N].
    """
    await_inputs(PDL)
    places, is_inside = places_of(x_stride, num_columns, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + places, mask=is_inside, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + columns, mask=is_inside, other=0.0)
    value = activated(value, ACTIVATION)
    if GATED:
        up = tl.load(x + num_columns + places, mask=is_inside, other=0.0).to(tl.float32)
        if bias is not None:
            up += tl.load(bias + num_columns + columns, mask=is_inside, other=0.0)
        value *= up
    if residual is not None:
        places, _ = places_of(residual_stride, num_columns, BLOCK)
        value += tl.load(residual + places, mask=is_inside, other=0.0).to(tl.float32)
    places, _ = places_of(out_stride, num_columns, BLOCK)
    tl.store(out + places, narrowed(value, out.dtype.element_ty), mask=is_inside)


@dependent
def scale_add_kernel(
    x,
    residual,
    out,
    scale,
    num_columns,
    x_stride,
    residual_stride,
    out_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """`Ops.scale_add`."""
    await_inputs(PDL)
    places, is_inside = places_of(x_stride, num_columns, BLOCK)
    value = tl.load(x + places, mask=is_inside, other=0.0).to(tl.float32) * scale
    if residual is not None:
        places, _ = places_of(residual_stride, num_columns, BLOCK)
        value += tl.load(residual + places, mask=is_inside, other=0.0).to(tl.float32)
    places, _ = places_of(out_stride, num_columns, BLOCK)
    tl.store(out + places, narrowed(value, out.dtype.element_ty), mask=is_inside)


@dependent
def quick_gelu_kernel(x, num_columns, stride, BLOCK: tl.constexpr, PDL: tl.constexpr = False):
    """quick_gelu of `Ops.activate`."""
    await_inputs(PDL)
    places, is_inside = places_of(stride, num_columns, BLOCK)
    value = tl.load(x + places, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(x + places, narrowed(value * sigmoid(1.702 * value), x.dtype.element_ty), mask=is_inside)


@triton.jit
def exponential_less_one(x):
    """exp(x) - 1 of numbers below zero: near it by nine terms of the series."""
    term = 1.0 + x / 9.0
    for divisor in tl.static_range(8, 1, -1):
        term = 1.0 + x / divisor * term
    return tl.where(x < -0.5, tl.exp(x) - 1.0, x * term)


@dependent
def xielu_kernel(x, positive, negative, beta, eps, num_columns, stride, BLOCK: tl.constexpr, PDL: tl.constexpr = False):
    """xielu of `Ops.activate`."""
    await_inputs(PDL)
    places, is_inside = places_of(stride, num_columns, BLOCK)
    value = tl.load(x + places, mask=is_inside, other=0.0).to(tl.float32)
    below = (exponential_less_one(tl.where(value > eps, eps, value)) - value) * negative
    result = tl.where(value > 0, positive * value * value, below) + beta * value
    tl.store(x + places, narrowed(result, x.dtype.element_ty), mask=is_inside)


@dependent
def gate_kernel(
    x, gates, num_columns, stride, gates_stride,
    NEIGHBOURS: tl.constexpr, IS_SOFTPLUS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """`Ops.gate`."""
    await_inputs(PDL)
    places, is_inside = places_of(stride, num_columns, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * gates_stride + columns // NEIGHBOURS
    given = tl.load(gates + at, mask=is_inside, other=0.0).to(tl.float32)
    opening = softplus(given) if IS_SOFTPLUS else sigmoid(given)
    value = tl.load(x + places, mask=is_inside, other=0.0).to(tl.float32) * opening
    tl.store(x + places, narrowed(value, x.dtype.element_ty), mask=is_inside)


@dependent
def soft_cap_kernel(logits, cap, num_columns, stride, BLOCK: tl.constexpr, PDL: tl.constexpr = False):
    """`Ops.soft_cap`."""
    await_inputs(PDL)
    places, is_inside = places_of(stride, num_columns, BLOCK)
    value = tl.load(logits + places, mask=is_inside, other=0.0)
    tl.store(logits + places, tanh(value / cap) * cap, mask=is_inside)


@dependent
def clamped_gate_kernel(
    both, out, limit, slope, offset, num_columns, stride, out_stride, BLOCK: tl.constexpr, PDL: tl.constexpr = False
):
    """`ClampedGate` of sums, the gate's in front of the others. Shapes: both [T, 2N] float32, out [T, N]."""
    await_inputs(PDL)
    places, is_inside = places_of(stride, num_columns, BLOCK)
    opened, up = tl.load(both + places, mask=is_inside), tl.load(both + num_columns + places, mask=is_inside)
    opened = tl.where(opened > limit, limit, opened)  # NaN stays
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    value = opened * sigmoid(slope * opened) * (up + offset)
    places, _ = places_of(out_stride, num_columns, BLOCK)
    tl.store(out + places, narrowed(value, out.dtype.element_ty), mask=is_inside)


def fill_clamped_gate(out: Tensor, both: Tensor, gate: ClampedGate) -> None:
    """A `ClampedGate` of float32 sums. Shapes: both [T, 2F]. Mutates: out [T, F]."""
    limits = (gate.limit, gate.slope, gate.offset)
    _launch(clamped_gate_kernel, out, both, out, *limits, out.shape[1], both.stride(0), out.stride(0))


def finish_product(
    out: Tensor, x: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None, *, gated: bool
) -> None:
    """Activation of x + bias, times the up half if gated, plus residual, rounded once. Mutates: out [T, N]."""
    _launch(
        finish_kernel, out, x, bias, residual, out, out.shape[1], x.stride(0), _stride(residual), out.stride(0),
        ACTIVATION=ACTIVATION_CODES[activation], GATED=gated,
    )  # fmt: skip


def scale_add(x: Tensor, scale: float, residual: Tensor | None = None) -> Tensor:
    """See `Ops.scale_add`. Without fusion of product and sum, so that bits are the reference's."""
    out = torch.empty_like(x)
    _launch(
        scale_add_kernel, out, x, residual, out, scale, out.shape[1], x.stride(0), _stride(residual), out.stride(0),
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def activate(x: Tensor, activation: str, parameters: tuple[float, ...] = ()) -> None:
    """See `Ops.activate`."""
    kernel = {"quick_gelu": quick_gelu_kernel, "xielu": xielu_kernel}[activation]
    _launch(kernel, x, x, *parameters, x.shape[1], x.stride(0))


def clip(x: Tensor, limit: float) -> None:
    """See `Ops.clip`."""
    x.clamp_(min=-limit, max=limit)


def gate(x: Tensor, gates: Tensor, activation: str = "sigmoid") -> None:
    """See `Ops.gate`."""
    numbers = x.shape[1], x.stride(0), gates.stride(0)
    constants = {"NEIGHBOURS": x.shape[1] // gates.shape[1], "IS_SOFTPLUS": activation == "softplus"}
    _launch(gate_kernel, x, x, gates, *numbers, **constants)


def gated_activation(both: Tensor, activation: str) -> Tensor:
    """See `Ops.gated_activation`."""
    out = both.new_empty(both.shape[0], both.shape[1] // 2)
    finish_product(out, both, None, None, activation, gated=True)
    return out


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """See `Ops.join_columns`."""
    return torch.cat(list(parts), dim=1)


def scale_heads(x: Tensor, weight: Tensor) -> None:
    """See `Ops.scale_heads`."""
    x.mul_(weight)


def scale_tokens(x: Tensor, scales: Tensor, positions: Tensor) -> None:
    """See `Ops.scale_tokens`."""
    x.mul_(scales.index_select(0, positions).view(-1, 1, 1))


def soft_cap(logits: Tensor, cap: float) -> None:
    """See `Ops.soft_cap`."""
    _launch(soft_cap_kernel, logits, logits, cap, logits.shape[1], logits.stride(0))


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


def _launch(kernel: Any, out: Tensor, *args: object, **constants: object) -> None:
    """A program for each stretch of `BLOCK` columns of each row of `out`."""
    if out.numel():
        kernel[(out.shape[0], triton.cdiv(out.shape[1], BLOCK))](*args, BLOCK=BLOCK, **constants)


def _variants(dtype: str) -> tuple[Variant, ...]:
    def variant(kernel: Any, pointers: str, floats: str = "", *, missing: str = "", **constants: object) -> Variant:
        others = [name for name in parameters(kernel) if name not in constants and name != "BLOCK"]
        types = dict.fromkeys(others, "i32") | dict.fromkeys(pointers.split(), dtype)
        types |= dict.fromkeys(floats.split(), "fp32") | ({"bias": "*fp32"} if "bias" in others else {})
        absent = missing.split()
        return Variant(
            kernel=kernel,
            signature={name: kind for name, kind in types.items() if name not in absent},
            constants=constants | {"BLOCK": BLOCK} | dict.fromkeys(absent),
            enable_fp_fusion=kernel is not scale_add_kernel,
        )

    gelu, silu = ACTIVATION_CODES["gelu"], ACTIVATION_CODES["silu"]
    tanh_code = ACTIVATION_CODES["gelu_tanh"]
    return (
        variant(finish_kernel, "x residual out", ACTIVATION=gelu, GATED=False),
        variant(finish_kernel, "x out", missing="bias residual", ACTIVATION=silu, GATED=True),
        variant(finish_kernel, "x out", missing="bias residual", ACTIVATION=tanh_code, GATED=True),
        variant(scale_add_kernel, "x residual out", "scale"),
        variant(quick_gelu_kernel, "x"),
        variant(xielu_kernel, "x", "positive negative beta eps"),
        variant(gate_kernel, "x gates", NEIGHBOURS=1, IS_SOFTPLUS=False),
        variant(gate_kernel, "x gates", NEIGHBOURS=128, IS_SOFTPLUS=False),
        variant(gate_kernel, "x gates", NEIGHBOURS=128, IS_SOFTPLUS=True),
    )


VARIANTS: tuple[Variant, ...] = in_models(
    (
        *_variants("*bf16"),
        *_variants("*fp16"),
        *_variants("*fp32"),
        Variant(
            kernel=soft_cap_kernel,
            signature={"logits": "*fp32", "cap": "fp32", "num_columns": "i32", "stride": "i32"},
            constants={"BLOCK": BLOCK},
        ),
        Variant(
            kernel=clamped_gate_kernel,
            signature={"both": "*fp32", "out": "*bf16"}
            | dict.fromkeys(("limit", "slope", "offset"), "fp32")
            | dict.fromkeys(("num_columns", "stride", "out_stride"), "i32"),
            constants={"BLOCK": BLOCK},
        ),
    )
)
