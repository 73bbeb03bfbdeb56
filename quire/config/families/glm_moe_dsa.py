"""GLM-5: DeepSeek V3.2 without groups of experts; an indexer rotates neighbours, too, and may serve several layers."""

from quire.config.families.deepseek_v32 import DEFAULTS
from quire.config.family_spec import FamilySpec, experts
from quire.config.layers.experts import deepseek_v3_experts
from quire.config.layers.latent import indexed_attention, indexed_heads, shared_choices

SPEC = FamilySpec(
    architecture="GlmMoeDsaForCausalLM",
    defaults={
        **DEFAULTS,
        "intermediate_size": 12_288,
        "max_position_embeddings": 202_752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
    },
    derived=indexed_heads,
    latent=indexed_attention(interleaved_index=True),
    latent_layers=shared_choices,
    mlp=experts(deepseek_v3_experts),
)
