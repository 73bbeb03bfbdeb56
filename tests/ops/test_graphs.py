"""A graph does its run again: on new contents of the same buffers, with the bits of the ops called one by one."""

from __future__ import annotations

import threading
from array import array

import pytest
import torch
from torch import Tensor

from quire.ops.backends import ops_of
from quire.ops.contracts.ops import Ops
from tests.ops.implementations import implementations_of, rand


@pytest.fixture(params=implementations_of("make_graphs"))
def ops(request: pytest.FixtureRequest) -> Ops:
    return ops_of(request.param)


class Block:
    """Norm, gated layer and projection over a buffer."""

    def __init__(self, ops: Ops, size: int = 64) -> None:
        self.ops = ops
        self.norm = 1 + rand(size, seed=1)
        self.gate_up = self.ops.pack_linear([rand(2 * size, size, seed=2)], dtype=torch.float32)
        self.down = self.ops.pack_linear([rand(size, size, seed=3)], dtype=torch.float32)

    def __call__(self, x: Tensor, depth: int = 3) -> Tensor:
        for _ in range(depth):
            hidden = self.ops.gated_linear(self.ops.rms_norm(x, self.norm, 1e-6), self.gate_up, activation="silu")
            x = self.ops.linear(hidden, self.down, residual=x)
        return x


def test_a_replay_gives_the_bits_of_the_ops(ops: Ops) -> None:
    block, buffer = Block(ops), torch.zeros(8, 64)
    graphs = ops.make_graphs()
    of_rows = {rows: graphs.record(lambda rows=rows: (block(buffer[:rows]),)) for rows in (1, 3, 8)}
    for seed, rows in enumerate((8, 1, 3, 1, 8)):
        buffer.copy_(rand(8, 64, seed=seed))
        (replayed,) = of_rows[rows].replay()
        assert torch.equal(replayed, block(buffer[:rows]))


def test_several_outputs_stand_side_by_side(ops: Ops) -> None:
    block, buffer, rows = Block(ops), rand(4, 64), torch.tensor([3, 1])

    def run() -> tuple[Tensor, Tensor]:
        hidden = block(buffer)
        return hidden, ops.linear(ops.embedding(rows, hidden), block.down)

    hidden, logits = ops.make_graphs().record(run).replay()
    assert torch.equal(hidden, block(buffer))
    assert torch.equal(logits, ops.linear(hidden[[3, 1]], block.down))


def test_memory_does_not_grow_with_the_depth_of_a_run() -> None:
    from quire.ops.cpu.runtime.memory import REGION, Arena

    arena, taken = Arena(), set()
    for _ in range(100):
        x = arena.empty((64, 64), torch.float32)
        y = arena.empty((64, 128), torch.float32)
        view = x[3:]
        assert abs(x.data_ptr() - y.data_ptr()) >= min(x.nbytes, y.nbytes)
        taken |= {x.data_ptr(), y.data_ptr()}
        del x
        assert arena.empty((64, 64), torch.float32).data_ptr() != view.data_ptr(), "a view keeps memory taken"
    assert len(taken) <= 6
    large = arena.empty((REGION // 4 + 16,), torch.float32)  # more bytes than a region has
    large.fill_(1)
    assert large.data_ptr() % 64 == 0


def test_ops_run_again_after_a_recording_that_failed(ops: Ops) -> None:
    block, buffer, graphs = Block(ops), rand(4, 64), ops.make_graphs()
    expected = block(buffer)
    if graphs.only_ops:
        with pytest.raises(ZeroDivisionError):
            graphs.record(lambda: (block(buffer), 1 // 0))  # type: ignore[arg-type]
    assert torch.equal(expected, block(buffer))
    assert torch.equal(graphs.record(lambda: (block(buffer),)).replay()[0], expected)


def test_a_thread_that_records_does_not_disturb_one_that_computes(ops: Ops) -> None:
    block, buffer = Block(ops), rand(4, 64)
    expected = block(buffer)
    recording, done = threading.Event(), threading.Event()

    def record() -> None:
        def run() -> tuple[Tensor]:
            out = block(buffer)
            recording.set()
            assert done.wait(30)
            return (block(out),)

        ops.make_graphs().record(run).replay()

    thread = threading.Thread(target=record)
    thread.start()
    assert recording.wait(30)
    try:
        assert torch.equal(block(buffer), expected)
    finally:
        done.set()
        thread.join()


class Bf16Block:
    """Norm, gated layer and projection in bfloat16, as models chain them."""

    size = 64

    def __init__(self, ops: Ops) -> None:
        self.ops, size = ops, self.size
        self.norm = 1 + rand(size, seed=1)
        self.gate_up = self.ops.pack_linear([rand(2 * size, size, seed=2, dtype=torch.bfloat16)], dtype=torch.bfloat16)
        self.down = self.ops.pack_linear([rand(size, size, seed=3, dtype=torch.bfloat16)], dtype=torch.bfloat16)
        self.half = self.ops.pack_linear([rand(32, 32, seed=4, dtype=torch.bfloat16)], dtype=torch.bfloat16)

    def normed(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.norm, 1e-6)

    def chained(self, x: Tensor) -> tuple[Tensor, ...]:
        for _ in range(2):
            x = self.ops.linear(
                self.ops.gated_linear(self.normed(x), self.gate_up, activation="silu"), self.down, residual=x
            )
        return (x,)

    def read_twice(self, x: Tensor) -> tuple[Tensor, ...]:
        """As in models whose attention and MLP share a norm."""
        normed = self.normed(x)
        return self.ops.linear(normed, self.down), self.ops.gated_linear(normed, self.gate_up, activation="silu")

    def read_later(self, x: Tensor) -> tuple[Tensor, ...]:
        normed = self.normed(x)
        first = self.ops.linear(normed, self.down)
        return (self.ops.linear(self.normed(first), self.down, residual=normed),)

    def returned(self, x: Tensor) -> tuple[Tensor, ...]:
        normed = self.normed(x)
        return self.ops.linear(normed, self.down), normed

    def viewed(self, x: Tensor) -> tuple[Tensor, ...]:
        normed = self.normed(x)
        first = self.ops.linear(normed[:40], self.down)
        return first, self.ops.linear(normed[1:41], self.down)

    def reshaped(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.ops.linear(self.normed(x).view(-1, 32), self.half),)


@pytest.mark.parametrize("rows", [32, 33, 45, 300])
@pytest.mark.parametrize("run", ["chained", "read_twice", "read_later", "returned", "viewed", "reshaped"])
def test_what_ops_pass_on_in_tiles_has_the_same_bits(ops: Ops, run: str, rows: int) -> None:
    block, buffer = Bf16Block(ops), torch.zeros(max(rows, 41), Bf16Block.size, dtype=torch.bfloat16)
    graph = ops.make_graphs().record(lambda: getattr(block, run)(buffer))
    for seed in (1, 2):
        buffer.copy_(rand(*buffer.shape, seed=seed))
        for replayed, expected in zip(graph.replay(), getattr(block, run)(buffer), strict=True):
            assert torch.equal(replayed, expected)


@pytest.mark.parametrize(
    ("run", "passed"),
    [("chained", 4), ("read_twice", 0), ("read_later", 1), ("returned", 0), ("viewed", 0), ("reshaped", 0)],
)
def test_only_what_nothing_else_reads_is_passed_on_in_tiles(run: str, passed: int) -> None:
    if "cpu" not in implementations_of("make_graphs"):
        pytest.skip("needs the native library")
    from quire.ops.cpu import library
    from quire.ops.cpu.runtime import dtypes, graphs

    ops = ops_of("cpu")
    block, buffer = Bf16Block(ops), torch.zeros(64, Bf16Block.size, dtype=torch.bfloat16)
    graph = ops.make_graphs().record(lambda: getattr(block, run)(buffer))
    assert isinstance(graph, graphs.Graph)
    writers_and_readers = 2 * passed if library.isa() == "amx" else 0
    (words,) = graph._parts
    assert isinstance(words, array)
    assert words.count(dtypes.TILES) == writers_and_readers
