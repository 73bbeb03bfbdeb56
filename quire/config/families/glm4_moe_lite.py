"""GLM-4.7-Flash: DeepSeek V3, whose first layer only has no experts."""

from quire.config.families.deepseek_v2 import DEFAULTS
from quire.config.family_spec import FamilySpec, experts
from quire.config.layers.experts import deepseek_v3_experts
from quire.config.layers.latent import latent_attention, latent_heads

SPEC = FamilySpec(
    architecture="Glm4MoeLiteForCausalLM",
    defaults={
        **DEFAULTS,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202_752,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rope_interleave": True,
        "partial_rotary_factor": 1.0,
        "intermediate_size": 10_240,
        "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    derived=latent_heads,
    latent=latent_attention(interleaved="rope_interleave"),
    mlp=experts(deepseek_v3_experts),
)
