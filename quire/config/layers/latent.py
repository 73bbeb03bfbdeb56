"""Multi-head latent attention as config.json describes it: the rules of DeepSeek's families and their relatives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import Flag, is_set
from quire.config.layers.layer_kinds import LayerKind
from quire.config.layers.mixers import HEAD_MULTIPLE, IndexerSpec, LatentAttentionSpec, LatentRule, cached_latent_size
from quire.config.layers.rope import RopeConfig, RopeType, read_ropes, yarn_scale
from quire.errors import counted

MAX_HEADS = 4096
"""Each has weights of its own; more can only be a mistake."""
INDEXED = "indexed_attention"
"""What transformers calls layers that have an indexer."""
EARLIER = "deepseek_sparse_attention"
"""What it called them before."""
FULL, SHARED = "full", "shared"
"""What `indexer_types` calls layers that have one, and those that attend to the choice of another."""
OFFSET = "index_skip_topk_offset"
MAX_INDEX_SIZE = 1024
"""Of an indexer's key, which is a part of a head of the cache."""


def latent_attention(interleaved: Flag = False, *, rotates: bool = True, is_gated: bool = False) -> LatentRule:
    """Latent attention in all layers, whose rotated features are pairs of neighbours or not, or do not rotate, and
    whose heads may have gates, products that `names.gate` names.
    """

    def rule(keys: ConfigKeys, max_position: int, aliases: Mapping[str, str]) -> LatentAttentionSpec:
        nope_size, rope_size = keys.count("qk_nope_head_dim"), keys.count("qk_rope_head_dim")
        rope = _rope(keys, rope_size, max_position, aliases) if rotates else None
        num_heads = keys.count("num_attention_heads", most=MAX_HEADS)
        return LatentAttentionSpec(
            num_heads=num_heads,
            query_rank=keys.optional_count("q_lora_rank"),
            latent_size=keys.count("kv_lora_rank"),
            rope_size=rope_size,
            nope_size=nope_size,
            value_size=keys.count("v_head_dim"),
            rope=rope,
            interleaved=is_set(keys, interleaved),
            query_scale=_query_scale(rope, nope_size + rope_size),
            num_gates=num_heads if is_gated else 0,
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


def indexed_attention(*, interleaved_index: bool, interleaved: bool = True) -> LatentRule:
    """Latent attention whose tokens an indexer chooses; the rotated features of both are pairs of neighbours or not."""
    attention = latent_attention(interleaved)

    def rule(keys: ConfigKeys, max_position: int, aliases: Mapping[str, str]) -> LatentAttentionSpec:
        spec = attention(keys, max_position, aliases)
        if spec.query_rank is None:
            keys.refuse("q_lora_rank", None, "must be a number: the indexer reads low-rank queries")
        kinds = keys.raw.get("layer_types")
        if kinds is not None and (not kinds or not isinstance(kinds, list) or {*map(str, kinds)} - {INDEXED, EARLIER}):
            keys.refuse("layer_types", kinds, f"must be null or list {INDEXED} alone")
        return replace(spec, indexer=indexer_of(keys, max_position, interleaved=interleaved_index))

    return rule


def indexer_of(keys: ConfigKeys, max_position: int, *, interleaved: bool) -> IndexerSpec:
    """What chooses the tokens of a layer."""
    return IndexerSpec(
        num_heads=keys.count("index_n_heads", most=MAX_HEADS),
        head_size=_index_size(keys),
        num_selected=min(keys.count("index_topk"), max_position),
        interleaved=interleaved,
    )


def shared_choices(keys: ConfigKeys, spec: LatentAttentionSpec, num_layers: int) -> Sequence[LatentAttentionSpec]:
    """Layers whose `indexer_types` is shared attend to what the last one before them chose."""
    assert spec.indexer is not None
    kinds = _indexer_types(keys, num_layers)
    shared = replace(spec, indexer=None, num_shared=spec.indexer.num_selected)
    followed = replace(spec, indexer=replace(spec.indexer, is_shared=True))
    return [
        shared if kind == SHARED else followed if following == SHARED else spec
        for kind, following in zip(kinds, [*kinds[1:], FULL], strict=True)
    ]


def _indexer_types(keys: ConfigKeys, num_layers: int) -> Sequence[str]:
    """Of each layer. The first key that is there counts, as in transformers."""
    names = ("indexer_types", "index_topk_pattern")
    name = next((name for name in names if keys.raw.get(name) is not None), None)
    if name is None:
        return _by_frequency(keys, num_layers)
    given = keys.raw[name]
    letters = dict(zip("FS", (FULL, SHARED), strict=True)) if isinstance(given, str) else {}
    kinds = [letters.get(kind, kind) for kind in given] if isinstance(given, (str, list)) else []
    if len(kinds) != num_layers or not all(kind in (FULL, SHARED) for kind in kinds):
        keys.refuse(name, given, f"must name {FULL} or {SHARED} for each of the {counted(num_layers, 'layer')}")
    if kinds[0] == SHARED:
        keys.refuse(name, given, f"must begin with {FULL}: no layer before the first has chosen tokens")
    return kinds


def _by_frequency(keys: ConfigKeys, num_layers: int) -> Sequence[str]:
    """Every `index_topk_freq`-th layer has an indexer from number `index_skip_topk_offset` - 1 on, and all before."""
    step, offset = (keys.raw.get(name, default) for name, default in (("index_topk_freq", 1), (OFFSET, 2)))
    for name, value in (("index_topk_freq", step), (OFFSET, offset)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            keys.refuse(name, value, "must be a whole number, 0 or more")
    step = max(step, 1)
    kinds = [SHARED if max(index - offset + 1, 0) % step else FULL for index in range(num_layers)]
    if kinds[0] == SHARED:
        keys.refuse(OFFSET, offset, "must let the first layer have an indexer: no layer before it has chosen tokens")
    return kinds


def indexed_heads(keys: ConfigKeys) -> Mapping[str, Any]:
    """As `latent_heads`, with the indexer's key behind each token's latent."""
    heads = latent_heads(keys)
    return {**heads, "head_dim": heads["head_dim"] + _index_size(keys)}


def _index_size(keys: ConfigKeys) -> int:
    size, rope_size = keys.count("index_head_dim", most=MAX_INDEX_SIZE), keys.count("qk_rope_head_dim")
    if size % HEAD_MULTIPLE or size < rope_size:
        problem = f"must be a multiple of {HEAD_MULTIPLE}, and no less than qk_rope_head_dim ({rope_size})"
        keys.refuse("index_head_dim", size, problem)
    return size


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
