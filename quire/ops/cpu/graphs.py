"""Recorded runs of ops, replayed by one call; `csrc/cpu/graph.cpp`."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from torch import Tensor

from quire.ops.cpu.library import check, load, recording
from quire.ops.cpu.memory import Arena, from_arena

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

    only_ops = True

    def __init__(self) -> None:
        self._arena = Arena()

    def record(self, run: Callable[[], tuple[Tensor, ...]]) -> Graph:
        """See `functional.Graphs.record`."""
        with recording() as words, from_arena(self._arena):
            outputs = run()
        return Graph(words, tuple(self._arena.untracked(output) for output in outputs))
