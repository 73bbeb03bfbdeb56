"""Flint: Qwen 3 MoE, with windows and learned sinks; layers without a window do not rotate; experts by sigmoids."""

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, HeadNorms, Norms, WeightNames, experts
from quire.config.layers.experts import ExpertsSpec, Routing, Scores, by_sparse_step, num_chosen_of, num_experts_of
from quire.config.layers.layer_kinds import LayerKind, listed_or, sliding_rotated


def derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """The first two layers have no experts, unless the config lists others."""
    return {"mlp_only_layers": [0, 1]} if keys.raw.get("mlp_only_layers") is None else {}


def full_at_both_ends(keys: ConfigKeys, num_layers: int) -> tuple[LayerKind, ...]:
    """The first two layers, every fourth and the last are full."""
    full = {0, num_layers - 1, *range(1, num_layers, 4)}
    return tuple(LayerKind.FULL if index in full else LayerKind.SLIDING for index in range(num_layers))


def sigmoid_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """With a shared expert of a width of its own."""
    count = num_experts_of(keys, "num_experts", "num_local_experts")
    routing = Routing(
        num_chosen=num_chosen_of(keys, count, "num_experts_per_tok"),
        scores=Scores.SIGMOID,
        renormalized=keys.flag("norm_topk_prob", default=False),
    )
    spec = ExpertsSpec(
        num_experts=count,
        size=keys.count("moe_intermediate_size"),
        routing=routing,
        shared_size=keys.count("shared_expert_intermediate_size"),
    )
    return by_sparse_step(keys, spec, num_layers)


SPEC = FamilySpec(
    architecture="FlintForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262_144,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "sliding_window": 513,
        "intermediate_size": 6144,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 1024,
        "num_experts": 256,
        "num_experts_per_tok": 6,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
    derived=derived,
    layer_kinds=listed_or(full_at_both_ends),
    rotated=sliding_rotated,
    has_sinks=True,
    norms=Norms(heads=HeadNorms.EACH),
    mlp=experts(sigmoid_experts),
    names=WeightNames(sinks="softmax_offset"),
)
