"""OPT."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.errors import ConfigError
from quire.layers.activation import activation_of
from quire.layers.attention import Attention
from quire.layers.context import LayerContext
from quire.layers.embedding import Embedding, LMHead
from quire.layers.linear import Linear
from quire.layers.norm import LayerNorm
from quire.layers.weights import WeightMap
from quire.models.blocks import plain_attention

POSITION_OFFSET = 2
"""Rows of the position table that no position uses."""
NORM_EPS = 1e-5


class OPTLayer:
    """Attention and MLP with layer norms before them; the 350m model has them behind the residual sums instead."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int, *, affine: bool) -> None:
        size, bias = arch.hidden_size, arch.attention_bias
        attention = ctx.child("self_attn")
        self.norm_before = arch.raw.get("do_layer_norm_before", True)
        self.self_attn_layer_norm = LayerNorm(ctx.child("self_attn_layer_norm"), size, NORM_EPS, affine=affine)
        self.qkv_proj = Linear(attention.child("qkv_proj"), size, size, size, size, bias=bias)
        self.attention: Attention = plain_attention(arch, index)
        self.out_proj = Linear(attention.child("out_proj"), size, size, bias=bias, shard_dim=1)
        self.final_layer_norm = LayerNorm(ctx.child("final_layer_norm"), size, NORM_EPS, affine=affine)
        self.fc1 = Linear(ctx.child("fc1"), size, arch.intermediate_size, bias=bias)
        self.fc2 = Linear(ctx.child("fc2"), arch.intermediate_size, size, bias=bias, shard_dim=1)
        self.activation = activation_of(arch)

    def __call__(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Shapes: hidden [T, E] -> [T, E]."""
        if self.norm_before:
            hidden = self._attend(self.self_attn_layer_norm(hidden), ctx, residual=hidden)
            return self._mlp(self.final_layer_norm(hidden), residual=hidden)
        hidden = self.self_attn_layer_norm(self._attend(hidden, ctx, residual=hidden))
        return self.final_layer_norm(self._mlp(hidden, residual=hidden))

    def _attend(self, x: Tensor, ctx: ForwardContext, *, residual: Tensor) -> Tensor:
        return self.out_proj(self.attention(self.qkv_proj(x), ctx), residual=residual)

    def _mlp(self, x: Tensor, *, residual: Tensor) -> Tensor:
        return self.fc2(self.fc1(x, activation=self.activation), residual=residual)


class OPTForCausalLM:
    """Learned positions, layer norms, biases everywhere, a plain MLP."""

    weights: ClassVar[WeightMap] = WeightMap(fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")})

    def __init__(self, arch: ModelArch, ctx: LayerContext) -> None:
        affine = arch.raw.get("layer_norm_elementwise_affine", True)
        width = arch.embedding_size
        decoder = ctx.child("model").child("decoder")
        tied, embed = arch.tie_word_embeddings, decoder.child("embed_tokens")
        self.embed_tokens = Embedding(embed, arch.vocab_size, width, tied=tied)
        self.embed_positions = Embedding(
            decoder.child("embed_positions"),
            arch.max_position_embeddings + POSITION_OFFSET,
            arch.hidden_size,
            first_row=POSITION_OFFSET,
        )
        self.project_in = self.project_out = None
        if width != arch.hidden_size:
            self.project_in = Linear(decoder.child("project_in"), width, arch.hidden_size)
            self.project_out = Linear(decoder.child("project_out"), arch.hidden_size, width)
        self.layers = [
            OPTLayer(arch, decoder.child("layers").child(index), index, affine=affine)
            for index in range(arch.num_layers)
        ]
        has_norm = arch.raw.get("do_layer_norm_before", True) and not arch.raw.get("_remove_final_layer_norm", False)
        norm = decoder.child("final_layer_norm")
        self.final_layer_norm = LayerNorm(norm, arch.hidden_size, NORM_EPS, affine=affine) if has_norm else None
        head = embed if tied else ctx.child("lm_head")
        self.lm_head = LMHead(head, arch.vocab_size, width, tied_to=self.embed_tokens if tied else None)
        _check_flags(arch)

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """See `interfaces.Model`."""
        hidden = self.embed_tokens(token_ids)
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        hidden = self.embed_positions(ctx.positions, residual=hidden)
        for layer in self.layers:
            hidden = layer(hidden, ctx)
        if self.final_layer_norm is not None:
            hidden = self.final_layer_norm(hidden)
        return hidden if self.project_out is None else self.project_out(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `interfaces.Model`."""
        return self.lm_head(hidden)


def _check_flags(arch: ModelArch) -> None:
    for name in ("do_layer_norm_before", "layer_norm_elementwise_affine", "_remove_final_layer_norm"):
        value = arch.raw.get(name, False)
        if not isinstance(value, bool):
            raise ConfigError(f"{arch.source}: {name} is {value!r}; it must be true or false. Correct the file.")
