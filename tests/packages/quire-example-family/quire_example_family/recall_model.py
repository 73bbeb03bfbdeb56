"""The forward pass of Recall. Imported when a model is loaded: specs import no torch, classes do."""

from __future__ import annotations

from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.config.config_keys import ConfigKeys
from quire.layers.context import LayerContext
from quire.models.decoder import DecoderForCausalLM


class RecallForCausalLM(DecoderForCausalLM):
    """The common decoder, with the embeddings times `recall_scale` added to what each layer reads."""

    def __init__(self, arch: ModelArch, ctx: LayerContext) -> None:
        super().__init__(arch, ctx)
        self.scale = ConfigKeys(arch.raw, arch.source, arch.family.defaults).positive("recall_scale")

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """See `quire.models.interfaces.Model`."""
        embedded = hidden = self.embed_tokens(token_ids)
        for layer in self.layers:
            hidden = layer(self.ops.scale_add(embedded, self.scale, hidden), ctx)
        return hidden if self.norm is None else self.norm(hidden)
