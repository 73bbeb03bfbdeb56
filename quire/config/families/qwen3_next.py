"""Qwen3-Next: the gated delta rule in most layers, gated attention in the others, and a mixture of experts."""

from quire.config.family_spec import FamilySpec, HeadNorms, Norms, WeightNames, experts
from quire.config.layers.experts import qwen2_experts
from quire.config.layers.gated_recurrence import gated_delta_layers
from quire.config.layers.recurrent_mixers import DeltaLayout

DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
NORMS = Norms(offset=1.0, heads=HeadNorms.EACH)
NAMES = WeightNames(recurrent="linear_attn")
EXPERTS = {
    "intermediate_size": 5632,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
}

SPEC = FamilySpec(
    architecture="Qwen3NextForCausalLM",
    defaults={**DEFAULTS, **EXPERTS},
    recurrent=gated_delta_layers(DeltaLayout.BY_KEY_HEAD),
    is_gated=True,
    norms=NORMS,
    mlp=experts(qwen2_experts),
    names=NAMES,
)
