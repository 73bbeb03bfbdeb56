"""Dense families with an MLP, norms, positions or weights of another kind than those of Llama."""

from __future__ import annotations

from typing import Any

from tests.models.cases.rotations import rope

UNLIKE_LLAMA: dict[str, tuple[str, dict[str, Any]]] = {
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
    "cohere-compass": ("cohere_compass_text", {}),
    "cohere-compass-untied": (
        "cohere_compass_text",
        {
            "hidden_size": 60,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "logit_scale": None,
            "layer_types": None,
            "rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        },
    ),
    "dory": ("dory", {}),
    "dory-odd-heads": (
        "dory",
        {
            "hidden_size": 60,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            "layer_types": None,
            "n_input_layers": 0,
            "n_recurrent_layers": None,
            "n_output_layers": 3,
            "n_recurrent_loops": 2,
        },
    ),
    "dory-one-loop": (
        "dory",
        {
            "n_recurrent_loops": 1,
            "recurrent_kv_cache_mode": "last_loop",
            "sliding_window": 9,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
            },
        },
    ),
    "doge": ("doge", {}),
    "doge-odd-heads": (
        "doge",
        {
            "hidden_size": 60,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
            "sliding_window": 9,
            "rms_norm_eps": 1e-3,
        },
    ),
    "bitnet": ("bitnet", {}),
    "bitnet-odd-heads": (
        "bitnet",
        {
            "hidden_size": 60,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-3,
        },
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
    "gpt-neox-japanese": ("gpt_neox_japanese", {}),
    "gpt-neox-japanese-untied": (
        "gpt_neox_japanese",
        {
            "tie_word_embeddings": False,
            "hidden_size": 96,
            "num_attention_heads": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.25},
        },
    ),
    "gptj": ("gptj", {}),
    "gptj-tied": ("gptj", {"n_inner": 80, "rotary_dim": 12, "tie_word_embeddings": True}),
    "codegen": ("codegen", {}),
    "codegen-tied": ("codegen", {"n_head": 4, "n_inner": 80, "rotary_dim": 12, "tie_word_embeddings": True}),
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
    "arcee": ("arcee", {}),
    "arcee-biases": (
        "arcee",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "nemotron": ("nemotron", {}),
    "nemotron-biases": (
        "nemotron",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 24,
            "intermediate_size": 50,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.25},
        },
    ),
    "jais2": ("jais2", {}),
    "jais2-plain": (
        "jais2",
        {
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "hidden_size": 60,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "hidden_act": "gelu",
        },
    ),
    "apertus": ("apertus", {}),
    "apertus-biases": (
        "apertus",
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "intermediate_size": 50,
            "num_key_value_heads": 4,
            **rope("default", rope_theta=1e5),
        },
    ),
    "apertus1p5": ("apertus1p5_text", {}),
    "apertus1p5-pruned": (
        "apertus1p5_text",
        {
            "vocab_size": 400,
            "output_vocab_size": 317,
            "attention_bias": True,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 20,
        },
    ),
    "apertus1p5-tied": ("apertus1p5_text", {"tie_word_embeddings": True, **rope("default")}),
    "apertus-silu": ("apertus", {"hidden_act": "silu", "num_key_value_heads": 1}),
    "persimmon": ("persimmon", {}),
    "persimmon-no-head-norms": (
        "persimmon",
        {"qk_layernorm": False, "tie_word_embeddings": True, "hidden_size": 72, "num_attention_heads": 3},
    ),
    "persimmon-odd-heads": (
        "persimmon",
        {
            "hidden_size": 72,
            "num_attention_heads": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    ),
    "phi-head-norms": ("phi", {"qk_layernorm": True, "num_key_value_heads": 1}),
    "phi-head-norms-odd": (
        "phi",
        {"qk_layernorm": True, "hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 3},
    ),
    "stablelm-head-norms": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "stablelm-head-norms-odd": (
        "stablelm",
        {"qk_layernorm": True, "hidden_size": 72, "num_attention_heads": 3, "num_key_value_heads": 3},
    ),
    "cohere-head-norms": ("cohere", {"use_qk_norm": True}),
    "cohere-head-norms-odd": (
        "cohere",
        {"use_qk_norm": True, "hidden_size": 72, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "biogpt": ("biogpt", {}),
    "biogpt-unscaled": (
        "biogpt",
        {"scale_embedding": False, "tie_word_embeddings": False, "hidden_size": 72, "num_attention_heads": 3},
    ),
    "bloom": ("bloom", {}),
    "bloom-odd-heads": ("bloom", {"hidden_size": 84, "n_head": 7, "tie_word_embeddings": False}),
    "mpt": ("mpt", {}),
    "mpt-odd-heads": (
        "mpt",
        {
            "d_model": 60,
            "n_heads": 5,
            "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3},
            "tie_word_embeddings": False,
        },
    ),
    "falcon-alibi": (
        "falcon",
        {
            "alibi": True,
            "new_decoder_architecture": False,
            "multi_query": False,
            "num_kv_heads": None,
            "parallel_attn": False,
            "bias": True,
        },
    ),
    "falcon-alibi-odd-heads": (
        "falcon",
        {
            "alibi": True,
            "new_decoder_architecture": False,
            "multi_query": True,
            "num_kv_heads": None,
            "hidden_size": 60,
            "num_attention_heads": 5,
            "tie_word_embeddings": False,
        },
    ),
    "xglm": ("xglm", {}),
    "xglm-odd": (
        "xglm",
        {
            "d_model": 66,
            "attention_heads": 3,
            "scale_embedding": False,
            "activation_function": "relu",
            "tie_word_embeddings": False,
            "pad_token_id": 5,
        },
    ),
    "exaone": ("exaone", {}),
    "exaone-odd": (
        "exaone",
        {
            "hidden_size": 60,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "tie_word_embeddings": True,
            **rope(
                "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
            ),
        },
    ),
    "ctrl": ("ctrl", {}),
    "ctrl-untied": (
        "ctrl",
        {"n_embd": 66, "n_head": 3, "layer_norm_epsilon": 1e-3, "tie_word_embeddings": False, "n_positions": 200},
    ),
    "emu3": ("emu3_text_model", {}),
    "emu3-odd-heads": (
        "emu3_text_model",
        {
            "hidden_size": 60,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            **rope("linear", factor=2.0),
        },
    ),
    "mllama": ("mllama_text_model", {}),
    "mllama-odd-heads": (
        "mllama_text_model",
        {
            "hidden_size": 60,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "cross_attention_layers": [0, 2, 7],
            **rope(
                "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
            ),
        },
    ),
    "diffllama": ("diffllama", {}),
    "diffllama-biases": (
        "diffllama",
        {
            "hidden_size": 60,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "head_dim": 14,
            "attention_bias": True,
            "tie_word_embeddings": True,
            **rope("linear", factor=2.0),
        },
    ),
    "openai-gpt": ("openai-gpt", {}),
    "openai-gpt-untied": (
        "openai-gpt",
        {"n_embd": 60, "n_head": 3, "afn": "relu", "layer_norm_epsilon": 1e-3, "tie_word_embeddings": False},
    ),
    "opt": ("opt", {}),
    "opt-norm-after": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-plain": ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"}),
    "opt-untied": ("opt", {"tie_word_embeddings": False}),
    "gpt2": ("gpt2", {}),
    "gpt2-inner": ("gpt2", {"n_inner": 80, "activation_function": "relu"}),
    "gpt2-scales": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False}),
}
