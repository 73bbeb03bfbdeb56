"""Multi-head latent attention as config.json describes it: the rules of DeepSeek's families and their relatives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import Flag, is_set
from quire.config.layers.layer_kinds import LayerKind
from quire.config.layers.mixers import LatentAttentionSpec, LatentRule, cached_latent_size
from quire.config.layers.rope import RopeConfig, RopeType, read_ropes, yarn_scale

MAX_HEADS = 4096
"""Each has weights of its own; more can only be a mistake."""


def latent_attention(interleaved: Flag = False, *, rotates: bool = True) -> LatentRule:
    """Latent attention in all layers, whose rotated features are pairs of neighbours or not, or do not rotate."""

    def rule(keys: ConfigKeys, max_position: int, aliases: Mapping[str, str]) -> LatentAttentionSpec:
        nope_size, rope_size = keys.count("qk_nope_head_dim"), keys.count("qk_rope_head_dim")
        rope = _rope(keys, rope_size, max_position, aliases) if rotates else None
        return LatentAttentionSpec(
            query_rank=keys.optional_count("q_lora_rank"),
            latent_size=keys.count("kv_lora_rank"),
            rope_size=rope_size,
            nope_size=nope_size,
            value_size=keys.count("v_head_dim"),
            rope=rope,
            interleaved=is_set(keys, interleaved),
            query_scale=_query_scale(rope, nope_size + rope_size),
        )

    return rule


def latent_heads(keys: ConfigKeys) -> Mapping[str, Any]:
    """The heads as attention over latents has them: all queries read one KV head, which is what the cache keeps."""
    num_heads = keys.count("num_attention_heads", most=MAX_HEADS)
    name, given = keys.find(("num_key_value_heads",))
    if given is not None and given != num_heads:
        keys.refuse(name, given, f"must be num_attention_heads ({num_heads}): each head has keys of its own")
    rope_size, latent_size = keys.count("qk_rope_head_dim"), keys.count("kv_lora_rank")
    return {"num_key_value_heads": 1, "head_dim": cached_latent_size(rope_size, latent_size)}


def _rope(keys: ConfigKeys, rope_size: int, max_position: int, aliases: Mapping[str, str]) -> RopeConfig:
    if rope_size % 2:
        keys.refuse("qk_rope_head_dim", rope_size, "must be even: pairs are rotated")
    rope = read_ropes(keys, dict.fromkeys(LayerKind, rope_size), max_position, aliases, None)[LayerKind.FULL]
    if rope.rotary_dim != rope_size:
        keys.refuse("partial_rotary_factor", rope.rotary_dim / rope_size, "must be 1: qk_rope_head_dim is all rotated")
    return rope


def _query_scale(rope: RopeConfig | None, size: int) -> float:
    """DeepSeek puts yarn's factor here, and the inverse of what `mscale_all_dim` makes of it into the rotation."""
    scale = 1.0 / math.sqrt(size)
    if rope is None or rope.type is RopeType.DEFAULT or rope.mscale_all_dim is None:
        return scale
    return scale * yarn_scale(rope.factor, rope.mscale_all_dim) ** 2
