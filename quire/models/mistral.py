"""Mistral."""

from __future__ import annotations

from quire.models.decoder import DecoderForCausalLM


class MistralForCausalLM(DecoderForCausalLM):
    """Llama, with a sliding window on every layer (`arch.layers`)."""
