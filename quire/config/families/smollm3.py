"""SmolLM3: Llama; some layers do not rotate queries and keys, and may have a window instead."""

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec
from quire.config.layers.layer_kinds import LayerKind, listed_or
from quire.errors import counted


def rotated(keys: ConfigKeys, kinds: tuple[LayerKind, ...]) -> tuple[bool, ...]:
    """The layers with a 1 in `no_rope_layers`, or all but every n-th."""
    listed, num_layers = keys.raw.get("no_rope_layers"), len(kinds)
    if listed is None:
        interval = keys.count("no_rope_layer_interval")
        return tuple(number % interval != 0 for number in range(1, num_layers + 1))
    if not isinstance(listed, list) or len(listed) < num_layers or not all(item in (0, 1) for item in listed):
        keys.refuse("no_rope_layers", listed, f"must list a 1 or a 0 for each of {counted(num_layers, 'layer')}")
    return tuple(map(bool, listed[:num_layers]))


def sliding_where_not_rotated(keys: ConfigKeys, num_layers: int) -> tuple[LayerKind, ...]:
    """Layers without rotation have a window, if the config wants windows. Layers that it lists have it anyway."""
    full = (LayerKind.FULL,) * num_layers
    if not keys.flag("use_sliding_window", default=False):
        return full
    return tuple(LayerKind.FULL if rotates else LayerKind.SLIDING for rotates in rotated(keys, full))


SPEC = FamilySpec(
    architecture="SmolLM3ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
    },
    layer_kinds=listed_or(sliding_where_not_rotated),
    rotated=rotated,
)
