"""Tiny random checkpoints, made by transformers: what the models, the loader and the engine are tested against.

Each is a complete model directory: config.json, model.safetensors (or shards), generation_config.json and a byte-level
tokenizer with a chat template. The same arguments always give the same bytes.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from tests.expert_checkpoints import EXPERTS, VOCAB_SIZE
from tests.expert_checkpoints import SIZES as _COMMON
from tests.foreign_checkpoints import FOREIGN
from tests.tiny_tokenizer import write_tokenizer

_GPT2 = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.15,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
_OPT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "init_std": 0.15,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": 1,
}
_MAMBA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "state_size": 8,
    "conv_kernel": 4,
    "expand": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
_HYBRID = {
    **_COMMON,
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}

_LATENT = {
    **_COMMON,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
_DEEPSEEK = {
    **_LATENT,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
}
_INDEXER = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 12}
"""So many heads that hardly any score is zero: transformers breaks ties as they come."""

_DELTA = {
    **_COMMON,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    # Outputs of heads are small in a random model; smaller roots would make 1e-3 of float32 errors on either side.
    "rms_norm_eps": 1e-4,
}
_DELTA_EXPERTS = {
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 72,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "mistral": {**_COMMON, "sliding_window": 24},
    "qwen2": {**_COMMON, "tie_word_embeddings": True},
    "qwen3": {**_COMMON, "head_dim": 32, "tie_word_embeddings": True},
    "phi3": _COMMON,
    "gemma2": {**_COMMON, "head_dim": 24, "sliding_window": 24, "query_pre_attn_scalar": 20},
    "gemma3_text": {
        **_COMMON,
        "num_hidden_layers": 6,
        "head_dim": 24,
        "sliding_window": 24,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 20,
    },
    "gemma3n_text": {
        **_COMMON,
        "num_hidden_layers": 5,
        "intermediate_size": [96, 80, 96, 64, 96],
        "head_dim": 24,
        "sliding_window": 24,
        "layer_types": [*["sliding_attention", "full_attention"] * 2, "sliding_attention"],
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.8, 0.0, 0.9, 0.0, 0.5],
        "altup_num_inputs": 3,
        "laurel_rank": 12,
        "hidden_size_per_layer_input": 10,
        "vocab_size_per_layer_input": 270,
    },
    "gemma4_text": {
        **_COMMON,
        "num_hidden_layers": 5,
        "head_dim": 24,
        "global_head_dim": 48,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 2],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 10,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "final_logit_softcapping": 30.0,
    },
    "gemma4_unified_text": {
        **_COMMON,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
    "seed_oss": {**_COMMON, "head_dim": 32},
    "ernie4_5": {**_COMMON, "head_dim": 16},
    "helium": {**_COMMON, "head_dim": 16},
    "ministral": {**_COMMON, "head_dim": 16, "sliding_window": 24},
    "ministral3": {
        **_COMMON,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "gemma": {**_COMMON, "head_dim": 24},
    "smollm3": {**_COMMON, "no_rope_layer_interval": 2},
    "glm": {**_COMMON, "head_dim": 24, "pad_token_id": 0},
    "glm4": {**_COMMON, "head_dim": 24, "pad_token_id": 0},
    **EXPERTS,
    "bitnet": _COMMON,
    "olmo": _COMMON,
    "olmo2": _COMMON,
    "olmo3": {
        **_COMMON,
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "granite": {
        **_COMMON,
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.0,
    },
    "internlm3": {**_COMMON, "head_dim": 24},
    "starcoder2": {**_COMMON, "sliding_window": 24},
    "stablelm": _COMMON,
    "cohere": {**_COMMON, "logit_scale": 0.3},
    "cohere2": {**_COMMON, "num_hidden_layers": 4, "sliding_window": 24, "sliding_window_pattern": 2},
    "cohere_compass_text": {
        **_COMMON,
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3, "mrope_section": [2, 3, 3]},
            "full_attention": None,
        },
        "logit_scale": 0.3,
    },
    "exaone4": {**_COMMON, "num_hidden_layers": 4, "sliding_window": 24, "sliding_window_pattern": 2},
    "phi": _COMMON,
    "gpt_neox": {key: value for key, value in _COMMON.items() if key != "num_key_value_heads"},
    "gpt_neox_japanese": {
        **{key: value for key, value in _COMMON.items() if key not in ("intermediate_size", "num_key_value_heads")},
        "intermediate_multiple_size": 2,
    },
    "gptj": {**_GPT2, "rotary_dim": 8},
    "codegen": {**_GPT2, "n_head": 8, "rotary_dim": 4},
    "gpt_bigcode": _GPT2,
    "falcon": {
        **{key: value for key, value in _COMMON.items() if key not in ("intermediate_size", "num_key_value_heads")},
        "ffn_hidden_size": 96,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
    },
    "longcat_flash": {
        **{key: value for key, value in _LATENT.items() if key not in ("num_hidden_layers", "intermediate_size")},
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "head_dim": 8,
        "moe_topk": 3,
        "n_routed_experts": 5,
        "zero_expert_num": 3,
        "expert_ffn_hidden_size": 40,
        "routed_scaling_factor": 2.5,
    },
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": {**_DEEPSEEK, "n_group": 4, "topk_group": 2},
    "axk1": {**_DEEPSEEK, "n_group": 4, "topk_group": 2},
    "deepseek_v32": {**_DEEPSEEK, **_INDEXER, "n_group": 4, "topk_group": 2},
    "mistral4": {
        **_DEEPSEEK,
        "first_k_dense_replace": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "glm4_moe_lite": {key: value for key, value in _DEEPSEEK.items() if key != "first_k_dense_replace"},
    "glm_moe_dsa": {**_DEEPSEEK, **_INDEXER},
    "minicpm3": {**_LATENT, "scale_emb": 3, "dim_model_base": 32},
    "youtu": _LATENT,
    "arcee": {**_COMMON, "head_dim": 24},
    "nemotron": _COMMON,
    "jais2": _COMMON,
    "apertus": _COMMON,
    "apertus1p5_text": _COMMON,
    "hunyuan_v1_dense": {**_COMMON, "head_dim": 24},
    "nanochat": _COMMON,
    "cwm": {
        **_COMMON,
        "bos_token_id": 256,
        "num_hidden_layers": 4,
        "head_dim": 24,
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "hyperclovax": {
        **_COMMON,
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "logits_scaling": 0.5,
    },
    "vaultgemma": {**_COMMON, "head_dim": 24, "sliding_window": 24, "query_pre_attn_scalar": 20},
    "granite_swa": {
        **_COMMON,
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.0,
    },
    "persimmon": {key: value for key, value in _COMMON.items() if key != "num_key_value_heads"},
    "gpt_neo": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "max_position_embeddings": 256,
        "window_size": 24,
        "attention_types": [[["global", "local"], 1]],
        "initializer_range": 0.15,
        "bos_token_id": 256,
        "eos_token_id": 256,
    },
    "biogpt": {key: value for key, value in _COMMON.items() if key not in ("num_key_value_heads", "pad_token_id")},
    "bloom": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "n_layer": 3,
        "n_head": 4,
        "initializer_range": 0.15,
        "bos_token_id": 256,
        "eos_token_id": 256,
    },
    "mpt": {
        "vocab_size": VOCAB_SIZE,
        "d_model": 64,
        "n_layers": 3,
        "n_heads": 4,
        "max_seq_len": 256,
        "initializer_range": 0.15,
        "eos_token_id": 256,
    },
    "exaone": {**_COMMON, "head_dim": 16},
    "iquestcoder": _COMMON,
    "xglm": {
        "vocab_size": VOCAB_SIZE,
        "d_model": 64,
        "ffn_dim": 96,
        "num_layers": 3,
        "attention_heads": 4,
        "max_position_embeddings": 256,
        "init_std": 0.15,
        "initializer_range": 0.15,
        "bos_token_id": 256,
        "eos_token_id": 256,
    },
    "opt": _OPT,
    "gpt2": _GPT2,
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA,
    "bamba": {**_HYBRID, "attn_layer_indices": [2]},
    "granitemoehybrid": {
        **_HYBRID,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 72,
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.0,
    },
    "jamba": {
        **_COMMON,
        "num_hidden_layers": 4,
        "num_experts": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "mamba_d_state": 8,
        "mamba_expand": 2,
    },
    "lfm2": {
        **_COMMON,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "block_multiple_of": 32,
    },
    "qwen3_next": {**_DELTA, **_DELTA_EXPERTS},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_DELTA_EXPERTS},
    "minimax": {
        **_COMMON,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "full_attn_alpha_factor": 1.5,
        "linear_attn_alpha_factor": 2.0,
        "linear_attn_beta_factor": 0.7,
        "mlp_beta_factor": 0.8,
    },
    "olmo_hybrid": {
        **{key: value for key, value in _DELTA.items() if key != "head_dim"},
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_value_head_dim": 20,
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
    },
    "kimi_linear": {
        **{key: value for key, value in _DEEPSEEK.items() if key != "n_routed_experts"},
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "q_lora_rank": None,
        "num_local_experts": 8,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "rms_norm_eps": 1e-4,
    },
    "bailing_hybrid": {
        **{key: value for key, value in _DEEPSEEK.items() if key != "n_routed_experts"},
        "num_hidden_layers": 4,
        "layer_group_size": 2,
        "num_local_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "linear_head_dim": 16,
        "rms_norm_eps": 1e-4,
    },
    "lara_mini": {
        **_DELTA,
        **_DELTA_EXPERTS,
        "num_hidden_layers": 5,
        "sliding_window": 24,
        "layer_types": [*["linear_attention", "sliding_attention"] * 2, "full_attention"],
    },
    "lfm3": {
        **_COMMON,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 24,
        "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
    },
    "recurrent_gemma": {**_COMMON, "attention_window_size": 24, "w_init_variance_scale": 1.0},
    "lfm2_moe": {
        **_COMMON,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "num_dense_layers": 1,
        "moe_intermediate_size": 40,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    },
    "mamba2": {**_MAMBA, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16},
    "zamba2": {
        **{key: value for key, value in _COMMON.items() if key != "num_key_value_heads"},
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention"],
        "use_shared_attention_adapter": True,
        "adapter_rank": 12,
        "use_mem_rope": True,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 8,
        "initializer_range": 0.1,
        "chunk_size": 16,
        "time_step_min": 1e-12,  # in prompts, transformers bounds time steps by it
    },
    "falcon_h1": {
        **_HYBRID,
        "num_hidden_layers": 3,
        "mamba_d_ssm": 96,
        "mamba_d_head": 12,
        "embedding_multiplier": 5.66,
        "lm_head_multiplier": 0.3,
        "attention_in_multiplier": 1.1,
        "attention_out_multiplier": 0.94,
        "key_multiplier": 0.39,
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.35, 0.25, 0.36, 0.5, 0.8],
        "ssm_out_multiplier": 0.7,
        "mlp_multipliers": [0.88, 0.59],
    },
    "nemotron_h": {
        **_COMMON,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "n_routed_experts": 6,
        "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 56,
        "head_dim": 16,
        "mamba_num_heads": 6,
        "mamba_head_dim": 12,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "time_step_min": 1e-12,  # in prompts, transformers bounds time steps by it
    },
}
"""family -> the configuration that `make_checkpoint` starts from."""
ATTENTION_FREE = ("mamba", "falcon_mamba", "mamba2")
"""Families none of whose layers have attention."""
RECURRENT = (
    *ATTENTION_FREE,
    "bamba",
    "granitemoehybrid",
    "jamba",
    "lfm2",
    "lfm2_moe",
    "nemotron_h",
    "falcon_h1",
    "zamba2",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "minimax",
    "olmo_hybrid",
    "kimi_linear",
    "bailing_hybrid",
    "lara_mini",
    "lfm3",
    "recurrent_gemma",
)
"""Families some of whose layers keep a state."""
ONE_OF_EACH_KIND = (
    "llama",  # one norm before each part, rotary positions, all layers see everything
    "gemma2",  # windows in every other layer, norms on both sides, soft caps
    "phi",  # attention and MLP side by side, LayerNorm, part of a head rotated
    "qwen3_moe",  # experts beside a dense layer, norms of queries and keys
    "gpt2",  # learned positions, an MLP without a gate
    "mamba2",  # states in place of keys and values
)
"""Families that stand for those built like them, in tests of what is not the family's own."""


def make_checkpoint(
    family: str,
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a random model of a family (a key of FAMILIES or FOREIGN) and a tokenizer into a directory, and return it.

    overrides change the transformers configuration. A small `max_shard_size` ("40KB") gives a sharded checkpoint.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = random_model(family, seed=seed, **overrides).to(dtype)
        model.save_pretrained(directory, max_shard_size=max_shard_size)
    write_tokenizer(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 258]}))
    return directory


def random_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """The transformers model of a family with random weights, biases and norms included."""
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.for_model(family, **{**{**FOREIGN, **FAMILIES}[family], **overrides})
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_model().from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            is_alike = isinstance(value, torch.nn.Parameter) and (value.dim() == 1 or not value.any())
            if is_alike or name.endswith(("_correction_bias", "expert_bias", "layer_scalar")):
                # Norms start at one, biases and some routers at zero, which would hide mistakes.
                value.add_(torch.randn(value.shape, generator=generator) * 0.1)
    return model


@cache
def auto_model() -> Any:
    """transformers' `AutoModelForCausalLM`, which does not list every class that continues texts."""
    from transformers import AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
    return AutoModelForCausalLM


@lru_cache(maxsize=2)
def in_transformers(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A checkpoint as transformers reads it, to compare with. The last two are kept: reading takes longer than running.

    Callers must not change it.
    """
    from transformers import AutoConfig

    # Falcon's eager attention adds ALiBi twice, once with the mask.
    attention = "sdpa" if getattr(AutoConfig.from_pretrained(directory), "alibi", False) else "eager"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        model = auto_model().from_pretrained(
            directory, dtype=dtype, attn_implementation=attention, experts_implementation="eager"
        )
    return model.eval()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread: with models this small more of them mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
