"""Emu3 (text): Llama, with another base of the rotation."""

from dataclasses import replace

from quire.config.families.llama import SPEC as LLAMA

SPEC = replace(
    LLAMA,
    architecture="Emu3ForCausalLM",
    defaults={
        **LLAMA.defaults,
        "vocab_size": 184_622,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 9216,
        "rope_theta": 1_000_000.0,
        "bos_token_id": 151_849,
        "eos_token_id": 151_850,
    },
)
