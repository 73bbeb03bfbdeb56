"""BitNet: Llama, with squared ReLUs and norms before the last products of attention and MLP."""

from quire.config.family_spec import FamilySpec, Norms, gated

SPEC = FamilySpec(
    architecture="BitNetForCausalLM",
    defaults={
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "num_key_value_heads": 5,
        "rope_theta": 500_000.0,
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
    },
    norms=Norms(attended="attn_sub_norm", gated="ffn_sub_norm"),
    mlp=gated(),
)
