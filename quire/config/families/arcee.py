"""Arcee (AFM): Llama, with a plain MLP of squared ReLUs."""

from quire.config.family_spec import FamilySpec, plain

SPEC = FamilySpec(
    architecture="ArceeForCausalLM",
    defaults={
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
    },
    mlp=plain("mlp_bias"),
)
