"""Qwen2 MoE: Qwen2, with a mixture of experts and a shared expert in most layers."""

from quire.config.families import qwen2
from quire.config.family_spec import FamilySpec, experts
from quire.config.layers.experts import qwen2_experts
from quire.config.layers.layer_kinds import listed_or, sliding_every_other

DEFAULTS = {**qwen2.DEFAULTS, "decoder_sparse_step": 1}

SPEC = FamilySpec(
    architecture="Qwen2MoeForCausalLM",
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "qkv_bias": True,
    },
    layer_kinds=listed_or(sliding_every_other),
    window_flag="use_sliding_window",
    attention_bias="qkv_bias",
    output_bias=False,
    mlp=experts(qwen2_experts),
)
