"""Dory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.config.layers.streams import SphereSpec
from quire.errors import ConfigError
from quire.layers.activation import activation_of
from quire.layers.attention import Attention
from quire.layers.context import LayerContext
from quire.layers.linear import GatedLinear, Linear
from quire.models.blocks import attention_of
from quire.models.decoder import DecoderForCausalLM
from quire.models.variants.head_norms import FusedNorms
from quire.ops.contracts.operands import Largest, LinearWeight
from quire.ops.contracts.ops import Ops

EPS = 1e-6
"""Added to squares of lengths."""


class UnitNorm:
    """x / sqrt(sum of squares): an RMS norm, all of whose weights are equal."""

    def __init__(self, ops: Ops, size: int) -> None:
        self.ops, self.eps = ops, EPS / size
        self.weight = torch.full((size,), size**-0.5, device=ops.device)

    def __call__(self, x: Tensor, *, weight: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """The norm, times `weight` where that is given. Shapes: x, residual [T, E], weight [E] -> [T, E]."""
        return self.ops.rms_norm(x, self.weight if weight is None else weight, self.eps, residual=residual)


class UnitNorms:
    """Those of a model, by what they norm."""

    def __init__(self, arch: ModelArch, ops: Ops) -> None:
        self.hidden = UnitNorm(ops, arch.hidden_size)
        self.head = UnitNorm(ops, arch.head_size)
        self.attended = UnitNorm(ops, arch.num_heads * arch.head_size)
        self.inner = UnitNorm(ops, arch.intermediate_size)


class SphereAttention:
    """o(norm(attended * sigmoid(gate))), whose queries are multiplied feature by feature behind their rotation."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, norms: UnitNorms, spec: SphereSpec) -> None:
        size, head_size = arch.hidden_size, arch.head_size
        query, key = arch.num_heads * head_size, arch.num_kv_heads * head_size
        self.ops, self.norm, bias = ctx.ops, norms.attended, arch.attention_bias
        self.qkv_proj = Linear(ctx.child("qkv_proj"), size, query, key, key, bias=bias)
        gates = _squared(ctx.tensor("s_gate", (query,), dtype=torch.float32), spec.gate)
        self.gate_proj = Linear.of(ctx.ops, _multiplied(ctx, [arch.family.names.gate or ""], [gates], size))
        self.o_proj = Linear(ctx.child("o_proj"), query, size, bias=arch.output_bias)
        scales = _squared(ctx.tensor("sqk", (query,), dtype=torch.float32), spec.query)
        unit = norms.head.weight
        self.heads = FusedNorms(query=unit, key=unit, rotated_query=scales.view(arch.num_heads, head_size))

    def __call__(self, hidden: Tensor, attention: Attention, ctx: ForwardContext) -> Tensor:
        """Shapes: hidden [T, E] -> [T, E]. Mutates: the cache of `attention`."""
        attended = attention(self.qkv_proj(hidden), ctx)
        self.ops.gate(attended, self.gate_proj(hidden))
        attended = self.norm(attended)
        return self.o_proj(attended)


class SphereMLP:
    """down(norm(activation(gate) * up)), with factors of each feature of gate and up."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, norms: UnitNorms, spec: SphereSpec) -> None:
        size, inner, names = arch.hidden_size, arch.intermediate_size, ("gate", "up")
        bias = arch.layers[0].mlp.has_bias
        factors = [ctx.tensor(f"suv_{name}", (inner,), dtype=torch.float32, scale=spec.inner) for name in names]
        products = [f"{name}_proj" for name in names]
        both = _multiplied(ctx, products, factors, size)
        self.gate_up_proj = GatedLinear.of(ctx.ops, both, _multiplied_bias(ctx, products, factors) if bias else None)
        self.gate_up_proj.activation = activation_of(arch)
        self.norm = norms.inner
        self.down_proj = Linear(ctx.child("down_proj"), inner, size, bias=bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [T, E] -> [T, E]."""
        return self.down_proj(self.norm(self.gate_up_proj.gate(hidden)))


class SphereLayer:
    """Attention and an MLP, each of which replaces a share of each feature of the hidden states."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int, norms: UnitNorms, spec: SphereSpec) -> None:
        """`ctx` is that of all layers, `index` the checkpoint's layer."""
        self.norm, (attention, mlp) = norms.hidden, _halves(ctx, index)
        self.attention = SphereAttention(arch, attention.inner, norms, spec)
        self.mlp = SphereMLP(arch, mlp.inner, norms, spec)
        self.mixed, self.fed = (_shares(arch, half, spec) for half in (attention, mlp))

    def __call__(self, hidden: Tensor, attention: Attention, ctx: ForwardContext) -> Tensor:
        """Shapes: hidden [T, E] -> [T, E]."""
        hidden = self._moved(hidden, self.attention(self.norm(hidden), attention, ctx), self.mixed)
        return self._moved(hidden, self.mlp(self.norm(hidden)), self.fed)

    def _moved(self, hidden: Tensor, out: Tensor, shares: tuple[Tensor, Tensor]) -> Tensor:
        kept, added = shares
        return self.norm(out, weight=added, residual=self.norm(hidden, weight=kept))


class DoryForCausalLM(DecoderForCausalLM):
    """Layers before, layers that are passed several times, each time beside what the first gave, and layers behind."""

    def __init__(self, arch: ModelArch, ctx: LayerContext) -> None:
        super().__init__(arch, ctx)
        head = ctx.child(arch.family.names.head)
        self.logit_scale = head.tensor("logit_scale", (arch.vocab_size,), dtype=torch.float32, scale=self.spec.logits)

    def make_layers(self, arch: ModelArch, ctx: LayerContext) -> None:
        """See `DecoderForCausalLM`. Raises: ConfigError where the model would be split."""
        if ctx.parallel.tp.size > 1:
            raise ConfigError(f"{arch.source}: hidden states of length 1 are not split between processes. Use one.")
        assert arch.sphere is not None
        self.spec, self.norms = arch.sphere, UnitNorms(arch, ctx.ops)
        made: dict[int, SphereLayer] = {}
        self.passes: list[tuple[SphereLayer, Attention]] = []
        for index in range(arch.num_layers):
            source = self.spec.layer_of(index)
            if source not in made:
                made[source] = SphereLayer(arch, ctx, source, self.norms, self.spec)
            layer, (half, _) = made[source], _halves(ctx, source)
            self.passes.append((layer, attention_of(arch, half.inner, index, norms=layer.attention.heads)))

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """See `interfaces.Model`."""
        spec, norm = self.spec, self.norms.hidden
        hidden = self.embed_tokens(token_ids)
        for layer, attention in self.passes[: spec.num_before]:
            hidden = layer(hidden, attention, ctx)
        begun = norm(hidden)
        for loop in range(spec.num_loops):
            first = spec.num_before + loop * spec.num_repeated
            hidden = norm(hidden, residual=begun)
            for layer, attention in self.passes[first : first + spec.num_repeated]:
                hidden = layer(hidden, attention, ctx)
        for layer, attention in self.passes[spec.num_before + spec.num_loops * spec.num_repeated :]:
            hidden = layer(hidden, attention, ctx)
        return norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `interfaces.Model`."""
        logits = self.lm_head(hidden)
        self.ops.scale_heads(logits.view(logits.shape[0], 1, -1), self.logit_scale)
        return logits

    def largest_logits(self, hidden: Tensor) -> Largest:
        """See `interfaces.Model`."""
        return Largest(*self.ops.row_max_tensors(self.compute_logits(hidden)))


@dataclass(frozen=True, slots=True)
class Half:
    """Where a checkpoint has the attention or the MLP of a layer."""

    inner: LayerContext
    outer: LayerContext
    rate: str
    """The share of the hidden states that it replaces, a tensor of `outer`."""


def _halves(layers: LayerContext, index: int) -> tuple[Half, Half]:
    """Attention and MLP of a layer, which published checkpoints count as two layers."""
    first, second, own = layers.child(2 * index), layers.child(2 * index + 1), layers.child(index)
    if first.has("attn_alpha"):
        return Half(first.child("mixer"), first, "attn_alpha"), Half(second.child("mixer"), second, "mlp_alpha")
    return Half(own.child("self_attn"), own, "lambda_1"), Half(own.child("mlp"), own, "lambda_2")


def _shares(arch: ModelArch, half: Half, spec: SphereSpec) -> tuple[Tensor, Tensor]:
    """What weighs the normed hidden states that are kept, and what is added to them; norms carry both."""
    rate = half.outer.tensor(half.rate, (arch.hidden_size,), dtype=torch.float32, scale=spec.rate)
    if rate.is_meta:
        return rate, rate
    rate, unit = rate.abs_(), arch.hidden_size**-0.5
    return (1.0 - rate).mul_(unit), rate * unit


def _squared(factors: Tensor, scale: float) -> Tensor:
    return factors if factors.is_meta else factors.mul_(scale).square_()


def _multiplied(ctx: LayerContext, names: Sequence[str], factors: Sequence[Tensor], in_features: int) -> LinearWeight:
    """Weights whose rows carry factors, as numbers where the checkpoint has them quantised."""
    full = [f"{name}.weight" for name in names]
    rows = [ctx.read_plain(name, (len(own), in_features)) for name, own in zip(full, factors, strict=True)]
    if not rows[0].is_meta:
        rows = [row.float() * own.cpu().unsqueeze(1) for row, own in zip(rows, factors, strict=True)]
    return ctx.packed(full, rows)


def _multiplied_bias(ctx: LayerContext, names: Sequence[str], factors: Sequence[Tensor]) -> Tensor:
    biases = [
        ctx.child(name).tensor("bias", (len(own),), dtype=torch.float32)
        for name, own in zip(names, factors, strict=True)
    ]
    return biases[0] if biases[0].is_meta else torch.cat(biases).mul_(torch.cat(list(factors)))
