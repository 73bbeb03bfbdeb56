"""Seed-OSS."""

from __future__ import annotations

from quire.models.decoder import DecoderForCausalLM


class SeedOssForCausalLM(DecoderForCausalLM):
    """Llama, with a bias on the QKV projection and, by a key of its own, on the output (`arch`)."""
