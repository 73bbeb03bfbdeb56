"""Ministral: Mistral, whose windows may be on some layers only."""

from quire.config.families.mistral import DEFAULTS
from quire.config.family_spec import FamilySpec, gated
from quire.config.layers.layer_kinds import all_sliding, listed_or

SPEC = FamilySpec(
    architecture="MinistralForCausalLM",
    defaults=DEFAULTS,
    layer_kinds=listed_or(all_sliding),
    attention_bias=False,
    output_bias=False,
    mlp=gated(),
)
