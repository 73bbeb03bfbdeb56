"""MiniMax M2: Llama, rotating a part of each head, with norms over all heads of queries, and of keys, and experts
chosen as in DeepSeek V3."""

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, HeadNorms, Norms, WeightNames, experts
from quire.config.layers.experts import deepseek_v3_experts


def rotary_share(keys: ConfigKeys) -> Mapping[str, Any]:
    """`rotary_dim` as the share of a head that it is."""
    if keys.raw.get("rotary_dim") is None or keys.raw.get("partial_rotary_factor") is not None:
        return {}
    return {"partial_rotary_factor": keys.count("rotary_dim") / keys.count("head_dim")}


SPEC = FamilySpec(
    architecture="MiniMaxM2ForCausalLM",
    spellings={"n_routed_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 196_608,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "partial_rotary_factor": 1.0,
        "rope_theta": 5_000_000.0,
        "bos_token_id": 200_034,
        "eos_token_id": 200_020,
        "intermediate_size": 1536,
        "n_routed_experts": 256,
        "n_shared_experts": 0,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
    },
    derived=rotary_share,
    norms=Norms(heads=HeadNorms.WHOLE),
    attention_bias=False,
    output_bias=False,
    mlp=experts(deepseek_v3_experts),
    names=WeightNames(mlp="block_sparse_moe"),
)
