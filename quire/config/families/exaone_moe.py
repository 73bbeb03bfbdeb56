"""K-EXAONE: EXAONE 4, with norms before attention and MLP, and DeepSeek V3's experts behind the first layers."""

from quire.config.families import exaone4
from quire.config.family_spec import FamilySpec, HeadNorms, Norms, experts
from quire.config.layers.experts import deepseek_v3_experts
from quire.config.layers.layer_kinds import listed_or, sliding_rotated

SPEC = FamilySpec(
    architecture="ExaoneMoeForCausalLM",
    spellings={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
    defaults={
        **exaone4.SPEC.defaults,
        "bos_token_id": 1,
        "eos_token_id": 53,
        "intermediate_size": 16_384,
        "moe_intermediate_size": 1024,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
    },
    layer_kinds=listed_or(exaone4.by_window),
    rotated=sliding_rotated,
    norms=Norms(heads=HeadNorms.EACH),
    attention_bias=False,
    output_bias=False,
    mlp=experts(deepseek_v3_experts),
)
