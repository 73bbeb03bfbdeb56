"""Qwen3: Llama, with a norm on each query and key head, and windows on some layers."""

from quire.config.families.qwen2 import DEFAULTS
from quire.config.family_spec import FamilySpec, HeadNorms, Norms, gated
from quire.config.layers.layer_kinds import full_below, listed_or

SPEC = FamilySpec(
    architecture="Qwen3ForCausalLM",
    defaults={**DEFAULTS, "head_dim": 128},
    layer_kinds=listed_or(full_below),
    window_flag="use_sliding_window",
    norms=Norms(heads=HeadNorms.EACH),
    mlp=gated("mlp_bias"),
)
