"""Graphs of the device under test: a GPU's own, or in the interpreter a double that replays call by call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.ops.backends import ops_of
from tests.ops.triton.device import DEVICE, INTERPRETED, randoms
from tests.ops.triton.recorded import make_graphs

from quire.ops.triton.graphs import CapturedGraphs, SharedOutputs  # isort: skip  (see device)

SIZE = 32


class Block:
    """Norm, gated layer and projection over a buffer, by kernels and by torch."""

    def __init__(self) -> None:
        self.ops = ops_of("triton", device=str(DEVICE))
        self.norm = 1 + randoms(SIZE, seed=1)
        self.gate_up = self.ops.pack_linear([randoms(2 * SIZE, SIZE, seed=2)], dtype=torch.float32)
        self.down = self.ops.pack_linear([randoms(SIZE, SIZE, seed=3)], dtype=torch.float32)

    def __call__(self, x: Tensor) -> Tensor:
        hidden = self.ops.gated_linear(self.ops.rms_norm(x, self.norm, 1e-6), self.gate_up, activation="silu")
        hidden = self.ops.join_columns([hidden[:, : SIZE // 2], hidden[:, SIZE // 2 :]])
        self.ops.clip(hidden, 0.5)
        return self.ops.linear(hidden, self.down, residual=x)


def test_a_replay_gives_the_bits_of_the_ops_on_what_the_buffers_hold() -> None:
    block, buffer, graphs = Block(), randoms(8, SIZE), make_graphs()
    of_rows = {rows: graphs.record(lambda rows=rows: (block(buffer[:rows]),)) for rows in (8, 1, 3)}  # type: ignore[misc]
    for seed, rows in enumerate((3, 8, 1, 3)):
        buffer.copy_(randoms(8, SIZE, seed=seed))
        (replayed,) = of_rows[rows].replay()
        assert torch.equal(replayed, block(buffer[:rows]))


def test_what_a_run_changes_in_place_is_changed_again() -> None:
    block, buffer, total, graphs = Block(), randoms(2, SIZE), torch.zeros(2, SIZE, device=DEVICE), make_graphs()

    def run() -> tuple[Tensor]:
        total.add_(block(buffer))
        return (total,)

    graph = graphs.record(run)
    total.zero_()
    for _ in range(3):
        graph.replay()
    assert torch.equal(total, block(buffer) + block(buffer) + block(buffer))


def baked(buffer: Tensor, length: list[int]) -> Tensor:
    return buffer * length[0]


def from_host(buffer: Tensor, length: list[int]) -> Tensor:
    return buffer * torch.tensor(float(length[0])).to(DEVICE, non_blocking=True)


@pytest.mark.parametrize("compute", [baked, from_host] if INTERPRETED else [baked])
def test_a_number_of_the_host_stays_what_it_was(compute: Callable[[Tensor, list[int]], Tensor]) -> None:
    buffer, length = randoms(2, SIZE), [3]
    graph = make_graphs().record(lambda: (compute(buffer, length),))
    length[0] = 4
    assert torch.equal(graph.replay()[0], 3 * buffer)


def test_a_run_that_waits_for_the_device_cannot_be_recorded_and_others_can_afterwards() -> None:
    block, buffer, graphs = Block(), randoms(2, SIZE), make_graphs()
    with pytest.raises(RuntimeError, match="captur"):
        graphs.record(lambda: (buffer * buffer.sum().item(),))
    assert torch.equal(graphs.record(lambda: (block(buffer),)).replay()[0], block(buffer))


def test_a_replay_that_reads_memory_nobody_wrote_gives_something_else() -> None:
    """Only of the double: on a device such memory may hold what it held."""
    if not INTERPRETED:
        pytest.skip("a device fills no memory")
    buffer = randoms(2, SIZE)

    def run() -> tuple[Tensor]:
        out = torch.empty_like(buffer)
        out[:1] = buffer[:1]
        return (out,)

    replayed = make_graphs().record(run).replay()[0]
    assert torch.equal(replayed[:1], buffer[:1])
    assert replayed[1:].isnan().all()


def test_outputs_of_all_graphs_share_memory_as_large_as_the_largest() -> None:
    outputs = SharedOutputs()
    large = outputs.like((torch.empty(8, 4), torch.empty(8, 100)))
    small = outputs.like((torch.empty(2, 4), torch.empty(2, 100)))
    assert [each.shape for each in small] == [(2, 4), (2, 100)]
    assert [each.data_ptr() for each in small] == [each.data_ptr() for each in large]
    more = outputs.like((torch.empty(9, 4), torch.empty(8, 100)))
    assert more[0].data_ptr() != large[0].data_ptr()
    assert more[1].data_ptr() == large[1].data_ptr()


def test_ops_of_a_gpu_capture_and_those_of_the_interpreter_do_not() -> None:
    graphs = ops_of("triton", device=str(DEVICE)).make_graphs()
    assert isinstance(graphs, CapturedGraphs) == graphs.captures == (not INTERPRETED)


def test_to_name_a_gpu_is_enough_to_capture_on_it() -> None:
    """Nothing is asked of a device before the first graph."""
    from quire.ops.triton import ops_on

    graphs = ops_on("cuda")["make_graphs"]()
    assert isinstance(graphs, CapturedGraphs)
