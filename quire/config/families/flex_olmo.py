"""FlexOlmo: OLMo 2, with OLMoE's mixture of experts in every layer."""

from quire.config.families import olmo2
from quire.config.family_spec import FamilySpec, experts
from quire.config.layers.experts import olmoe_experts

SPEC = FamilySpec(
    architecture="FlexOlmoForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_theta": 500_000.0,
        "eos_token_id": 100_257,
        "intermediate_size": 11_008,
        "num_experts": 7,
        "num_experts_per_tok": 5,
    },
    norms=olmo2.NORMS,
    mlp=experts(olmoe_experts),
)
