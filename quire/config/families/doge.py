"""Doge: Qwen3, with scores that gain a number from each key's value, and factors of the residual's features."""

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, HeadNorms, Norms, Scales
from quire.config.layers.layer_kinds import all_sliding
from quire.config.layers.rope import rotation_of


def _derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """Contexts are no longer than attention sees all of: behind that, tokens are masked by what their values say."""
    kept, longest = keys.count("keep_window_size"), keys.count("max_position_embeddings")
    _, rotation = rotation_of(keys)
    if kept < longest and isinstance(rotation, Mapping) and rotation.get("rope_type", "default") != "default":
        problem = f"must be max_position_embeddings ({longest}) or more where the rotation is stretched"
        keys.refuse("keep_window_size", kept, problem)
    return {"max_position_embeddings": min(kept, longest)}


SPEC = FamilySpec(
    architecture="DogeForCausalLM",
    model_class="quire.models.variants.doge:DogeForCausalLM",
    defaults={
        "vocab_size": 32_768,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 32,
        "num_attention_heads": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "sliding_window": None,
        "keep_window_size": 2048,
    },
    derived=_derived,
    refused={
        "is_moe": "does not have its experts: in transformers their choice for a token depends on those behind it. "
        "Use a checkpoint without."
    },
    layer_kinds=all_sliding,
    biases_keys=True,
    norms=Norms(heads=HeadNorms.EACH),
    scales=lambda keys: Scales(of_features=("input_residual", "post_attention_residual")),
)
