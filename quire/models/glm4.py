"""GLM-4 of 2025 (0414) and GLM-Z1, the dense text models."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.layers.context import LayerContext
from quire.layers.norm import RMSNorm
from quire.layers.weights import WeightMap
from quire.models.blocks import DecoderSpec
from quire.models.decoder import DecoderForCausalLM, DecoderLayer
from quire.models.glm import GlmForCausalLM


class Glm4Layer(DecoderLayer):
    """A second norm behind attention and MLP; `post_attention_layernorm` is the one before the MLP, as in Llama."""

    def __init__(self, arch: ModelArch, spec: DecoderSpec, ctx: LayerContext, index: int) -> None:
        super().__init__(arch, spec, ctx, index)
        size, eps = arch.hidden_size, arch.norm_eps
        self.post_self_attn_layernorm = RMSNorm(ctx.child("post_self_attn_layernorm"), size, eps)
        self.post_mlp_layernorm = RMSNorm(ctx.child("post_mlp_layernorm"), size, eps)

    def __call__(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Shapes: hidden [T, E] -> [T, E]."""
        attended = self.self_attn(self.input_layernorm(hidden), ctx)
        hidden = self.post_self_attn_layernorm(attended, residual=hidden)
        return self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(hidden)), residual=hidden)


class Glm4ForCausalLM(DecoderForCausalLM):
    """GLM, with norms on both sides of attention and MLP."""

    weights: ClassVar[WeightMap] = GlmForCausalLM.weights
    layer_class: ClassVar[type[DecoderLayer]] = Glm4Layer

    @staticmethod
    def spec(arch: ModelArch) -> DecoderSpec:
        """See `DecoderForCausalLM.spec`."""
        return DecoderSpec(interleaved_rope=True)
