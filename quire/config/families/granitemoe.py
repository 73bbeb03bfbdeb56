"""Granite 3 MoE: Granite, with a mixture of experts in every layer."""

from quire.config.families import granite
from quire.config.family_spec import FamilySpec, WeightNames, experts
from quire.config.layers.experts import granite_experts

SPEC = FamilySpec(
    architecture="GraniteMoeForCausalLM",
    defaults={
        **granite.SPEC.defaults,
        "intermediate_size": 11_008,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    mlp=experts(granite_experts),
    scales=granite.scales,
    names=WeightNames(mlp="block_sparse_moe"),
)
