"""A graph does its run again: on new contents of the same buffers, with the bits of the ops called one by one."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from quire.ops import functional as F
from quire.ops import table
from tests.ops.implementations import implementations_of, rand


@pytest.fixture(params=implementations_of("make_graphs"))
def implementation(request: pytest.FixtureRequest) -> str:
    table.use(request.param)
    return str(request.param)


class Block:
    """Norm, gated layer and projection over a buffer."""

    def __init__(self, size: int = 64) -> None:
        self.norm = 1 + rand(size, seed=1)
        self.gate_up = F.pack_linear([rand(2 * size, size, seed=2)], dtype=torch.float32)
        self.down = F.pack_linear([rand(size, size, seed=3)], dtype=torch.float32)

    def __call__(self, x: Tensor, depth: int = 3) -> Tensor:
        for _ in range(depth):
            hidden = F.gated_linear(F.rms_norm(x, self.norm, 1e-6), self.gate_up, activation="silu")
            x = F.linear(hidden, self.down, residual=x)
        return x


def test_a_replay_gives_the_bits_of_the_ops(implementation: str) -> None:
    block, buffer = Block(), torch.zeros(8, 64)
    graphs = F.make_graphs()
    of_rows = {rows: graphs.record(lambda rows=rows: (block(buffer[:rows]),)) for rows in (1, 3, 8)}
    for seed, rows in enumerate((8, 1, 3, 1, 8)):
        buffer.copy_(rand(8, 64, seed=seed))
        (replayed,) = of_rows[rows].replay()
        assert torch.equal(replayed, block(buffer[:rows]))


def test_several_outputs_stand_side_by_side(implementation: str) -> None:
    block, buffer, rows = Block(), rand(4, 64), torch.tensor([3, 1])

    def run() -> tuple[Tensor, Tensor]:
        hidden = block(buffer)
        return hidden, F.linear(F.embedding(rows, hidden), block.down)

    hidden, logits = F.make_graphs().record(run).replay()
    assert torch.equal(hidden, block(buffer))
    assert torch.equal(logits, F.linear(hidden[[3, 1]], block.down))


def test_memory_does_not_grow_with_the_depth_of_a_run() -> None:
    from quire.ops.cpu.memory import REGION, Arena

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
    large = arena.empty((REGION,), torch.float32)
    large.fill_(1)
    assert large.data_ptr() % 64 == 0


def test_ops_run_again_after_a_recording_that_failed(implementation: str) -> None:
    block, buffer, graphs = Block(), rand(4, 64), F.make_graphs()
    expected = block(buffer)
    if graphs.only_ops:
        with pytest.raises(ZeroDivisionError):
            graphs.record(lambda: (block(buffer), 1 // 0))  # type: ignore[arg-type]
    assert torch.equal(expected, block(buffer))
    assert torch.equal(graphs.record(lambda: (block(buffer),)).replay()[0], expected)


def test_a_thread_that_records_does_not_disturb_one_that_computes(implementation: str) -> None:
    block, buffer = Block(), rand(4, 64)
    expected = block(buffer)
    recording, done = threading.Event(), threading.Event()

    def record() -> None:
        def run() -> tuple[Tensor]:
            out = block(buffer)
            recording.set()
            assert done.wait(30)
            return (block(out),)

        F.make_graphs().record(run).replay()

    thread = threading.Thread(target=record)
    thread.start()
    assert recording.wait(30)
    try:
        assert torch.equal(block(buffer), expected)
    finally:
        done.set()
        thread.join()
