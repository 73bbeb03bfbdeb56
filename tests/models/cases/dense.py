"""Dense families that are Llama but for sizes, scales, biases and rotations."""

from __future__ import annotations

from typing import Any

from tests.models.cases.rotations import rope

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "iquestcoder": ("iquestcoder", {}),
    "iquestcoder-biases": (
        "iquestcoder",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "hidden_size": 60,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            **rope("default", rope_theta=5e5),
        },
    ),
    "llama": ("llama", {}),
    "llama-mha-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-size": ("llama", {"head_dim": 24}),
    "llama-odd-heads": (
        "llama",
        {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 22},
    ),
    "llama-theta": ("llama", rope("default", rope_theta=500_000.0)),
    "llama-share-unread": ("llama", rope("default", partial_rotary_factor=0.5)),
    "llama-linear": ("llama", rope("linear", factor=4.0)),
    "llama-dynamic": ("llama", rope("dynamic", factor=4.0)),
    "llama-llama3": (
        "llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama-yarn": ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama-yarn-scales": (
        "llama",
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=0.7,
            mscale_all_dim=0.9,
            truncate=False,
        ),
    ),
    "llama-yarn-attention": (
        "llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.3),
    ),
    "mistral": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "mistral-wide-window": ("mistral", {"sliding_window": 100}),
    "qwen2": ("qwen2", {}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen2-yarn": ("qwen2", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 20}),
    "phi3-partial": ("phi3", rope("default", partial_rotary_factor=0.5)),
    "seed-oss": ("seed_oss", {}),
    "seed-oss-biases": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "seed-oss-plain": ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "tie_word_embeddings": True}),
    "ernie4.5": ("ernie4_5", {}),
    "ernie4.5-biases": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False, "head_dim": 24}),
    "helium": ("helium", {}),
    "helium-biases": ("helium", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "gemma": ("gemma", {}),
    "gemma-mqa": ("gemma", {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": False}),
    "glm": ("glm", {}),
    "glm-odd-share": ("glm", {"head_dim": 10, **rope("linear", factor=2.0, partial_rotary_factor=0.5)}),
    "glm-plain": ("glm", {"attention_bias": False, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "glm4": ("glm4", {}),
    "glm4-plain": ("glm4", {"attention_bias": False, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "olmo": ("olmo", {}),
    "olmo-tied": ("olmo", {"tie_word_embeddings": True, "num_key_value_heads": 4, "attention_bias": True}),
    "olmo2": ("olmo2", {}),
    "olmo2-odd-heads": (
        "olmo2",
        {"hidden_size": 72, "num_attention_heads": 3, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "granite": ("granite", {}),
    "granite-biases": (
        "granite",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "residual_multiplier": 1.0},
    ),
    "internlm3": ("internlm3", {}),
    "internlm3-biases": ("internlm3", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "hunyuan-alpha": (
        "hunyuan_v1_dense",
        {**rope("dynamic", alpha=50.0, factor=1.0), "attention_bias": True, "tie_word_embeddings": True},
    ),
    "hunyuan-yarn": (
        "hunyuan_v1_dense",
        {
            **rope("yarn", factor=4.0, original_max_position_embeddings=64),
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        },
    ),
    "hunyuan-yarn-epsilon": (
        "hunyuan_v1_dense",
        {**rope("yarn", factor=40.0, original_max_position_embeddings=64), "rms_norm_eps": 1e-2},
    ),
    "nanochat": ("nanochat", {}),
    "nanochat-tied": (
        "nanochat",
        {
            "tie_word_embeddings": True,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "num_key_value_heads": 4,
            **rope("linear", factor=2.0),
        },
    ),
    "hyperclovax": ("hyperclovax", {}),
    "hyperclovax-plain": (
        "hyperclovax",
        {
            "use_post_norm": False,
            "attention_multiplier": None,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "hyperclovax-no-residual-scale": ("hyperclovax", {"residual_multiplier": 1.0, "num_key_value_heads": 1}),
    "olmo-clipped": ("olmo", {"clip_qkv": 0.4}),
    "olmo-clipped-biases": ("olmo", {"clip_qkv": 0.7, "attention_bias": True, "num_key_value_heads": 1}),
}
