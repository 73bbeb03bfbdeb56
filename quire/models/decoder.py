"""The pre-norm decoder that most families are; they give a `DecoderSpec`, or a layer class of their own."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.layers.context import LayerContext
from quire.layers.embedding import Embedding, LMHead
from quire.layers.norm import RMSNorm
from quire.layers.weights import WeightMap
from quire.models.blocks import DecoderSpec, SelfAttention, mlp_of

FUSED = WeightMap(fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")})
"""The usual checkpoint: one tensor per projection."""


class DecoderLayer:
    """Attention and MLP, each behind a norm and added to the residual: eight op calls."""

    def __init__(self, arch: ModelArch, spec: DecoderSpec, ctx: LayerContext, index: int) -> None:
        size, eps, offset = arch.hidden_size, arch.norm_eps, spec.norm_offset
        self.input_layernorm = RMSNorm(ctx.child("input_layernorm"), size, eps, offset=offset)
        self.self_attn = SelfAttention(arch, spec, ctx.child("self_attn"), index)
        self.post_attention_layernorm = RMSNorm(ctx.child("post_attention_layernorm"), size, eps, offset=offset)
        self.mlp = mlp_of(arch, ctx, index)

    def __call__(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Shapes: hidden [T, E] -> [T, E]."""
        hidden = self.self_attn(self.input_layernorm(hidden), ctx, residual=hidden)
        return self.mlp(self.post_attention_layernorm(hidden), residual=hidden)


class DecoderForCausalLM:
    """Embedding, layers, norm, head. Subclasses override what differs."""

    weights: ClassVar[WeightMap] = FUSED
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer

    @staticmethod
    def spec(arch: ModelArch) -> DecoderSpec:
        """How the family differs from Llama."""
        return DecoderSpec()

    def __init__(self, arch: ModelArch, ctx: LayerContext) -> None:
        spec, model = self.spec(arch), ctx.child("model")
        tied, embed = arch.tie_word_embeddings, model.child("embed_tokens")
        self.embed_tokens = Embedding(
            embed,
            arch.vocab_size,
            arch.hidden_size,
            scale=spec.embedding_scale,
            tied=tied,
        )
        self.layers = [
            self.layer_class(arch, spec, model.child("layers").child(index), index) for index in range(arch.num_layers)
        ]
        self.norm = RMSNorm(model.child("norm"), arch.hidden_size, arch.norm_eps, offset=spec.norm_offset)
        self.lm_head = LMHead(
            embed if tied else ctx.child("lm_head"),
            arch.vocab_size,
            arch.hidden_size,
            tied_to=self.embed_tokens if tied else None,
            soft_cap=arch.final_soft_cap,
        )

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """See `interfaces.Model`."""
        hidden = self.embed_tokens(token_ids)
        for layer in self.layers:
            hidden = layer(hidden, ctx)
        return self.norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `interfaces.Model`."""
        return self.lm_head(hidden)
