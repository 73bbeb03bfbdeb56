"""The parts of a decoder's layer, as its `ModelArch` describes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.config.family_spec import MlpKind, MlpSpec
from quire.config.layers.any_mixer import MixerSpec
from quire.config.layers.experts import Routing, Scores
from quire.config.layers.layer_kinds import Heads
from quire.config.layers.mixers import AttentionSpec, CompressedAttentionSpec, LatentAttentionSpec
from quire.config.layers.recurrent_mixers import (
    GatedDeltaSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    RecurrentSpec,
    RgLruSpec,
    ShortConvSpec,
)
from quire.errors import ConfigError
from quire.layers.activation import Activation, activation_of
from quire.layers.attention import Attention, position_scales
from quire.layers.attention_experts import attention_expert_weights
from quire.layers.compressed import CompressedAttention
from quire.layers.context import LayerContext
from quire.layers.experts import MixtureOfExperts
from quire.layers.indexers.blocks import BlockIndexer
from quire.layers.indexers.means import MeanIndexer
from quire.layers.indexers.tokens import IndexedAttention, QueryGatedAttention, SharedChoiceAttention
from quire.layers.latent import LatentAttention
from quire.layers.linear import GatedLinear, Linear
from quire.layers.norm import RMSNorm
from quire.layers.quantization.kv_scales import read_kv_scales
from quire.layers.quantization.schemes import plain
from quire.layers.recurrent.gated import GatedDelta, LightningAttention, RgLru
from quire.layers.recurrent.scanned import Mamba2Mixer, ShortConv, mamba_mixer
from quire.layers.rotary import rotary_table
from quire.layers.weights import HeadOrder, Rows, split_rows
from quire.models.variants.head_norms import NO_NORMS, FusedNorms, fused_norms, separate_norms
from quire.models.variants.narrow_values import narrow_output, narrow_projection
from quire.ops.contracts.operands import RopeAndCacheSpec


class Mixer(Protocol):
    """What lets a layer's tokens learn of those before them."""

    def __call__(self, hidden: Tensor, ctx: ForwardContext, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]. Mutates: this layer's cache."""


class SelfAttention:
    """QKV projection, attention, output projection."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        self.ops = ctx.ops
        mixer = arch.mixers[index]
        assert isinstance(mixer, AttentionSpec)
        self.qkv_proj = self._projection(arch, ctx, mixer)
        self.o_proj = self._output(arch, ctx.child(arch.family.names.output), mixer)
        if mixer.output_bias is not None:
            self.o_proj.bias = ctx.tensor(mixer.output_bias, (arch.hidden_size,), dtype=torch.float32)
        self.output_norm = _inner_norm(arch, ctx, arch.norms.attended, mixer.heads.query_size)
        self.norms = separate_norms(arch, ctx, index)
        self.clip = arch.clip_qkv
        self.attention = attention_of(arch, ctx, index, norms=fused_norms(arch, ctx, index))

    def __call__(self, hidden: Tensor, ctx: ForwardContext, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]."""
        attended = self._attended(hidden, ctx)
        if self.output_norm is not None:
            attended = self.output_norm(attended)
        return self.o_proj(attended, residual=residual)

    def _attended(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        return self.attention(self._qkv(hidden), ctx)

    def _output(self, arch: ModelArch, ctx: LayerContext, mixer: AttentionSpec) -> Linear:
        if mixer.heads.num_unused:
            return narrow_output(arch, ctx, mixer)
        return Linear(
            ctx,
            mixer.heads.query_size,
            arch.hidden_size,
            bias=arch.output_bias,
            shard_dim=1,
            factors=(mixer.factors.output,),
        )

    def _projection(self, arch: ModelArch, ctx: LayerContext, mixer: AttentionSpec) -> Linear:
        """To queries, keys and values; to queries alone where keys and values are another layer's."""
        heads, query = mixer.heads, arch.family.names.qkv[0]
        if mixer.reads is not None:
            return Linear(ctx.child(query), arch.hidden_size, heads.query_size, bias=arch.attention_bias)
        if heads.values_are_keys:
            return _keys_twice(arch, ctx, heads)
        if heads.num_unused:
            return narrow_projection(arch, ctx, heads)
        return Linear(
            ctx.child("qkv_proj"),
            arch.hidden_size,
            heads.query_size,
            heads.kv_size,
            heads.kv_size,
            bias=arch.attention_bias,
            order=_head_order(arch),
            input_factor=mixer.factors.input,
            factors=mixer.factors.inner,
        )

    def _qkv(self, hidden: Tensor) -> Tensor:
        qkv = self.qkv_proj(hidden)
        if self.norms is not None:
            self.norms.apply(qkv)
        if self.clip is not None:
            self.ops.clip(qkv, self.clip)
        return qkv


class GatedAttention(SelfAttention):
    """o_proj(attended * activation(gate)). The checkpoint has gates of their own, or each behind its head's query."""

    gate_proj: Linear
    gate_activation: str

    def __call__(self, hidden: Tensor, ctx: ForwardContext, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]."""
        attended = self._attended(hidden, ctx)
        self.ops.gate(attended, self.gate_proj(hidden), self.gate_activation)
        return self.o_proj(attended, residual=residual)

    def _projection(self, arch: ModelArch, ctx: LayerContext, mixer: AttentionSpec) -> Linear:
        if ctx.parallel.tp.size > 1:
            raise ConfigError(f"{arch.source}: gated attention cannot be split between processes yet. Use one process.")
        name, self.gate_activation = arch.family.names.gate, arch.family.gate_activation
        if name is not None:
            self.gate_proj = Linear(ctx.child(name), arch.hidden_size, mixer.num_gates)
            self.gate_proj.bias = _gate_bias(arch, ctx, mixer)
            return super()._projection(arch, ctx, mixer)
        kinds = ["weight", "bias"] if arch.attention_bias else ["weight"]
        read = {kind: _read_gated(arch, ctx, kind) for kind in kinds}
        gates = ctx.packed([], read["weight"][0])
        names = [f"{name}.weight" for name in arch.family.names.qkv]
        qkv = ctx.packed(names, read["weight"][1])
        biases = [_joined(parts, ctx.ops.device) for parts in read["bias"]] if arch.attention_bias else [None, None]
        self.gate_proj = Linear.of(ctx.ops, gates, biases[0])
        return Linear.of(ctx.ops, qkv, biases[1])


class BlockSparseAttention(SelfAttention):
    """Attention over the blocks of tokens that an indexer chooses."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        super().__init__(arch, ctx, index)
        self.indexer = BlockIndexer(arch, ctx, index, self.attention)

    def _attended(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        at = self.attention
        query, selected = at.write(self._qkv(hidden), ctx), self.indexer.select(hidden, ctx)
        kv_cache, metadata = ctx.kv_caches[at.index], at.group(ctx).attention
        run = self.indexer.spec.block_size
        return self.ops.selected_attention(query, kv_cache, metadata, selected, scale=at.scale, run=run)


class MeanSparseAttention(GatedAttention):
    """Attention over the tokens of blocks that an indexer chooses by their means."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        super().__init__(arch, ctx, index)
        self.indexer = MeanIndexer(arch, ctx.child("indexer"), index)

    def _attended(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        at = self.attention
        query, selected = at.write(self._qkv(hidden), ctx), self.indexer.select(hidden, ctx)
        kv_cache, metadata = ctx.kv_caches[at.index], at.group(ctx).attention
        return self.ops.selected_attention(query, kv_cache, metadata, selected, scale=at.scale, ends_early=True)


class DifferentialAttention(SelfAttention):
    """What one half of the heads attended to, less a share of what the other half did, normed (DiffLlama).

    A head attends to the values of two KV heads with the same weights: they are kept as one value, twice as wide.
    """

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        super().__init__(arch, ctx, index)
        mixer = arch.mixers[index]
        assert isinstance(mixer, AttentionSpec)
        assert mixer.difference is not None
        if ctx.parallel.tp.size > 1:
            raise ConfigError(f"{arch.source}: differential attention is not split between processes. Use one process.")
        self.heads, self.size = mixer.heads, mixer.cached.head_size
        self.factor = mixer.difference + _learned_difference(ctx, mixer.heads.head_size)
        scale = 1.0 - mixer.difference
        self.norm = RMSNorm(ctx, self.size, arch.norm_eps, has_weight=False, scale=scale)

    def __call__(self, hidden: Tensor, ctx: ForwardContext, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]. Mutates: this layer's cache."""
        return self.o_proj(self._normed(hidden, ctx), residual=residual)

    def _normed(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        qkv = self.ops.pair_values(self._qkv(hidden), self.heads.num_heads, self.heads.num_kv_heads)
        attended = self.ops.subtract_heads(self.attention(qkv, ctx), self.factor)
        return self.norm(attended.view(-1, self.size)).view(attended.shape)


class BiasedKeysAttention:
    """Attention whose scores of a key gain a number that its value says (Doge)."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        mixer = arch.mixers[index]
        assert isinstance(mixer, AttentionSpec)
        if ctx.parallel.tp.size > 1:
            raise ConfigError(f"{arch.source}: biases of keys cannot be split between processes yet. Use one process.")
        heads, bias = mixer.heads, arch.attention_bias
        self.ops, self.size, self.eps = ctx.ops, heads.head_size, arch.norm_eps
        sizes = heads.query_size, heads.kv_size, heads.kv_size
        self.q_proj, self.k_proj, self.v_proj = (
            Linear(ctx.child(name), arch.hidden_size, size, bias=bias)
            for name, size in zip(arch.family.names.qkv, sizes, strict=True)
        )
        self.time_proj = Linear(ctx.child("dt_proj"), heads.kv_size, heads.num_kv_heads, bias=bias)
        self.decay = ctx.tensor("A", (heads.num_kv_heads,), dtype=torch.float32)
        norms = fused_norms(arch, ctx, index)
        assert norms.query is not None
        assert norms.key is not None
        self.q_norm, self.k_norm = norms.query, norms.key
        self.o_proj = narrow_output(arch, ctx.child(arch.family.names.output), mixer)
        self.attention = attention_of(arch, ctx, index)

    def __call__(self, hidden: Tensor, ctx: ForwardContext, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]. Mutates: this layer's cache."""
        return self.o_proj(self.attention(self._qkv(hidden), ctx), residual=residual)

    def _qkv(self, hidden: Tensor) -> Tensor:
        query, key = self._normed(self.q_proj, hidden, self.q_norm), self._normed(self.k_proj, hidden, self.k_norm)
        value, times = self.v_proj(hidden), self.time_proj
        steps = self.ops.linear(value, times.weight, times.bias, out_dtype=torch.float32)
        return self.ops.bias_keys(query, key, value, steps, self.decay, self.attention.scale)

    def _normed(self, product: Linear, hidden: Tensor, weight: Tensor) -> Tensor:
        heads = product(hidden).view(-1, self.size)
        return self.ops.rms_norm(heads, weight, self.eps).view(hidden.shape[0], -1)


def _learned_difference(ctx: LayerContext, size: int) -> float:
    """exp(q1 . k1) - exp(q2 . k2)"""
    names = [f"lambda_{kind}{half}" for half in (1, 2) for kind in ("q", "k")]
    q1, k1, q2, k2 = (ctx.tensor(name, (size,), dtype=torch.float32) for name in names)
    return 0.0 if q1.is_meta else (q1.dot(k1).exp() - q2.dot(k2).exp()).item()


class ExpertAttention:
    """Attention whose query heads, and what is made of them, are those of the experts that each token chooses."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        mixer = arch.mixers[index]
        assert isinstance(mixer, AttentionSpec)
        assert mixer.experts is not None
        self.ops = ctx.ops
        self.head_size = arch.head_size
        self.kv_proj = Linear(ctx.child("kv_proj"), arch.hidden_size, 2 * arch.num_kv_heads * arch.head_size)
        self.routing = Routing(num_chosen=mixer.experts.num_chosen, scores=Scores.LOGITS)
        self.experts = attention_expert_weights(arch, mixer.experts, ctx.child("experts"))
        self.attention = attention_of(arch, ctx, index)

    def __call__(self, hidden: Tensor, ctx: ForwardContext, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]."""
        attended = self.attention(self._qkv(hidden), ctx)
        return self.ops.expert_outputs(attended, hidden, self.experts, self.routing, self.head_size, residual=residual)

    def _qkv(self, hidden: Tensor) -> Tensor:
        return self.ops.expert_queries(hidden, self.kv_proj(hidden), self.experts, self.routing, self.head_size)


def _keys_twice(arch: ModelArch, ctx: LayerContext, heads: Heads) -> Linear:
    """The product to queries and keys, and to keys once more in place of values: norms and rotations tell them apart.

    Raises: ConfigError where the model would be split.
    """
    if ctx.parallel.tp.size > 1:
        raise ConfigError(
            f"{arch.source}: values that are keys cannot be split between processes yet. Use one process."
        )
    names, rows = arch.family.names.qkv[:2], (heads.query_size, heads.kv_size)

    def read(kind: str, width: tuple[int, ...]) -> list[Rows]:
        query, key = (ctx.read(f"{name}.{kind}", (count, *width)) for name, count in zip(names, rows, strict=True))
        return [query, key, key]

    weight = ctx.packed([f"{name}.weight" for name in names], read("weight", (arch.hidden_size,)))
    bias = None
    if arch.attention_bias:
        bias = _joined(read("bias", ()), ctx.ops.device)
        ctx.release([f"{name}.bias" for name in names])
    return Linear.of(ctx.ops, weight, bias)


def _gate_bias(arch: ModelArch, ctx: LayerContext, mixer: AttentionSpec) -> Tensor | None:
    """Of all gates, from a number for each head."""
    name, heads = arch.family.names.gate_bias, mixer.heads.num_heads
    if name is None:
        return None
    stored = ctx.tensor(name, (heads,), dtype=torch.float32)
    return stored if stored.is_meta else stored.repeat_interleave(mixer.num_gates // heads)


def _read_gated(arch: ModelArch, ctx: LayerContext, kind: str) -> tuple[list[Rows], list[Rows]]:
    """Gates, head by head; and queries, head by head, keys and values. Views."""
    heads, kv_heads, size = arch.num_heads, arch.num_kv_heads, arch.head_size
    rows = (2 * heads * size, kv_heads * size, kv_heads * size)
    width = (arch.hidden_size,) if kind == "weight" else ()
    names = [f"{name}.{kind}" for name in arch.family.names.qkv]
    both, key, value = (ctx.read(name, (count, *width)) for name, count in zip(names, rows, strict=True))
    by_head = split_rows(both, [size] * 2 * heads)
    return by_head[1::2], [*by_head[::2], key, value]


def _joined(parts: list[Rows], device: str) -> Tensor:
    """A bias in float32."""
    numbers = [plain(part) for part in parts]
    return numbers[0] if numbers[0].is_meta else torch.cat([part.to(device, torch.float32) for part in numbers])


def _inner_norm(arch: ModelArch, ctx: LayerContext, name: str | None, size: int) -> RMSNorm | None:
    """The norm between two products that the checkpoint calls `name`."""
    if name is None:
        return None
    return RMSNorm(ctx.child(name), size, arch.norm_eps, offset=arch.norms.offset)


def _attention(arch: ModelArch, ctx: LayerContext, index: int) -> Mixer:
    mixer = arch.mixers[index]
    if isinstance(mixer, AttentionSpec) and mixer.experts is not None:
        return ExpertAttention(arch, ctx, index)
    if isinstance(mixer, AttentionSpec) and mixer.difference is not None:
        return DifferentialAttention(arch, ctx, index)
    if isinstance(mixer, AttentionSpec) and mixer.biases_keys:
        return BiasedKeysAttention(arch, ctx, index)
    if isinstance(mixer, AttentionSpec) and mixer.blocks is not None:
        return BlockSparseAttention(arch, ctx, index)
    if isinstance(mixer, AttentionSpec) and mixer.means is not None:
        return MeanSparseAttention(arch, ctx, index)
    is_gated = isinstance(mixer, AttentionSpec) and mixer.num_gates
    return (GatedAttention if is_gated else SelfAttention)(arch, ctx, index)


def _latent_attention(arch: ModelArch, ctx: LayerContext, index: int) -> Mixer:
    mixer = arch.mixers[index]
    assert isinstance(mixer, LatentAttentionSpec)
    if mixer.indexer is None:
        return (LatentAttention if mixer.num_shared is None else SharedChoiceAttention)(arch, ctx, index)
    return (QueryGatedAttention if mixer.gates_with_queries else IndexedAttention)(arch, ctx, index)


def _head_order(arch: ModelArch) -> HeadOrder | None:
    """Of a single tensor of queries, keys and values that has them otherwise than one after the other."""
    names, size = arch.family.names, arch.head_size
    if names.qkv_groups is not None:
        each = arch.num_heads // names.qkv_groups
        return HeadOrder(
            num_groups=names.qkv_groups, num_queries=each, num_keys=each, head_size=size, values_first=True
        )
    if not names.qkv_by_head:
        return None
    return HeadOrder(num_groups=arch.num_kv_heads, num_queries=arch.num_heads // arch.num_kv_heads, head_size=size)


def attention_of(arch: ModelArch, ctx: LayerContext, index: int, *, norms: FusedNorms = NO_NORMS) -> Attention:
    """The attention at a place among the model's mixers, without its projections."""
    mixer = arch.mixers[index]
    assert isinstance(mixer, AttentionSpec)
    heads = mixer.cached
    spec = RopeAndCacheSpec(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads if mixer.reads is None else 0,
        head_size=heads.head_size,
        rotary_dim=mixer.rope.rotary_dim if mixer.rope else 0,
        interleaved=arch.family.rotates_pairs,
        norm_eps=arch.norm_eps / mixer.rope.normed_factor**2 if mixer.rope else arch.norm_eps,
    )
    return Attention(
        ctx.ops,
        arch.caches_of(index)[0],
        spec,
        scale=mixer.query_scale,
        cos_sin=rotary_table(mixer.rope, ctx.max_model_len, ctx.ops.device) if mixer.rope else None,
        q_norm=norms.query,
        k_norm=norms.key,
        query_weight=norms.rotated_query,
        query_scales=position_scales(mixer.position_scale, ctx.max_model_len, ctx.ops.device)
        if mixer.position_scale
        else None,
        sliding_window=None if mixer.is_chunked else mixer.window,
        chunk_size=_chunk_size(mixer, ctx.max_model_len),
        soft_cap=arch.attn_soft_cap,
        slopes=None if mixer.slopes is None else torch.tensor(mixer.slopes, device=ctx.ops.device),
        kv_scales=read_kv_scales(ctx, heads.num_kv_heads),
        sinks=ctx.tensor(arch.family.names.sinks, (heads.num_heads,), dtype=torch.float32) if mixer.has_sinks else None,
    )


def _chunk_size(mixer: AttentionSpec, max_model_len: int) -> int | None:
    """Of attention in chunks; None where the longest context is a single one."""
    chunk = mixer.window if mixer.is_chunked else None
    return None if chunk is None or max_model_len <= chunk else chunk


def mixer_of(arch: ModelArch, ctx: LayerContext, index: int) -> Mixer:
    """The mixer at a place among the model's; its layer's context is given."""
    spec, names = arch.mixers[index], arch.family.names
    name = names.recurrent if isinstance(spec, RecurrentSpec) else names.attention
    return MIXERS[type(spec)](arch, ctx.child(name), index)


class Mlp(Protocol):
    """The MLP of a layer."""

    def __call__(self, hidden: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]."""


class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, arch: ModelArch, spec: MlpSpec, ctx: LayerContext) -> None:
        size, inner, bias, factors = arch.hidden_size, spec.intermediate_size, spec.has_bias, spec.factors
        self.gate_up_proj = GatedLinear(
            ctx.child("gate_up_proj"),
            size,
            inner,
            activation=activation_of(arch),
            bias=bias,
            input_factor=factors.input,
            factors=factors.inner,
        )
        self.ops, self.clamped = ctx.ops, spec.gate
        if self.clamped is not None and ctx.ops.name == "triton":
            raise ConfigError(
                f"{arch.source}: an MLP with a clamped gate (swiglu_limit) is what the triton ops do not have yet; "
                "give device='cpu'"
            )
        self.norm = _inner_norm(arch, ctx, arch.norms.gated, inner)
        down = ctx.child(arch.family.names.down)
        self.down_proj = Linear(down, inner, size, bias=bias, shard_dim=1, factors=(factors.output,))

    def __call__(self, hidden: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """See `Mlp`."""
        if self.clamped is not None:
            inner = self.ops.gated_activation(self.gate_up_proj(hidden), self.clamped)
        else:
            inner = self.gate_up_proj.gate(hidden)
        if self.norm is not None:
            inner = self.norm(inner)
        return self.down_proj(inner, residual=residual)


class SparseGatedMLP(GatedMLP):
    """As `GatedMLP`, with the largest gates of each token only."""

    def __init__(self, arch: ModelArch, spec: MlpSpec, ctx: LayerContext) -> None:
        super().__init__(arch, spec, ctx)
        self.size, self.cutoff = spec.intermediate_size, spec.cutoff

    def __call__(self, hidden: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """See `Mlp`."""
        both = self.gate_up_proj(hidden)
        self.ops.statistical_top_k(both, self.size, self.cutoff)
        return self.down_proj(self.ops.gated_activation(both, self.gate_up_proj.activation), residual=residual)


class PlainMLP:
    """down(activation(up(x)))."""

    def __init__(self, arch: ModelArch, spec: MlpSpec, ctx: LayerContext) -> None:
        size, inner, names = arch.hidden_size, spec.intermediate_size, arch.family.names
        self.up_proj = Linear(ctx.child(names.up), size, inner, bias=spec.has_bias)
        self.down_proj = Linear(ctx.child(names.down), inner, size, bias=spec.has_bias, shard_dim=1)
        self.activation = Activation(arch, ctx.child(names.activation))

    def __call__(self, hidden: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """See `Mlp`."""
        inner = self.up_proj(hidden, activation=self.activation.of_product)
        return self.down_proj(self.activation.finish(inner), residual=residual)


MLPS: Mapping[MlpKind, Callable[[ModelArch, MlpSpec, LayerContext], Mlp]] = MappingProxyType(
    {
        MlpKind.GATED: GatedMLP,
        MlpKind.SPARSE: SparseGatedMLP,
        MlpKind.PLAIN: PlainMLP,
        MlpKind.EXPERTS: MixtureOfExperts,
    }
)

MIXERS: Mapping[type[MixerSpec], Callable[[ModelArch, LayerContext, int], Mixer]] = MappingProxyType(
    {
        AttentionSpec: _attention,
        LatentAttentionSpec: _latent_attention,
        MambaSpec: mamba_mixer,
        Mamba2Spec: Mamba2Mixer,
        ShortConvSpec: ShortConv,
        GatedDeltaSpec: GatedDelta,
        LightningSpec: LightningAttention,
        RgLruSpec: RgLru,
        CompressedAttentionSpec: CompressedAttention,
    }
)


def mlp_of(arch: ModelArch, ctx: LayerContext, index: int) -> Mlp:
    """The MLP of a layer, whose context is given."""
    spec, name = arch.layers[index].mlp, arch.family.names.mlp
    return MLPS[spec.kind](arch, spec, ctx.child(name) if name else ctx)
