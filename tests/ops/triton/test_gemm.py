"""Products in Triton. Tolerances are those of `implementations.TOLERANCE`: float32 sums in another order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.ops.reference import gemm as reference
from tests.ops.implementations import assert_close
from tests.ops.test_gemm import ACTIVATIONS, DTYPES
from tests.ops.triton.device import DEVICE, randoms

from quire.ops.triton import gemm, hopper  # isort: skip  (device decides whether Triton can be imported)
from quire.ops.triton.tiles import dense_tiles  # isort: skip

LARGE = "quire.ops.triton.tiles.PROGRAMS"
"""At 1, products of more than 16 rows take the largest tile."""


def assert_rows_alone(compute: Callable[[slice], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits for a row whatever rows stand beside it, also where they take another tile."""
    with monkeypatch.context() as patch:
        patch.setattr(LARGE, 1)
        whole = compute(slice(0, 70))
    for rows in (slice(0, 1), slice(3, 19), slice(1, 18), slice(0, 70)):
        assert torch.equal(compute(rows), whole[rows]), rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_is_product_bias_activation_residual(dtype: torch.dtype, activation: str | None) -> None:
    x, weight, bias = randoms(13, 97, dtype=dtype), randoms(41, 97, seed=1, dtype=dtype) / 10, randoms(41, seed=2)
    residual = randoms(13, 41, seed=3, dtype=dtype)
    packed = gemm.pack_linear([weight[:9], weight[9:]], dtype=dtype)
    actual = gemm.linear(x, packed, bias, activation=activation, residual=residual)
    product = x.double() @ weight.double().T + bias.double()
    assert_close(actual, ACTIVATIONS[activation](product) + residual.double())
    assert actual.dtype == dtype
    assert actual.is_contiguous()


@pytest.mark.parametrize(("num_rows", "programs"), [(1, 1), (16, 1), (17, 99), (65, 99), (17, 1), (130, 1)])
def test_every_tile_gives_the_product(num_rows: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LARGE, programs)
    x, weight = randoms(num_rows, 70, dtype=torch.bfloat16), randoms(33, 70, seed=1, dtype=torch.bfloat16)
    packed = gemm.pack_linear([weight], dtype=torch.bfloat16)
    assert_close(gemm.linear(x, packed, out_dtype=torch.float32), x.double() @ weight.double().T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_tiles_give_the_same_bits(dtype: torch.dtype) -> None:
    assert gemm.tiles_agree(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [False, True])
def test_tiles_of_hopper_give_the_bits_of_the_others(
    dtype: torch.dtype, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they are copied by descriptors or, as rows of an odd length, are not.

    The interpreter rounds at each step of a tile, whose lengths differ; a GPU adds up 16 inputs at a time in all.
    """
    monkeypatch.setattr(gemm, "is_hopper", lambda: True)
    for num_rows, num_inputs in ((1, 64), (17, 72), (70, 61), (130, 136)):
        x, weight = randoms(num_rows, num_inputs, dtype=dtype), randoms(2 * 37, num_inputs, seed=1, dtype=dtype) / 8
        packed, bias = gemm.pack_linear([weight], dtype=dtype), randoms(2 * 37, seed=2)
        tiles = (hopper.GATED if gated else hopper.PLAIN).all()
        outs = [x.new_empty(num_rows, 37 if gated else 74) for _ in (*tiles, None)]
        for tile, out in zip((*tiles, dense_tiles(dtype).medium), outs, strict=True):
            gemm._dense_product(out, x, packed.tensors["weight"], bias, None, "silu", tile, gated=gated)
        for out in outs:
            assert torch.equal(out, outs[-1]) or (DEVICE.type == "cpu" and close(out, outs[-1]))


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=2.0**-7, atol=2.0**-9)


def test_what_the_copy_engine_cannot_read_is_not_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "is_hopper", lambda: True)
    x = randoms(4, 72, dtype=torch.bfloat16)
    assert gemm.can_describe(x)
    assert gemm.can_describe(x[:, 8:])
    assert not gemm.can_describe(x[:, 1:])
    assert not gemm.can_describe(x[:, :61].contiguous())
    assert not gemm.can_describe(x.t())


@pytest.mark.parametrize("tiles", [hopper.PLAIN, hopper.GATED])
def test_many_rows_take_the_tile_whose_rounds_end_first(tiles: hopper.HopperTiles) -> None:
    largest, smallest = tiles.large[0].tile, tiles.large[-1].tile
    assert tiles.of(8192, 12288) == largest
    assert tiles.of(65, 64) == smallest
    assert not tiles.of(1000, 4096).tma, "launched soon"
    for num_rows in (65, 200, 512, 2048):
        for num_features in (64, 4096, 6144):
            found = tiles.of(num_rows, num_features)
            (taken,) = (each for each in tiles.large if each.tile == found)
            assert all(taken.of(num_rows, num_features) <= each.of(num_rows, num_features) for each in tiles.large)


def test_tiles_for_many_features_give_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.ops.triton.tiles.MANY_FEATURES", 32)
    x, weight = randoms(3, 64, dtype=torch.float16), randoms(70, 64, seed=1, dtype=torch.float16)
    actual = gemm.linear(x, gemm.pack_linear([weight], dtype=torch.float16), out_dtype=torch.float32)
    assert_close(actual, x.double() @ weight.double().T)


def test_linear_rounds_to_16_bits_once() -> None:
    x, weight = randoms(5, 64, dtype=torch.bfloat16), randoms(48, 64, seed=1, dtype=torch.bfloat16)
    residual = randoms(5, 48, seed=2, dtype=torch.bfloat16)
    packed = gemm.pack_linear([weight], dtype=torch.bfloat16)
    exact = x.double() @ weight.double().T + residual.double()
    error = (gemm.linear(x, packed, residual=residual).double() - exact).abs()
    assert (error <= exact.abs() * 2.0**-8 + 1e-5).all()


def test_linear_takes_a_float32_weight_beside_16_bit_activations() -> None:
    x, weight = randoms(4, 50, dtype=torch.bfloat16), randoms(20, 50, seed=1)
    packed = gemm.pack_linear([weight], dtype=torch.float32)
    assert_close(gemm.linear(x, packed, out_dtype=torch.float32), x.double() @ weight.double().T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_linear_is_activated_gate_times_up(dtype: torch.dtype, activation: str) -> None:
    x, weight, bias = randoms(9, 70, dtype=dtype), randoms(2 * 37, 70, seed=1, dtype=dtype) / 8, randoms(74, seed=2)
    packed = gemm.pack_linear([weight[:37], weight[37:]], dtype=dtype)
    gate, up = (x.double() @ weight.double().T + bias.double()).chunk(2, dim=-1)
    assert_close(gemm.gated_linear(x, packed, bias, activation=activation), ACTIVATIONS[activation](gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_see_each_other(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual = randoms(70, 150, dtype=dtype), randoms(70, 37, seed=3, dtype=dtype)
    packed, bias = gemm.pack_linear([randoms(37, 150, seed=1)], dtype=dtype), randoms(37, seed=2)
    assert_rows_alone(
        lambda rows: gemm.linear(x[rows], packed, bias, activation="gelu_tanh", residual=residual[rows]), monkeypatch
    )
    both = gemm.pack_linear([randoms(2 * 19, 150, seed=1)], dtype=dtype)
    assert_rows_alone(lambda rows: gemm.gated_linear(x[rows], both, activation="silu"), monkeypatch)


def test_broken_rows_stay_by_themselves() -> None:
    packed, x = gemm.pack_linear([randoms(20, 64, seed=1)], dtype=torch.float32), randoms(20, 64)
    alone = gemm.linear(x[4:5], packed)
    x[3], x[5] = float("nan"), float("inf")
    out = gemm.linear(x, packed)
    assert torch.equal(out[4:5], alone)
    assert [row for row in range(20) if not out[row].isfinite().all()] == [3, 5]


def test_products_take_no_rows() -> None:
    packed = gemm.pack_linear([randoms(64, 32)], dtype=torch.float32)
    assert gemm.linear(randoms(0, 32), packed).shape == (0, 64)
    assert gemm.gated_linear(randoms(0, 32), packed, activation="silu").shape == (0, 32)


def test_pack_linear_converts_views_and_keeps_nothing_of_them() -> None:
    stored, x = randoms(64, 48), randoms(4, 64, seed=1)
    packed = gemm.pack_linear([stored.t()[:20], stored.t()[20:]], dtype=torch.float32, device=DEVICE)
    expected = x.double() @ stored.double()
    stored.zero_()
    assert (packed.out_features, packed.in_features, packed.format) == (48, 64, "dense")
    assert_close(gemm.linear(x, packed), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_gives_rows_of_a_table_or_packed_weight(dtype: torch.dtype) -> None:
    weight, ids = randoms(77, 30, dtype=dtype), torch.tensor([5, 0, 76, 33, 5], device=DEVICE)
    assert torch.equal(gemm.embedding(ids, weight), weight[ids])
    assert torch.equal(gemm.embedding(ids, gemm.pack_linear([weight[:40], weight[40:]], dtype=dtype)), weight[ids])


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_many_rows_may_go_to_the_library(dtype: torch.dtype) -> None:
    """Tolerance doubled: a 16-bit product is rounded before what follows it."""
    x, weight, bias = randoms(8, 64, dtype=dtype), randoms(48, 64, seed=1, dtype=dtype) / 8, randoms(48, seed=2)
    residual, packed = randoms(8, 48, seed=3, dtype=dtype), gemm.pack_linear([weight], dtype=dtype)
    cpu = [tensor.cpu() for tensor in (x, bias, residual)]
    on_cpu = reference.pack_linear([weight.cpu()], dtype=dtype)
    for rows in (4, 9):
        actual = gemm.linear(x, packed, bias, activation="silu", residual=residual, library_rows=rows).cpu()
        expected = reference.linear(cpu[0], on_cpu, cpu[1], activation="silu", residual=cpu[2])
        assert_close(actual / 2, expected / 2)
        actual = gemm.gated_linear(x, packed, bias, activation="silu", library_rows=rows).cpu()
        assert_close(actual / 2, reference.gated_linear(cpu[0], on_cpu, cpu[1], activation="silu") / 2)
    logits = gemm.linear(x, packed, out_dtype=torch.float32, library_rows=1)
    assert logits.dtype == torch.float32
    assert_close(logits, x.double() @ weight.double().T)
