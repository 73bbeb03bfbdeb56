"""Llama: the decoder that the others are compared with."""

from __future__ import annotations

from quire.models.decoder import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    """RMS norms, rotary positions, grouped queries, a gated MLP; optional biases."""
