"""ERNIE 4.5, the dense text models."""

from __future__ import annotations

from quire.config.arch import ModelArch
from quire.models.blocks import DecoderSpec
from quire.models.decoder import DecoderForCausalLM


class Ernie4_5ForCausalLM(DecoderForCausalLM):
    """Llama, rotating pairs of neighbours; one key gives all projections a bias."""

    @staticmethod
    def spec(arch: ModelArch) -> DecoderSpec:
        """See `DecoderForCausalLM.spec`."""
        return DecoderSpec(interleaved_rope=True)
