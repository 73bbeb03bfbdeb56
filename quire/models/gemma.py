"""Gemma, the first."""

from __future__ import annotations

import math

from quire.config.arch import ModelArch
from quire.models.blocks import DecoderSpec
from quire.models.decoder import DecoderForCausalLM
from quire.models.gemma2 import refuse_bidirectional


class GemmaForCausalLM(DecoderForCausalLM):
    """Llama, with scaled embeddings; the checkpoint stores norm weights less one."""

    @staticmethod
    def spec(arch: ModelArch) -> DecoderSpec:
        """See `DecoderForCausalLM.spec`."""
        refuse_bidirectional(arch)
        return DecoderSpec(norm_offset=1.0, embedding_scale=math.sqrt(arch.hidden_size))
