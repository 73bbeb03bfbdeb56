"""Families whose layers attend over latents."""

from __future__ import annotations

from typing import Any

from tests.models.cases.rotations import rope

LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral4": ("mistral4", {}),
    "mistral4-groups": (
        "mistral4",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.0,
            "first_k_dense_replace": 1,
            "rope_interleave": False,
            "attention_bias": True,
            "q_lora_rank": None,
            "tie_word_embeddings": True,
        },
    ),
    "mistral4-default-rope": ("mistral4", {"rope_parameters": None, "max_position_embeddings": 16_384}),
    "longcat-flash": ("longcat_flash", {}),
    "longcat-flash-odd-heads": (
        "longcat_flash",
        {
            "hidden_size": 60,
            "num_layers": 1,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "zero_expert_num": 8,
            "moe_topk": 4,
            "attention_bias": True,
            "tie_word_embeddings": True,
            **rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.7),
        },
    ),
    "longcat-flash-experts-alone": ("longcat_flash", {"zero_expert_num": 0, "expert_ffn_hidden_size": 64}),
    "deepseek-v2": ("deepseek_v2", {}),
    "deepseek-v2-lite": ("deepseek_v2", {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True}),
    "deepseek-v2-groups": (
        "deepseek_v2",
        {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
            "first_k_dense_replace": 0,
        },
    ),
    "deepseek-v2-dense": ("deepseek_v2", {"first_k_dense_replace": 3, "n_shared_experts": 1}),
    "deepseek-v2-odd-heads": (
        "deepseek_v2",
        {
            "hidden_size": 60,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "kv_lora_rank": 20,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 6,
            "v_head_dim": 7,
            "rms_norm_eps": 1e-3,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek-v2-yarn": (
        "deepseek_v2",
        rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.9),
    ),
    "deepseek-v3": ("deepseek_v3", {}),
    "deepseek-v3-halves": (
        "deepseek_v3",
        {"rope_interleave": False, "q_lora_rank": None, "v_head_dim": 16, "attention_bias": True},
    ),
    "deepseek-v3-share-unread": ("deepseek_v3", rope("default", partial_rotary_factor=0.5)),
    "deepseek-v3-yarn": (
        "deepseek_v3",
        {
            **rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0),
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "kv_lora_rank": 15,
            "qk_nope_head_dim": 5,
        },
    ),
    "glm4-moe-lite": ("glm4_moe_lite", {}),
    "glm4-moe-lite-listed": (
        "glm4_moe_lite",
        {
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_interleave": False,
            "attention_bias": True,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "minicpm3": ("minicpm3", {}),
    "minicpm3-plain": (
        "minicpm3",
        {
            "q_lora_rank": None,
            "v_head_dim": None,
            "scale_depth": None,
            "dim_model_base": None,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "minicpm3-linear": ("minicpm3", rope("linear", factor=4.0, mscale_all_dim=0.8)),
    "youtu": ("youtu", {}),
    "youtu-halves": (
        "youtu",
        {
            "rope_interleave": False,
            "q_lora_rank": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "hidden_size": 66,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
        },
    ),
}
