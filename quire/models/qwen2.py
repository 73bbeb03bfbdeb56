"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from quire.models.decoder import DecoderForCausalLM


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Llama, with a bias on the QKV projection (`arch.attention_bias`) and, on some layers, a sliding window."""
