"""`GraphRunner`: the forward pass of a step, recorded once for each shape and replayed by one call."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor

from quire.log import get_logger
from quire.models.interfaces import Model
from quire.ops import functional as F
from quire.worker.input_builder import StepInputs

log = get_logger(__name__)

MAX_GRAPHS = 64
MAX_KEPT_TOKENS = 512
"""Larger steps are recorded anew each time: their kernels take a hundred times as long."""


class GraphRunner:
    """Runs a model from graphs. One whose forward pass computes with more than ops is run without them."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._set = F.make_graphs()
        self._graphs: OrderedDict[tuple[int, ...], F.Graph] = OrderedDict()
        """By shape of the step, the one used last at the end."""
        self._recordable = True

    def run(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        """Hidden states and, if there are any, the logits of the sampled rows; both are valid until the next run.

        Shapes: -> [T, E], [R, V] float32.
        """
        hidden, *logits = self._replay(inputs) if self._recordable else self._forward(inputs)
        return hidden, logits[0] if logits else None

    def _forward(self, inputs: StepInputs) -> tuple[Tensor, ...]:
        hidden = self.model.forward(inputs.token_ids, inputs.context)
        if len(inputs.sampled_rows) == 0:
            return (hidden,)
        rows = hidden if len(inputs.sampled_rows) == len(hidden) else F.embedding(inputs.sampled_rows, hidden)
        return hidden, self.model.compute_logits(rows)

    def _replay(self, inputs: StepInputs) -> tuple[Tensor, ...]:
        graph = self._graphs.pop(inputs.shape, None)
        if graph is None:
            try:
                graph = self._set.record(lambda: self._forward(inputs))
            except F.NotRecordable as reason:
                log.info("%s runs op by op: %s", type(self.model).__name__, reason)
                self._recordable = False
                return self._forward(inputs)
        if len(inputs.token_ids) <= MAX_KEPT_TOKENS:
            self._graphs[inputs.shape] = graph
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        return graph.replay()
