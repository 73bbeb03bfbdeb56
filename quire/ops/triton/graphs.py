"""CUDA graphs, on ROCm too: the launches of a run, captured from a stream and replayed by one call.

All graphs of a set share a pool of memory: what one run computes on the way is gone once another one runs. Only outputs
outlive a run. They are copied out of the pool, as the last part of the run, to memory that all graphs of the set use in
turn; kept in the pool, those of each graph would take room for good. So graphs may be replayed in any order.

Where there is no device, `tests/ops/triton/recorded.py` has a double that replays calls of torch and launches of
kernels one by one, in the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


class SharedOutputs:
    """Memory for the outputs of graphs of which one runs at a time."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []

    def like(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Room for outputs of these shapes. What was larger has room for what is smaller."""
        return tuple(self._room(index, output) for index, output in enumerate(outputs))

    def _room(self, index: int, output: Tensor) -> Tensor:
        count = output.numel()
        if index == len(self._memory) or self._memory[index].numel() < count:
            self._memory[index : index + 1] = [torch.empty(count, dtype=output.dtype, device=output.device)]
        memory = self._memory[index]
        assert memory.dtype == output.dtype, "all graphs of a set give the same kinds of outputs"
        return memory[:count].view(output.shape)


class CapturedGraph:
    """See `operands.Graph`. Replayed on the current stream."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: tuple[Tensor, ...]) -> None:
        self._graph = graph
        self._outputs = outputs

    def replay(self) -> tuple[Tensor, ...]:
        """See `operands.Graph`."""
        self._graph.replay()
        return self._outputs


class CapturedGraphs:
    """See `operands.Graphs`."""

    only_ops = True
    captures = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outputs = SharedOutputs()
        self._stream: torch.cuda.Stream | None = None
        self._pool: _POOL_HANDLE | None = None

    def record(self, run: Callable[[], tuple[Tensor, ...]]) -> CapturedGraph:
        """See `operands.Graphs`. `run` is called twice: before it is captured, kernels have to be compiled and loaded,
        and tables of addresses made.

        Raises: RuntimeError for a run that waits for the device, or takes more memory than there is.
        """
        with torch.cuda.device(self._device), torch.inference_mode():
            if self._stream is None:
                self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            outputs = self._outputs.like(self._warm_up(run, self._stream))
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads may go on: while steps rest, none of them has work for the device.
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    for output, computed in zip(outputs, run(), strict=True):
                        output.copy_(computed)
            except BaseException:
                self._stream = self._pool = None  # torch goes on recording into the pool of a capture that failed
                raise
        return CapturedGraph(graph, outputs)

    def _warm_up(self, run: Callable[[], tuple[Tensor, ...]], stream: torch.cuda.Stream) -> tuple[Tensor, ...]:
        """Run beside the current stream, as what is captured will be."""
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            computed = run()
        current.wait_stream(stream)
        return computed
