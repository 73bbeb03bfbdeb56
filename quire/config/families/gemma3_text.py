"""Gemma 3, the text-only models: Gemma 2, with a norm on each query and key head; layers with a window have a rotary
base of their own."""

from quire.config.families.gemma import CAUSAL_ONLY, scales
from quire.config.families.gemma2 import DEFAULTS, both_sides
from quire.config.family_spec import FamilySpec, HeadNorms
from quire.config.layers.layer_kinds import full_by_pattern, listed_or

SPEC = FamilySpec(
    architecture="Gemma3ForCausalLM",
    spellings={"hidden_act": "hidden_activation"},
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
    },
    ignored=("attn_logit_softcapping",),
    refused=CAUSAL_ONLY,
    layer_kinds=listed_or(full_by_pattern),
    sliding_theta="rope_local_base_freq",
    norms=both_sides(HeadNorms.EACH),
    scales=scales,
)
