"""Hunyuan, the dense models: Llama, with a norm on each query and key head behind the rotation."""

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, HeadNorms, Norms, WeightNames, gated
from quire.config.layers.rope import rotation_of


def derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """A "dynamic" rotation with `alpha` is none: its base is raised once and for all (NTK-aware scaling)."""
    _, rope = rotation_of(keys)
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) != "dynamic" or not rope.get("alpha"):
        return {}
    size = keys.count("head_dim", default=keys.count("hidden_size") // keys.count("num_attention_heads"))
    if size <= 2:
        keys.refuse("head_dim", size, "must be more than 2 for a rotation with alpha")
    given = ConfigKeys(rope, keys.source, {"rope_theta": keys.positive("rope_theta", default=10_000.0)})
    theta = given.positive("rope_theta") * given.positive("alpha") ** (size / (size - 2))
    return {"rope_theta": theta, "rope_parameters": None, "rope_scaling": None}


SPEC = FamilySpec(
    architecture="HunYuanDenseV1ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    derived=derived,
    norms=Norms(heads=HeadNorms.ROTATED),
    mlp=gated(),
    names=WeightNames(q_norm="query_layernorm", k_norm="key_layernorm"),
)
