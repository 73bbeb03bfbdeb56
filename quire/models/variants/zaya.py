"""Zaya."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.config.layers.mixers import AttentionSpec
from quire.layers.context import LayerContext
from quire.layers.experts import MixtureOfExperts
from quire.layers.linear import Linear
from quire.layers.norm import model_norm
from quire.layers.recurrent.convolved_qkv import ConvolvedQkv
from quire.layers.router_mlp import RouterMlp
from quire.models.blocks import attention_of
from quire.models.decoder import DecoderForCausalLM

SUM = ("hidden_states_scale", "hidden_states_bias", "residual_scale", "residual_bias")
"""Scales and shifts of what is added to the residual, and of the residual."""
INPUT = ("input_hidden_states_scale", "input_hidden_states_bias")
"""Of the embeddings."""


class ZayaLayer:
    """Attention over convolved queries and keys, and a mixture of experts; what they give is scaled and shifted, as is
    the residual."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        at, mlp, spec = ctx.child(arch.family.names.attention), ctx.child("mlp"), arch.layers[index].mlp
        assert spec.experts is not None
        assert spec.experts.router is not None
        place, of_state = arch.places_of(index)
        mixer = arch.mixers[place]
        assert isinstance(mixer, AttentionSpec)
        self.ops = ctx.ops
        self.input_norm = model_norm(arch, ctx, "input_layernorm")
        self.qkv = ConvolvedQkv(arch, at, of_state)
        self.attention = attention_of(arch, at, place)
        self.o_proj = Linear(at.child("o_proj"), mixer.heads.query_size, arch.hidden_size, bias=arch.output_bias)
        self.mixed_sum = scales_and_shifts(ctx.child("post_attention_residual_scale"), SUM, arch.hidden_size)
        self.mlp_norm = model_norm(arch, ctx, "post_attention_layernorm")
        self.router = RouterMlp(arch, spec.experts.router, mlp.child("gate"))
        self.experts = MixtureOfExperts(arch, spec, mlp)
        self.fed_sum = scales_and_shifts(ctx.child("post_mlp_residual_scale"), SUM, arch.hidden_size)

    def __call__(self, hidden: Tensor, routed: Tensor | None, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Gives the next layer's `routed`, too. Shapes: hidden [T, E], routed [T, P] float32 -> [T, E], [T, P]."""
        return self._feed(self._attend(hidden, ctx), routed)

    def _attend(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        attended = self.o_proj(self.attention(self.qkv(self.input_norm(hidden), ctx), ctx))
        self.ops.scale_shift(attended, self.mixed_sum, hidden)
        return attended

    def _feed(self, hidden: Tensor, routed: Tensor | None) -> tuple[Tensor, Tensor]:
        normed = self.mlp_norm(hidden)
        routed, read = self.router(normed, routed)
        fed = self.experts(normed, routed=read)
        self.ops.scale_shift(fed, self.fed_sum, hidden)
        return fed, routed


def scales_and_shifts(ctx: LayerContext, names: tuple[str, ...], size: int) -> Tensor:
    """As `Ops.scale_shift` takes them."""
    parts = [ctx.tensor(name, (size,), dtype=torch.float32) for name in names]
    return parts[0] if parts[0].is_meta else torch.stack(parts)


class ZayaForCausalLM(DecoderForCausalLM):
    """The decoder, with layers whose routers read what those before them made of the hidden states."""

    def __init__(self, arch: ModelArch, ctx: LayerContext) -> None:
        super().__init__(arch, ctx)
        self.input = scales_and_shifts(ctx.child(arch.family.names.base), INPUT, arch.hidden_size)

    def make_layers(self, arch: ModelArch, ctx: LayerContext) -> None:
        """See `DecoderForCausalLM`."""
        self.zaya_layers = [ZayaLayer(arch, ctx.child(index), index) for index in range(arch.num_layers)]

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """See `interfaces.Model`."""
        hidden, routed = self.embed_tokens(token_ids), None
        self.ops.scale_shift(hidden, self.input)
        for layer in self.zaya_layers:
            hidden, routed = layer(hidden, routed, ctx)
        assert self.norm is not None
        return self.norm(hidden)
