"""Zamba and Zamba 2."""

from __future__ import annotations

from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.config.layers.mixers import AttentionSpec, SharedBlock
from quire.errors import ConfigError
from quire.layers.activation import activation_of
from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm, model_norm
from quire.models.blocks import attention_of, mixer_of
from quire.models.decoder import DecoderForCausalLM


class Block:
    """What several layers share: attention's products, an MLP, and the norms before both."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, spec: SharedBlock) -> None:
        size, heads, kv_heads = arch.hidden_size, arch.num_heads, arch.num_kv_heads
        attention, mlp = ctx.child("self_attn"), ctx.child("feed_forward")
        self.input_norm = RMSNorm(ctx.child("input_layernorm"), 2 * size, arch.norm_eps)
        features = [count * arch.head_size for count in (heads, kv_heads, kv_heads)]
        self.qkv_proj = Linear(attention.child("qkv_proj"), 2 * size, *features)
        self.o_proj = Linear(attention.child("o_proj"), heads * arch.head_size, size)
        self.mlp_norm = RMSNorm(ctx.child("pre_ff_layernorm"), size, arch.norm_eps)
        inner, bias = spec.intermediate_size, spec.has_bias
        self.gate_up_proj = Linear(mlp.child("gate_up_proj"), size, inner, inner, bias=bias)
        self.down_proj = Linear(mlp.child("down_proj"), inner, size, bias=bias)
        self.activation = activation_of(arch)


class Adapter:
    """up(down(x)), by which one layer differs from those that it shares a product with."""

    def __init__(self, ctx: LayerContext, in_features: int, rank: int, out_features: int) -> None:
        self.down = Linear(ctx.child(0), in_features, rank)
        self.up = Linear(ctx.child(1), rank, out_features)

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: x [T, M] -> [T, N]."""
        return self.up(self.down(x))


class SharedTransformer:
    """A block as one layer uses it: with the layer's adapters, cache, and product behind it."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int, block: Block) -> None:
        """`ctx` is that of all layers, `index` the place among the mixers."""
        spec = _shared(arch, index)
        assert spec is not None
        names, size, width = ctx.child(spec.first).child(spec.name), arch.hidden_size, arch.num_heads * arch.head_size
        self.ops, self.block = ctx.ops, block
        self.adapters = []
        if spec.adapts_attention:
            lists = [names.child("self_attn").child(f"linear_{part}_adapter_list") for part in "qkv"]
            self.adapters = [Adapter(part.child(spec.number), 2 * size, spec.rank, width) for part in lists]
        self.mlp_adapter = None
        if spec.rank:
            mlp = names.child("feed_forward").child("gate_up_proj_adapter_list")
            self.mlp_adapter = Adapter(mlp.child(spec.number), size, spec.rank, 2 * spec.intermediate_size)
        self.attention = attention_of(arch, names, index)

    def __call__(self, hidden: Tensor, embedded: Tensor, ctx: ForwardContext) -> Tensor:
        """Shapes: hidden, embedded [T, E] -> [T, E]."""
        return self._feed(self.block.mlp_norm(self._attend(self._normed(hidden, embedded), ctx)))

    def _normed(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return self.block.input_norm(self.ops.join_columns([hidden, embedded]))

    def _attend(self, normed: Tensor, ctx: ForwardContext) -> Tensor:
        return self.block.o_proj(self.attention(self._qkv(normed), ctx))

    def _qkv(self, normed: Tensor) -> Tensor:
        if not self.adapters:
            return self.block.qkv_proj(normed)
        adapted = self.ops.join_columns([adapter(normed) for adapter in self.adapters])
        return self.block.qkv_proj(normed, residual=adapted)

    def _feed(self, normed: Tensor) -> Tensor:
        block = self.block
        return block.down_proj(self.ops.gated_activation(self._gate_up(normed), block.activation))

    def _gate_up(self, normed: Tensor) -> Tensor:
        adapted = None if self.mlp_adapter is None else self.mlp_adapter(normed)
        return self.block.gate_up_proj(normed, residual=adapted)


class ZambaLayer:
    """hidden + mamba(norm(hidden + linear(shared))), where some layers have a shared block, and some several Mambas."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int, block: Block | None) -> None:
        """`ctx` is that of all layers."""
        own, places = ctx.child(index), arch.places_of(index)
        self.shared = self.linear = None
        recurrent = places if block is None else places[1:]
        if block is not None:
            self.shared = SharedTransformer(arch, ctx, places[0], block)
            self.linear = Linear(own.child("linear"), arch.hidden_size, arch.hidden_size)
            own = own.child("mamba_decoder")
        self.input_norm = model_norm(arch, own, arch.norms.input or "")
        self.mambas = [mixer_of(arch, own, place) for place in recurrent]

    def __call__(self, hidden: Tensor, embedded: Tensor, ctx: ForwardContext) -> Tensor:
        """Shapes: hidden, embedded [T, E] -> [T, E]."""
        if self.shared is None or self.linear is None:
            return self._scan(self.input_norm(hidden), hidden, ctx)
        read = self.linear(self.shared(hidden, embedded, ctx), residual=hidden)
        return self._scan(self.input_norm(read), hidden, ctx)

    def _scan(self, normed: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        for mamba in self.mambas:
            hidden = mamba(normed, ctx, residual=hidden)
        return hidden


class ZambaForCausalLM(DecoderForCausalLM):
    """Layers of Mamba or Mamba 2, some of which read attention and an MLP that they share."""

    def make_layers(self, arch: ModelArch, ctx: LayerContext) -> None:
        """See `DecoderForCausalLM`. Raises: ConfigError where the model would be split."""
        if ctx.parallel.tp.size > 1:
            raise ConfigError(f"{arch.source}: shared blocks cannot be split between processes yet. Use one process.")
        blocks: dict[int, Block] = {}
        self.hybrid_layers = []
        for index in range(arch.num_layers):
            spec = _shared(arch, arch.places_of(index)[0])
            if spec is not None and spec.is_first:
                blocks[index] = Block(arch, ctx.child(index).child(spec.name), spec)
            self.hybrid_layers.append(ZambaLayer(arch, ctx, index, None if spec is None else blocks[spec.first]))

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """See `interfaces.Model`."""
        embedded = hidden = self.embed_tokens(token_ids)
        for layer in self.hybrid_layers:
            hidden = layer(hidden, embedded, ctx)
        assert self.norm is not None
        return self.norm(hidden)


def _shared(arch: ModelArch, index: int) -> SharedBlock | None:
    mixer = arch.mixers[index]
    return mixer.shared if isinstance(mixer, AttentionSpec) else None
