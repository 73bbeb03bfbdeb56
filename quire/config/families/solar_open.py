"""Solar Open: Llama, with DeepSeek V3's experts in every layer."""

from quire.config.families import glm4_moe
from quire.config.family_spec import FamilySpec, experts
from quire.config.layers.experts import deepseek_v3_experts

SPEC = FamilySpec(
    architecture="SolarOpenForCausalLM",
    defaults={
        **glm4_moe.SPEC.defaults,
        "head_dim": 128,
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": 1.0,
        "moe_intermediate_size": 1280,
        "first_k_dense_replace": 0,
    },
    output_bias=False,
    mlp=experts(deepseek_v3_experts),
)
