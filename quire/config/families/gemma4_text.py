"""Gemma 4, the text models: Gemma 3, with heads that differ between layers with and without a window, norms of values,
and, by size, embeddings of each layer, shared caches, or experts beside the MLP."""

import math
from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.families.gemma2 import both_sides
from quire.config.family_spec import FamilySpec, HeadNorms, MlpKind, MlpSpec, Scales
from quire.config.layers.by_layer import BY_LAYER, by_layer
from quire.config.layers.experts import gemma4_experts, whole_number
from quire.config.layers.layer_kinds import Heads, LayerKind, full_every, last_read, listed_or
from quire.config.layers.streams import LayerEmbeddingsSpec

ROTATIONS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


layer_kinds = listed_or(full_every(6))


def derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """Layers of which the last one is full; rotations of configs that give none."""
    name, direction = keys.find(("use_bidirectional_attention",))
    if direction not in (None, "vision"):
        keys.refuse(name, direction, "must be null or vision: quire generates with causal attention only")
    kinds = layer_kinds(keys, keys.count("num_hidden_layers"))
    last_full = [*kinds[:-1], LayerKind.FULL]
    given = keys.raw.get("rope_parameters")
    return {
        "layer_types": [str(kind) for kind in last_full],
        **({"rope_parameters": ROTATIONS} if given is None else {}),
    }


def heads(keys: ConfigKeys, given: Heads) -> Mapping[LayerKind, Heads]:
    """Full layers have their own: as transformers 5 writes them layer by layer, or of two keys for all of them."""
    shares, own = keys.flag("attention_k_eq_v", default=False), ConfigKeys(_of_full_layers(keys), keys.source)
    num_kv_heads = own.count("num_key_value_heads", default=given.num_kv_heads)
    if given.num_heads % num_kv_heads:
        keys.refuse("num_global_key_value_heads", num_kv_heads, f"must divide the {given.num_heads} heads of queries")
    full = Heads(
        num_heads=given.num_heads,
        num_kv_heads=num_kv_heads,
        head_size=own.count("head_dim", default=given.head_size),
        values_are_keys=shares,
    )
    return {LayerKind.SLIDING: given, LayerKind.FULL: full}


def _of_full_layers(keys: ConfigKeys) -> Mapping[str, Any]:
    """What full layers have in place of keys of the config."""
    num_layers = keys.count("num_hidden_layers")
    own = by_layer(keys, num_layers)
    if own is None:
        shares = keys.flag("attention_k_eq_v", default=False)
        found = {
            "head_dim": "global_head_dim",
            **({"num_key_value_heads": "num_global_key_value_heads"} if shares else {}),
        }
        return {key: keys.find((name,))[1] for key, name in found.items()}
    full = {index for index, kind in enumerate(layer_kinds(keys, num_layers)) if kind is LayerKind.FULL}
    values = [*own.values()]
    is_known = all(set(value) <= {"head_dim", "num_key_value_heads"} for value in values)
    if not is_known or (own and set(own) != full) or any(value != values[0] for value in values):
        problem = "must have head_dim and num_key_value_heads, the same of all full layers"
        keys.refuse(BY_LAYER, keys.raw[BY_LAYER], problem)
    return values[0] if values else {}


def mlps(keys: ConfigKeys, num_layers: int, size: int) -> tuple[MlpSpec, ...]:
    """Layers that read others' keys and values may have MLPs of twice the width."""
    num_own = num_layers - whole_number(keys, "num_kv_shared_layers")
    wide, beside = keys.flag("use_double_wide_mlp", default=False), gemma4_experts(keys)
    return tuple(
        MlpSpec(
            kind=MlpKind.GATED,
            intermediate_size=2 * size if wide and index >= num_own else size,
            has_bias=False,
            beside=beside,
        )
        for index in range(num_layers)
    )


def layer_embeddings(keys: ConfigKeys) -> LayerEmbeddingsSpec | None:
    """None where they would have no features."""
    if keys.find(("hidden_size_per_layer_input",))[1] == 0:
        return None
    num_tokens, vocab_size = keys.count("vocab_size_per_layer_input"), keys.count("vocab_size")
    if num_tokens < vocab_size:
        keys.refuse("vocab_size_per_layer_input", num_tokens, f"must be vocab_size ({vocab_size}) or more")
    return LayerEmbeddingsSpec(size=keys.count("hidden_size_per_layer_input"), vocab_size=num_tokens)


def scales(keys: ConfigKeys) -> Scales:
    """Those of Gemma, and a number of each layer."""
    return Scales(embedding=math.sqrt(keys.count("hidden_size")), query=1.0, of_layers=True)


DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
    BY_LAYER: None,
    "bos_token_id": 2,
    "eos_token_id": 1,
}

SPEC = FamilySpec(
    architecture="Gemma4ForCausalLM",
    model_class="quire.models.variants.gemma4:Gemma4ForCausalLM",
    spellings={"hidden_act": "hidden_activation"},
    defaults=DEFAULTS,
    derived=derived,
    layer_kinds=layer_kinds,
    heads=heads,
    sliding_theta="rope_theta",
    norms=both_sides(HeadNorms.EACH, offset=0.0, of_values=True),
    reads=last_read,
    layer_embeddings=layer_embeddings,
    mlp=mlps,
    scales=scales,
)
