"""DeepSeek V3: V2, with experts that are chosen by sigmoids and a bias; neighbours rotate unless the config says no."""

from quire.config.families.deepseek_v2 import DEFAULTS
from quire.config.family_spec import FamilySpec, experts
from quire.config.layers.experts import deepseek_v3_experts
from quire.config.layers.latent import latent_attention, latent_heads

SPEC = FamilySpec(
    architecture="DeepseekV3ForCausalLM",
    defaults={
        **DEFAULTS,
        "intermediate_size": 18_432,
        "max_position_embeddings": 4096,
        "rope_interleave": True,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    derived=latent_heads,
    latent=latent_attention(interleaved="rope_interleave"),
    mlp=experts(deepseek_v3_experts),
)
