"""Qwen3 and Qwen3 MoE."""

from __future__ import annotations

from quire.config.arch import ModelArch
from quire.models.blocks import DecoderSpec
from quire.models.decoder import DecoderForCausalLM


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Llama, with an RMS norm on each query and key head."""

    @staticmethod
    def spec(arch: ModelArch) -> DecoderSpec:
        """See `DecoderForCausalLM.spec`."""
        return DecoderSpec(qk_norm=True)


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3, with a mixture of experts in most layers (`arch.layers`)."""
