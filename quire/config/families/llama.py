"""Llama: the decoder that the others are compared with. RMS norms, rotation, grouped queries, gated MLPs."""

from quire.config.family_spec import FamilySpec

SPEC = FamilySpec(
    architecture="LlamaForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
