"""OLMo Hybrid: OLMo 2, with the gated delta rule behind a norm in most layers; most checkpoints do not rotate."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.families import olmo2
from quire.config.family_spec import FamilySpec, Norms, WeightNames, gated
from quire.config.layers.gated_recurrence import LINEAR, gated_delta
from quire.config.layers.layer_kinds import LayerKind
from quire.config.layers.recurrent import listed_layers
from quire.config.layers.recurrent_mixers import DeltaLayout, RecurrentSpec

OUTPUT_NORM_EPS = 1e-5
"""Of the norm behind the delta rule, whatever the model's others have."""


def _derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """Layers that are not listed, and sizes that follow from those of attention."""
    num_heads, num_layers = keys.count("num_attention_heads"), keys.count("num_hidden_layers")
    num_keys = keys.count("linear_num_key_heads", default=num_heads)
    key_size = keys.count("linear_key_head_dim", default=int(0.75 * keys.count("hidden_size") / num_keys))
    changes: dict[str, Any] = {
        "linear_num_key_heads": num_keys,
        "linear_num_value_heads": keys.count("linear_num_value_heads", default=num_heads),
        "linear_key_head_dim": key_size,
        "linear_value_head_dim": keys.count("linear_value_head_dim", default=2 * key_size),
    }
    if keys.raw.get("layer_types") is None:
        kinds = [LayerKind.FULL if index % 4 == 3 else LINEAR for index in range(num_layers)]
        changes["layer_types"] = kinds if LayerKind.FULL in kinds else [*kinds[:-1], LayerKind.FULL]
    return changes


def _recurrent(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    spec = gated_delta(keys, DeltaLayout.APART)
    most_rate = 2.0 if keys.flag("linear_allow_neg_eigval", default=True) else 1.0
    return listed_layers(keys, replace(spec, norm_eps=OUTPUT_NORM_EPS, most_rate=most_rate), num_layers, (LINEAR,))


def _rotated(keys: ConfigKeys, kinds: tuple[LayerKind, ...]) -> tuple[bool, ...]:
    """None where the base is null."""
    given = keys.raw.get("rope_parameters")
    where = given if isinstance(given, Mapping) and "rope_theta" in given else keys.raw
    return (where.get("rope_theta", 0) is not None,) * len(kinds)


SPEC = FamilySpec(
    architecture="OlmoHybridForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "intermediate_size": 11_008,
        "max_position_embeddings": 65_536,
        "linear_conv_kernel_dim": 4,
        "eos_token_id": 100_257,
    },
    derived=_derived,
    recurrent=_recurrent,
    rotated=_rotated,
    norms=replace(olmo2.NORMS, recurrent=Norms(input="attention_layer_norm", pre_mlp="feedforward_layer_norm")),
    mlp=gated(),
    names=WeightNames(recurrent="linear_attn", resaved=(("post_attention_layernorm.", "feedforward_layer_norm."),)),
)
