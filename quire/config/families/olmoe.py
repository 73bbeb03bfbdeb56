"""OLMoE: Llama, with a mixture of experts in every layer, and one norm over all heads of queries, and of keys."""

from quire.config.families import olmo
from quire.config.family_spec import FamilySpec, HeadNorms, Norms, experts
from quire.config.layers.experts import olmoe_experts

SPEC = FamilySpec(
    architecture="OlmoeForCausalLM",
    defaults={
        **olmo.DEFAULTS,
        **olmo.CLIPPED,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "intermediate_size": 2048,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    norms=Norms(heads=HeadNorms.WHOLE),
    mlp=experts(olmoe_experts),
)
