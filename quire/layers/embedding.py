"""Token and position embeddings, and the head that turns hidden states into logits."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.context import LayerContext
from quire.layers.weights import WHOLE
from quire.ops import functional


class Embedding:
    """Rows of a table, multiplied by `scale` once, at load.

    A tied table is needed twice, as rows and in the head's layout; its rows then stay in the file, which the system has
    in its cache anyway, because the head was just read from it.
    """

    def __init__(
        self, ctx: LayerContext, num_rows: int, hidden_size: int, *, scale: float = 1.0, tied: bool = False
    ) -> None:
        self.table = ctx.tensor("weight", (num_rows, hidden_size), scale=scale, copy=not tied)

    def __call__(self, ids: Tensor) -> Tensor:
        """Shapes: ids [T] int64 -> [T, E]."""
        return functional.embedding(ids, self.table)


class LMHead:
    """Logits in float32, optionally capped. A tied head is built with the context of the embedding it shares."""

    def __init__(self, ctx: LayerContext, vocab_size: int, hidden_size: int, *, soft_cap: float | None = None) -> None:
        self.weight = ctx.linear_weight(hidden_size, (vocab_size,), WHOLE)
        self.soft_cap = soft_cap

    def __call__(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [S, E] -> [S, V] float32."""
        logits = functional.linear(hidden, self.weight, out_dtype=torch.float32)
        if self.soft_cap is not None:
            for row in logits.div_(self.soft_cap):  # row by row, for their bits must not depend on their number
                row.tanh_()
            logits.mul_(self.soft_cap)
        return logits
