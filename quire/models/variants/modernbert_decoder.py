"""The ModernBERT decoder."""

from __future__ import annotations

from torch import Tensor

from quire.config.arch import ModelArch
from quire.layers.activation import activation_of
from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.layers.norm import model_norm
from quire.models.decoder import DecoderForCausalLM
from quire.ops.contracts.operands import Largest


class ModernBertDecoderForCausalLM(DecoderForCausalLM):
    """The common decoder, with a product, an activation and a norm before the head."""

    def __init__(self, arch: ModelArch, ctx: LayerContext) -> None:
        super().__init__(arch, ctx)
        spec, names = arch.head_transform, ctx.child("lm_head")
        assert spec is not None
        self.dense = Linear(names.child("dense"), arch.hidden_size, arch.hidden_size, bias=spec.has_bias)
        self.activation = activation_of(arch, spec.activation)
        self.head_norm = model_norm(arch, names, "norm")

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `interfaces.Model`."""
        return self.lm_head(self._transformed(hidden))

    def largest_logits(self, hidden: Tensor) -> Largest:
        """See `interfaces.Model`."""
        return self.lm_head.largest(self._transformed(hidden))

    def _transformed(self, hidden: Tensor) -> Tensor:
        return self.head_norm(self.dense(hidden, activation=self.activation))
