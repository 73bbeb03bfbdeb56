"""Embeddings that tokens have for each layer (Gemma 3n and 4)."""

from __future__ import annotations

import math

from torch import Tensor

from quire.config.arch import ModelArch
from quire.layers.activation import activation_of
from quire.layers.context import LayerContext
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm, model_norm


class LayerEmbeddings:
    """Of each token one embedding for each layer, joined by a product of the token's own embedding."""

    def __init__(self, arch: ModelArch, ctx: LayerContext) -> None:
        """`ctx` is that of all layers."""
        spec = arch.layer_embeddings
        assert spec is not None
        self.ops = ctx.ops
        self.size, width = spec.size, arch.num_layers * spec.size
        self.table = Embedding(
            ctx.beside("embed_tokens_per_layer"),
            spec.vocab_size,
            width,
            scale=math.sqrt(self.size),
            num_more=max(0, arch.vocab_size - spec.vocab_size),
        )
        self.projection = Linear(ctx.beside("per_layer_model_projection"), arch.hidden_size, width)
        # The norm's input is divided by the root of the hidden size, which only its epsilon notices.
        eps = arch.norm_eps * arch.hidden_size
        self.norm = RMSNorm(ctx.beside("per_layer_projection_norm"), self.size, eps)

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """Shapes: token_ids [T], embedded [T, E] -> [T, L * P]."""
        rows, projected = self.table(token_ids), self.projection(embedded)
        by_layer = (-1, self.size)
        joined = self.norm(projected.view(by_layer), residual=rows.view(by_layer))
        return self.ops.scale_add(joined, math.sqrt(0.5)).view(rows.shape)


class LayerEmbedding:
    """norm(projection(activation(gate(x)) * e)), of the embedding e that a token has for this layer."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        spec = arch.layer_embeddings
        assert spec is not None
        self.ops, self.first = ctx.ops, index * spec.size
        self.gate = Linear(ctx.child("per_layer_input_gate"), arch.hidden_size, spec.size)
        self.projection = Linear(ctx.child("per_layer_projection"), spec.size, arch.hidden_size)
        self.norm = model_norm(arch, ctx, "post_per_layer_input_norm")
        self.activation = activation_of(arch)

    def __call__(self, hidden: Tensor, embeddings: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E], embeddings [T, L * P] -> [T, E]."""
        gated = self.gate(hidden, activation=self.activation)
        self.ops.multiply_columns(gated, embeddings, first=self.first)
        return self.norm(self.projection(gated), residual=residual)
