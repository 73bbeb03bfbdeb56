"""Youtu-LLM: the latent attention of DeepSeek V3, with gated MLPs in all layers."""

from quire.config.families.deepseek_v2 import DEFAULTS
from quire.config.family_spec import FamilySpec, gated
from quire.config.layers.latent import latent_attention, latent_heads

SPEC = FamilySpec(
    architecture="YoutuForCausalLM",
    defaults={
        **DEFAULTS,
        "intermediate_size": 6144,
        "max_position_embeddings": 131_072,
        "rope_interleave": True,
        "tie_word_embeddings": True,
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
    },
    derived=latent_heads,
    latent=latent_attention(interleaved="rope_interleave"),
    mlp=gated(),
)
