"""Granite MoE with a shared expert: Granite 3 MoE, and an expert that every token passes."""

from quire.config.families import granite, granitemoe
from quire.config.family_spec import FamilySpec, WeightNames, experts
from quire.config.layers.experts import granite_shared_experts

SPEC = FamilySpec(
    architecture="GraniteMoeSharedForCausalLM",
    defaults={**granitemoe.SPEC.defaults, "shared_intermediate_size": 0},
    mlp=experts(granite_shared_experts),
    scales=granite.scales,
    names=WeightNames(mlp="block_sparse_moe", gate_up=("input_linear",), down="output_linear"),
)
