"""Qwen3 MoE: Qwen3, with a mixture of experts in most layers."""

from quire.config.families.qwen2_moe import DEFAULTS
from quire.config.family_spec import FamilySpec, HeadNorms, Norms, experts
from quire.config.layers.experts import qwen3_experts
from quire.config.layers.layer_kinds import all_sliding

SPEC = FamilySpec(
    architecture="Qwen3MoeForCausalLM",
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    layer_kinds=all_sliding,
    window_flag="use_sliding_window",
    norms=Norms(heads=HeadNorms.EACH),
    mlp=experts(qwen3_experts),
)
