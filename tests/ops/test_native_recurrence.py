"""The native recurrent layers against torch's: sizes that fill vectors and blocks, dtypes, threads, graphs and NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.ops.contracts.operands import ConvWeights, Mamba2Weights, MambaWeights, StateMetadata
from tests.ops.implementations import assert_close, implementations_of, rand
from tests.ops.implementations import ops as ops_of
from tests.ops.test_recurrence import metadata

pytestmark = pytest.mark.skipif("cpu" not in implementations_of("paged_attention"), reason="no native kernels")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COUNTS = [1, 40, 3]
SECOND, THIRD = slice(1, 41), slice(41, 44)


@dataclass(frozen=True)
class Layer:
    """An op with its weights: columns of its input, and numbers of a state."""

    run: Callable[[str, Tensor, Tensor, StateMetadata], Tensor]
    columns: int
    size: int

    def pool(self, num_pages: int = 7) -> Tensor:
        return torch.full((2, num_pages, (self.size + 1) // 2 + 8), float("nan"))


def conv_of(channels: int, width: int, has_bias: bool) -> ConvWeights:
    return ConvWeights(weight=rand(channels, width, seed=1), bias=rand(channels, seed=2) if has_bias else None)


def mamba(dtype: torch.dtype, channels: int, size: int, rank: int, width: int, norms: str) -> Layer:
    derive, widen = rand(rank + 2 * size, channels, seed=3) * channels**-0.5, rand(channels, rank, seed=4) * rank**-0.5

    @cache
    def weights_of(name: str) -> MambaWeights:
        pack: Callable[..., Any] = ops_of(name)["pack_linear"]
        return MambaWeights(
            conv=conv_of(channels, width, norms == "none"),
            derive=pack([derive], dtype=dtype),
            widen=pack([widen], dtype=dtype),
            time_bias=rand(channels, seed=5),
            decay=-rand(channels, size, seed=6).exp(),
            skip=rand(channels, seed=7),
            norms={
                "none": None,
                "plain": (None, None, None),
                "weighted": (rand(rank, seed=8), rand(size, seed=9), rand(size, seed=10)),
            }[norms],
            norm_eps=1e-6,
        )

    return Layer(
        lambda name, x, states, step: ops_of(name)["mamba"](x, weights_of(name), states, step),
        2 * channels,
        (width - 1) * channels + channels * size,
    )


def mamba2(heads: int, head_size: int, groups: int, size: int, width: int) -> Layer:
    inner = heads * head_size
    convolved = inner + 2 * groups * size
    weights = Mamba2Weights(
        conv=conv_of(convolved, width, True),
        num_groups=groups,
        state_size=size,
        time_bias=rand(heads, seed=5),
        decay=-rand(heads, seed=6).exp(),
        skip=rand(heads, seed=7),
        norm=rand(inner, seed=8),
        norm_eps=1e-5,
    )
    return Layer(
        lambda name, x, states, step: ops_of(name)["mamba2"](x, weights, states, step),
        inner + convolved + heads,
        (width - 1) * convolved + inner * size,
    )


def short_conv(channels: int, width: int) -> Layer:
    weights = conv_of(channels, width, has_bias=width == 3)
    return Layer(
        lambda name, x, states, step: ops_of(name)["short_conv"](x, weights, states, step),
        3 * channels,
        (width - 1) * channels,
    )


LAYERS: dict[str, Callable[[torch.dtype], Layer]] = {
    "mamba": lambda dtype: mamba(dtype, 128, 16, 8, 4, "none"),
    "mamba, some of a block": lambda dtype: mamba(dtype, 84, 20, 5, 2, "plain"),
    "mamba, normed": lambda dtype: mamba(dtype, 70, 7, 33, 1, "weighted"),
    "mamba2": lambda dtype: mamba2(4, 64, 1, 128, 4),
    "mamba2, odd sizes": lambda dtype: mamba2(6, 7, 3, 20, 2),
    "short_conv": lambda dtype: short_conv(300, 3),
    "short_conv without a past": lambda dtype: short_conv(64, 1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_native_and_reference_agree(name: str, dtype: torch.dtype) -> None:
    layer = LAYERS[name](dtype)
    x = rand(sum(COUNTS), layer.columns, seed=11, dtype=dtype)
    results = {}
    for ops in ("reference", "cpu"):
        states = layer.pool()
        first = layer.run(ops, x, states, metadata(COUNTS, [-1, -1, -1], [2, 0, 5]))
        second = layer.run(ops, x, states, metadata(COUNTS, [0, -1, 5], [1, 3, 6]))
        results[ops] = first, second, states.nan_to_num(nan=9.0)
    for actual, expected in zip(results["cpu"], results["reference"], strict=True):
        if dtype == torch.float32:
            assert_close(actual / expected.abs().max(), expected / expected.abs().max())
        else:
            assert (actual - expected).float().abs().mean() < 4e-3 * expected.float().abs().mean()


@pytest.mark.parametrize("name", LAYERS)
def test_threads_and_company_change_no_bit(name: str) -> None:
    from quire.ops.cpu import library

    layer = LAYERS[name](torch.bfloat16)
    x = rand(sum(COUNTS), layer.columns, seed=12, dtype=torch.bfloat16)
    threads, results = library.num_threads(), []
    try:
        for count in (1, 2, 3):
            library.set_num_threads(count)
            states = layer.pool()
            out = layer.run("cpu", x, states, metadata(COUNTS, [-1, -1, -1], [2, 0, 5]))
            results.append((out, states))
    finally:
        library.set_num_threads(threads)
    alone = layer.pool()
    second = layer.run("cpu", x[SECOND], alone, metadata([40], [-1], [0]))
    for out, states in results:
        assert torch.equal(out, results[0][0])
        assert torch.equal(states.nan_to_num(), results[0][1].nan_to_num())
        assert torch.equal(out[SECOND], second)
        assert torch.equal(states[:, 0].nan_to_num(), alone[:, 0].nan_to_num())


@pytest.mark.parametrize("name", LAYERS)
def test_a_sequence_that_is_no_number_leaves_others_alone(name: str) -> None:
    layer = LAYERS[name](torch.float32)
    x = rand(sum(COUNTS), layer.columns, seed=13)
    step = metadata(COUNTS, [-1, -1, -1], [2, 0, 5])
    states = layer.pool()
    clean = layer.run("cpu", x, states, step)
    x[SECOND][::7] = float("nan")
    x[2] = float("inf")
    dirty_states = layer.pool()
    dirty = layer.run("cpu", x, dirty_states, step)
    assert dirty[SECOND].isnan().any()
    for rows in (slice(0, 1), THIRD):
        assert torch.equal(dirty[rows], clean[rows])
    assert torch.equal(dirty_states[:, [2, 5]].nan_to_num(), states[:, [2, 5]].nan_to_num())


@pytest.mark.parametrize("name", LAYERS)
def test_a_recorded_step_is_native_ops_alone(name: str) -> None:
    """And is replayed on what inputs, pages and states hold by then."""
    from quire.ops.cpu.runtime.graphs import Graphs

    layer = LAYERS[name](torch.bfloat16)
    buffer = torch.zeros(sum(COUNTS), layer.columns, dtype=torch.bfloat16)
    step, states, expected = metadata(COUNTS, [-1, -1, -1], [2, 0, 5]), layer.pool(), layer.pool()
    graph = Graphs().record(lambda: (layer.run("cpu", buffer, states, step),))
    assert len(graph._parts) == 1, "a Python call between native ops"
    for seed, (reads, writes) in enumerate((([-1, -1, -1], [2, 0, 5]), ([0, 5, -1], [1, 3, 6]))):
        buffer.copy_(rand(*buffer.shape, seed=seed))
        step.reads.copy_(torch.tensor(reads))
        step.writes.copy_(torch.tensor(writes))
        (out,) = graph.replay()
        assert torch.equal(out, layer.run("cpu", buffer, expected, step))
        assert torch.equal(states.nan_to_num(), expected.nan_to_num())
