"""Ling 3: Kimi Linear, with gates of heads and a rotation in layers of latent attention, and bounded decays."""

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.families import kimi_linear
from quire.config.family_spec import FamilySpec, WeightNames, experts
from quire.config.layers.experts import deepseek_v3_experts
from quire.config.layers.gated_recurrence import LINEAR, ling_delta
from quire.config.layers.latent import latent_attention, latent_heads
from quire.config.layers.layer_kinds import LayerKind
from quire.config.layers.recurrent import listed_layers
from quire.config.layers.recurrent_mixers import RecurrentSpec

SIZES = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_attention_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""Sizes of recurrent layers, as transformers writes them -> as published configs have them."""


def _derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """transformers never ties the head."""
    changes: dict[str, Any] = {**latent_heads(keys), "tie_word_embeddings": False}
    changes |= {name: keys.count(name, published) for name, published in SIZES.items()}
    step = keys.raw.get("moe_layer_freq")
    if step not in (None, 1) and keys.raw.get("mlp_layer_types") is None:
        keys.refuse("moe_layer_freq", step, "must be 1, or mlp_layer_types must say which layers have experts")
    if keys.raw.get("layer_types") is None:
        size, numbers = keys.count("layer_group_size"), range(1, keys.count("num_hidden_layers") + 1)
        changes["layer_types"] = [LINEAR if number % size else LayerKind.FULL for number in numbers]
    return changes


def _recurrent(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    return listed_layers(keys, ling_delta(keys), num_layers, (LINEAR,))


SPEC = FamilySpec(
    architecture="BailingHybridForCausalLM",
    spellings=kimi_linear.SPEC.spellings,
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "hidden_size": 2560,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "max_position_embeddings": 262_144,
        "rope_theta": 6_000_000.0,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "layer_group_size": 6,
        "kda_lower_bound": -5.0,
        "first_k_dense_replace": 2,
        "n_routed_experts": 512,
        "n_shared_experts": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "eos_token_id": 156_895,
    },
    derived=_derived,
    recurrent=_recurrent,
    latent=latent_attention(interleaved=True, is_gated=True),
    mlp=experts(deepseek_v3_experts),
    names=WeightNames(
        embedding="word_embeddings", attention="attention", recurrent="attention", output="dense", gate="g_proj"
    ),
)
