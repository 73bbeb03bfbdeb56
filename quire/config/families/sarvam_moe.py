"""Sarvam MoE: GLM-4.5, rotating whole heads, with names of its own."""

from dataclasses import replace

from quire.config.config_keys import ConfigKeys
from quire.config.families import glm4_moe
from quire.config.family_spec import HeadNorms, Norms, WeightNames


def _norms(keys: ConfigKeys) -> Norms:
    return Norms(heads=HeadNorms.EACH if keys.flag("use_qk_norm", default=True) else HeadNorms.NONE)


SPEC = replace(
    glm4_moe.SPEC,
    architecture="SarvamMoEForCausalLM",
    spellings={
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "attention_bias": "use_qkv_bias",
    },
    defaults={
        **glm4_moe.SPEC.defaults,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "partial_rotary_factor": 1.0,
        "rope_theta": 8_000_000.0,
        "intermediate_size": 8192,
        "moe_intermediate_size": 1024,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.5,
        "eos_token_id": 1,
    },
    norms=_norms,
    names=WeightNames(
        embedding="word_embeddings",
        attention="attention",
        qkv=("query_key_value",),
        output="dense",
        q_norm="query_layernorm",
        k_norm="key_layernorm",
    ),
)
