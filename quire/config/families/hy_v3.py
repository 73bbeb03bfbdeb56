"""Hunyuan 3: Qwen3, with DeepSeek V3's experts, all of one group, behind the first layer."""

from quire.config.family_spec import FamilySpec, HeadNorms, Norms, experts
from quire.config.layers.experts import hy_v3_experts

SPEC = FamilySpec(
    architecture="HYV3ForCausalLM",
    spellings={
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "routed_scaling_factor": "router_scaling_factor",
    },
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 11_158_840.0,
        "intermediate_size": 13_312,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 192,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.826,
        "first_k_dense_replace": 1,
    },
    norms=Norms(heads=HeadNorms.EACH),
    mlp=experts(hy_v3_experts, "mlp_bias"),
)
