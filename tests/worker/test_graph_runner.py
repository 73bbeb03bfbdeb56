"""Models that compute with ops alone run from graphs; others are noticed and run op by op, with the same results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.attention.context import ForwardContext
from quire.messages.kv import kv_layout
from quire.ops.backends import implementation_of, ops_of
from quire.ops.contracts.operands import Largest
from quire.ops.contracts.ops import Ops
from quire.ops.graphs import Graph, Graphs
from quire.worker.graph_runner import GraphRunner
from quire.worker.input_batch import InputBatch
from quire.worker.input_builder import InputBuilder, StepShape
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

    def largest_logits(self, hidden: Tensor) -> Largest:
        return Largest(*self.ops.linear_max(hidden, self.weight))


class Capturing(Graphs):
    """Runs again what it has, as if it had captured it. Its ops are the reference's."""

    captures = True

    def __init__(self, room_for: int = 99) -> None:
        self.num_recorded = 0
        self._room_for = room_for

    def record(self, run: Callable[[], tuple[Tensor, ...]]) -> Graph:
        if self.num_recorded == self._room_for:
            raise RuntimeError("out of memory")
        self.num_recorded += 1
        return super().record(run)


def capturing(graphs: Capturing, sizes: tuple[int, ...]) -> tuple[InputBuilder, GraphRunner]:
    ops = Ops("reference", implementation_of("reference") | {"make_graphs": lambda: graphs})
    batch, layout = InputBatch(8, 3), kv_layout(specs_of(4))
    builder = InputBuilder(ops, [], batch, layout=layout, max_num_tokens=8, graph_sizes=sizes)
    return builder, GraphRunner(ops, Small(ops, lambda ops, hidden, ctx: hidden), builder)


def test_sizes_are_captured_one_by_one_the_largest_first_and_then_steps_run_from_them() -> None:
    graphs = Capturing()
    builder, runner = capturing(graphs, (1, 2, 4))
    for size in (3, 5, 8):
        hidden, logits = runner.run(builder.padding(size))
        assert len(hidden) == size
        assert isinstance(logits, Tensor)
        assert len(logits) == size
    assert graphs.num_recorded == 0, "nothing is captured while steps run"
    assert [runner.capture_next() for _ in range(4)] == [True, True, False, False]
    assert [shape.num_seqs for shape in runner._captured] == [4, 2, 1]
    builder.padding(4)
    hidden, logits = runner.run(StepShape(3, 3, 3))
    assert len(hidden) == 3
    assert isinstance(logits, Tensor)
    assert len(logits) == 3
    runner.run(builder.padding(8))
    assert graphs.num_recorded == 3


def test_without_sizes_a_device_that_captures_runs_op_by_op() -> None:
    graphs = Capturing()
    builder, runner = capturing(graphs, ())
    runner.run(builder.padding(1))
    assert not runner.capture_next()
    assert graphs.num_recorded == 0


def test_where_a_capture_fails_steps_go_on_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    builder, runner = capturing(Capturing(room_for=1), (1, 2, 4))
    with caplog.at_level("WARNING"):
        assert [runner.capture_next() for _ in range(3)] == [True, False, False]
    assert [record.getMessage() for record in caplog.records] == [
        "1 sizes of steps run from graphs, the others op by op: RuntimeError: out of memory"
    ]
    for size in (1, 2, 3, 4):
        assert len(runner.run(builder.padding(size))[0]) == size


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
        assert isinstance(logits, Tensor)
        assert torch.equal(logits, model.compute_logits(expected))
        hidden, largest = runner.run(shape._replace(only_largest=True))
        assert torch.equal(hidden, expected)
        assert isinstance(largest, Largest)
        assert all(map(torch.equal, largest, model.compute_logits(expected).max(dim=-1)))


def test_a_captured_size_gives_all_logits_to_steps_that_need_the_largest_alone() -> None:
    graphs = Capturing()
    builder, runner = capturing(graphs, (2, 4))
    shape = builder.padding(3)._replace(only_largest=True)
    _, largest = runner.run(shape)
    assert isinstance(largest, Largest)
    assert len(largest.token_ids) == 3
    while runner.capture_next():
        pass
    _, logits = runner.run(shape)
    assert isinstance(logits, Tensor)
    assert logits.shape == (3, 32)
    assert graphs.num_recorded == 2
