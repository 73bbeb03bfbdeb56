"""DeepSeek V3.2: V3, with an indexer in each layer that chooses the tokens which attention sees."""

from quire.config.families.deepseek_v3 import SPEC as DEEPSEEK_V3
from quire.config.family_spec import FamilySpec, experts
from quire.config.layers.experts import deepseek_v3_experts
from quire.config.layers.latent import indexed_attention, indexed_heads

DEFAULTS = {
    **DEEPSEEK_V3.defaults,
    "max_position_embeddings": 163_840,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
}
"""Of GLM-5, too."""

SPEC = FamilySpec(
    architecture="DeepseekV32ForCausalLM",
    defaults=DEFAULTS,
    derived=indexed_heads,
    latent=indexed_attention(interleaved_index=False),
    mlp=experts(deepseek_v3_experts),
)
