"""Compressed attention as config.json describes it, and what else the layers of DeepSeek V4 are made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.layers.experts import ClampedGate, ExpertsSpec, Routing, Scores, num_chosen_of, num_experts_of
from quire.config.layers.mixers import CompressedAttentionSpec, CompressorSpec, IndexerSpec
from quire.config.layers.rope import SHARE, RopeConfig, RopeType, rotation_of, single_rope
from quire.errors import counted

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATIOS: Mapping[int, str] = {0: SLIDING, 4: SPARSE, 128: HEAVY}
"""Kinds of layers by the numbers of the published key `compress_ratios`."""
RATE_KEYS: Mapping[str, str] = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}
"""Keys that count before `compress_rates`."""
MAX_BLOCK = 8192
"""Tokens of the smallest block that has whole entries of all layers; more can only be a mistake."""
MAX_HEADS = 4096
MAX_INDEX_SIZE = 1024
SCORES: Mapping[str, Scores] = {"sqrtsoftplus": Scores.SQRT_SOFTPLUS, "sigmoid": Scores.SIGMOID}
STRETCHED = (RopeType.DEFAULT, RopeType.LINEAR, RopeType.YARN, RopeType.LLAMA3)
"""Rotations whose frequencies are the same for contexts of any length."""


def compressed_heads(keys: ConfigKeys) -> Mapping[str, Any]:
    """All queries read one key, whatever size the heads have."""
    if keys.raw.get("num_key_value_heads") not in (None, 1):
        keys.refuse("num_key_value_heads", keys.raw["num_key_value_heads"], "must be 1: all queries read one key")
    return {"num_key_value_heads": 1, "head_dim": keys.count("head_dim", most=MAX_HEADS)}


def compressed_attention(keys: ConfigKeys, num_layers: int, max_position: int) -> list[CompressedAttentionSpec]:
    """The attention of each layer."""
    kinds = _kinds(keys, num_layers)
    ropes = _ropes(keys, max_position)
    rates = {kind: _rate(keys, kind) for kind in (SPARSE, HEAVY) if kind in kinds}
    if math.lcm(*rates.values()) > MAX_BLOCK:
        problem = f"must have a least common multiple of {MAX_BLOCK} tokens at most, which is the smallest block"
        keys.refuse("compress_rates", rates, problem)
    of_kind = {kind: _attention(keys, kind, rates.get(kind), ropes) for kind in dict.fromkeys(kinds)}
    return [of_kind[kind] for kind in kinds]


def _attention(
    keys: ConfigKeys, kind: str, rate: int | None, ropes: Mapping[str, RopeConfig]
) -> CompressedAttentionSpec:
    num_heads, head_size = keys.count("num_attention_heads", most=MAX_HEADS), keys.count("head_dim", most=MAX_HEADS)
    groups, rope = keys.count("o_groups"), ropes["main" if kind == SLIDING else "compress"]
    if num_heads * head_size % groups:
        keys.refuse("o_groups", groups, f"must divide the {num_heads * head_size} features of all heads")
    compressor = None
    if rate is not None:
        indexer = _indexer(keys, rope) if kind == SPARSE else None
        compressor = CompressorSpec(rate=rate, overlaps=kind == SPARSE, indexer=indexer)
    return CompressedAttentionSpec(
        num_heads=num_heads,
        head_size=head_size,
        window=keys.count("sliding_window"),
        rope=rope,
        query_rank=keys.count("q_lora_rank"),
        num_groups=groups,
        group_rank=keys.count("o_lora_rank"),
        compressor=compressor,
    )


def _indexer(keys: ConfigKeys, rope: RopeConfig) -> IndexerSpec:
    size = keys.count("index_head_dim", most=MAX_INDEX_SIZE)
    if size < rope.rotary_dim:
        keys.refuse("index_head_dim", size, f"must be no less than what rotates of it ({rope.rotary_dim})")
    return IndexerSpec(
        num_heads=keys.count("index_n_heads", most=MAX_HEADS),
        head_size=size,
        num_selected=keys.count("index_topk"),
        interleaved=True,
    )


def _kinds(keys: ConfigKeys, num_layers: int) -> Sequence[str]:
    """Those of the layers: as listed, or two that are heavily compressed, and then one of each in turns."""
    listed = keys.raw.get("layer_types")
    if listed is not None:
        return _listed(keys, "layer_types", listed, (SLIDING, SPARSE, HEAVY), num_layers)
    ratios = keys.raw.get("compress_ratios")
    if ratios is None:
        return [SPARSE if index >= 2 and index % 2 else HEAVY for index in range(num_layers)]
    kinds = [RATIOS.get(ratio) if _is_whole(ratio) else None for ratio in ratios] if isinstance(ratios, list) else []
    found = [kind for kind in kinds[:num_layers] if kind is not None]
    if len(found) != num_layers:
        numbers = ", ".join(map(str, RATIOS))
        keys.refuse(
            "compress_ratios", ratios, f"must list one of {numbers} for each of the {counted(num_layers, 'layer')}"
        )
    return found


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _listed(keys: ConfigKeys, name: str, listed: object, known: Sequence[str], num_layers: int) -> list[str]:
    """Of the layers; what is listed behind them is left out."""
    kinds = listed[:num_layers] if isinstance(listed, list) else []
    if len(kinds) != num_layers or any(kind not in known for kind in kinds):
        problem = f"must list {' or '.join(known)} for each of the {counted(num_layers, 'layer')}"
        keys.refuse(name, listed, problem)
    return kinds


def _rate(keys: ConfigKeys, kind: str) -> int:
    rates = keys.raw.get("compress_rates")
    given = rates.get(kind) if isinstance(rates, Mapping) else 0
    if rates is None:
        given = next(ratio for ratio, name in RATIOS.items() if name == kind)
    own = keys.raw.get(RATE_KEYS[kind])
    rate = given if own is None else own
    if not isinstance(rate, int) or isinstance(rate, bool) or not 0 < rate <= MAX_BLOCK:
        name, value = (RATE_KEYS[kind], own) if own is not None else ("compress_rates", rates)
        keys.refuse(name, value, f"must say how many tokens an entry of {kind} has, 1 to {MAX_BLOCK}")
    return rate


def _ropes(keys: ConfigKeys, max_position: int) -> Mapping[str, RopeConfig]:
    """Of layers that see the last tokens alone, and of all others."""
    name, given = rotation_of(keys)
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        keys.refuse(name, given, "must be null or an object")
    theta, share = keys.positive("rope_theta"), _share(keys)
    if all(isinstance(given.get(label), Mapping) for label in ("main", "compress")):
        # Of the two objects each one is read by itself; a share that none of both says is the whole head.
        whole = {"rope_theta": theta, SHARE: keys.raw.get(SHARE) or 1.0}
        parts = {label: {**whole, **given[label]} for label in ("main", "compress")}
    else:
        rest = {key: value for key, value in given.items() if key not in ("main", "compress")}
        stretched = {**rest, "rope_theta": keys.positive("compress_rope_theta"), SHARE: share}
        if stretched.get("rope_type", stretched.get("type")) == RopeType.YARN:
            stretched.setdefault("attention_factor", 1.0)
        parts = {"main": {"rope_theta": theta, SHARE: share}, "compress": stretched}
    return {label: _rope(keys, f"{name}.{label}", part, max_position) for label, part in parts.items()}


def _rope(keys: ConfigKeys, name: str, given: Mapping[str, Any], max_position: int) -> RopeConfig:
    rope = single_rope(keys, given, name, keys.count("head_dim", most=MAX_HEADS), max_position)
    if rope.type not in STRETCHED:
        known = ", ".join(STRETCHED)
        keys.refuse(f"{name}.rope_type", rope.type.value, f"must be one of {known}: no other is built for this family")
    return rope


def _share(keys: ConfigKeys) -> float:
    """The part of a head that rotates."""
    if keys.raw.get(SHARE) is None and keys.raw.get("qk_rope_head_dim") is not None:
        return keys.count("qk_rope_head_dim") / keys.count("head_dim", most=MAX_HEADS)
    return keys.positive(SHARE)


def token_or_router_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Experts in every layer; those of the first layers are named by a table of the token's number."""
    kinds = _expert_kinds(keys, num_layers)
    count = num_experts_of(keys, "n_routed_experts", "num_local_experts", scoring=tuple(SCORES))
    size, activation = keys.count("moe_intermediate_size"), keys.text("hidden_act")
    for name, meant in (("intermediate_size", size), ("num_local_experts", count)):
        if keys.raw.get(name) not in (None, meant):
            keys.refuse(name, keys.raw[name], f"must be {meant}, as the family's own key for it has it")
    if activation not in ("silu", "swish"):
        keys.refuse("hidden_act", activation, "must be silu: experts of this family have no other gate")
    _, num_shared = keys.find(("n_shared_experts",))
    if num_shared != 1:
        keys.refuse("n_shared_experts", num_shared, "must be 1: layers of this family have one shared expert")
    if not keys.flag("norm_topk_prob", default=True):
        keys.refuse("norm_topk_prob", False, "must be true: the weights of this family's experts add up to one")
    routing = Routing(
        num_chosen=num_chosen_of(keys, count, "num_experts_per_tok"),
        scores=SCORES[keys.text("scoring_func")],
        renormalized=True,
        added_to_sum=1e-20,
        factor=keys.positive("routed_scaling_factor"),
    )
    return tuple(
        ExpertsSpec(
            num_experts=count,
            size=size,
            routing=routing,
            gate=ClampedGate(limit=keys.positive("swiglu_limit")),
            has_choice_bias=kind == "moe",
            has_token_table=kind == "hash_moe",
            shared_size=size,
        )
        for kind in kinds
    )


def _expert_kinds(keys: ConfigKeys, num_layers: int) -> Sequence[str]:
    listed = keys.raw.get("mlp_layer_types")
    if listed is not None:
        return _listed(keys, "mlp_layer_types", listed, ("hash_moe", "moe"), num_layers)
    _, first = keys.find(("num_hash_layers",))
    if not _is_whole(first) or first < 0:
        keys.refuse("num_hash_layers", first, "must be a whole number, 0 or more")
    return ["hash_moe" if index < first else "moe" for index in range(num_layers)]
