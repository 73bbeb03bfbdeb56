"""One row per way in which a checkpoint of a family can differ."""

from __future__ import annotations

from typing import Any

HALF_HEAD = 8
"""Rotated pairs of a head in the small Llama (16 elements)."""
LONG_FACTORS = [1.0 + index / 2 for index in range(HALF_HEAD)]
SHORT_FACTORS = [1.0 + index / 10 for index in range(HALF_HEAD)]


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0} | parameters}


# Not a case: transformers chooses factors by the batch, so it needs tests of its own.
LONGROPE = rope("longrope", short_factor=SHORT_FACTORS, long_factor=LONG_FACTORS, original_max_position_embeddings=32)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
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
    "gemma2": ("gemma2", {}),
    "gemma2-no-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-biases": ("gemma2", {"attention_bias": True, "num_key_value_heads": 4}),
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
    "seed-oss": ("seed_oss", {}),
    "seed-oss-biases": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "seed-oss-plain": ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "tie_word_embeddings": True}),
    "ernie4.5": ("ernie4_5", {}),
    "ernie4.5-biases": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False, "head_dim": 24}),
    "helium": ("helium", {}),
    "helium-biases": ("helium", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "ministral": ("ministral", {}),
    "ministral-layer-types": (
        "ministral",
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "head_dim": 24},
    ),
    "gemma": ("gemma", {}),
    "gemma-mqa": ("gemma", {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": False}),
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
    "glm": ("glm", {}),
    "glm-plain": ("glm", {"attention_bias": False, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "glm4": ("glm4", {}),
    "glm4-plain": ("glm4", {"attention_bias": False, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "mixtral": ("mixtral", {}),
    "mixtral-odd": (
        "mixtral",
        {
            "hidden_size": 60,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 22,
            "intermediate_size": 50,
            "num_experts_per_tok": 3,
            "sliding_window": 20,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral-one": ("mixtral", {"num_local_experts": 33, "num_experts_per_tok": 1}),
    "olmoe": ("olmoe", {}),
    "olmoe-odd-heads": (
        "olmoe",
        {
            "hidden_size": 72,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "norm_topk_prob": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoe": ("granitemoe", {}),
    "granitemoe-tied": (
        "granitemoe",
        {
            "num_experts_per_tok": 6,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "residual_multiplier": 1.0,
            "intermediate_size": 50,
        },
    ),
    "ernie4.5-moe": ("ernie4_5_moe", {}),
    "ernie4.5-moe-biases": (
        "ernie4_5_moe",
        {
            "use_bias": True,
            "tie_word_embeddings": False,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 1,
            "num_attention_heads": 2,
        },
    ),
    "ernie4.5-moe-none-shared": (
        "ernie4_5_moe",
        {"moe_num_shared_experts": 0, "moe_layer_interval": 2, "num_hidden_layers": 4},
    ),
    "qwen2-moe": ("qwen2_moe", {}),
    "qwen2-moe-all": (
        "qwen2_moe",
        {
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 6,
            "qkv_bias": False,
            "tie_word_embeddings": True,
            "shared_expert_intermediate_size": 50,
        },
    ),
    "qwen2-moe-windows": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2, "mlp_only_layers": [1]},
    ),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen3-moe-plain": (
        "qwen3_moe",
        {
            "mlp_only_layers": [],
            "norm_topk_prob": False,
            "num_experts_per_tok": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        },
    ),
    "qwen3-moe-windows": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 20, "decoder_sparse_step": 3, "num_experts": 40},
    ),
    "olmo": ("olmo", {}),
    "olmo-tied": ("olmo", {"tie_word_embeddings": True, "num_key_value_heads": 4, "attention_bias": True}),
    "olmo2": ("olmo2", {}),
    "olmo2-odd-heads": (
        "olmo2",
        {"hidden_size": 72, "num_attention_heads": 3, "num_key_value_heads": 3, "tie_word_embeddings": True},
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
    "granite": ("granite", {}),
    "granite-biases": (
        "granite",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "residual_multiplier": 1.0},
    ),
    "internlm3": ("internlm3", {}),
    "internlm3-biases": ("internlm3", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2-plain": (
        "starcoder2",
        {"use_bias": False, "sliding_window": None, "tie_word_embeddings": False, "num_key_value_heads": 1},
    ),
    "stablelm": ("stablelm", {}),
    "stablelm-parallel": (
        "stablelm",
        {
            "use_parallel_residual": True,
            "use_qkv_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "cohere": ("cohere", {}),
    "cohere-untied": ("cohere", {"tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 4}),
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
    "phi": ("phi", {}),
    "phi-odd-heads": (
        "phi",
        {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "gpt-neox": ("gpt_neox", {}),
    "gpt-neox-sequential": (
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "hidden_size": 96,
            "num_attention_heads": 3,
        },
    ),
    "gptj": ("gptj", {}),
    "gptj-tied": ("gptj", {"n_inner": 80, "rotary_dim": 12, "tie_word_embeddings": True}),
    "gpt-bigcode": ("gpt_bigcode", {}),
    "gpt-bigcode-heads": ("gpt_bigcode", {"multi_query": False, "tie_word_embeddings": False, "n_inner": 80}),
    "falcon": ("falcon", {}),
    "falcon-7b": (
        "falcon",
        {"new_decoder_architecture": False, "multi_query": True, "num_kv_heads": None, "tie_word_embeddings": False},
    ),
    "falcon-one-norm": ("falcon", {"num_ln_in_parallel_attn": 1, "bias": True, "num_kv_heads": 4}),
    "falcon-sequential": (
        "falcon",
        {
            "new_decoder_architecture": False,
            "multi_query": False,
            "num_kv_heads": None,
            "parallel_attn": False,
            "bias": True,
        },
    ),
    "opt": ("opt", {}),
    "opt-norm-after": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-plain": ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"}),
    "opt-untied": ("opt", {"tie_word_embeddings": False}),
    "gpt2": ("gpt2", {}),
    "gpt2-inner": ("gpt2", {"n_inner": 80, "activation_function": "relu"}),
    "gpt2-scales": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False}),
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
