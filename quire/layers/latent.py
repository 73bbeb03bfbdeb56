"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

The keys and values of all heads are products of one short vector for each token, the latent, which is what the cache
keeps, with one rotated key that all heads share: one KV head of [rotated key | latent]. Its values are the latents
again, though they are its keys: the native kernels read keys and values in different tilings. What attention gives of
the rotated part is dropped.

A head's key is W_k . latent, so query . key = (W_k^T . query) . latent: each query is taken to the latents, attention
runs over latents, and each head's values are products of what it gives (section 2.1.2, "absorbed"). Prefill and decode
compute this one formula, so that chunks change no bit. Expanding all keys and values first would take fewer operations
in long prefills, but round differently.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.config.layers.mixers import LatentAttentionSpec
from quire.errors import ConfigError
from quire.layers.attention import Attention, position_scales
from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.rotary import rotary_table
from quire.layers.weights import WHOLE, ShardSpec, split_rows
from quire.ops.contracts.operands import HeadWeights, LatentSpec, LinearWeight, RopeAndCacheSpec

LATENT_AND_KEY = "kv_a_proj_with_mqa"
KEYS_AND_VALUES = "kv_b_proj.weight"


class LatentAttention:
    """Projections to queries and latents, attention over latents, output projection."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        mixer = arch.mixers[index]
        assert isinstance(mixer, LatentAttentionSpec)
        if ctx.parallel.tp.size > 1:
            raise ConfigError(f"{arch.source}: latent attention is not split between processes. Use one process.")
        heads, size = mixer.num_heads, arch.hidden_size
        self.ops = ctx.ops
        self.spec = latent_spec(mixer)
        self.query = _query(arch, mixer, ctx)
        self.compressed = (NormedKey if mixer.has_key_norm else _compression)(arch, mixer, ctx)
        self.kv_a_norm = RMSNorm(
            ctx.child("kv_a_layernorm"), mixer.latent_size, mixer.norm_eps, scale=mixer.latent_norm_scale
        )
        with ctx.ops.weights_together():
            by_head = [_head_weights(self.spec, ctx, head) for head in range(heads)]
        self.to_latents = HeadWeights(heads=tuple(to_latents for to_latents, _ in by_head))
        self.to_values = HeadWeights(heads=tuple(to_values for _, to_values in by_head))
        self.attention = _attention(arch, mixer, ctx, index)
        self.gate_proj = _gates(arch, mixer, ctx)
        output = ctx.child(arch.family.names.output)
        self.o_proj = Linear(output, heads * mixer.value_size, size, bias=arch.output_bias)

    def __call__(self, hidden: Tensor, ctx: ForwardContext, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]. Mutates: this layer's cache."""
        values = self._values(self.attention(self._qkv(hidden), ctx))
        return self.o_proj(self._gated(values, hidden), residual=residual)

    def _qkv(self, hidden: Tensor) -> Tensor:
        query, compressed = self.query(hidden), self.compressed(hidden)
        return self.ops.latent_qkv(query, compressed, self.kv_a_norm.weight, self.to_latents, self.spec)

    def _values(self, attended: Tensor) -> Tensor:
        return self.ops.latent_values(attended, self.to_values, self.spec)

    def _gated(self, values: Tensor, hidden: Tensor) -> Tensor:
        if self.gate_proj is not None:
            self.ops.gate(values, self.gate_proj(hidden), "sigmoid")
        return values


def _compression(arch: ModelArch, mixer: LatentAttentionSpec, ctx: LayerContext) -> Linear:
    """The product that gives the latent, and the key that all heads share behind it."""
    size = mixer.latent_size + mixer.rope_size
    return Linear(ctx.child(LATENT_AND_KEY), arch.hidden_size, size, bias=arch.attention_bias)


class NormedKey:
    """As `_compression`, with a norm of the key. The two are products by themselves."""

    def __init__(self, arch: ModelArch, mixer: LatentAttentionSpec, ctx: LayerContext) -> None:
        self.ops = ctx.ops
        stored, sizes = ctx.child(LATENT_AND_KEY), [mixer.latent_size, mixer.rope_size]
        latent, key = split_rows(stored.read("weight", (sum(sizes), arch.hidden_size)), sizes)
        bias = stored.linear_bias((sum(sizes),), WHOLE) if arch.attention_bias else None
        of_latent, of_key = (None, None) if bias is None else torch.split(bias, sizes)
        self.key = Linear.of(ctx.ops, stored.packed([], [key]), of_key)
        self.latent = Linear.of(ctx.ops, stored.packed(["weight"], [latent]), of_latent)
        self.norm = RMSNorm(ctx.child("k_rope_only_layernorm"), mixer.rope_size, mixer.norm_eps)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [T, E] -> [T, C + P]."""
        return self.ops.join_columns([self.latent(hidden), self.norm(self.key(hidden))])


class LowRankQuery:
    """up(norm(down(x)))."""

    def __init__(self, arch: ModelArch, mixer: LatentAttentionSpec, ctx: LayerContext, rank: int) -> None:
        self.down = Linear(ctx.child("q_a_proj"), arch.hidden_size, rank, bias=arch.attention_bias)
        self.norm = RMSNorm(ctx.child("q_a_layernorm"), rank, mixer.norm_eps, scale=mixer.query_norm_scale)
        self.up = self._second(mixer, ctx, rank)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [T, E] -> [T, H * (U + P)]."""
        return self.up(self.lower(hidden))

    def lower(self, hidden: Tensor) -> Tensor:
        """What the second product reads. Shapes: hidden [T, E] -> [T, rank]."""
        return self.norm(self.down(hidden))

    def _second(self, mixer: LatentAttentionSpec, ctx: LayerContext, rank: int) -> Linear:
        return Linear(ctx.child("q_b_proj"), rank, _query_features(mixer))


class QueryWithGates(LowRankQuery):
    """The second product reads norm(down(x)) and down(x), and gives gates, too, which are computed by themselves."""

    gates: Linear

    def lower_both(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What an indexer reads, and what both products do. Shapes: hidden [T, E] -> [T, rank], [T, 2 * rank]."""
        down = self.down(hidden)
        low = self.norm(down)
        return low, self.norm.ops.join_columns([low, down])

    def _second(self, mixer: LatentAttentionSpec, ctx: LayerContext, rank: int) -> Linear:
        name, sizes = "q_b_proj.weight", (mixer.nope_size + mixer.rope_size, mixer.num_gates // mixer.num_heads)
        stored = ctx.read(name, (mixer.num_heads * sum(sizes), 2 * rank))
        by_head = split_rows(stored, sizes * mixer.num_heads)
        self.gates = Linear.of(ctx.ops, ctx.packed([], by_head[1::2]))
        return Linear.of(ctx.ops, ctx.packed([name], by_head[::2]))


def latent_spec(mixer: LatentAttentionSpec) -> LatentSpec:
    """The sizes that ops need."""
    return LatentSpec(
        num_heads=mixer.num_heads,
        rope_size=mixer.rope_size,
        nope_size=mixer.nope_size,
        latent_size=mixer.latent_size,
        value_size=mixer.value_size,
        head_size=mixer.cached_size,
        norm_eps=mixer.norm_eps,
    )


def _query(arch: ModelArch, mixer: LatentAttentionSpec, ctx: LayerContext) -> Linear | LowRankQuery:
    if mixer.query_rank is None:
        return Linear(ctx.child("q_proj"), arch.hidden_size, _query_features(mixer))
    kind = QueryWithGates if mixer.gates_with_queries else LowRankQuery
    return kind(arch, mixer, ctx, mixer.query_rank)


def _gates(arch: ModelArch, mixer: LatentAttentionSpec, ctx: LayerContext) -> Linear | None:
    if not mixer.num_gates or mixer.gates_with_queries:
        return None
    name = arch.family.names.gate
    assert name is not None
    return Linear(ctx.child(name), arch.hidden_size, mixer.num_gates)


def _query_features(mixer: LatentAttentionSpec) -> int:
    return mixer.num_heads * (mixer.nope_size + mixer.rope_size)


def _head_weights(spec: LatentSpec, ctx: LayerContext, head: int) -> tuple[LinearWeight, LinearWeight]:
    """From a head's queries to the latents, and from them to its values. Shapes: [C, U], [W, C].

    As numbers: the first is transposed, so what is quantised by its columns cannot stay.
    """
    rows = spec.nope_size + spec.value_size
    one = ShardSpec(part=head, parts=spec.num_heads)
    stored = ctx.read_plain(KEYS_AND_VALUES, (spec.num_heads * rows, spec.latent_size), one)
    to_latents = ctx.packed([], [stored[: spec.nope_size].t()])
    return to_latents, ctx.packed([KEYS_AND_VALUES], [stored[spec.nope_size :]])


def _attention(arch: ModelArch, mixer: LatentAttentionSpec, ctx: LayerContext, index: int) -> Attention:
    spec = RopeAndCacheSpec(
        num_heads=mixer.num_heads,
        num_kv_heads=1,
        head_size=mixer.cached_size,
        rotary_dim=mixer.rope_size if mixer.rope else 0,
        interleaved=mixer.interleaved,
    )
    cos_sin = rotary_table(mixer.rope, ctx.max_model_len, ctx.ops.device) if mixer.rope else None
    scales = position_scales(mixer.position_scale, ctx.max_model_len, ctx.ops.device) if mixer.position_scale else None
    sinks = arch.family.names.sinks
    return Attention(
        ctx.ops,
        index,
        spec,
        scale=mixer.query_scale,
        cos_sin=cos_sin,
        sliding_window=mixer.window,
        soft_cap=arch.attn_soft_cap,
        query_scales=scales,
        sinks=ctx.tensor(sinks, (mixer.num_heads,), dtype=torch.float32) if mixer.has_sinks else None,
    )
