"""OPT."""

from __future__ import annotations

from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.layers.activation import activation_of
from quire.layers.context import LayerContext
from quire.layers.embedding import Embedding, LMHead
from quire.layers.linear import Linear
from quire.layers.norm import model_norm
from quire.models.blocks import attention_of
from quire.ops.contracts.operands import Largest


class OPTLayer:
    """Attention and MLP with layer norms before them; the 350m model has them behind the residual sums instead."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        size, bias = arch.hidden_size, arch.attention_bias
        attention = ctx.child("self_attn")
        self.norm_before = arch.raw.get("do_layer_norm_before") is not False
        self.self_attn_layer_norm = model_norm(arch, ctx, "self_attn_layer_norm")
        self.qkv_proj = Linear(attention.child("qkv_proj"), size, size, size, size, bias=bias)
        self.attention = attention_of(arch, attention, index)
        self.out_proj = Linear(attention.child("out_proj"), size, size, bias=bias, shard_dim=1)
        self.final_layer_norm = model_norm(arch, ctx, "final_layer_norm")
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

    def __init__(self, arch: ModelArch, ctx: LayerContext) -> None:
        unused = arch.family.names.unused_positions
        width = arch.embedding_size
        decoder = ctx.child("model").child("decoder")
        tied, embed = arch.tie_word_embeddings, decoder.child("embed_tokens")
        self.embed_tokens = Embedding(embed, arch.vocab_size, width, tied=tied)
        self.embed_positions = Embedding(
            decoder.child("embed_positions"),
            arch.max_position_embeddings + unused,
            arch.hidden_size,
            first_row=unused,
        )
        self.project_in = self.project_out = None
        if width != arch.hidden_size:
            self.project_in = Linear(decoder.child("project_in"), width, arch.hidden_size)
            self.project_out = Linear(decoder.child("project_out"), arch.hidden_size, width)
        layers = decoder.child("layers")
        self.layers = [OPTLayer(arch, layers.child(index), index) for index in range(arch.num_layers)]
        final = arch.norms.final
        self.final_layer_norm = model_norm(arch, decoder, final) if final else None
        head = embed if tied else ctx.child("lm_head")
        self.lm_head = LMHead(head, arch.vocab_size, width, tied_to=self.embed_tokens if tied else None)

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

    def largest_logits(self, hidden: Tensor) -> Largest:
        """See `interfaces.Model`."""
        return self.lm_head.largest(hidden)
