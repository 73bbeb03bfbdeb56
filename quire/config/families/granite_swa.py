"""Granite with windows: Granite, with windows on three layers of four, learned sinks, and layers that do not rotate."""

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys, is_number
from quire.config.families.granite import scales
from quire.config.family_spec import FamilySpec
from quire.config.layers.layer_kinds import LayerKind, first_full_of, listed_or
from quire.config.layers.rope import rotation_of


def _thetas(keys: ConfigKeys) -> list[float] | None:
    """The base of each layer, 0 where it does not rotate."""
    given = keys.raw.get("layer_rope_theta")
    if given is None:
        return None
    if (
        not isinstance(given, list)
        or len(given) != keys.count("num_hidden_layers")
        or not all(is_number(theta) for theta in given)
        or len({*given} - {0}) > 1
    ):
        keys.refuse("layer_rope_theta", given, "must list a number for each layer: 0, or one that is the same for all")
    return given


def derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """The one base that there is."""
    bases = {*(_thetas(keys) or ())} - {0}
    if not bases:
        return {}
    _, rope = rotation_of(keys)
    given = rope if isinstance(rope, Mapping) else {}
    return {"rope_parameters": {**given, "rope_theta": bases.pop()}, "rope_scaling": None}


def rotated(keys: ConfigKeys, kinds: tuple[LayerKind, ...]) -> tuple[bool, ...]:
    """Layers with a base."""
    thetas = _thetas(keys)
    return (True,) * len(kinds) if thetas is None else tuple(theta != 0 for theta in thetas)


SPEC = FamilySpec(
    architecture="GraniteSWAForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "sliding_window": 128,
        "tie_word_embeddings": True,
        "bos_token_id": 100_257,
        "eos_token_id": 100_257,
    },
    derived=derived,
    layer_kinds=listed_or(first_full_of(4)),
    rotated=rotated,
    has_sinks=True,
    scales=scales,
)
