"""MiMo V2 Flash: GLM-4.5 without a shared expert, with values narrower than keys, and windows that have sinks and twice
the KV heads."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, Scales, WeightNames, experts
from quire.config.layers.experts import deepseek_v3_experts, sparse_layers
from quire.config.layers.layer_kinds import Heads, LayerKind, listed_or
from quire.config.layers.mixers import Factors

SHARE = 0.334
"""Of each head that is rotated, where the config does not say."""
ROTATIONS = {
    LayerKind.FULL: {"rope_type": "default", "rope_theta": 5_000_000.0},
    LayerKind.SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}


def first_and_every_sixth_full(keys: ConfigKeys, num_layers: int) -> tuple[LayerKind, ...]:
    """Of six layers the last one is full, and the first of all."""
    full = {0, *range(5, num_layers, 6)}
    return tuple(LayerKind.FULL if index in full else LayerKind.SLIDING for index in range(num_layers))


layer_kinds = listed_or(first_and_every_sixth_full)


def derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """Rotations, the layers with experts, and a window of so many tokens beside the query."""
    shared, past = keys.raw.get("n_shared_experts"), keys.optional_count("sliding_window_size")
    if shared not in (None, 0):
        keys.refuse("n_shared_experts", shared, "must be 0 or null: this family has no shared experts")
    sparse = ["dense", *["sparse"] * (keys.count("num_hidden_layers") - 1)]
    changes = {
        "n_shared_experts": 0,
        "rope_parameters": _rotations(keys),
        "mlp_layer_types": sparse if keys.raw.get("mlp_layer_types") is None else keys.raw["mlp_layer_types"],
        **({} if past is None else {"sliding_window": past + 1}),
    }
    _check_published_keys(ConfigKeys({**keys.raw, **changes}, keys.source, keys.defaults))
    return changes


def _rotations(keys: ConfigKeys) -> Mapping[str, Any]:
    given = keys.raw.get("rope_parameters")
    if given is None:
        given = ROTATIONS
    if not isinstance(given, Mapping) or not all(isinstance(rope, Mapping) for rope in given.values()):
        keys.refuse("rope_parameters", given, f"must have one object for each of {' and '.join(LayerKind)}")
    shares = {kind: SHARE if rope.get("rope_type", "default") == "default" else 1.0 for kind, rope in given.items()}
    return {kind: {"partial_rotary_factor": shares[kind], **rope} for kind, rope in given.items()}


def _check_published_keys(keys: ConfigKeys) -> None:
    """Refuse keys of published configs that contradict those by which transformers computes the model."""
    num_layers, ropes = keys.count("num_hidden_layers"), keys.raw["rope_parameters"]
    full, sliding = (ropes.get(kind, {}) for kind in (LayerKind.FULL, LayerKind.SLIDING))
    means = {
        "hybrid_layer_pattern": [int(kind is LayerKind.SLIDING) for kind in layer_kinds(keys, num_layers)],
        "moe_layer_freq": [int(is_sparse) for is_sparse in sparse_layers(keys, num_layers)],
        "swa_num_attention_heads": keys.count("num_attention_heads"),
        "swa_num_key_value_heads": 2 * keys.count("num_key_value_heads"),
        "swa_head_dim": keys.count("head_dim"),
        "swa_v_head_dim": keys.count("v_head_dim"),
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "layernorm_epsilon": keys.positive("rms_norm_eps"),
        "rope_theta": full.get("rope_theta"),
        "swa_rope_theta": sliding.get("rope_theta"),
        "partial_rotary_factor": full.get("partial_rotary_factor"),
    }
    for name, meant in means.items():
        given = keys.raw.get(name)
        if given is not None and given != meant:
            keys.refuse(name, given, f"must be {meant}, which is what the other keys of this family mean")


def heads(keys: ConfigKeys, given: Heads) -> Mapping[LayerKind, Heads]:
    """Layers with a window have twice the KV heads."""
    value_size, num_kv_heads = keys.count("v_head_dim"), 2 * given.num_kv_heads
    if value_size > given.head_size:
        keys.refuse("v_head_dim", value_size, f"must be at most head_dim, {given.head_size}")
    if given.num_heads % num_kv_heads:
        problem = f"must be half of a number that divides the {given.num_heads} heads of queries"
        keys.refuse("num_key_value_heads", given.num_kv_heads, problem)
    full = replace(given, value_size=value_size)
    return {LayerKind.FULL: full, LayerKind.SLIDING: replace(full, num_kv_heads=num_kv_heads)}


def scales(keys: ConfigKeys) -> Scales:
    """A factor of values, which the output's product carries."""
    return Scales(attention=Factors(output=keys.optional_positive("attention_value_scale") or 1.0))


SPEC = FamilySpec(
    architecture="MiMoV2FlashForCausalLM",
    defaults={
        "vocab_size": 152_576,
        "intermediate_size": 16_384,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "head_dim": 192,
        "partial_rotary_factor": 1.0,
        "v_head_dim": 128,
        "sliding_window": 129,
        "attention_value_scale": 0.707,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "bos_token_id": 1,
    },
    derived=derived,
    refused={"rope_scaling": "reads rotations of this family from rope_parameters alone. Move them there."},
    layer_kinds=layer_kinds,
    heads=heads,
    sliding_theta="rope_theta",
    has_sinks=True,
    sinks_in=(LayerKind.SLIDING,),
    output_bias=False,
    mlp=experts(deepseek_v3_experts),
    scales=scales,
    names=WeightNames(sinks="attention_sink_bias"),
)
