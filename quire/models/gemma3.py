"""Gemma 3, the text-only models."""

from __future__ import annotations

import math
from typing import ClassVar

from quire.config.arch import ModelArch
from quire.models.blocks import DecoderSpec
from quire.models.decoder import DecoderForCausalLM, DecoderLayer
from quire.models.gemma2 import Gemma2Layer, refuse_bidirectional


class Gemma3ForCausalLM(DecoderForCausalLM):
    """Gemma 2, with a norm on each query and key head; local layers have a rotary base of their own (`arch.layers`)."""

    layer_class: ClassVar[type[DecoderLayer]] = Gemma2Layer

    @staticmethod
    def spec(arch: ModelArch) -> DecoderSpec:
        """See `DecoderForCausalLM.spec`."""
        refuse_bidirectional(arch)
        return DecoderSpec(qk_norm=True, norm_offset=1.0, embedding_scale=math.sqrt(arch.hidden_size))
