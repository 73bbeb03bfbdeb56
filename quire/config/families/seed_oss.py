"""Seed-OSS: Llama, with a bias on queries, keys and values and, by a key of its own, on attention's output."""

from quire.config.family_spec import FamilySpec

SPEC = FamilySpec(
    architecture="SeedOssForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 524_288,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    output_bias="attention_out_bias",
)
