"""GLM-4 of 2024."""

from __future__ import annotations

from typing import ClassVar

from quire.config.arch import ModelArch
from quire.layers.weights import WeightMap
from quire.models.blocks import DecoderSpec
from quire.models.decoder import DecoderForCausalLM


class GlmForCausalLM(DecoderForCausalLM):
    """Llama, rotating pairs of neighbours in half of each head; gate and up are one tensor of the checkpoint."""

    weights: ClassVar[WeightMap] = WeightMap(fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")})

    @staticmethod
    def spec(arch: ModelArch) -> DecoderSpec:
        """See `DecoderForCausalLM.spec`."""
        return DecoderSpec(interleaved_rope=True)
