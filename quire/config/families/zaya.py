"""Zaya: queries, keys and values that tokens before a token have a part in, and experts chosen by an MLP, or none."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, Scales, experts
from quire.config.layers.experts import ExpertsSpec, RouterMlpSpec, Routing, num_experts_of
from quire.config.layers.layer_kinds import LayerKind, all_full, listed_or
from quire.config.layers.recurrent import MAX_CONV_WIDTH
from quire.config.layers.recurrent_mixers import ConvolvedQkvSpec, RecurrentSpec

KINDS = {"hybrid": LayerKind.FULL, "hybrid_sliding": LayerKind.SLIDING}
"""Names in `layer_types` and `rope_parameters`."""
ROPES = {
    "hybrid": {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5},
    "hybrid_sliding": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}


def _derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """Kinds of layers, and their rotations, by the names that other families have for them."""
    listed = keys.raw.get("layer_types")
    if listed is None:
        return {"rope_parameters": {LayerKind.FULL: _rope(keys, "hybrid")}}
    if not isinstance(listed, list) or not all(isinstance(kind, str) and kind in KINDS for kind in listed):
        keys.refuse("layer_types", listed, f"may name only {' and '.join(KINDS)}")
    if "hybrid_sliding" in listed and keys.optional_count("sliding_window") is None:
        keys.refuse("sliding_window", None, "must be given where layer_types has hybrid_sliding")
    ropes = {KINDS[name]: _rope(keys, name) for name in dict.fromkeys(listed)}
    return {"layer_types": [KINDS[kind] for kind in listed], "rope_parameters": ropes}


def _rope(keys: ConfigKeys, name: str) -> Mapping[str, Any]:
    """The rotation of a kind of layers. Published configs have the name of a type beside both."""
    given = keys.raw.get("rope_parameters")
    given = ROPES if given is None else given
    rope = given.get(name) if isinstance(given, Mapping) else None
    if not isinstance(rope, Mapping):
        keys.refuse("rope_parameters", keys.raw.get("rope_parameters"), f"must have an object for {name} layers")
    if rope.get("rope_theta") is None and keys.raw.get("rope_theta") is None:
        keys.refuse(f"rope_parameters.{name}.rope_theta", None, "must be a number above 0")
    return rope


def _convolved(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    spec = ConvolvedQkvSpec(
        num_heads=keys.count("num_attention_heads"),
        num_kv_heads=keys.count("num_key_value_heads"),
        head_size=keys.count("head_dim"),
        single_width=keys.count("cca_time0", most=MAX_CONV_WIDTH),
        joint_width=keys.count("cca_time1", most=MAX_CONV_WIDTH),
        has_bias=keys.flag("attention_bias", default=False),
    )
    if spec.num_kv_heads * spec.head_size % 2:
        keys.refuse("head_dim", spec.head_size, "must be even where num_key_value_heads is odd: values have two halves")
    return (spec,) * num_layers


def _attends(keys: ConfigKeys, recurrent: Sequence[RecurrentSpec | None]) -> tuple[bool, ...]:
    return (True,) * len(recurrent)


def _experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """One of them for each token, or none: the router has a row more than there are experts."""
    chosen = keys.count("num_experts_per_tok")
    if chosen != 1:
        keys.refuse("num_experts_per_tok", chosen, "must be 1: the routing of this family chooses one")
    router = RouterMlpSpec(rank=keys.count("router_hidden_size"), reads_last=True)
    spec = ExpertsSpec(
        num_experts=num_experts_of(keys, "num_experts"),
        num_skips=1,
        size=keys.count("moe_intermediate_size"),
        routing=Routing(num_chosen=1),
        has_choice_bias=True,
        router=router,
    )
    return (replace(spec, router=replace(router, reads_last=False)), *(spec,) * (num_layers - 1))


def _scales(keys: ConfigKeys) -> Scales:
    return Scales(has_shifts=True)


SPEC = FamilySpec(
    architecture="ZayaForCausalLM",
    model_class="quire.models.variants.zaya:ZayaForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": 262_272,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "partial_rotary_factor": 1.0,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 1,
        "num_experts": 16,
        "router_hidden_size": 256,
        "cca_time0": 2,
        "cca_time1": 2,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 106,
    },
    derived=_derived,
    refused={"rope_scaling": "reads the rotations of this family from rope_parameters alone. Put it there."},
    recurrent=_convolved,
    attends=_attends,
    layer_kinds=listed_or(all_full),
    sliding_theta="rope_theta",
    head_bias="lm_head_bias",
    mlp=experts(_experts),
    scales=_scales,
)
