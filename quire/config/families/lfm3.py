"""LFM3: LFM2, with norms on both sides, windows on some layers, and a gate for each head of attention."""

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, HeadNorms, Norms, WeightNames, gated
from quire.config.layers.layer_kinds import LayerKind, listed_among
from quire.config.layers.recurrent import WINDOW_TYPES, listed_layers, short_conv
from quire.config.layers.recurrent_mixers import RecurrentSpec

CONV = "conv"
"""What `layer_types` calls a layer without attention."""
ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


def _derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """What configs that do not list layers, and those without a rotation, have."""
    changes: dict[str, Any] = {} if keys.raw.get("rope_parameters") else {"rope_parameters": ROPES}
    if keys.raw.get("layer_types") is None:
        kinds = (LayerKind.SLIDING, CONV, LayerKind.FULL, CONV)
        num_layers = keys.count("num_hidden_layers")
        changes["layer_types"] = [CONV, *(kinds[index % len(kinds)] for index in range(1, num_layers))]
    return changes


def _recurrent(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    return listed_layers(keys, short_conv(keys), num_layers, (CONV,), WINDOW_TYPES)


def _norms(keys: ConfigKeys) -> Norms:
    has_both = keys.flag("use_sandwich_norm", default=True)
    return Norms(
        input="operator_norm",
        post_attention="post_operator_norm" if has_both else None,
        pre_mlp="ffn_norm",
        post_mlp="post_ffn_norm" if has_both else None,
        final="embedding_norm",
        heads=HeadNorms.EACH,
    )


SPEC = FamilySpec(
    architecture="Lfm3ForCausalLM",
    spellings={"rms_norm_eps": "norm_eps"},
    defaults={
        "hidden_act": "silu",
        "norm_eps": 1e-5,
        "intermediate_size": 7680,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 128_000,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": 256,
        "conv_L_cache": 7,
        "use_attention_gate": True,
        "tie_word_embeddings": True,
        "bos_token_id": 124_894,
        "eos_token_id": 124_900,
    },
    derived=_derived,
    recurrent=_recurrent,
    layer_kinds=listed_among(CONV),
    sliding_theta="rope_local_base_freq",
    is_gated="use_attention_gate",
    gates_heads=True,
    norms=_norms,
    mlp=gated(),
    names=WeightNames(recurrent=CONV, gate="gate_proj", mlp="feed_forward", gate_up=("w1", "w3"), down="w2"),
)
