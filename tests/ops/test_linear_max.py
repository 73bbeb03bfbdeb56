"""linear_max against linear and row_max_tensors: the same bits, for every kind of weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.ops.contracts.operands import LinearWeight
from tests.ops.implementations import implementations_of, ops, rand

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [1, 2, 8, 16, 17, 32, 33, 100]
each_implementation = pytest.mark.parametrize("implementation", implementations_of("linear_max"))


def assert_same(implementation: str, x: Tensor, weight: LinearWeight, bias: Tensor | None, cap: float | None) -> None:
    table = ops(implementation)
    logits = table["linear"](x, weight, bias, out_dtype=torch.float32)
    if cap is not None:
        table["soft_cap"](logits, cap)
    values, ids = table["linear_max"](x, weight, bias, soft_cap=cap)
    expected_values, expected_ids = table["row_max_tensors"](logits)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(values.nan_to_num(1e30), expected_values.nan_to_num(1e30))


@each_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 63, 1000])
def test_dense_weights(implementation: str, dtype: torch.dtype, vocab_size: int) -> None:
    weight = ops(implementation)["pack_linear"]([rand(vocab_size, 96, dtype=dtype) / 10], dtype=dtype)
    for rows in ROWS:
        x = rand(rows, 96, seed=rows, dtype=dtype)
        assert_same(implementation, x, weight, None, None)
        assert_same(implementation, x, weight, rand(vocab_size, seed=1), 2.0)


@each_implementation
@pytest.mark.parametrize("formats", [("int8",), ("int4_g32",), ("int4_g128",), ("int8", "int4_g64", "bfloat16")])
def test_quantised_weights_and_several_side_by_side(implementation: str, formats: tuple[str, ...]) -> None:
    table = ops(implementation)
    if "quantize_linear" not in table:
        pytest.skip("it quantises nothing")
    parts = []
    for index, name in enumerate(formats):
        numbers = rand(70 + index, 128, seed=index)
        if name == "bfloat16":
            parts.append(table["pack_linear"]([numbers], dtype=torch.bfloat16))
        else:
            parts.append(table["quantize_linear"]([numbers], format=name))
    weight = parts[0]
    if len(parts) > 1:
        num_outputs = sum(part.out_features for part in parts)
        weight = LinearWeight(out_features=num_outputs, in_features=128, format="mixed", tensors={}, parts=tuple(parts))
    for rows in ROWS:
        assert_same(implementation, rand(rows, 128, dtype=torch.bfloat16), weight, None, None)


@each_implementation
def test_the_first_of_equal_logits_and_the_first_nan_are_found(implementation: str) -> None:
    rows = rand(100, 64)
    rows[[40, 41, 90]] = rows[20] = 3.0
    rows[99] = torch.inf
    weight = ops(implementation)["pack_linear"]([rows], dtype=torch.float32)
    x = torch.ones(4, 64)
    x[1] = 0.0  # times inf: not a number
    x[2, 5] = torch.nan
    x[3] = -1.0
    values, ids = ops(implementation)["linear_max"](x, weight)
    assert ids.tolist()[:3] == [99, 99, 0]
    assert values[0] == torch.inf
    assert values[1:3].isnan().all()
    assert_same(implementation, x, weight, None, None)
    weight = ops(implementation)["pack_linear"]([rows[:99]], dtype=torch.float32)
    assert ops(implementation)["linear_max"](x[:2], weight)[1].tolist() == [20, 0]


@each_implementation
def test_a_graph_replays_it(implementation: str) -> None:
    table = ops(implementation)
    weight = table["pack_linear"]([rand(300, 64)], dtype=torch.float32)
    x = rand(5, 64, seed=1)
    graph = table["make_graphs"]().record(lambda: table["linear_max"](x, weight))
    x.copy_(rand(5, 64, seed=2))
    expected = table["linear_max"](x, weight)
    assert all(map(torch.equal, graph.replay(), expected))
