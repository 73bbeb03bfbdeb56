"""Mellum 2: Qwen3 MoE, whose layers with a window have a rotation of their own."""

from quire.config.families import qwen3_moe
from quire.config.family_spec import FamilySpec, experts
from quire.config.layers.experts import mellum_experts
from quire.config.layers.layer_kinds import all_full, listed_or

SPEC = FamilySpec(
    architecture="MellumForCausalLM",
    spellings={"num_experts": "num_local_experts"},
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rope_theta": 500_000.0,
        "rope_local_base_freq": 10_000.0,
        "partial_rotary_factor": 1.0,
        "sliding_window": 1024,
        "intermediate_size": 7168,
        "moe_intermediate_size": 896,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "first_k_dense_replace": 0,
    },
    layer_kinds=listed_or(all_full),
    sliding_theta="rope_local_base_freq",
    norms=qwen3_moe.SPEC.norms,
    mlp=experts(mellum_experts),
)
