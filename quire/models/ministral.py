"""Ministral."""

from __future__ import annotations

from quire.models.decoder import DecoderForCausalLM


class MinistralForCausalLM(DecoderForCausalLM):
    """Mistral, whose windows may be on some layers only (`arch.layers`)."""
