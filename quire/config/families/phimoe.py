"""Phi-3.5 MoE: Mixtral, with layer norms, and experts that are chosen one after the other among near ones."""

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, NormKind, Norms, WeightNames, experts
from quire.config.layers.experts import phimoe_experts
from quire.config.layers.layer_kinds import all_sliding
from quire.config.layers.rope import rotation_of


def rotation(keys: ConfigKeys) -> Mapping[str, Any]:
    """The factor of a stretched rotation has a name of its own, twice."""
    name, given = rotation_of(keys)
    if not isinstance(given, Mapping) or "short_mscale" not in given:
        return {}
    rope = ConfigKeys(given, f"{keys.source}: {name}")
    short, long = rope.positive("short_mscale"), rope.positive("long_mscale")
    if short != long:
        rope.refuse("long_mscale", long, f"must be short_mscale ({short:g})")
    return {name: {**given, "attention_factor": short}}


SPEC = FamilySpec(
    architecture="PhimoeForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "intermediate_size": 6400,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.01,
    },
    derived=rotation,
    layer_kinds=all_sliding,
    norms=Norms(kind=NormKind.LAYER, has_bias=True),
    head_bias="lm_head_bias",
    mlp=experts(phimoe_experts),
    names=WeightNames(mlp="block_sparse_moe"),
)
