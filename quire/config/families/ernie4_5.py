"""ERNIE 4.5, the dense text models: Llama, rotating neighbours; one key gives all projections a bias."""

from quire.config.family_spec import FamilySpec, gated

SPEC = FamilySpec(
    architecture="Ernie4_5ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    rotates_pairs=True,
    attention_bias="use_bias",
    output_bias="use_bias",
    mlp=gated("use_bias"),
)
