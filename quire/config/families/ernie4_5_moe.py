"""ERNIE 4.5 MoE, the text models: ERNIE 4.5, with a mixture of experts and shared ones behind the first layers."""

from quire.config.families import ernie4_5
from quire.config.family_spec import FamilySpec, experts
from quire.config.layers.experts import ernie_experts

SPEC = FamilySpec(
    architecture="Ernie4_5_MoeForCausalLM",
    defaults={
        **{key: value for key, value in ernie4_5.SPEC.defaults.items() if key != "head_dim"},
        "num_key_value_heads": 4,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
    },
    rotates_pairs=True,
    attention_bias="use_bias",
    output_bias="use_bias",
    head_bias="use_bias",
    mlp=experts(ernie_experts, "use_bias"),
)
