"""`GraphRunner`: the forward pass of a step, recorded once for each shape and replayed by one call."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.log import get_logger
from quire.models.interfaces import Model
from quire.ops.contract import Ops
from quire.ops.operands import Graph
from quire.sampling.torch_mode import torch_mode
from quire.worker.graph_cache import GraphCache
from quire.worker.input_builder import InputBuilder, StepShape

log = get_logger(__name__)


class GraphRunner:
    """Runs a model from graphs, if its forward pass computes with ops alone; otherwise op by op."""

    def __init__(self, ops: Ops, model: Model, builder: InputBuilder) -> None:
        """`builder`'s buffers are written."""
        self._ops = ops
        self.model = model
        self._builder = builder
        self._set = ops.make_graphs()
        self._graphs = GraphCache[Graph]()
        reason = self._why_not() if self._set.only_ops else None
        self.recordable = reason is None
        if reason is not None:
            log.info("%s runs op by op, not from graphs: %s", type(model).__name__, reason)

    def run(self, shape: StepShape) -> tuple[Tensor, Tensor | None]:
        """The step in the builder's buffers: hidden states and, if there are any, the logits of the sampled rows.

        Both are valid until the next run. Shapes: -> [T, E], [R, V] float32.
        """
        hidden, *logits = self._graph(shape).replay() if self.recordable else self._forward(shape)
        return hidden, logits[0] if logits else None

    def try_one_token(self) -> None:
        """Compute a token of nobody's: kernels that are compiled are compiled by that. Before the first step.

        Raises: ConfigError for a model that needs an op which is missing.
        """
        self._forward(self._builder.one_token(token_id=0, position=0))

    @torch_mode()
    def _forward(self, shape: StepShape) -> tuple[Tensor, ...]:
        inputs = self._builder.inputs(shape)
        hidden = self.model.forward(inputs.token_ids, inputs.context)
        if shape.num_sampled == 0:
            return (hidden,)
        rows = hidden if shape.num_sampled == shape.num_tokens else self._ops.embedding(inputs.sampled_rows, hidden)
        return hidden, self.model.compute_logits(rows)

    def _graph(self, shape: StepShape) -> Graph:
        return self._graphs.get(shape, lambda: self._set.record(lambda: self._forward(shape)))

    def _why_not(self) -> str | None:
        """Record a step, change its input, and compare: what was not computed by ops would be that of the old input."""
        try:
            shape = self._builder.one_token(token_id=0, position=0)
            graph = self._set.record(lambda: self._forward(shape))
            expected = self._forward(self._builder.one_token(token_id=1, position=1))
            same = all(map(torch.equal, graph.replay(), expected))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None if same else "it computes with more than ops"
