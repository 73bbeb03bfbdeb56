"""The decoder that most families are. What differs between them is in their `FamilySpec`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.config.family_spec import Join, MlpKind, Norms, WaveSpec
from quire.config.layers.recurrent_mixers import RecurrentSpec
from quire.layers.context import LayerContext
from quire.layers.embedding import Embedding, LMHead, Waves
from quire.layers.norm import GatedNorm, Norm, model_norm
from quire.layers.weights import WHOLE
from quire.models.blocks import Mlp, mixer_of, mlp_of
from quire.ops.contracts.operands import Largest


class DecoderLayer:
    """Attention or a recurrence (or the sum of both), and an MLP, each between the norms that there are, and added to
    the residual. A layer may have one half only.

    Llama's is eight op calls.
    """

    is_last = False
    """Whether its hidden states are the model's: what is behind the mixers is done for the rows that are wanted."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        self.ops = ctx.ops
        layer = arch.layers[index]
        norms = arch.norms_of(layer)
        self.input_norm = self.post_attention_norm = self.pre_mlp_norm = self.post_mlp_norm = self.mlp = None
        self.mixers = [mixer_of(arch, ctx, place) for place in arch.places_of(index)]
        if self.mixers:
            self.input_norm, self.post_attention_norm = _norms(arch, ctx, norms, norms.of_mixers, 2 * index + 1)
        if layer.mlp.kind is not MlpKind.NONE:
            self.pre_mlp_norm, self.post_mlp_norm = _norms(arch, ctx, norms, norms.of_mlp, 2 * index + 2)
            self.mlp = mlp_of(arch, ctx, index)
        self.scale = arch.scales.residual

    def __call__(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Shapes: hidden [T, E] -> [T, E], or [R, E] of the last layer."""
        if self.mixers:
            hidden = self._mix(hidden, ctx)
        if self.is_last and ctx.wanted is not None:
            hidden = self.ops.embedding(ctx.wanted, hidden)
        return hidden if self.mlp is None else self._feed(hidden, self.mlp)

    def _mix(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        normed = hidden if self.input_norm is None else self.input_norm(hidden)
        if self.post_attention_norm is None and self.scale == 1.0:
            return self._mixed(normed, ctx, hidden)
        return self._add(self._mixed(normed, ctx, None), self.post_attention_norm, hidden)

    def _mixed(self, normed: Tensor, ctx: ForwardContext, residual: Tensor | None) -> Tensor:
        """What all mixers make of the same hidden states, added to the residual."""
        total = self.mixers[0](normed, ctx, residual=residual)
        for mixer in self.mixers[1:]:
            total = mixer(normed, ctx, residual=total)
        return total

    def _feed(self, hidden: Tensor, mlp: Mlp) -> Tensor:
        normed = hidden if self.pre_mlp_norm is None else self.pre_mlp_norm(hidden)
        if self.post_mlp_norm is None and self.scale == 1.0:
            return mlp(normed, residual=hidden)
        return self._add(mlp(normed), self.post_mlp_norm, hidden)

    def _add(self, out: Tensor, norm: Norm | None, residual: Tensor) -> Tensor:
        if norm is not None and self.scale == 1.0:
            return norm(out, residual=residual)
        return self.ops.scale_add(out if norm is None else norm(out), self.scale, residual)


def _norms(
    arch: ModelArch, ctx: LayerContext, norms: Norms, names: tuple[str | None, str | None], num_parts: int
) -> Iterator[Norm | None]:
    """Before and behind one half of a layer, which reads a sum of so many parts."""
    for name, parts in zip(names, (num_parts, 1), strict=True):
        if name in norms.with_gate:
            yield GatedNorm(ctx.child(name), arch.hidden_size, arch.norm_eps, norms.gate_rank)
        else:
            yield model_norm(arch, ctx, name, num_parts=parts) if name else None


class ParallelLayer(DecoderLayer):
    """Attention and MLP read the same residual, behind one norm or each behind its own."""

    def __call__(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Shapes: hidden [T, E] -> [T, E]."""
        normed = hidden if self.input_norm is None else self.input_norm(hidden)
        attended = self._mixed(normed, ctx, hidden) if self.mixers else hidden
        if self.pre_mlp_norm is not None:
            normed = self.pre_mlp_norm(hidden)
        return attended if self.mlp is None else self.mlp(normed, residual=attended)


class JoinedLayer(DecoderLayer):
    """Attention and MLP are added to what they read, each with a factor (`Joins`)."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        super().__init__(arch, ctx, index)
        joins = arch.scales.joins
        assert joins is not None
        (mixer,) = arch.layers[index].mixers
        self.join_mixed = joins.recurrent if isinstance(mixer, RecurrentSpec) else joins.attention
        self.join_fed = joins.mlp

    def __call__(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Shapes: hidden [T, E] -> [T, E]."""
        assert self.input_norm is not None
        assert self.pre_mlp_norm is not None
        assert self.mlp is not None
        normed = self.input_norm(hidden)
        normed = self.pre_mlp_norm(self._join(normed, self._mixed(normed, ctx, None), self.join_mixed))
        return self._join(normed, self.mlp(normed), self.join_fed)

    def _join(self, read: Tensor, out: Tensor, join: Join) -> Tensor:
        return self.ops.scale_add(out, join.added, self.ops.scale_add(read, join.kept))


def _waves(arch: ModelArch, ctx: LayerContext, spec: WaveSpec) -> Waves:
    padding = arch.raw.get("pad_token_id") if spec.skips_padding else None
    return Waves(
        ctx,
        arch.max_position_embeddings,
        arch.hidden_size,
        spec,
        padding=padding if isinstance(padding, int) else None,
    )


class DecoderForCausalLM:
    """Embedding, layers, norm, head."""

    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer
    """Of layers whose attention and MLP follow each other."""

    def __init__(self, arch: ModelArch, ctx: LayerContext) -> None:
        self.ops = ctx.ops
        names, size = arch.family.names, arch.hidden_size
        model = ctx.child(names.base)
        tied, embed = arch.tie_word_embeddings, model.child(names.embedding)
        self.embed_tokens = Embedding(
            embed,
            arch.vocab_size,
            size,
            scale=arch.scales.embedding,
            tied=tied,
            num_unread=arch.num_embeddings - arch.vocab_size,
        )
        self.embed_positions: Embedding | Waves | None = None
        if arch.family.waves is not None:
            self.embed_positions = _waves(arch, model, arch.family.waves)
        if names.positions is not None:
            unused = names.unused_positions
            self.embed_positions = Embedding(
                model.child(names.positions), arch.max_position_embeddings + unused, size, first_row=unused
            )
        first = arch.norms.embedding
        self.embed_norm = model_norm(arch, model, first) if first else None
        self.make_layers(arch, model.child(names.layers))
        # Logits are linear in the last norm, so it carries their factor.
        final = arch.norms.final
        num_parts = 2 * arch.num_layers + 1
        self.norm = model_norm(arch, model, final, scale=arch.scales.logits, num_parts=num_parts) if final else None
        head = ctx.child(names.head)
        self.lm_head = LMHead(
            embed if tied else head,
            arch.vocab_size,
            size,
            tied_to=self.embed_tokens if tied else None,
            soft_cap=arch.final_soft_cap,
            bias=head.linear_bias((arch.vocab_size,), WHOLE) if arch.head_bias else None,
        )

    def make_layers(self, arch: ModelArch, ctx: LayerContext) -> None:
        """Read the layers; `ctx` is the one that they are the children of."""
        layer_class = ParallelLayer if arch.is_parallel else self.layer_class
        if arch.scales.joins is not None:
            layer_class = JoinedLayer
        numbers = [n for n in range(arch.num_layers + len(arch.image_layers)) if n not in arch.image_layers]
        self.layers = [layer_class(arch, ctx.child(number), index) for index, number in enumerate(numbers)]
        self.layers[-1].is_last = layer_class is DecoderLayer

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """See `interfaces.Model`."""
        hidden = self.embed_tokens(token_ids)
        if self.embed_positions is not None:
            hidden = self.embed_positions(ctx.positions, residual=hidden)
        if self.embed_norm is not None:
            hidden = self.embed_norm(hidden)
        for layer in self.layers:
            hidden = layer(hidden, ctx)
        return hidden if self.norm is None else self.norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `interfaces.Model`."""
        return self.lm_head(hidden)

    def largest_logits(self, hidden: Tensor) -> Largest:
        """See `interfaces.Model`."""
        return self.lm_head.largest(hidden)
