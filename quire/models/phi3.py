"""Phi-3, Phi-3.5 and Phi-4 (the dense text models)."""

from __future__ import annotations

from typing import ClassVar

from quire.layers.weights import WeightMap
from quire.models.decoder import DecoderForCausalLM


class Phi3ForCausalLM(DecoderForCausalLM):
    """Llama, with a checkpoint that is already fused; partial rotation and longrope come with `arch.layers`."""

    weights: ClassVar[WeightMap] = WeightMap()
