"""The gated delta rule, lightning attention and the RG-LRU: against naive recurrences in float64, and the bits of
sequences that are cut into steps and in company.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quire.ops.contracts.operands import ConvWeights, GatedDeltaWeights, LightningWeights, RgLruWeights, StateMetadata
from quire.ops.shared import gated_recurrence, recurrence
from tests.ops.implementations import implementations_of
from tests.ops.implementations import ops as ops_of
from tests.ops.test_recurrence import check_cuts, metadata, numbers, pool

HEADS, KEY_HEADS, KEY_SIZE, SIZE, WIDTH, BLOCKS = 6, 2, 21, 12, 3, 3
INNER = HEADS * SIZE
CHANNELS = 2 * KEY_HEADS * KEY_SIZE + INNER
Run = Callable[[Tensor, Tensor, StateMetadata], Tensor]

DELTA = GatedDeltaWeights(
    conv=ConvWeights(weight=numbers(CHANNELS, WIDTH), bias=None),
    num_key_heads=KEY_HEADS,
    key_size=KEY_SIZE,
    time_bias=numbers(HEADS),
    decay=-numbers(HEADS).exp(),
    norm=numbers(SIZE, seed=1),
    norm_eps=1e-3,
    most_rate=1.75,
)
CHANNEL_DELTA = replace(DELTA, time_bias=numbers(HEADS, KEY_SIZE), gates_by_sigmoid=True)
BOUNDED_DELTA = replace(CHANNEL_DELTA, bound=-1.5)
BY_CHANNEL, BOUNDED = "gated_delta by channel", "gated_delta by channel, bounded"
RATES = torch.tensor((0.5, 0.25, 0.125, 1.0, 2.0, 0.01))
LIGHTNING = LightningWeights(decay=torch.exp(-RATES), norm=numbers(INNER, seed=2), norm_eps=1e-6)


def rg_lru_weights(ops: dict[str, Any], dtype: torch.dtype = torch.float32) -> RgLruWeights:
    block = INNER // BLOCKS
    return RgLruWeights(
        conv=ConvWeights(weight=numbers(INNER, WIDTH), bias=numbers(INNER)),
        gates=tuple(
            ops["pack_linear"]([numbers(2 * block, block, seed=index)], dtype=dtype) for index in range(BLOCKS)
        ),
        gate_biases=numbers(BLOCKS, 2 * block),
        decay=-numbers(INNER, seed=3).exp(),
    )


def runs_of(ops: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, tuple[Run, int, int]]:
    """By kind: the op, the columns of its input, and the numbers of a state."""
    lru = rg_lru_weights(ops, dtype)
    return {
        "gated_delta": (
            lambda x, states, meta: ops["gated_delta"](x, DELTA, states, meta),
            CHANNELS + INNER + 2 * HEADS,
            (WIDTH - 1) * CHANNELS + INNER * KEY_SIZE,
        ),
        BY_CHANNEL: (
            lambda x, states, meta: by_channel(ops["gated_delta"], x, states, meta),
            sum(PARTS),
            (WIDTH - 1) * CHANNELS + INNER * KEY_SIZE,
        ),
        BOUNDED: (
            lambda x, states, meta: ops["gated_delta"](x, BOUNDED_DELTA, states, meta),
            CHANNELS + INNER + HEADS + HEADS * KEY_SIZE,
            (WIDTH - 1) * CHANNELS + INNER * KEY_SIZE,
        ),
        "lightning_attention": (
            lambda x, states, meta: ops["lightning_attention"](x, LIGHTNING, states, meta),
            4 * INNER,
            INNER * SIZE,
        ),
        "rg_lru": (
            lambda x, states, meta: ops["rg_lru"](*halves(x), lru, states, meta),
            2 * INNER,
            WIDTH * INNER,
        ),
    }


PARTS = (CHANNELS + HEADS, INNER, HEADS * KEY_SIZE)
"""Columns of what the rule reads where each channel of a key decays by itself."""


def by_channel(op: Callable[..., Tensor], x: Tensor, states: Tensor, step: StateMetadata) -> Tensor:
    projected, gates, times = (part.contiguous() for part in x.split(PARTS, dim=1))
    return op(projected, CHANNEL_DELTA, states, step, gates=gates, times=times)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, dim=1)
    return first.contiguous(), second.contiguous()


@pytest.mark.parametrize("implementation", implementations_of("rg_lru"))
@pytest.mark.parametrize("kind", ["gated_delta", BY_CHANNEL, BOUNDED, "lightning_attention", "rg_lru"])
@pytest.mark.parametrize("extra", [0, 40])
def test_a_sequence_has_the_same_bits_however_it_is_cut_and_in_any_company(
    kind: str, extra: int, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_cuts(*runs_of(ops_of(implementation))[kind], extra, monkeypatch)


def convolved(x: Tensor, weights: ConvWeights) -> Tensor:
    """Shapes: x [T, C] float64 -> [T, C]."""
    bias = None if weights.bias is None else weights.bias.double()
    padded = F.pad(x.t().unsqueeze(0), (WIDTH - 1, 0))
    return F.conv1d(padded, weights.weight.double().unsqueeze(1), bias, groups=x.shape[1])[0].t()


def rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def naive_delta(projected: Tensor) -> Tensor:
    u, gate, rate, time = projected.split((CHANNELS, INNER, HEADS, HEADS), dim=1)
    return naive_rule(u, F.silu(gate), rate, softplus_decay((time + DELTA.time_bias.double()).unsqueeze(2)))


def naive_channel_delta(projected: Tensor) -> Tensor:
    u, rate, gate, time = projected.split((CHANNELS, HEADS, *PARTS[1:]), dim=1)
    return naive_rule(u, gate.sigmoid(), rate, softplus_decay(channel_times(time)))


def naive_bounded_delta(projected: Tensor) -> Tensor:
    u, gate, rate, time = projected.split((CHANNELS, INNER, HEADS, HEADS * KEY_SIZE), dim=1)
    opening = (channel_times(time) * -DELTA.decay.double().unsqueeze(1)).sigmoid()
    return naive_rule(u, gate.sigmoid(), rate, (-1.5 * opening).exp())


def channel_times(time: Tensor) -> Tensor:
    return time.view(-1, HEADS, KEY_SIZE) + CHANNEL_DELTA.time_bias.double()


def softplus_decay(time: Tensor) -> Tensor:
    return (F.softplus(time) * DELTA.decay.double().unsqueeze(1)).exp()


def naive_rule(u: Tensor, opened: Tensor, rate: Tensor, decay: Tensor) -> Tensor:
    """Shapes: decay [T, HEADS, KEY_SIZE], or 1 for all channels of a key."""
    keys = KEY_HEADS * KEY_SIZE
    query, key, value = F.silu(convolved(u, DELTA.conv)).split((keys, keys, INNER), dim=1)
    query, key = (
        part.reshape(-1, KEY_HEADS, KEY_SIZE).repeat_interleave(HEADS // KEY_HEADS, dim=1) for part in (query, key)
    )
    query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
    state, rows = torch.zeros(HEADS, KEY_SIZE, SIZE, dtype=torch.float64), []
    for t in range(len(u)):
        state = state * decay[t].unsqueeze(2)
        known = torch.einsum("hnd,hn->hd", state, key[t])
        change = (value[t].view(HEADS, SIZE) - known) * DELTA.most_rate * rate[t].sigmoid()[:, None]
        state = state + key[t].unsqueeze(2) * change.unsqueeze(1)
        rows.append(torch.einsum("hnd,hn->hd", state, query[t]) / KEY_SIZE**0.5)
    normed = rms(torch.stack(rows), DELTA.norm_eps) * DELTA.norm.double()
    return normed.flatten(1) * opened


def naive_lightning(projected: Tensor) -> Tensor:
    """Every token attends to those before it, less for each token between them."""
    u, gate = projected.split((3 * INNER, INNER), dim=1)
    query, key, value = F.silu(u).view(-1, HEADS, 3, SIZE).unbind(2)
    scores = torch.einsum("thd,uhd->htu", query, key)
    distance = torch.arange(len(u)).unsqueeze(1) - torch.arange(len(u))
    decay = torch.exp(-RATES.double()[:, None, None] * distance).tril()
    y = torch.einsum("htu,uhd->thd", scores * decay, value).flatten(1)
    return rms(y, LIGHTNING.norm_eps) * LIGHTNING.norm.double() * gate.sigmoid()


def naive_rg_lru(projected: Tensor) -> Tensor:
    x, gate = projected.chunk(2, dim=1)
    weights = rg_lru_weights(ops_of("reference"))
    u = convolved(x, weights.conv)
    block = INNER // BLOCKS
    by_block = [numbers(2 * block, block, seed=index).double() for index in range(BLOCKS)]
    products = [part @ weight.t() for part, weight in zip(u.chunk(BLOCKS, dim=1), by_block, strict=True)]
    gates = (torch.stack(products, dim=1) + weights.gate_biases.double()).sigmoid()
    opened, kept = (part.flatten(1) for part in gates.chunk(2, dim=2))
    decay = (kept * weights.decay.double()).exp()
    state, rows = torch.zeros(INNER, dtype=torch.float64), []
    for t in range(len(x)):
        root = (1 - decay[t] ** 2).sqrt() if t else 1.0
        state = decay[t] * state + root * opened[t] * u[t]
        rows.append(state)
    return torch.stack(rows) * gate


NAIVE = {
    "gated_delta": naive_delta,
    BY_CHANNEL: naive_channel_delta,
    BOUNDED: naive_bounded_delta,
    "lightning_attention": naive_lightning,
    "rg_lru": naive_rg_lru,
}


@pytest.mark.parametrize("implementation", implementations_of("rg_lru"))
@pytest.mark.parametrize("kind", NAIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_recurrence_is_its_definition(kind: str, implementation: str, dtype: torch.dtype) -> None:
    run, columns, size = runs_of(ops_of(implementation), dtype)[kind]
    projected = numbers(40, columns).to(dtype)
    actual = run(projected, pool(size, 0), metadata([40], [-1], [0]))
    assert actual.dtype is dtype
    close = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.01}[dtype]
    torch.testing.assert_close(actual.double(), NAIVE[kind](projected.double()), rtol=10 * close, atol=close)


@pytest.mark.parametrize("width", [1, 7, 31, 64, 100])
@pytest.mark.parametrize("neighbours", [1, 5])
@pytest.mark.parametrize("implementation", implementations_of("gate"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_is_a_sigmoid_and_does_not_depend_on_other_rows(
    implementation: str, width: int, neighbours: int, dtype: torch.dtype
) -> None:
    op = ops_of(implementation)["gate"]
    given, gates = numbers(50, width * neighbours).to(dtype), numbers(50, width, seed=1).to(dtype)
    together = given.clone()
    op(together, gates)
    exact = given.double() * gates.double().sigmoid().repeat_interleave(neighbours, dim=1)
    torch.testing.assert_close(together.double(), exact, rtol=0.005 if dtype is torch.bfloat16 else 1e-6, atol=0)
    for rows in (slice(1), slice(3), slice(-17, None), slice(20, 22)):
        some = given[rows].clone()
        op(some, gates[rows].clone())
        assert torch.equal(some, together[rows])


@pytest.mark.parametrize("function", [gated_recurrence.SIGMOID, gated_recurrence.EXPM1])
@pytest.mark.parametrize("width", [1, 7, 31, 64, 100])
def test_functions_of_rows_do_not_depend_on_other_rows(function: Callable[..., Tensor], width: int) -> None:
    rows = numbers(50, width)
    together = recurrence.apart(function, rows)
    for count in (1, 2, 3, 17):
        assert torch.equal(recurrence.apart(function, rows[:count]), together[:count])
        assert torch.equal(recurrence.apart(function, rows[-count:]), together[-count:])
