"""Granite MoE with windows: Granite with windows, with the mixtures of experts of Granite MoE."""

from quire.config.families import granite, granite_swa, granitemoeshared
from quire.config.family_spec import FamilySpec, experts
from quire.config.layers.experts import granite_shared_experts
from quire.config.layers.layer_kinds import first_full_of, listed_or

SPEC = FamilySpec(
    architecture="GraniteMoeSWAForCausalLM",
    defaults={**granitemoeshared.SPEC.defaults, "sliding_window": 128},
    derived=granite_swa.derived,
    layer_kinds=listed_or(first_full_of(4)),
    rotated=granite_swa.rotated,
    has_sinks=True,
    mlp=experts(granite_shared_experts),
    scales=granite.scales,
    names=granitemoeshared.SPEC.names,
)
