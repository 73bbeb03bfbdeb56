"""Beam: DeepSeek V3's experts and gated attention, averages as hidden states, and windows that alone rotate."""

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.families.gemma2 import both_sides
from quire.config.family_spec import FamilySpec, HeadNorms, Scales, WeightNames, experts
from quire.config.layers.experts import deepseek_v3_experts
from quire.config.layers.layer_kinds import LayerKind, full_every, listed_or
from quire.config.layers.mixers import PowerScale

ROTATIONS = {LayerKind.SLIDING: {"rope_type": "default", "rope_theta": 10_000.0}, LayerKind.FULL: None}


def _sixth_and_last_full(keys: ConfigKeys, num_layers: int) -> tuple[LayerKind, ...]:
    return (*full_every(6)(keys, num_layers)[:-1], LayerKind.FULL)


layer_kinds = listed_or(_sixth_and_last_full)


def _derived(keys: ConfigKeys) -> Mapping[str, Any]:
    given = keys.raw.get("rope_parameters")
    rotations = ROTATIONS if given is None else given
    used = set(layer_kinds(keys, keys.count("num_hidden_layers")))
    if not isinstance(rotations, Mapping) or not used <= set(rotations):
        keys.refuse("rope_parameters", given, f"must have an object or null for each of {' and '.join(sorted(used))}")
    return {"rope_parameters": rotations, "n_shared_experts": 0}


def _rotated(keys: ConfigKeys, kinds: tuple[LayerKind, ...]) -> tuple[bool, ...]:
    return tuple(keys.raw["rope_parameters"][kind] is not None for kind in kinds)


SPEC = FamilySpec(
    architecture="BeamForCausalLM",
    spellings={"n_routed_experts": "num_experts"},
    defaults={
        "vocab_size": 151_936,
        "hidden_size": 5120,
        "intermediate_size": 20_480,
        "num_hidden_layers": 52,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "moe_intermediate_size": 2560,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "final_logit_softcapping": 30.0,
    },
    derived=_derived,
    refused={"rope_scaling": "reads rotations of this family from rope_parameters alone. Move it there."},
    layer_kinds=layer_kinds,
    rotated=_rotated,
    sliding_theta="rope_theta",
    position_scale=lambda keys: PowerScale(beta=0.1, period=2048, first=1, only_unrotated=True),
    is_gated=True,
    norms=both_sides(HeadNorms.EACH, offset=0.0),
    mlp=experts(deepseek_v3_experts),
    scales=lambda keys: Scales(averages=True),
    names=WeightNames(gate="gate_proj", gate_bias="gate_bias"),
)
