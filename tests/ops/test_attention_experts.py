"""Experts in front of and behind attention: values, and rows that do not depend on their neighbours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.config.layers.experts import Routing, Scores
from quire.ops.contracts.operands import AttentionExpertWeights
from tests.ops.implementations import assert_close, assert_rows_alone, implementations_of, ops, rand

NUM_EXPERTS, NUM_KV_HEADS, HEAD_SIZE, SIZE = 5, 3, 22, 60
INNER = NUM_KV_HEADS * HEAD_SIZE
KEYS_VALUES = 2 * INNER


class Stored:
    """Experts as a checkpoint has them, and packed by an implementation."""

    def __init__(self, implementation: str, dtype: torch.dtype) -> None:
        self.router = rand(NUM_EXPERTS, SIZE)
        self.queries = rand(NUM_EXPERTS, INNER, SIZE, seed=1, dtype=dtype)
        self.outputs = rand(NUM_EXPERTS, SIZE, INNER, seed=2, dtype=dtype)
        self.bias = rand(SIZE, seed=3)
        pack = ops(implementation)["pack_linear"]
        self.packed = AttentionExpertWeights(
            router=pack([self.router], dtype=torch.float32),
            queries=tuple(pack([weight], dtype=dtype) for weight in self.queries),
            outputs=tuple(pack([weight], dtype=dtype) for weight in self.outputs),
            output_bias=self.bias,
        )

    def routed(self, row: Tensor, num_chosen: int) -> tuple[list[int], Tensor]:
        """The experts of a row, best first, and their weights."""
        best = (self.router.double() @ row.double()).topk(num_chosen)
        return best.indices.tolist(), best.values.softmax(0)


@pytest.mark.parametrize("implementation", implementations_of("expert_queries"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_chosen", [1, 3])
def test_queries_are_those_of_each_tokens_experts(implementation: str, dtype: torch.dtype, num_chosen: int) -> None:
    stored, routing = Stored(implementation, dtype), Routing(num_chosen=num_chosen, scores=Scores.LOGITS)
    x, keys_values = rand(13, SIZE, seed=4, dtype=dtype), rand(13, KEYS_VALUES, seed=5, dtype=dtype)

    def computed(rows: slice) -> Tensor:
        return ops(implementation)["expert_queries"](x[rows], keys_values[rows], stored.packed, routing, HEAD_SIZE)

    qkv = computed(slice(0, 13))
    assert torch.equal(qkv[:, num_chosen * INNER :], keys_values)
    queries = qkv[:, : num_chosen * INNER].view(13, NUM_KV_HEADS, num_chosen, HEAD_SIZE)
    for index, row in enumerate(x):
        chosen, _ = stored.routed(row, num_chosen)
        expected = (stored.queries[chosen].double() @ row.double()).view(num_chosen, NUM_KV_HEADS, HEAD_SIZE)
        assert_close(queries[index], expected.transpose(0, 1))
    assert_rows_alone(computed, 13)


@pytest.mark.parametrize("implementation", implementations_of("expert_outputs"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_chosen", [1, 3])
@pytest.mark.parametrize("has_residual", [False, True])
def test_outputs_are_weighed_and_biased_once(
    implementation: str, dtype: torch.dtype, num_chosen: int, has_residual: bool
) -> None:
    stored, routing = Stored(implementation, dtype), Routing(num_chosen=num_chosen, scores=Scores.LOGITS)
    x, attended = rand(13, SIZE, seed=4, dtype=dtype), rand(13, num_chosen * INNER, seed=5, dtype=dtype)
    residual = rand(13, SIZE, seed=6, dtype=dtype) if has_residual else None

    def computed(rows: slice) -> Tensor:
        beside = None if residual is None else residual[rows]
        return ops(implementation)["expert_outputs"](
            attended[rows], x[rows], stored.packed, routing, HEAD_SIZE, residual=beside
        )

    out = computed(slice(0, 13))
    for index, row in enumerate(x):
        chosen, weights = stored.routed(row, num_chosen)
        heads = attended[index].double().view(NUM_KV_HEADS, num_chosen, HEAD_SIZE).transpose(0, 1).reshape(-1, INNER)
        given = torch.einsum("kni,ki->kn", stored.outputs[chosen].double(), heads)
        expected = weights @ given + stored.bias + (0 if residual is None else residual[index])
        assert_close(out[index], expected)
    assert_rows_alone(computed, 13)
