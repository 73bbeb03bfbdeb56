"""Mistral 4, the text models: DeepSeek V3, with experts chosen by a softmax, and queries scaled by their position."""

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.families import ministral3
from quire.config.family_spec import FamilySpec, experts
from quire.config.layers.experts import mistral4_experts
from quire.config.layers.latent import latent_attention, latent_heads
from quire.config.layers.rope import rotation_of

ROPE = {
    **ministral3.ROPE,
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
}


def _derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """`partial_rotary_factor` is the share of whole queries that `qk_rope_head_dim` is."""
    _, given = rotation_of(keys)
    rope = ROPE if given is None else given
    if isinstance(rope, Mapping):
        rope = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
    return {**latent_heads(keys), "rope_parameters": rope, "rope_scaling": None, "partial_rotary_factor": None}


SPEC = FamilySpec(
    architecture="Mistral4ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1_048_576,
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 0,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    derived=_derived,
    latent=latent_attention(interleaved="rope_interleave"),
    position_scale=ministral3.position_scale,
    mlp=experts(mistral4_experts),
)
