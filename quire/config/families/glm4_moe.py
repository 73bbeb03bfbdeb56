"""GLM-4.5 to 4.7, the text models: Llama, rotating half of each head, with DeepSeek V3's experts behind the first
layers."""

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, HeadNorms, Norms, experts
from quire.config.layers.experts import deepseek_v3_experts


def norms(keys: ConfigKeys) -> Norms:
    """With norms on each query and key head, if the config says so."""
    return Norms(heads=HeadNorms.EACH if keys.flag("use_qk_norm", default=False) else HeadNorms.NONE)


SPEC = FamilySpec(
    architecture="Glm4MoeForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
    },
    norms=norms,
    output_bias=False,
    mlp=experts(deepseek_v3_experts),
)
