"""Apertus 1.5 (text): Apertus, with embeddings for parts of images and sounds that have no logits."""

from dataclasses import replace

from quire.config.families import apertus

SPEC = replace(
    apertus.SPEC,
    architecture="Apertus1p5TextForCausalLM",
    defaults={
        **apertus.SPEC.defaults,
        "vocab_size": 266_752,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    output_vocab="output_vocab_size",
)
