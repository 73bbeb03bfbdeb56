"""Models for text and images, and others with a language model inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TEXT: Mapping[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "initializer_range": 0.15,
}
MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
SIGLIP = {**VISION, "model_type": "siglip_vision_model"}
PIXTRAL = {**SIGLIP, "model_type": "pixtral", "head_dim": 16}
CLIP = {**SIGLIP, "model_type": "clip_vision_model", "projection_dim": 32}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [0],
}
QWEN3_VISION = {
    **QWEN_VISION,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
SAM = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "global_attn_indexes": [0],
    "output_channels": 8,
    "image_size": 64,
    "mlp_dim": 32,
}
WHISPER = {"d_model": 32, "encoder_ffn_dim": 32, "encoder_layers": 1, "encoder_attention_heads": 2}
VQ = {"embed_dim": 4, "base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "num_attention_heads": 1}
LLAMA, QWEN2 = {**TEXT, "model_type": "llama"}, {**TEXT, "model_type": "qwen2"}
WITHOUT_SIZE = {key: value for key, value in TEXT.items() if key != "head_dim"}
HALF = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
GLM_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 14,
    "image_size": 28,
    "out_hidden_size": 64,
}
Case = tuple[str, Mapping[str, Any], Mapping[str, Any]]
"""model_type, the config of the language model, and the rest of the whole one's."""
KIMI: Case = (
    "kimi_k25",
    {
        **WITHOUT_SIZE,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    {"vision_config": VISION},
)
DOTS: Case = (
    "dots3_note",
    {
        **WITHOUT_SIZE,
        "model_type": "dots3_note_text",
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 9,
        "sliding_window": 11,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 12,
        "swa_kv_lora_rank": 20,
        "swa_head_dim": 20,
        "swa_qk_nope_head_dim": 14,
        "swa_v_head_dim": 10,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_experts_intermediate_size": 24,
    },
    {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "mlp_layer_types": ["dense"],
            "adapter_in_dim": 32,
            "adapter_out_dim": 64,
        },
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "downsample_hidden_size": 4,
            "adapter_input_size": 32,
            "adapter_out_dim": 64,
        },
    },
)
CASES: Mapping[str, Case] = {
    "dots3_note": DOTS,
    "gemma3": (
        "gemma3",
        {**TEXT, "model_type": "gemma3_text", "sliding_window": 8, "query_pre_attn_scalar": 20},
        {"vision_config": SIGLIP, "mm_tokens_per_image": 4, "image_token_index": 280},
    ),
    "mistral3": (
        "mistral3",
        {**TEXT, "model_type": "mistral", "sliding_window": None},
        {"vision_config": PIXTRAL, "image_token_index": 280},
    ),
    "minimax_m3": (
        "minimax_m3_vl",
        {
            **TEXT,
            "model_type": "minimax_m3_vl_text",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "partial_rotary_factor": 0.5,
            "sparse_attention_config": {
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 8,
                "sparse_block_size": 16,
                "sparse_topk_blocks": 1,
                "sparse_local_block": 0,
                "sparse_attention_freq": [0, 1, 1],
            },
            "moe_layer_freq": [0, 1, 1],
        },
        {"vision_config": SIGLIP, "image_token_index": 280, "projector_hidden_size": 32},
    ),
    "llava": (
        "llava",
        {**TEXT, "model_type": "llama"},
        {"vision_config": CLIP, "image_token_index": 280, "tie_word_embeddings": False},
    ),
    "cohere_compass": (
        "cohere_compass",
        {
            **{key: value for key, value in TEXT.items() if key != "head_dim"},
            "model_type": "cohere_compass_text",
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"sliding_attention": MROPE, "full_attention": None},
        },
        {"vision_config": {**QWEN3_VISION, "deepstack_visual_indexes": [0]}},
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {**TEXT, "model_type": "qwen2_5_vl_text", "rope_parameters": MROPE, "head_dim": None},
        {"vision_config": QWEN_VISION, "tie_word_embeddings": False},
    ),
    "qwen3_vl": (
        "qwen3_vl",
        {**TEXT, "model_type": "qwen3_vl_text", "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        {"vision_config": QWEN3_VISION, "tie_word_embeddings": True},
    ),
    "deepseek_vl": ("deepseek_vl", LLAMA, {"vision_config": SIGLIP}),
    "deepseek_vl_hybrid": (
        "deepseek_vl_hybrid",
        LLAMA,
        {"vision_config": SIGLIP, "high_res_vision_config": {**SAM, "model_type": "sam_vision_model"}},
    ),
    "emu3": (
        "emu3",
        {**TEXT, "model_type": "emu3_text_model"},
        {
            "vq_config": {**VQ, "codebook_size": 16, "latent_channels": 4, "hidden_size": 32, "attn_resolutions": []},
            "vocabulary_map": {"<image>": 280},
        },
    ),
    "exaone4_5": (
        "exaone4_5",
        {**TEXT, "model_type": "exaone4", "sliding_window": 8},
        {"vision_config": QWEN_VISION},
    ),
    "glm4v": (
        "glm4v",
        {**WITHOUT_SIZE, "model_type": "glm4v_text", "rope_parameters": HALF},
        {"vision_config": GLM_VISION},
    ),
    "glm46v": (
        "glm46v",
        {**WITHOUT_SIZE, "model_type": "glm4v_text", "rope_parameters": MROPE},
        {"vision_config": GLM_VISION},
    ),
    "glm4v_moe": (
        "glm4v_moe",
        {
            **TEXT,
            "model_type": "glm4v_moe_text",
            "rope_parameters": HALF,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
        {"vision_config": GLM_VISION},
    ),
    "got_ocr2": ("got_ocr2", QWEN2, {"vision_config": SAM}),
    "hyperclovax_vision_v2": (
        "hyperclovax_vision_v2",
        {**TEXT, "model_type": "hyperclovax"},
        {"vision_config": {**QWEN_VISION, "model_type": "qwen2_5_vl_vision"}},
    ),
    "idefics2": (
        "idefics2",
        {**TEXT, "model_type": "mistral", "sliding_window": None},
        {
            "vision_config": VISION,
            "perceiver_config": {
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 8,
                "num_key_value_heads": 1,
                "resampler_n_latents": 2,
            },
        },
    ),
    "idefics3": ("idefics3", LLAMA, {"vision_config": VISION, "scale_factor": 2}),
    "janus": (
        "janus",
        LLAMA,
        {
            "vision_config": {**VISION, "projection_dim": 64},
            "vq_config": {
                **VQ,
                "num_embeddings": 16,
                "projection_dim": 64,
                "hidden_size": 64,
                "image_token_embed_dim": 64,
                "num_patches": 4,
            },
        },
    ),
    "lfm2_vl": (
        "lfm2_vl",
        {**TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]},
        {
            "vision_config": {**VISION, "model_type": "siglip2_vision_model", "num_patches": 4},
            "projector_hidden_size": 16,
        },
    ),
    "lfm3_vl": ("lfm3_vl", {**TEXT, "model_type": "lfm3"}, {"vision_config": VISION}),
    "lighton_ocr": ("lighton_ocr", {**TEXT, "model_type": "qwen3"}, {"vision_config": PIXTRAL}),
    "llava_next_video": ("llava_next_video", LLAMA, {"vision_config": CLIP, "tie_word_embeddings": False}),
    "minicpmv4_6": (
        "minicpmv4_6",
        {
            **TEXT,
            "model_type": "qwen3_5_text",
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        {"vision_config": VISION},
    ),
    "mllama": (
        "mllama",
        {**TEXT, "model_type": "mllama_text_model", "cross_attention_layers": [1]},
        {
            "vision_config": {
                **VISION,
                "num_global_layers": 1,
                "attention_heads": 2,
                "vision_output_dim": 64,
                "supported_aspect_ratios": [[1, 1]],
                "intermediate_layers_indices": [0],
                "max_num_tiles": 1,
            },
            "image_token_index": 290,
        },
    ),
    "ovis2": ("ovis2", QWEN2, {"vision_config": {**VISION, "vocab_size": 16}, "hidden_size": 64}),
    "qwen4_exp": (
        "qwen4_exp",
        {
            **TEXT,
            "model_type": "qwen4_exp_text",
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "hc_count": 2,
            "hc_lowrank": 8,
            "ple_layer_ids": [1],
            "ple_embed_dim": 32,
            "ngram_vocab_size_base": 50,
            "split_ngram_parts": 4,
            "indexer_n_heads": 16,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 32,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
        },
        {"vision_config": QWEN3_VISION},
    ),
    "qwen2_audio": ("qwen2_audio", QWEN2, {"audio_config": WHISPER}),
    "smolvlm": ("smolvlm", LLAMA, {"vision_config": VISION, "scale_factor": 2}),
    "video_llama_3": ("video_llama_3", QWEN2, {"vision_config": VISION}),
    "video_llava": ("video_llava", LLAMA, {"vision_config": CLIP, "tie_word_embeddings": False}),
    "vipllava": ("vipllava", LLAMA, {"vision_config": CLIP}),
    "voxtral": ("voxtral", LLAMA, {"audio_config": VISION}),
}
