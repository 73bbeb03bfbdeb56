"""Helium."""

from __future__ import annotations

from quire.config.arch import ModelArch
from quire.models.blocks import DecoderSpec
from quire.models.decoder import DecoderForCausalLM


class HeliumForCausalLM(DecoderForCausalLM):
    """Llama, rotating pairs of neighbours; no bias on the attention's output."""

    @staticmethod
    def spec(arch: ModelArch) -> DecoderSpec:
        """See `DecoderForCausalLM.spec`."""
        return DecoderSpec(interleaved_rope=True)
