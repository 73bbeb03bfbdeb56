"""GPT-2."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.errors import ConfigError
from quire.layers.activation import activation_of
from quire.layers.context import LayerContext
from quire.layers.embedding import Embedding, LMHead
from quire.layers.linear import Linear
from quire.layers.norm import LayerNorm
from quire.layers.weights import WeightMap
from quire.models.blocks import plain_attention


class GPT2Block:
    """Attention and MLP, each behind a layer norm and added to the residual."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        size, attention, mlp = arch.hidden_size, ctx.child("attn"), ctx.child("mlp")
        scale = arch.query_scale / (index + 1 if arch.raw.get("scale_attn_by_inverse_layer_idx", False) else 1)
        self.ln_1 = LayerNorm(ctx.child("ln_1"), size, arch.norm_eps)
        self.c_attn = Linear(attention.child("c_attn"), size, size, size, size, bias=True)
        self.attention = plain_attention(arch, index, scale=scale)
        self.c_proj = Linear(attention.child("c_proj"), size, size, bias=True, shard_dim=1)
        self.ln_2 = LayerNorm(ctx.child("ln_2"), size, arch.norm_eps)
        self.mlp_c_fc = Linear(mlp.child("c_fc"), size, arch.intermediate_size, bias=True)
        self.mlp_c_proj = Linear(mlp.child("c_proj"), arch.intermediate_size, size, bias=True, shard_dim=1)
        self.activation = activation_of(arch)

    def __call__(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Shapes: hidden [T, E] -> [T, E]."""
        attended = self.attention(self.c_attn(self.ln_1(hidden)), ctx)
        hidden = self.c_proj(attended, residual=hidden)
        return self.mlp_c_proj(self.mlp_c_fc(self.ln_2(hidden), activation=self.activation), residual=hidden)


class GPT2LMHeadModel:
    """Learned positions, layer norms, biases everywhere; linear weights are stored [in, out]."""

    weights: ClassVar[WeightMap] = WeightMap(
        transposed=frozenset({"c_attn", "c_proj", "c_fc"}), base_prefix="transformer."
    )

    def __init__(self, arch: ModelArch, ctx: LayerContext) -> None:
        if arch.raw.get("add_cross_attention", False):
            raise ConfigError(
                f"{arch.source}: add_cross_attention is true, but quire runs GPT-2 as a decoder only. "
                "Use a generative GPT-2 checkpoint."
            )
        base = ctx.child("transformer")
        tied, embed = arch.tie_word_embeddings, base.child("wte")
        self.wte = Embedding(embed, arch.vocab_size, arch.hidden_size, tied=tied)
        self.wpe = Embedding(base.child("wpe"), arch.max_position_embeddings, arch.hidden_size)
        self.blocks = [GPT2Block(arch, base.child("h").child(index), index) for index in range(arch.num_layers)]
        self.ln_f = LayerNorm(base.child("ln_f"), arch.hidden_size, arch.norm_eps)
        head = embed if tied else ctx.child("lm_head")
        self.lm_head = LMHead(head, arch.vocab_size, arch.hidden_size, tied_to=self.wte if tied else None)

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """See `interfaces.Model`."""
        hidden = self.wpe(ctx.positions, residual=self.wte(token_ids))
        for block in self.blocks:
            hidden = block(hidden, ctx)
        return self.ln_f(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `interfaces.Model`."""
        return self.lm_head(hidden)
