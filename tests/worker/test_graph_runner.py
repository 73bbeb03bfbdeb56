"""Models that compute with ops alone run from graphs; others are noticed and run op by op, with the same results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.attention.context import ForwardContext
from quire.messages.kv import kv_layout
from quire.ops.backends import ops_of
from quire.ops.contract import Ops
from quire.worker.graph_runner import GraphRunner
from quire.worker.input_batch import InputBatch
from quire.worker.input_builder import InputBuilder
from tests.fakes import specs_of
from tests.ops.implementations import implementations_of, rand


class Small:
    """An embedding, a layer, a head; `alter` is done to the hidden states."""

    def __init__(self, ops: Ops, alter: Callable[[Ops, Tensor, ForwardContext], Tensor]) -> None:
        self.ops = ops
        self.table = rand(50, 32)
        self.weight = ops.pack_linear([rand(32, 32, seed=1)], dtype=torch.float32)
        self.alter = alter

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        return self.alter(self.ops, self.ops.linear(self.ops.embedding(token_ids, self.table), self.weight), ctx)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.ops.linear(hidden, self.weight)


def with_torch(ops: Ops, hidden: Tensor, ctx: ForwardContext) -> Tensor:
    return hidden + ctx.positions.unsqueeze(1)


def in_place(ops: Ops, hidden: Tensor, ctx: ForwardContext) -> Tensor:
    return hidden.mul_(2)


def with_values(ops: Ops, hidden: Tensor, ctx: ForwardContext) -> Tensor:
    return ops.embedding(torch.tensor([int(hidden[0, 0])]), hidden)


CASES = {
    "ops": (lambda ops, hidden, ctx: hidden, True),
    "torch": (with_torch, False),
    "in place": (in_place, False),
    "values": (with_values, False),
}


@pytest.mark.parametrize("implementation", implementations_of("make_graphs"))
@pytest.mark.parametrize("case", CASES)
def test_only_what_is_done_by_ops_is_recorded(implementation: str, case: str) -> None:
    ops = ops_of(implementation)
    alter, recordable = CASES[case]
    model = Small(ops, alter)
    model.table[:, 0] = 0  # so that `with_values` reads row 0 of what is computed
    model.weight = ops.pack_linear([torch.eye(32)], dtype=torch.float32)
    builder = InputBuilder(ops, [], InputBatch(2, 3), layout=kv_layout(specs_of(4)), max_num_tokens=8)
    runner = GraphRunner(ops, model, builder)
    assert runner.recordable == (recordable or not ops.make_graphs().only_ops)
    for token_id, position in ((7, 0), (9, 3), (7, 2)):
        shape = builder.one_token(token_id=token_id, position=position)
        hidden, logits = runner.run(shape)
        inputs = builder.inputs(shape)
        expected = model.forward(inputs.token_ids, inputs.context)
        assert torch.equal(hidden, expected)
        assert logits is not None
        assert torch.equal(logits, model.compute_logits(expected))
