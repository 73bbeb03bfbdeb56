"""Gemma 2."""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.errors import ConfigError
from quire.layers.context import LayerContext
from quire.layers.norm import RMSNorm
from quire.models.blocks import DecoderSpec
from quire.models.decoder import DecoderForCausalLM, DecoderLayer


class Gemma2Layer(DecoderLayer):
    """A second norm behind attention and MLP, before each is added to the residual."""

    def __init__(self, arch: ModelArch, spec: DecoderSpec, ctx: LayerContext, index: int) -> None:
        super().__init__(arch, spec, ctx, index)
        size, eps, offset = arch.hidden_size, arch.norm_eps, spec.norm_offset
        self.pre_feedforward_layernorm = RMSNorm(ctx.child("pre_feedforward_layernorm"), size, eps, offset=offset)
        self.post_feedforward_layernorm = RMSNorm(ctx.child("post_feedforward_layernorm"), size, eps, offset=offset)

    def __call__(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Shapes: hidden [T, E] -> [T, E]."""
        attended = self.self_attn(self.input_layernorm(hidden), ctx)
        hidden = self.post_attention_layernorm(attended, residual=hidden)
        return self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden)), residual=hidden)


class Gemma2ForCausalLM(DecoderForCausalLM):
    """Llama, with norms on both sides, soft caps on scores and logits, scaled embeddings; half the layers are local."""

    layer_class: ClassVar[type[DecoderLayer]] = Gemma2Layer

    @staticmethod
    def spec(arch: ModelArch) -> DecoderSpec:
        """See `DecoderForCausalLM.spec`."""
        refuse_bidirectional(arch)
        return DecoderSpec(norm_offset=1.0, embedding_scale=math.sqrt(arch.hidden_size))


def refuse_bidirectional(arch: ModelArch) -> None:
    """Gemma checkpoints that embed text, instead of generating it, look at tokens to come.

    Raises: ConfigError.
    """
    if arch.raw.get("use_bidirectional_attention"):
        raise ConfigError(
            f"{arch.source}: use_bidirectional_attention is true, but quire generates with causal attention only. "
            "Use a generative checkpoint."
        )
