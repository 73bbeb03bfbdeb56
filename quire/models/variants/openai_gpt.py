"""GPT, the first."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from quire.attention.context import ForwardContext
from quire.models.decoder import DecoderForCausalLM, DecoderLayer


class PostNormLayer(DecoderLayer):
    """Attention and MLP are added to what they read, and the sums are normed."""

    def __call__(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Shapes: hidden [T, E] -> [T, E]."""
        assert self.input_norm is not None
        assert self.pre_mlp_norm is not None
        assert self.mlp is not None
        hidden = self.input_norm(self._mixed(hidden, ctx, hidden))
        return self.pre_mlp_norm(self.mlp(hidden, residual=hidden))


class OpenAIGPTForCausalLM(DecoderForCausalLM):
    """The common decoder, with norms behind sums."""

    layer_class: ClassVar[type[DecoderLayer]] = PostNormLayer
