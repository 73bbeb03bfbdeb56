"""VaultGemma: Gemma 2, without norms behind attention and MLP."""

from dataclasses import replace

from quire.config.families import gemma2
from quire.config.family_spec import FamilySpec, Norms

SPEC: FamilySpec = replace(
    gemma2.SPEC,
    architecture="VaultGemmaForCausalLM",
    refused={},
    norms=Norms(offset=1.0, pre_mlp="pre_feedforward_layernorm"),
)
