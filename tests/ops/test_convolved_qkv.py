"""Convolved queries and keys: against torch's convolutions in float64, and the bits of sequences in company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quire.ops.contracts.operands import ConvolvedQkvWeights, ConvWeights
from tests.ops.implementations import implementations_of
from tests.ops.implementations import ops as ops_of
from tests.ops.test_recurrence import Run, check_cuts, metadata, numbers, pool

SIZES = {"several": (6, 2, 10, 3, 2), "odd": (3, 3, 14, 2, 4), "no past": (5, 1, 8, 1, 1), "two": (4, 2, 16, 2, 2)}
"""Query heads, key heads, features of a head, and the widths of both convolutions."""


def weights_of(ops: dict[str, Any], case: str, has_bias: bool, dtype: torch.dtype) -> ConvolvedQkvWeights:
    heads, kv_heads, size, single, _ = SIZES[case]
    channels = (heads + kv_heads) * size
    return ConvolvedQkvWeights(
        num_heads=heads,
        num_kv_heads=kv_heads,
        single=ConvWeights(weight=numbers(channels, single), bias=numbers(channels)),
        joint=tuple(
            ops["pack_linear"]([joint_of(case)[head].transpose(1, 2).reshape(size, -1)], dtype=dtype)
            for head in range(heads + kv_heads)
        ),
        joint_bias=numbers(heads + kv_heads, size),
        temperatures=numbers(kv_heads, seed=2),
        product_bias=numbers(channels + kv_heads * size, seed=3) if has_bias else None,
    )


def joint_of(case: str) -> Tensor:
    """As torch has a convolution of groups: [heads, out, in, tokens]."""
    heads, kv_heads, size, _, joint = SIZES[case]
    return numbers(heads + kv_heads, size, size, joint, seed=1) * 0.3


def run_of(
    ops: dict[str, Any], case: str, *, has_bias: bool, dtype: torch.dtype = torch.float32
) -> tuple[Run, int, int]:
    """The op, the columns of its input, and the numbers of a state."""
    weights = weights_of(ops, case, has_bias, dtype)
    columns = sum(weights.sizes)
    state = weights.num_past * weights.sizes[0] + weights.sizes[2]
    return lambda x, states, meta: ops["convolved_qkv"](x, weights, states, meta), columns, state


def defined(x: Tensor, weights: ConvolvedQkvWeights, case: str) -> Tensor:
    """In float64, as the paper has it. Shapes: x [T, ...] -> [T, (H + 2K) * D]."""
    heads, kv_heads, size, _, _ = SIZES[case]
    tokens, channels = len(x), weights.sizes[0]
    query, key = x[:, : heads * size].view(tokens, heads, size), x[:, heads * size : channels].view(tokens, -1, size)
    u = F.pad(x[:, :channels].t().unsqueeze(0), (weights.num_past, 0))
    assert weights.single.bias is not None
    u = F.conv1d(u, weights.single.weight.double().unsqueeze(1), weights.single.bias.double(), groups=channels)
    joint = joint_of(case).double().flatten(0, 1)
    u = F.conv1d(u, joint, weights.joint_bias.double().flatten(), groups=heads + kv_heads)[0].t()
    means = (query + key.repeat_interleave(heads // kv_heads, dim=1)) / 2
    both = torch.cat((means, means.unflatten(1, (kv_heads, -1)).mean(2)), dim=1) + u.reshape(tokens, -1, size)
    both = F.normalize(both, dim=2) * size**0.5
    both = torch.cat((both[:, :heads], both[:, heads:] * weights.temperatures.double().unsqueeze(1)), dim=1)
    early, late = x[:, channels:].chunk(2, dim=1)
    bias = torch.zeros(1) if weights.product_bias is None else weights.product_bias
    first = bias.double()[-late.shape[1] :].expand(1, late.shape[1])
    return torch.cat((both.flatten(1), early, torch.cat((first, late[:-1]))), dim=1)


@pytest.mark.parametrize("implementation", implementations_of("convolved_qkv"))
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_its_definition(implementation: str, case: str, has_bias: bool, dtype: torch.dtype) -> None:
    ops = ops_of(implementation)
    run, columns, size = run_of(ops, case, has_bias=has_bias, dtype=dtype)
    x = numbers(40, columns).to(dtype)
    actual = run(x, pool(size, 0), metadata([40], [-1], [0]))
    assert actual.dtype is dtype
    close = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
    expected = defined(x.double(), weights_of(ops, case, has_bias, dtype), case)
    torch.testing.assert_close(actual.double(), expected, rtol=close, atol=close)


@pytest.mark.parametrize("implementation", implementations_of("convolved_qkv"))
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("extra", [0, 40])
def test_a_sequence_has_the_same_bits_however_it_is_cut_and_in_any_company(
    implementation: str, case: str, extra: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_cuts(*run_of(ops_of(implementation), case, has_bias=True), extra, monkeypatch)


@pytest.mark.parametrize("implementation", implementations_of("convolved_qkv"))
def test_a_head_of_zeros_stays_zero(implementation: str) -> None:
    ops: dict[str, Callable[..., Tensor]] = ops_of(implementation)
    _, columns, size = run_of(ops, "two", has_bias=False)
    weights = weights_of(ops, "two", False, torch.float32)
    assert weights.single.bias is not None
    weights.single.bias.zero_()
    weights.joint_bias.zero_()
    out = ops["convolved_qkv"](torch.zeros(3, columns), weights, pool(size, 0), metadata([3], [-1], [0]))
    assert torch.equal(out, torch.zeros_like(out))
