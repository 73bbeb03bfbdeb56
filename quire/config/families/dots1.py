"""dots.llm1: Qwen3, with DeepSeek V3's experts behind the first layers."""

from quire.config.family_spec import FamilySpec, HeadNorms, Norms, experts
from quire.config.layers.experts import deepseek_v3_experts
from quire.config.layers.layer_kinds import full_below, listed_or

SPEC = FamilySpec(
    architecture="Dots1ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
    },
    layer_kinds=listed_or(full_below),
    norms=Norms(heads=HeadNorms.EACH),
    mlp=experts(deepseek_v3_experts),
)
