"""Mixtral: Mistral, with a mixture of experts in every layer."""

from quire.config.family_spec import FamilySpec, WeightNames, experts
from quire.config.layers.experts import mixtral_experts
from quire.config.layers.layer_kinds import all_sliding

SPEC = FamilySpec(
    architecture="MixtralForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "intermediate_size": 14_336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    layer_kinds=all_sliding,
    attention_bias=False,
    output_bias=False,
    mlp=experts(mixtral_experts),
    names=WeightNames(mlp="block_sparse_moe"),
)
