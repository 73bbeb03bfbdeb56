"""DeepSeek V3: latent attention; rotates neighbours, unless `rope_interleave` is false."""

from quire.config.experts import dense_layers
from quire.config.families.deepseek_v2 import DEFAULTS
from quire.config.family_spec import FamilySpec, experts
from quire.config.latent import latent_attention, latent_heads

SPEC = FamilySpec(
    architecture="DeepseekV3ForCausalLM",
    defaults={
        **DEFAULTS,
        "intermediate_size": 18_432,
        "max_position_embeddings": 4096,
        "rope_interleave": True,
        "first_k_dense_replace": 3,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    derived=latent_heads,
    latent=latent_attention(interleaved="rope_interleave"),
    mlp=experts(dense_layers),
)
