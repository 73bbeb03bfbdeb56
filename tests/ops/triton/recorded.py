"""A device that captures, made up in Triton's interpreter: a replay does again what torch and Triton were called for.

As on a device, nothing of the Python between these calls runs again: a number that the host computed stays what it was
when the graph was recorded, and memory that a run took holds anything when it is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.ops.triton.device import DEVICE, INTERPRETED

from quire.ops.triton.graphs import CapturedGraphs, SharedOutputs  # isort: skip  (see device)

Call = Callable[[], object]
WAITS = ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2", "bincount")
"""What a device refuses while it captures: the host would wait for it."""
EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
"""What only takes memory."""


@dataclass(frozen=True)
class TorchCall:
    """A call of torch, whose results stay where they are."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Sequence[Tensor]

    def __call__(self) -> None:
        if self.function.overloadpacket.__name__ in EMPTY:
            for result in self.results:
                result.fill_(float("nan") if result.is_floating_point() else torch.iinfo(result.dtype).min)
            return
        again = tree_leaves(self.function(*self.args, **self.kwargs))
        if not writes(self.function):
            for result, value in zip(self.results, again, strict=True):
                result.copy_(value)


class TorchCalls(TorchDispatchMode):
    """Writes calls of torch down. Views are none: they only say where something is."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        results = func(*args, **(kwargs or {}))
        found = tree_leaves(results)
        if writes(func) or not memory_of(found) <= memory_of(tree_leaves((args, kwargs))):
            self._calls.append(TorchCall(func, args, kwargs or {}, found))
        return results


def writes(function: Any) -> bool:
    """Whether a function of torch changes what it is given."""
    return any(each.alias_info is not None and each.alias_info.is_write for each in function._schema.returns)


def memory_of(values: Sequence[Any]) -> set[int]:
    """Where tensors are kept. Of functions such as `contiguous` only this tells whether they gave a view."""
    return {value.untyped_storage().data_ptr() for value in values if isinstance(value, Tensor)}


@contextmanager
def launches_into(calls: list[Call]) -> Iterator[None]:
    """Write launches of kernels down, which all begin where Triton interprets one."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def noted(kernel: Any, *args: Any, **kwargs: Any) -> None:
        call = partial(run, kernel, *args, **kwargs)
        with _disable_current_modes():  # what the interpreter itself calls torch for
            call()
        calls.append(call)

    InterpretedFunction.run = noted
    try:
        yield
    finally:
        InterpretedFunction.run = run


class RecordedGraph:
    """See `operands.Graph`."""

    def __init__(self, graphs: RecordedGraphs, calls: list[Call], outputs: tuple[Tensor, ...]) -> None:
        self._graphs = graphs
        self._calls = calls
        self._outputs = outputs

    def replay(self) -> tuple[Tensor, ...]:
        self._graphs.num_replays += 1
        with torch.inference_mode():
            for call in self._calls:
                call()
        return self._outputs


class RecordedGraphs:
    """See `operands.Graphs`."""

    only_ops = True
    captures = True

    def __init__(self) -> None:
        self._outputs = SharedOutputs()
        self.num_replays = 0

    def record(self, run: Callable[[], tuple[Tensor, ...]]) -> RecordedGraph:
        calls: list[Call] = []
        with torch.inference_mode():
            outputs = self._outputs.like(run())
            with launches_into(calls), TorchCalls(calls):
                for output, computed in zip(outputs, run(), strict=True):
                    output.copy_(computed)
        return RecordedGraph(self, calls, outputs)


class CountedGraphs(CapturedGraphs):
    """A device's own, which count replays."""

    def __init__(self) -> None:
        super().__init__(DEVICE)
        self.num_replays = 0

    def record(self, run: Callable[[], tuple[Tensor, ...]]) -> Any:
        graph, replay = super().record(run), None
        replay = graph.replay

        def counted() -> tuple[Tensor, ...]:
            self.num_replays += 1
            return replay()

        graph.replay = counted  # type: ignore[method-assign]
        return graph


def make_graphs() -> RecordedGraphs | CountedGraphs:
    """The set of the device under test."""
    return RecordedGraphs() if INTERPRETED else CountedGraphs()
