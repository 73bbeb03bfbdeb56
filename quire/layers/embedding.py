"""Token and position embeddings, and the head that turns hidden states into logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.config.family_spec import WaveSpec
from quire.layers.context import LayerContext
from quire.layers.weights import WHOLE
from quire.ops.contracts.operands import BlockTable, Largest, LinearWeight


class Embedding:
    """Rows of a table, times `scale`. A tied table is kept once, in the head's layout, unless the head is quantised.

    A quantised table becomes numbers of the model's dtype; one of a GGUF file only row by row, when it is looked up.
    """

    def __init__(
        self,
        ctx: LayerContext,
        num_rows: int,
        hidden_size: int,
        *,
        scale: float = 1.0,
        tied: bool = False,
        first_row: int = 0,
        num_more: int = 0,
        num_unread: int = 0,
    ) -> None:
        """`first_row` is the checkpoint's row for id 0, and for `num_more` ids that it has no rows for.

        The last `num_unread` rows of the checkpoint, behind `num_rows`, belong to no id.
        """
        self.ops = ctx.ops
        self.table: Tensor | LinearWeight | BlockTable
        stays_quantized = ctx.is_quantized("weight") and not ctx.scheme.dequantizes
        if tied and ctx.scheme.head is None and not stays_quantized:
            self.table = ctx.linear_weight(hidden_size, (num_rows,), WHOLE, is_head=True)
        else:
            shape = (num_rows + num_unread, hidden_size)
            self.table = ctx.table("weight", shape, first_row=first_row, end=num_rows, num_more=num_more)
        # Rounded to the dtype first, as the models that scale their embeddings were trained.
        self.scale = None if scale == 1.0 else torch.tensor(scale, dtype=ctx.dtype).item()

    def __call__(self, ids: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: ids [T] int64, residual [T, E] -> [T, E]."""
        rows = self.ops.embedding(ids, self.table)
        if self.scale is None and residual is None:
            return rows
        return self.ops.scale_add(rows, 1.0 if self.scale is None else self.scale, residual)


class Waves:
    """Sines and cosines of each position (https://arxiv.org/abs/1706.03762, section 3.5), added to embeddings.

    As tensor2tensor has them: all sines, then all cosines.
    """

    def __init__(
        self, ctx: LayerContext, num_positions: int, size: int, spec: WaveSpec, *, padding: int | None
    ) -> None:
        """The position that counts as much as the token `padding` has for an id has a row of zeros."""
        self.ops = ctx.ops
        half, first = size // 2, spec.first
        rates = torch.exp(torch.arange(half).float() * -(math.log(10_000) / (half - spec.has_slowest)))
        angles = (torch.arange(num_positions) + first).float().unsqueeze(1) * rates
        table = torch.zeros(num_positions, size)
        table[:, :half], table[:, half : 2 * half] = angles.sin(), angles.cos()
        if padding is not None and first <= padding < first + num_positions:
            table[padding - first] = 0.0
        self.table = table.to(ctx.ops.device, ctx.dtype)

    def __call__(self, positions: Tensor, *, residual: Tensor) -> Tensor:
        """Shapes: positions [T] int64, residual [T, E] -> [T, E]."""
        return self.ops.scale_add(self.ops.embedding(positions, self.table), 1.0, residual)


class LMHead:
    """Logits in float32, optionally capped. A tied head is built with the embedding and its context."""

    def __init__(
        self,
        ctx: LayerContext,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_to: Embedding | None = None,
        soft_cap: float | None = None,
        bias: Tensor | None = None,
    ) -> None:
        self.ops = ctx.ops
        if tied_to is not None and isinstance(tied_to.table, LinearWeight):
            self.weight = tied_to.table
        else:
            self.weight = ctx.linear_weight(hidden_size, (vocab_size,), WHOLE, is_head=True)
        self.bias = bias
        self.soft_cap = soft_cap

    def __call__(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [S, E] -> [S, V] float32."""
        logits = self.ops.linear(hidden, self.weight, self.bias, out_dtype=torch.float32)
        if self.soft_cap is not None:
            self.ops.soft_cap(logits, self.soft_cap)
        return logits

    def largest(self, hidden: Tensor) -> Largest:
        """The largest logit of each row, without the others. Shapes: hidden [S, E] -> [S]."""
        return Largest(*self.ops.linear_max(hidden, self.weight, self.bias, soft_cap=self.soft_cap))
