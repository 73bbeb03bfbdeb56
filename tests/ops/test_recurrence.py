"""Recurrent layers: against a naive recurrence in float64, and the bits of sequences in company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quire.ops.contracts.operands import ConvWeights, Mamba2Weights, MambaWeights, StateMetadata
from quire.ops.shared import recurrence
from tests.ops.implementations import implementations_of
from tests.ops.implementations import ops as ops_of

CHANNELS, WIDTH, STATE_SIZE, HEADS, GROUPS, RANK = 12, 3, 5, 6, 2, 4
NUM_PAGES = 9
Run = Callable[[Tensor, Tensor, StateMetadata], Tensor]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def conv_of(channels: int) -> ConvWeights:
    return ConvWeights(weight=numbers(channels, WIDTH), bias=numbers(channels))


def mamba2_weights() -> Mamba2Weights:
    return Mamba2Weights(
        conv=conv_of(CHANNELS + 2 * GROUPS * STATE_SIZE),
        num_groups=GROUPS,
        state_size=STATE_SIZE,
        time_bias=numbers(HEADS),
        decay=-numbers(HEADS).exp(),
        skip=numbers(HEADS, seed=1),
        norm=numbers(CHANNELS, seed=2),
        norm_eps=1e-5,
    )


def runs_of(ops: dict[str, Any]) -> dict[str, tuple[Run, int, int]]:
    """By kind: the op, the columns of its input, and the numbers of a state."""
    past = WIDTH - 1
    mamba2, conv = mamba2_weights(), conv_of(CHANNELS)
    pack = ops["pack_linear"]
    mamba = MambaWeights(
        conv=conv,
        derive=pack([numbers(RANK + 2 * STATE_SIZE, CHANNELS)], dtype=torch.float32),
        widen=pack([numbers(CHANNELS, RANK)], dtype=torch.float32),
        time_bias=numbers(CHANNELS, seed=3),
        decay=-numbers(CHANNELS, STATE_SIZE).exp(),
        skip=numbers(CHANNELS, seed=4),
    )
    wide = CHANNELS + 2 * GROUPS * STATE_SIZE
    return {
        "mamba": (
            lambda x, states, meta: ops["mamba"](x, mamba, states, meta),
            2 * CHANNELS,
            past * CHANNELS + CHANNELS * STATE_SIZE,
        ),
        "mamba2": (
            lambda x, states, meta: ops["mamba2"](x, mamba2, states, meta),
            CHANNELS + wide + HEADS,
            past * wide + CHANNELS * STATE_SIZE,
        ),
        "short_conv": (lambda x, states, meta: ops["short_conv"](x, conv, states, meta), 3 * CHANNELS, past * CHANNELS),
    }


def metadata(counts: list[int], reads: list[int], writes: list[int]) -> StateMetadata:
    starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
    return StateMetadata(
        query_start=torch.tensor(starts, dtype=torch.int32),
        reads=torch.tensor(reads, dtype=torch.int32),
        writes=torch.tensor(writes, dtype=torch.int32),
    )


def pool(size: int, extra: int) -> Tensor:
    """Pages of NaN with some room beside a state, so that halves lie differently."""
    return torch.full((2, NUM_PAGES, (size + 1) // 2 + extra), float("nan"))


def check_cuts(run: Run, columns: int, size: int, extra: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that are cut into steps, beside others, have the bits that they have alone and whole."""
    inputs = [numbers(length, columns, seed=length) for length in (1, 9, 33)]
    whole = []
    for x in inputs:
        states = pool(size, extra)
        whole.append((run(x, states, metadata([len(x)], [-1], [4])), states[:, 4]))
    states = pool(size, extra)
    first = [1, 4, 30]
    parts = torch.cat([x[:count] for x, count in zip(inputs, first, strict=True)])
    began = run(parts, states, metadata(first, [-1, -1, -1], [1, 2, 3])).split(first)
    before = states.clone()
    rest = [5, 3]  # of the last two, in another order, some states at a time
    monkeypatch.setattr(recurrence, "STATES_AT_ONCE", 1)
    parts = torch.cat([inputs[1][4:], inputs[2][30:]])
    ended = run(parts, states, metadata(rest, [2, 3], [7, 8])).split(rest)
    assert torch.equal(began[0], whole[0][0])
    for index, end, page in ((1, ended[0], 7), (2, ended[1], 8)):
        assert torch.equal(torch.cat((began[index], end)), whole[index][0])
        assert torch.equal(states[:, page].nan_to_num(), whole[index][1].nan_to_num())
    others = [0, 1, 2, 3, 4, 5, 6]
    assert torch.equal(states[:, others].nan_to_num(), before[:, others].nan_to_num()), "only what is named is written"


@pytest.mark.parametrize("implementation", implementations_of("mamba"))
@pytest.mark.parametrize("kind", ["mamba", "mamba2", "short_conv"])
@pytest.mark.parametrize("extra", [0, 40])
def test_a_sequence_has_the_same_bits_however_it_is_cut_and_in_any_company(
    kind: str, extra: int, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_cuts(*runs_of(ops_of(implementation))[kind], extra, monkeypatch)


def naive_mamba2(projected: Tensor, weights: Mamba2Weights) -> Tensor:
    """Shapes: projected [T, ...] float64 -> [T, C]."""
    wide = CHANNELS + 2 * GROUPS * STATE_SIZE
    gate, u, time = projected.split((CHANNELS, wide, HEADS), dim=1)
    padded = F.pad(u.t().unsqueeze(0), (WIDTH - 1, 0))
    conv = weights.conv
    assert conv.bias is not None
    u = F.silu(F.conv1d(padded, conv.weight.double().unsqueeze(1), conv.bias.double(), groups=wide))[0].t()
    x, write, read = u.split((CHANNELS, GROUPS * STATE_SIZE, GROUPS * STATE_SIZE), dim=1)
    dt = F.softplus(time + weights.time_bias)
    state = torch.zeros(HEADS, CHANNELS // HEADS, STATE_SIZE, dtype=torch.float64)
    rows = []
    for t in range(len(x)):
        each = x[t].view(HEADS, -1)
        by_head = [
            part[t].view(GROUPS, -1).repeat_interleave(HEADS // GROUPS, 0).unsqueeze(1) for part in (write, read)
        ]
        state = state * (dt[t] * weights.decay).exp()[:, None, None]
        state = state + dt[t][:, None, None] * each.unsqueeze(-1) * by_head[0]
        rows.append(((state * by_head[1]).sum(-1) + weights.skip[:, None] * each).flatten())
    y = (torch.stack(rows) * F.silu(gate)).view(len(x), GROUPS, -1)
    return (y / (y.square().mean(-1, keepdim=True) + weights.norm_eps).sqrt()).view(len(x), -1) * weights.norm


def test_mamba2_is_its_definition() -> None:
    run, columns, size = runs_of(ops_of("reference"))["mamba2"]
    projected = numbers(40, columns)
    actual = run(projected, pool(size, 0), metadata([40], [-1], [0]))
    torch.testing.assert_close(
        actual.double(), naive_mamba2(projected.double(), mamba2_weights()), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("width", [1, 7, 31, 64, 100])
def test_functions_of_rows_do_not_depend_on_other_rows(width: int) -> None:
    for function in (recurrence.EXP, recurrence.SILU, recurrence.SOFTPLUS):
        rows = numbers(50, width)
        together = recurrence.apart(function, rows)
        for count in (1, 2, 3, 17):
            assert torch.equal(recurrence.apart(function, rows[:count]), together[:count])
            assert torch.equal(recurrence.apart(function, rows[-count:]), together[-count:])
