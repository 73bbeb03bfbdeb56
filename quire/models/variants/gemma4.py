"""Gemma 4's text model: experts beside the MLP, embeddings of each layer, and layers that scale what they give."""

from __future__ import annotations

from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.config.family_spec import mixture
from quire.config.layers.experts import ExpertsSpec
from quire.errors import ConfigError
from quire.layers.context import LayerContext
from quire.layers.experts import MixtureOfExperts
from quire.layers.norm import RMSNorm, model_norm
from quire.models.blocks import Mlp
from quire.models.decoder import DecoderForCausalLM, DecoderLayer
from quire.models.variants.layer_embeddings import LayerEmbedding, LayerEmbeddings


class ExpertsBeside:
    """norm(MLP) + norm(experts). Experts and their router read the residual behind other norms than the MLP does."""

    def __init__(self, arch: ModelArch, spec: ExpertsSpec, ctx: LayerContext) -> None:
        """`ctx` is the layer's."""
        self.router_norm = RMSNorm(ctx, arch.hidden_size, arch.norm_eps, has_weight=False)
        self.input_norm = model_norm(arch, ctx, "pre_feedforward_layernorm_2")
        self.experts = MixtureOfExperts(arch, mixture(spec), ctx)
        self.mlp_norm = model_norm(arch, ctx, "post_feedforward_layernorm_1")
        self.experts_norm = model_norm(arch, ctx, "post_feedforward_layernorm_2")

    def __call__(self, hidden: Tensor, fed: Tensor) -> Tensor:
        """Shapes: hidden, fed (what the MLP gives) [T, E] -> [T, E]."""
        normed = self.mlp_norm(fed)
        mixed = self.experts(self.input_norm(hidden), routed=self.router_norm(hidden))
        return self.experts_norm(mixed, residual=normed)


class Gemma4Layer(DecoderLayer):
    """A decoder layer, with all that a checkpoint may have behind its MLP."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        super().__init__(arch, ctx, index)
        beside = arch.layers[index].mlp.beside
        self.experts = None if beside is None else ExpertsBeside(arch, beside, ctx)
        self.embedding = None if arch.layer_embeddings is None else LayerEmbedding(arch, ctx, index)
        self.output_scale = _output_scale(ctx)

    def step(self, hidden: Tensor, embeddings: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Shapes: hidden [T, E], embeddings [T, L * P] -> [T, E]."""
        hidden = self(hidden, ctx)
        if self.embedding is not None and embeddings is not None:
            hidden = self.embedding(hidden, embeddings, residual=hidden)
        return self.ops.scale_add(hidden, self.output_scale)

    def _feed(self, hidden: Tensor, mlp: Mlp) -> Tensor:
        if self.experts is None:
            return super()._feed(hidden, mlp)
        assert self.pre_mlp_norm is not None
        assert self.post_mlp_norm is not None
        fed = mlp(self.pre_mlp_norm(hidden))
        return self.post_mlp_norm(self.experts(hidden, fed), residual=hidden)


def _output_scale(ctx: LayerContext) -> float:
    """What a layer's output is multiplied by, rounded to the model's dtype."""
    stored = ctx.tensor("layer_scalar", (1,))
    return 1.0 if stored.is_meta else stored.item()


class Gemma4ForCausalLM(DecoderForCausalLM):
    """The decoder, whose layers also read the embeddings that tokens have for them, where there are some."""

    def make_layers(self, arch: ModelArch, ctx: LayerContext) -> None:
        """See `DecoderForCausalLM`. Raises: ConfigError where the model would be split."""
        if ctx.parallel.tp.size > 1:
            raise ConfigError(f"{arch.source}: Gemma 4 cannot be split between processes yet. Use one process.")
        self.embed_layers = None if arch.layer_embeddings is None else LayerEmbeddings(arch, ctx)
        self.gemma_layers = [Gemma4Layer(arch, ctx.child(index), index) for index in range(arch.num_layers)]

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """See `interfaces.Model`."""
        hidden = self.embed_tokens(token_ids)
        embeddings = None if self.embed_layers is None else self.embed_layers(token_ids, hidden)
        for layer in self.gemma_layers:
            hidden = layer.step(hidden, embeddings, ctx)
        assert self.norm is not None
        return self.norm(hidden)
