"""`TransformersModel`: a causal decoder that transformers builds, as a `Model`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.attention.context import ForwardContext
from quire.models.fallback.attention import PagedAttention
from quire.ops.contracts.operands import Largest
from quire.ops.contracts.ops import Ops
from quire.ops.threads import torch_threads


class TransformersModel:
    """The body of the model, and its head.

    transformers computes everything but attention, on torch's own threads and in products of the step's shape: bits of
    a row follow the rows beside it, so the engine's promise does not hold.
    """

    def __init__(self, causal: PreTrainedModel, ops: Ops, *, vocab_size: int, num_threads: int) -> None:
        """Takes the model over. Its head may have more rows than the vocabulary. Mutates: causal."""
        self.body = causal.base_model
        self.head = causal
        setattr(causal, causal.base_model_prefix, _NoBody())
        self.attention = PagedAttention(ops)
        self.attention.attach(self.body)
        self._ops = ops
        self._vocab_size = vocab_size
        self._num_threads = num_threads

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """See `interfaces.Model`: the tokens of all sequences are one row of a batch of one."""
        self.attention.context = ctx
        try:
            with torch_threads(self._num_threads):
                out = self.body(
                    input_ids=token_ids.unsqueeze(0), position_ids=ctx.positions.unsqueeze(0), use_cache=False
                )
        finally:
            self.attention.context = None
        hidden: Tensor = out[0]
        return hidden[0].contiguous()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `interfaces.Model`: the head with whatever the model does to its logits."""
        with torch_threads(self._num_threads):
            logits: Tensor = self.head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
        return logits[0].float().contiguous()

    def largest_logits(self, hidden: Tensor) -> Largest:
        """See `interfaces.Model`."""
        return Largest(*self._ops.row_max_tensors(self.compute_logits(hidden)[:, : self._vocab_size].contiguous()))


class _NoBody(nn.Module):
    """Stands where the body was: what the head is given goes through."""

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> _Hidden:
        return _Hidden(inputs_embeds)


class _Hidden:
    """The output of a body, with nothing but hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: object) -> Any:
        return self.last_hidden_state if index == 0 else ()

    def __getattr__(self, name: str) -> None:
        return None
