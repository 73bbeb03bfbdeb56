"""`GraphCache`: graphs of the shapes that steps had last. It knows no torch, so that a simulator can keep one, too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

MAX_GRAPHS = 64
MAX_KEPT_TOKENS = 512
"""Larger steps are recorded anew each time: their kernels take a hundred times as long."""

Shape = tuple[int, ...]
"""Tokens, sequences and sampled rows of a step, and what else tells its ops from those of another step."""
G = TypeVar("G")


class GraphCache(Generic[G]):
    """One graph for each shape, as long as it is among those used last."""

    def __init__(self) -> None:
        self._graphs: OrderedDict[Shape, G] = OrderedDict()
        """The one used last at the end."""

    def __contains__(self, shape: Shape) -> bool:
        return shape in self._graphs

    def get(self, shape: Shape, record: Callable[[], G]) -> G:
        """The graph of a shape; `record` makes it if there is none."""
        graph = self._graphs.pop(shape) if shape in self._graphs else record()
        if shape[0] <= MAX_KEPT_TOKENS:
            self._graphs[shape] = graph
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        return graph
