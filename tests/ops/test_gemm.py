"""pack_linear, linear, gated_linear and embedding."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.ops.implementations import assert_close, assert_rows_alone, implementations_of, ops, rand, run, torch_threads

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
}
each_implementation = pytest.mark.parametrize("implementation", implementations_of("linear"))


@each_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_is_product_bias_activation_residual(
    implementation: str, dtype: torch.dtype, activation: str | None
) -> None:
    table = ops(implementation)
    x, weight, bias = rand(13, 96, dtype=dtype), rand(80, 96, seed=1, dtype=dtype) / 10, rand(80, seed=2)
    residual = rand(13, 80, seed=3, dtype=dtype)
    packed = table["pack_linear"]([weight], dtype=dtype)
    actual = table["linear"](x, packed, bias, activation=activation, residual=residual)
    product = x.double() @ weight.double().T + bias.double()
    assert_close(actual, ACTIVATIONS[activation](product) + residual.double())
    assert actual.dtype == dtype
    assert actual.is_contiguous()


@each_implementation
def test_linear_rounds_to_16_bits_once(implementation: str) -> None:
    table = ops(implementation)
    x, weight = rand(5, 64, dtype=torch.bfloat16), rand(48, 64, seed=1, dtype=torch.bfloat16)
    residual = rand(5, 48, seed=2, dtype=torch.bfloat16)
    packed = table["pack_linear"]([weight], dtype=torch.bfloat16)
    exact = x.double() @ weight.double().T + residual.double()
    error = (table["linear"](x, packed, residual=residual).double() - exact).abs()
    half_step = exact.abs() * 2.0**-8 + 1e-5  # bfloat16 keeps eight bits
    assert (error <= half_step).all()


@each_implementation
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_gives_logits_in_float32(implementation: str, dtype: torch.dtype) -> None:
    table = ops(implementation)
    x, weight = rand(3, 64, dtype=dtype), rand(100, 64, seed=1, dtype=dtype)
    logits = table["linear"](x, table["pack_linear"]([weight], dtype=dtype), out_dtype=torch.float32)
    assert logits.dtype == torch.float32
    assert_close(logits, x.double() @ weight.double().T)


@each_implementation
def test_pack_linear_concatenates_and_converts_views(implementation: str) -> None:
    table = ops(implementation)
    stored = rand(96, 64)
    packed = table["pack_linear"]([stored[:16], stored[16:48], stored.t()[:, :64].t()[48:64]], dtype=torch.bfloat16)
    assert (packed.out_features, packed.in_features) == (64, 64)
    x = rand(4, 64, seed=1, dtype=torch.bfloat16)
    assert_close(table["linear"](x, packed), x.double() @ stored[:64].bfloat16().double().T)


@each_implementation
def test_pack_linear_takes_transposed_weights(implementation: str) -> None:
    table = ops(implementation)
    stored = rand(64, 48)
    x = rand(4, 64, seed=1)
    assert_close(
        table["linear"](x, table["pack_linear"]([stored.t()], dtype=torch.float32)), x.double() @ stored.double()
    )


@each_implementation
def test_pack_linear_keeps_nothing_of_its_parts(implementation: str) -> None:
    table = ops(implementation)
    weight, x = rand(48, 64), rand(4, 64, seed=1)
    packed = table["pack_linear"]([weight], dtype=torch.float32)
    before = table["linear"](x, packed)
    weight.zero_()
    assert torch.equal(table["linear"](x, packed), before)


@each_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_gated_linear_is_activated_gate_times_up(implementation: str, dtype: torch.dtype, activation: str) -> None:
    table = ops(implementation)
    x, weight, bias = rand(9, 64, dtype=dtype), rand(2 * 48, 64, seed=1, dtype=dtype) / 8, rand(2 * 48, seed=2)
    packed = table["pack_linear"]([weight[:48], weight[48:]], dtype=dtype)
    gate, up = (x.double() @ weight.double().T + bias.double()).chunk(2, dim=-1)
    actual = table["gated_linear"](x, packed, bias, activation=activation)
    assert_close(actual, ACTIVATIONS[activation](gate) * up)
    assert actual.is_contiguous()


@each_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(2, 64), (3, 100), (7, 21), (11, 9), (64, 64), (320, 64), (37, 50), (96, 1024), (1030, 768), (2050, 128)],
)
@pytest.mark.parametrize("activation", [None, "gelu_tanh"])
def test_linear_rows_do_not_see_each_other(
    implementation: str, dtype: torch.dtype, outputs: int, inputs: int, activation: str | None
) -> None:
    table = ops(implementation)
    x, residual = rand(37, inputs, dtype=dtype), rand(37, outputs, seed=3, dtype=dtype)
    packed = table["pack_linear"]([rand(outputs, inputs, seed=1)], dtype=dtype)
    bias = rand(outputs, seed=2)
    assert_rows_alone(
        lambda rows: table["linear"](x[rows], packed, bias, activation=activation, residual=residual[rows]), 37
    )


@each_implementation
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sums_are_not_split_between_threads(implementation: str, dtype: torch.dtype) -> None:
    table = ops(implementation)
    x, packed = rand(8, 1024, dtype=dtype), table["pack_linear"]([rand(3072, 1024, seed=1)], dtype=dtype)
    with torch_threads(1):
        one = table["linear"](x, packed)
    with torch_threads(2):
        assert torch.equal(table["linear"](x, packed), one)


@each_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [48, 37, 704])
def test_gated_linear_rows_do_not_see_each_other(implementation: str, dtype: torch.dtype, features: int) -> None:
    table = ops(implementation)
    x = rand(37, 64, dtype=dtype)
    packed = table["pack_linear"]([rand(2 * features, 64, seed=1)], dtype=dtype)
    assert_rows_alone(lambda rows: table["gated_linear"](x[rows], packed, activation="silu"), 37)


@each_implementation
def test_linear_of_one_row_is_not_changed_by_broken_neighbours(implementation: str) -> None:
    table = ops(implementation)
    packed = table["pack_linear"]([rand(64, 64, seed=1)], dtype=torch.float32)
    x = rand(10, 64)
    alone = table["linear"](x[4:5], packed)
    x[3], x[5] = float("nan"), float("inf")
    assert torch.equal(table["linear"](x, packed)[4:5], alone)


@each_implementation
def test_linear_takes_no_rows(implementation: str) -> None:
    table = ops(implementation)
    packed = table["pack_linear"]([rand(64, 64, seed=1)], dtype=torch.float32)
    assert table["linear"](rand(0, 64), packed).shape == (0, 64)


@pytest.mark.parametrize("implementation", implementations_of("embedding"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_gives_rows_of_the_table(implementation: str, dtype: torch.dtype) -> None:
    table = rand(50, 24, dtype=dtype)
    ids = torch.tensor([0, 49, 7, 7])
    assert torch.equal(run(implementation, "embedding", ids, table), table[ids])


@pytest.mark.parametrize("implementation", implementations_of("embedding"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 64, 90])
def test_embedding_gives_rows_of_a_packed_weight(implementation: str, dtype: torch.dtype, width: int) -> None:
    weight, ids = rand(77, width, dtype=dtype), torch.tensor([5, 0, 76, 33, 5, 31, 32])
    packed = ops(implementation)["pack_linear"]([weight[:40], weight[40:]], dtype=dtype)
    assert torch.equal(run(implementation, "embedding", ids, packed), weight[ids])
