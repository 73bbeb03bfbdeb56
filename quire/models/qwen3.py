"""Qwen3."""

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
