"""Gemma 4, the text models of unified checkpoints: Gemma 4 without embeddings of each layer and experts."""

from dataclasses import replace

from quire.config.families.gemma4_text import DEFAULTS
from quire.config.families.gemma4_text import SPEC as GEMMA4

SPEC = replace(
    GEMMA4,
    architecture="Gemma4UnifiedForCausalLM",
    defaults={
        **{key: value for key, value in DEFAULTS.items() if not key.endswith("_per_layer_input")},
        "max_position_embeddings": 262_144,
        "sliding_window": 1024,
    },
    layer_embeddings=lambda keys: None,
)
