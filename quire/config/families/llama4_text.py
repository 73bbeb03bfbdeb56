"""Llama 4, the text models: Llama, with attention in chunks, layers that do not rotate, and mixtures of experts."""

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.families.smollm3 import rotated
from quire.config.family_spec import FamilySpec, HeadNorms, Norms, WeightNames, experts
from quire.config.layers.experts import ExpertsSpec, Routing, Scores, num_chosen_of, num_experts_of
from quire.config.layers.layer_kinds import LayerKind
from quire.config.layers.mixers import PositionScale

KINDS = {"chunked_attention": LayerKind.SLIDING, "full_attention": LayerKind.FULL}


def derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """An empty list, which published configs have, is none."""
    return {"no_rope_layers": None} if keys.raw.get("no_rope_layers") == [] else {}


def kinds(keys: ConfigKeys, num_layers: int) -> tuple[LayerKind, ...]:
    """As `layer_types` lists; without it, layers that rotate attend in chunks."""
    listed = keys.raw.get("layer_types")
    if listed is None:
        full = (LayerKind.FULL,) * num_layers
        return tuple(LayerKind.SLIDING if rotates else LayerKind.FULL for rotates in rotated(keys, full))
    if not isinstance(listed, list) or len(listed) != num_layers or not {*map(str, listed)} <= KINDS.keys():
        keys.refuse("layer_types", listed, f"must list {' or '.join(KINDS)} for each of the {num_layers} layers")
    return tuple(KINDS[kind] for kind in listed)


def norms(keys: ConfigKeys) -> Norms:
    """With norms on the heads that are rotated, if the config says so."""
    return Norms(heads=HeadNorms.UNIT_ROTATED if keys.flag("use_qk_norm", default=False) else HeadNorms.NONE)


def position_scale(keys: ConfigKeys) -> PositionScale | None:
    """Of layers that do not rotate, if the config says so."""
    if not keys.flag("attn_temperature_tuning", default=False):
        return None
    beta, period = keys.positive("attn_scale"), keys.count("floor_scale")
    return PositionScale(beta=beta, period=period, first=1, only_unrotated=True)


def input_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """What an expert reads is multiplied by the sigmoid of its logit; with a shared expert as wide as the others."""
    count, size = num_experts_of(keys, "num_local_experts", "num_experts"), keys.count("intermediate_size")
    chosen = num_chosen_of(keys, count, "num_experts_per_tok")
    routing = Routing(num_chosen=chosen, scores=Scores.LOGITS_SIGMOID, weighs_input=True)
    spec = ExpertsSpec(num_experts=count, size=size, routing=routing, shared_size=size)
    listed, step = keys.raw.get("moe_layers"), keys.count("interleave_moe_layer_step")
    if listed is None:
        listed = range(step - 1, num_layers, step)
    elif not isinstance(listed, list) or not all(type(index) is int for index in listed):
        keys.refuse("moe_layers", listed, f"must list indices of the {num_layers} layers")
    return tuple(spec if index in listed else None for index in range(num_layers))


SPEC = FamilySpec(
    architecture="Llama4ForCausalLM",
    spellings={"sliding_window": "attention_chunk_size"},
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 500_000.0,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    derived=derived,
    layer_kinds=kinds,
    is_chunked=True,
    rotated=rotated,
    rotates_pairs=True,
    position_scale=position_scale,
    norms=norms,
    mlp=experts(input_experts, dense_size="intermediate_size_mlp"),
    names=WeightNames(mlp="feed_forward", experts_transposed=True),
)
