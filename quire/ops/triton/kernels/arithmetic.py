"""What kernels share: rounding, products of tiles, activations.

In Triton's interpreter bfloat16 has no arithmetic, and conversion to it truncates. There, tiles are widened before a
product, and results are rounded by hand.
"""

from __future__ import annotations

from types import MappingProxyType

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on tensors of the CPU."""

ACTIVATION_CODES = MappingProxyType(
    {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4, "relu2": 5, "quick_gelu": 6}
)
"""Activations of `Ops.linear`, and another one of experts -> the constants that kernels know them by."""
SILU = tl.constexpr(1)
GELU = tl.constexpr(2)
GELU_TANH = tl.constexpr(3)
RELU = tl.constexpr(4)
RELU2 = tl.constexpr(5)
QUICK_GELU = tl.constexpr(6)


@triton.jit
def narrowed(value, dtype: tl.constexpr):
    """float32 in another type, rounded half to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(value == value, rounded, 0x7FC0)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value.to(dtype)


@triton.jit
def multiply_add(total, x, weight):
    """total + x @ weight.T in float32. Shapes: total [T, N], x [T, K], weight [N, K]."""
    if (
        INTERPRETED
    ):  # in float64, because the order of numpy's sums depends on the shape of the tile and the row's place
        step = tl.dot(x.to(tl.float32).to(tl.float64), tl.trans(weight.to(tl.float32).to(tl.float64)))
        return total + step.to(tl.float32)
    if x.dtype != weight.dtype:
        x, weight = x.to(tl.float32), weight.to(tl.float32)
    return tl.dot(x, tl.trans(weight), total, input_precision="ieee")


@triton.jit
def product(a, b):
    """a @ b in float32. Shapes: a [M, K], b [K, N]."""
    if INTERPRETED:  # as for `multiply_add`
        return tl.dot(a.to(tl.float32).to(tl.float64), b.to(tl.float32).to(tl.float64)).to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def add_product(total, a, b):
    """total + a @ b in float32."""
    if INTERPRETED:
        return total + product(a, b)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def tanh(x):
    """By the exponential of a negative number, which cannot overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    # Near zero 1 - small loses digits; the series is exact to float32 below 0.04.
    square = x * x
    series = tl.abs(x) * (1.0 + square * (-0.3333333333 + square * 0.1333333333))
    size = tl.where(tl.abs(x) < 0.04, series, size)
    return tl.where(x < 0, -size, size)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))"""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), exact to float32 also where exp(x) is small; x itself above 20."""
    small = tl.exp(tl.minimum(x, 20.0))
    raised = 1.0 + small
    found = tl.where(raised == 1.0, small, tl.log(raised) * (small / tl.where(raised == 1.0, 1.0, raised - 1.0)))
    return tl.where(x > 20.0, x, found)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """One of `ACTIVATION_CODES`. x is float32."""
    if ACTIVATION == SILU:
        x = x * sigmoid(x)
    elif ACTIVATION == GELU:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == GELU_TANH:
        x = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == RELU:
        x = tl.where(x < 0, 0.0, x)  # NaN stays
    elif ACTIVATION == RELU2:
        x = tl.where(x < 0, 0.0, x)
        x = x * x
    elif ACTIVATION == QUICK_GELU:
        x = x * sigmoid(1.702 * x)
    return x


@triton.jit
def floats_of(codes):
    """The bits of float8_e4m3fn as float16, 256 times as small: sign, then seven bits of exponent and fraction."""
    bits = codes.to(tl.int16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
