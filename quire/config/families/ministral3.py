"""Ministral 3, the text models: Mistral, with a stretched rotation and queries that are scaled by their position."""

from collections.abc import Mapping

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, gated
from quire.config.layers.layer_kinds import all_sliding
from quire.config.layers.mixers import PositionScale
from quire.config.layers.rope import rotation_of, unless_given

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def position_scale(keys: ConfigKeys) -> PositionScale:
    """Both numbers are among those of the rotation, which `read_ropes` checks to be an object. The context it was
    trained with may be beside it, or is the whole context.
    """
    _, rope = rotation_of(keys)
    given = ConfigKeys(rope if isinstance(rope, Mapping) else {}, f"{keys.source}: rope_parameters")
    name, longest = "original_max_position_embeddings", keys.count("max_position_embeddings")
    period = given.count(name, default=longest) if keys.raw.get(name) is None else keys.count(name)
    return PositionScale(beta=given.positive("llama_4_scaling_beta"), period=period)


SPEC = FamilySpec(
    architecture="Ministral3ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    derived=unless_given(ROPE),
    layer_kinds=all_sliding,
    position_scale=position_scale,
    attention_bias=False,
    output_bias=False,
    mlp=gated(),
)
