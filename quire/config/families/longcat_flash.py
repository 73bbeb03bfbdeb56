"""LongCat Flash: DeepSeek V3, each of whose layers is two with an MLP, and a mixture beside both, some of whose experts
give what they read."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, MlpKind, MlpSpec
from quire.config.layers.experts import check_only, longcat_experts
from quire.config.layers.latent import latent_attention, latent_heads
from quire.config.layers.mixers import LatentAttentionSpec

attention = latent_attention(interleaved=True)


def derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """Two layers in place of each, and heads as attention over latents has them."""
    _, pairs = keys.find(("num_layers",))
    name, given = keys.find(("num_hidden_layers",))
    num_layers = 2 * keys.count("num_layers") if given is None or keys.raw.get("num_layers") is not None else given
    if given not in (None, num_layers) or not isinstance(num_layers, int) or num_layers % 2:
        keys.refuse(name, given, f"must be even, and twice num_layers ({pairs}), each of which is two layers")
    rope_size, size = keys.count("qk_rope_head_dim"), keys.count("qk_nope_head_dim") + keys.count("qk_rope_head_dim")
    for key, meant in (("head_dim", rope_size), ("qk_head_dim", size)):
        if keys.raw.get(key) not in (None, meant):
            keys.refuse(key, keys.raw[key], f"must be {meant}, as the sizes of queries have it")
    for key in ("mla_scale_q_lora", "mla_scale_kv_lora"):
        if keys.raw.get(key) not in (None, True):
            keys.refuse(key, keys.raw[key], "must be true: latents of this family are scaled by their rank")
    check_only(keys, "attention_method", "MLA")
    return {**latent_heads(keys), "num_hidden_layers": num_layers}


def latent(keys: ConfigKeys, max_position: int, aliases: Mapping[str, str]) -> LatentAttentionSpec:
    """Latents and low-rank queries are multiplied by the root of how much narrower they are than the model."""
    spec, size = attention(keys, max_position, aliases), keys.count("hidden_size")
    if spec.query_rank is None:
        keys.refuse("q_lora_rank", None, "must be a number: queries of this family are of low rank")
    return replace(
        spec,
        query_norm_scale=math.sqrt(size / spec.query_rank),
        latent_norm_scale=math.sqrt(size / spec.latent_size),
    )


def mlps(keys: ConfigKeys, num_layers: int, size: int) -> tuple[MlpSpec, ...]:
    """The mixture belongs to the first layer of each two."""
    plain = MlpSpec(kind=MlpKind.GATED, intermediate_size=size, has_bias=False)
    return (replace(plain, beside=longcat_experts(keys)), plain) * (num_layers // 2)


SPEC = FamilySpec(
    architecture="LongcatFlashForCausalLM",
    model_class="quire.models.variants.longcat_flash:LongcatFlashForCausalLM",
    spellings={"intermediate_size": "ffn_hidden_size"},
    defaults={
        "vocab_size": 131_072,
        "hidden_size": 6144,
        "intermediate_size": 12_288,
        "num_layers": 28,
        "num_attention_heads": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000_000.0,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_topk": 12,
        "n_routed_experts": 512,
        "zero_expert_num": 256,
        "expert_ffn_hidden_size": 2048,
        "routed_scaling_factor": 6.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    derived=derived,
    refused={"router_bias": "does not add it, as transformers does not. Use another checkpoint."},
    latent=latent,
    mlp=mlps,
)
