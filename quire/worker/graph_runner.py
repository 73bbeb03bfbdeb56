"""`GraphRunner`: the forward pass of a step, recorded once for each shape and replayed by one call."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.log import get_logger
from quire.models.interfaces import Model
from quire.ops.contracts.operands import Graph, Largest
from quire.ops.contracts.ops import Ops
from quire.sampling.torch_mode import torch_mode
from quire.worker.graph_cache import GraphCache
from quire.worker.input_builder import InputBuilder, StepShape

log = get_logger(__name__)


class GraphRunner:
    """Runs a model from graphs, if its forward pass computes with ops alone; otherwise op by op.

    To record a step takes a CPU as long as to run it once, so each shape is recorded when it first comes. A device that
    captures takes longer, and keeps what it captured: there, steps in which each sequence computes one token are padded
    to a few sizes (`InputBuilder.graph_sizes`), `capture_next` captures these one by one while nothing else is to be
    done, and all other steps run op by op.
    """

    def __init__(self, ops: Ops, model: Model, builder: InputBuilder) -> None:
        """`builder`'s buffers are written."""
        self._ops = ops
        self.model = model
        self._builder = builder
        self._set = ops.make_graphs()
        self._sizes = builder.graph_sizes
        self._recorded = GraphCache[Graph]()
        """Where steps are not padded."""
        self._captured: dict[StepShape, Graph] = {}
        """Where they are."""
        self._missing = [StepShape(size, size, size) for size in self._sizes]
        """Shapes that are to be captured, the largest last."""
        self.recordable = bool(self._sizes) or not self._set.captures
        """Whether steps run from graphs."""
        reason = self._why_not() if self.recordable and self._set.only_ops else None
        if reason is not None:
            self.recordable = False
            log.info("%s runs op by op, not from graphs: %s", type(model).__name__, reason)

    def run(self, shape: StepShape) -> tuple[Tensor, Tensor | Largest | None]:
        """The step in the builder's buffers: hidden states (where the shape asks for no more, perhaps those of the
        sampled rows alone) and, if rows are sampled, their logits.

        Or the largest of these alone, where the shape asks for no more and no captured graph gives them all.
        All are valid until the next run. Shapes: -> [T, E], [R, V] float32.
        """
        graph = self._graph(shape.padded(self._sizes)) if self.recordable else None
        if graph is None:
            hidden, *found = self._forward(shape)
        else:
            hidden, *found = graph.replay()
        if self._sizes and len(hidden) > shape.num_tokens:
            return hidden[: shape.num_tokens], found[0][: shape.num_sampled]
        if len(found) == len(Largest._fields):
            return hidden, Largest(*found)
        return hidden, found[0] if found else None

    def capture_next(self) -> bool:
        """Capture the largest size that is missing: the smaller ones find room in its memory.

        Only while no step is computed. Gives whether more are missing.
        """
        if not self._missing or not self.recordable:
            return False
        shape = self._missing.pop()
        try:
            self._captured[shape] = self._record(self._builder.padding(shape.num_seqs))
        except Exception as error:  # whatever a device cannot do: steps go on as they did
            self._missing.clear()
            reason = f"{type(error).__name__}: {error}"
            log.warning("%d sizes of steps run from graphs, the others op by op: %s", len(self._captured), reason)
        return bool(self._missing)

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
        rows = hidden if len(hidden) == shape.num_sampled else self._ops.embedding(inputs.sampled_rows, hidden)
        if shape.only_largest:
            return hidden, *self.model.largest_logits(rows)
        return hidden, self.model.compute_logits(rows)

    def _graph(self, shape: StepShape) -> Graph | None:
        if self._sizes:
            return self._captured.get(shape)
        return self._recorded.get(shape, lambda: self._record(shape))

    def _record(self, shape: StepShape) -> Graph:
        return self._set.record(lambda: self._forward(shape))

    def _why_not(self) -> str | None:
        """Record a step, change its input, and compare: what was not computed by ops would be that of the old input."""
        try:
            shape = self._builder.one_token(token_id=0, position=0)
            graph = self._record(shape)
            expected = self._forward(self._builder.one_token(token_id=1, position=1))
            same = all(map(torch.equal, graph.replay(), expected))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if same and shape in self._missing:
            self._captured[shape] = graph
            self._missing.remove(shape)
        return None if same else "it computes with more than ops"
