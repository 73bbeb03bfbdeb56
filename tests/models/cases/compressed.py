"""Families whose layers attend over the last tokens and entries that stand for earlier ones."""

from __future__ import annotations

from typing import Any

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"

COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v4": ("deepseek_v4", {}),
    "deepseek-v4-odd-sizes": (
        "deepseek_v4",
        {
            "hidden_size": 60,
            "num_attention_heads": 3,
            "head_dim": 21,
            "partial_rotary_factor": 0.3,
            "q_lora_rank": 19,
            "o_groups": 3,
            "o_lora_rank": 7,
            "sliding_window": 5,
            "layer_types": [HEAVY, SPARSE, SPARSE, SLIDING],
            "compress_rates": {SPARSE: 3, HEAVY: 5},
            "mlp_layer_types": ["moe", "hash_moe", "moe", "hash_moe"],
            "index_n_heads": 17,
            "index_head_dim": 11,
            "index_topk": 4,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 3,
            "n_routed_experts": 7,
            "num_experts_per_tok": 1,
            "routed_scaling_factor": 0.7,
            "swiglu_limit": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek-v4-yarn": (
        "deepseek_v4",
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 4,
                "original_max_position_embeddings": 64,
                "beta_fast": 32,
                "beta_slow": 1,
            },
            "compress_rope_theta": 5000.0,
            "rope_theta": 500.0,
            "scoring_func": "sigmoid",
            "hc_mult": 1,
            "hc_eps": 1e-3,
            "index_topk": 1,
            "sliding_window": 100,
        },
    ),
    "deepseek-v4-defaults": (
        "deepseek_v4",
        {
            "layer_types": None,
            "compress_rates": None,
            "mlp_layer_types": None,
            "partial_rotary_factor": None,
            "head_dim": 64,
            "sliding_window": 128,
            "index_topk": 512,
            "o_groups": 1,
        },
    ),
    "deepseek-v4-nested-rotations": (
        "deepseek_v4",
        {
            "rope_parameters": {
                "main": {"rope_type": "default", "rope_theta": 300.0},
                "compress": {"rope_type": "linear", "factor": 2.0, "rope_theta": 900.0, "partial_rotary_factor": 0.5},
            },
            "partial_rotary_factor": 0.125,
            "layer_types": [SLIDING, SLIDING, HEAVY, SPARSE],
            "compress_rates": {SPARSE: 1, HEAVY: 2},
            "sliding_window": 1,
        },
    ),
    "deepseek-v4-last-tokens-alone": ("deepseek_v4", {"layer_types": [SLIDING] * 4, "num_attention_heads": 1}),
}
"""One row per way in which a checkpoint of a family can differ."""
