"""Recorded runs of ops, replayed by one call; `csrc/cpu/graph.cpp`."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.ops.cpu.library import check, load, recording
from quire.ops.cpu.memory import Arena, from_arena
from quire.ops.functional import NotRecordable

lib = load()


class Graph:
    """The ops of one run, with their arguments."""

    def __init__(self, words: array[int], outputs: tuple[Tensor, ...]) -> None:
        self._words = words
        self._outputs = outputs

    def replay(self) -> tuple[Tensor, ...]:
        """See `functional.Graph`."""
        check(lib.qr_replay(self._words.buffer_info()[0], len(self._words)))
        return self._outputs


class Graphs:
    """See `functional.Graphs`. All graphs of one set share their memory, for one runs at a time."""

    def __init__(self) -> None:
        self._arena = Arena()
        self._checked = False

    def record(self, run: Callable[[], tuple[Tensor, ...]]) -> Graph:
        """See `functional.Graphs.record`."""
        with recording() as words, from_arena(self._arena):
            if self._checked:
                outputs = run()
            else:
                with _OpsOnly():  # type: ignore[no-untyped-call]
                    outputs = run()
        self._checked = True
        return Graph(words, tuple(self._arena.untracked(output) for output in outputs))


class _OpsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses whatever computes with torch itself: a graph would not do it again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if not func.is_view or func.name() == "aten::lift_fresh":  # views, but not of what was made just now
            raise NotRecordable(f"it computes with {func}")
        return func(*args, **(kwargs or {}))
