"""MiniCPM3: the latent attention of DeepSeek V2, rotated as Llama's, with factors as Granite has them."""

import math
from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, Scales, gated
from quire.config.layers.latent import latent_attention, latent_heads


def scales(keys: ConfigKeys) -> Scales:
    """Null stands for no factor."""
    num_layers, size = keys.count("num_hidden_layers"), keys.count("hidden_size")
    depth, base = keys.optional_positive("scale_depth"), keys.optional_positive("dim_model_base")
    return Scales(
        embedding=keys.positive("scale_emb"),
        residual=1.0 if depth is None else depth / math.sqrt(num_layers),
        logits=1.0 if base is None else base / size,
    )


def derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """Values are as wide as a share of the hidden state, unless the config says otherwise."""
    share = keys.count("hidden_size") // keys.count("num_attention_heads")
    return {**latent_heads(keys), "v_head_dim": keys.count("v_head_dim", default=share)}


SPEC = FamilySpec(
    architecture="MiniCPM3ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "intermediate_size": 6400,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
        "q_lora_rank": 768,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    derived=derived,
    latent=latent_attention(interleaved=False),
    mlp=gated("mlp_bias"),
    scales=scales,
)
