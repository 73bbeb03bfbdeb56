"""EXAONE 4: norms behind attention and MLP and on each query and key head; layers without a window do not rotate."""

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, HeadNorms, Norms, gated
from quire.config.layers.layer_kinds import LayerKind, all_full, full_by_pattern, listed_or, sliding_rotated


def by_window(keys: ConfigKeys, num_layers: int) -> tuple[LayerKind, ...]:
    """By the pattern, if there is a window."""
    has_window = keys.optional_count("sliding_window") is not None
    return (full_by_pattern if has_window else all_full)(keys, num_layers)


SPEC = FamilySpec(
    architecture="Exaone4ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    layer_kinds=listed_or(by_window),
    rotated=sliding_rotated,
    norms=Norms(
        input=None,
        post_attention="post_attention_layernorm",
        pre_mlp=None,
        post_mlp="post_feedforward_layernorm",
        heads=HeadNorms.EACH,
    ),
    attention_bias=False,
    output_bias=False,
    mlp=gated(),
)
