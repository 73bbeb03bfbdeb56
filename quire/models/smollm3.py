"""SmolLM3."""

from __future__ import annotations

from quire.models.decoder import DecoderForCausalLM


class SmolLM3ForCausalLM(DecoderForCausalLM):
    """Llama; some layers do not rotate queries and keys, and may have a window (`arch.layers`)."""
