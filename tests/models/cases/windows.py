"""Dense families some of whose layers see a window, or do not rotate."""

from __future__ import annotations

from typing import Any

from tests.models.cases.rotations import rope

WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n": ("gemma3n_text", {}),
    "gemma3n-odd": (
        "gemma3n_text",
        {
            "hidden_size": 60,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_hidden_layers": 4,
            "layer_types": None,
            "intermediate_size": 50,
            "activation_sparsity_pattern": None,
            "num_kv_shared_layers": 0,
            "altup_num_inputs": 4,
            "altup_active_idx": 2,
            "altup_correct_scale": False,
            "attention_bias": True,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
            "vocab_size_per_layer_input": 288,
        },
    ),
    "gemma3n-mostly-shared": (
        "gemma3n_text",
        {
            "num_kv_shared_layers": 3,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "intermediate_size": 96,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 2e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
        },
    ),
    "gemma4": ("gemma4_text", {}),
    "gemma4-keys-are-values": (
        "gemma4_text",
        {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "tie_word_embeddings": False,
            "final_logit_softcapping": None,
        },
    ),
    "gemma4-experts": (
        "gemma4_text",
        {
            "num_hidden_layers": 5,
            "layer_types": None,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
            "attention_k_eq_v": True,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "gemma4-odd": (
        "gemma4_text",
        {
            "hidden_size": 60,
            "intermediate_size": 50,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_hidden_layers": 7,
            "layer_types": None,
            "num_kv_shared_layers": 0,
            "attention_k_eq_v": True,
            "attention_bias": True,
            "head_dim": 20,
            "global_head_dim": 12,
            "sliding_window": 9,
            "vocab_size_per_layer_input": 330,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 2e4},
                "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e3},
            },
        },
    ),
    "gemma4-everything": (
        "gemma4_text",
        {
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
            "attention_k_eq_v": True,
            "num_key_value_heads": 1,
            "num_global_key_value_heads": 4,
            "num_kv_shared_layers": 2,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4-unified": ("gemma4_unified_text", {}),
    "gemma4-unified-shared": (
        "gemma4_unified_text",
        {
            "num_hidden_layers": 6,
            "layer_types": ["full_attention", "sliding_attention"] * 3,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "attention_k_eq_v": False,
            "tie_word_embeddings": False,
        },
    ),
    "gemma2": ("gemma2", {}),
    "gemma2-no-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-biases": ("gemma2", {"attention_bias": True, "num_key_value_heads": 4}),
    "modernbert-decoder": ("modernbert-decoder", {}),
    "modernbert-decoder-biases": (
        "modernbert-decoder",
        {
            "hidden_size": 60,
            "num_attention_heads": 3,
            "local_attention": 13,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            "classifier_activation": "relu",
            "hidden_activation": "silu",
            "decoder_bias": False,
            "tie_word_embeddings": False,
            "norm_eps": 1e-3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
            },
        },
    ),
    "gemma3": ("gemma3_text", {}),
    "gemma3-six": ("gemma3_text", {"num_hidden_layers": 7, "sliding_window_pattern": 6}),
    "gemma3-linear": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
            }
        },
    ),
    "gemma3-layer-types": (
        "gemma3_text",
        {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "gemma3-caps": ("gemma3_text", {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 0.5}),
    "gemma3-biases": ("gemma3_text", {"attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": False}),
    "gemma3-wide-window": ("gemma3_text", {"sliding_window": 4096, "head_dim": 32}),
    "ministral": ("ministral", {}),
    "ministral-layer-types": (
        "ministral",
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "head_dim": 24},
    ),
    "ministral3": ("ministral3", {}),
    "ministral3-window": (
        "ministral3",
        {
            "sliding_window": 20,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e5,
                "original_max_position_embeddings": 7,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "smollm3": ("smollm3", {}),
    "smollm3-listed": ("smollm3", {"no_rope_layers": [0, 1, 0], "attention_bias": True, "mlp_bias": True}),
    "smollm3-windows": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 20, "tie_word_embeddings": False, "num_key_value_heads": 4},
    ),
    "smollm3-listed-windows": (
        "smollm3",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 20,
            "use_sliding_window": False,
        },
    ),
    "olmo3": ("olmo3", {}),
    "olmo3-unlisted": ("olmo3", {"layer_types": None}),
    "olmo3-yarn": (
        "olmo3",
        {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "rope_theta": 5e5,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "num_key_value_heads": 4,
            "attention_bias": True,
        },
    ),
    "olmo3-yarn-truncate-unread": (
        "olmo3",
        {
            "rope_parameters": {
                kind: {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "rope_theta": 1e4,
                    "truncate": False,
                }
                for kind in ("full_attention", "sliding_attention")
            }
        },
    ),
    "cohere2": ("cohere2", {}),
    "cohere2-listed": (
        "cohere2",
        {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
        },
    ),
    "exaone4": ("exaone4", {}),
    "exaone4-no-window": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 4, "tie_word_embeddings": True},
    ),
    "cwm": ("cwm", {}),
    "cwm-unlisted": ("cwm", {"num_hidden_layers": 5, "layer_types": None, "num_key_value_heads": 4}),
    "cwm-listed": (
        "cwm",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_bias": True,
            "tie_word_embeddings": True,
            **rope("default"),
        },
    ),
    "vaultgemma": ("vaultgemma", {}),
    "vaultgemma-listed": (
        "vaultgemma",
        {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attention_bias": True,
            "tie_word_embeddings": False,
            "attn_logit_softcapping": None,
            "num_key_value_heads": 4,
        },
    ),
    "granite-swa": ("granite_swa", {}),
    "granite-swa-unlisted": ("granite_swa", {"num_hidden_layers": 5, "layer_types": None, "num_key_value_heads": 1}),
    "granite-swa-bases": (
        "granite_swa",
        {
            "num_hidden_layers": 3,
            "layer_rope_theta": [5e4, 0, 5e4],
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "num_attention_heads": 8,
        },
    ),
    "gpt-neo": ("gpt_neo", {}),
    "gpt-neo-odd-layers": (
        "gpt_neo",
        {"num_layers": 3, "attention_types": [[["global", "local"], 1], [["global"], 1]], "window_size": 5},
    ),
    "gpt-neo-untied": (
        "gpt_neo",
        {
            "num_layers": 4,
            "attention_types": [[["global", "local"], 2]],
            "attention_layers": ["local", "local", "global", "local"],
            "window_size": 40,
            "intermediate_size": 80,
            "tie_word_embeddings": False,
            "activation_function": "quick_gelu",
        },
    ),
}
