"""Helium: Llama, rotating neighbours; attention's output has no bias."""

from quire.config.family_spec import FamilySpec

SPEC = FamilySpec(
    architecture="HeliumForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-8,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 20,
        "head_dim": 128,
        "rope_theta": 100_000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    rotates_pairs=True,
    output_bias=False,
)
