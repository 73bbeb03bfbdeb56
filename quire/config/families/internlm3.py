"""InternLM3: Llama, with other names for its biases."""

from quire.config.family_spec import FamilySpec

SPEC = FamilySpec(
    architecture="InternLM3ForCausalLM",
    spellings={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
