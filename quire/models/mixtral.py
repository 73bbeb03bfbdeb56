"""Mixtral."""

from __future__ import annotations

from quire.models.decoder import DecoderForCausalLM


class MixtralForCausalLM(DecoderForCausalLM):
    """Mistral, with a mixture of experts in every layer (`arch.layers`)."""
