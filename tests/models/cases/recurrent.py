"""Families with recurrent layers."""

from __future__ import annotations

from typing import Any

RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", {}),
    "mamba-odd": (
        "mamba",
        {
            "hidden_size": 40,
            "state_size": 5,
            "conv_kernel": 3,
            "time_step_rank": 7,
            "use_bias": True,
            "use_conv_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "falcon-mamba": ("falcon_mamba", {}),
    "falcon-mamba-untied": ("falcon_mamba", {"tie_word_embeddings": False, "expand": 3, "mixer_rms_eps": 1e-3}),
    "mamba2": ("mamba2", {}),
    "mamba2-odd": (
        "mamba2",
        {
            "hidden_size": 60,
            "num_heads": 3,
            "head_dim": 40,
            "n_groups": 1,
            "state_size": 13,
            "conv_kernel": 2,
            "use_bias": True,
            "use_conv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "bamba": ("bamba", {}),
    "bamba-odd": (
        "bamba",
        {
            "attn_layer_indices": [0, 3],
            "mamba_n_heads": 4,
            "mamba_d_head": "auto",
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "bamba-first": ("bamba", {"attn_layer_indices": [0], "mamba_d_conv": 2, "num_key_value_heads": 1}),
    "granitemoehybrid": ("granitemoehybrid", {}),
    "granitemoehybrid-dense": (
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
            "layer_types": ["attention", "mamba", "attention", "mamba"],
        },
    ),
    "granitemoehybrid-attention": (
        "granitemoehybrid",
        {"layer_types": ["attention"] * 4, "attention_bias": True, "residual_multiplier": 1.0},
    ),
    "jamba": ("jamba", {}),
    "jamba-odd": (
        "jamba",
        {
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_dt_rank": 5,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2": ("lfm2", {}),
    "lfm2-biases": (
        "lfm2",
        {
            "conv_bias": True,
            "conv_L_cache": 4,
            "layer_types": None,
            "full_attn_idxs": [1, 3],
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
            "num_key_value_heads": 1,
        },
    ),
}
