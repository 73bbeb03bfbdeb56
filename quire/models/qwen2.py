"""Qwen2, Qwen2.5 and Qwen2 MoE."""

from __future__ import annotations

from quire.models.decoder import DecoderForCausalLM


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Llama, with a bias on the QKV projection (`arch.attention_bias`) and, on some layers, a sliding window."""


class Qwen2MoeForCausalLM(DecoderForCausalLM):
    """Qwen2, with a mixture of experts and a shared expert in most layers (`arch.layers`)."""
