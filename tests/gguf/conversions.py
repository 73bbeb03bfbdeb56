"""What convert_hf_to_gguf.py of llama.cpp does to tensors, and writes of configurations, beside what files.py does.

Written from its description, not from what quire reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Config = Mapping[str, Any]
FUSED_BY_HEAD = ("gptneox", "bloom", "falcon")
"""Where a tensor has queries, keys and values of each head in turn, which the converter sorts by kind."""
HALVED = r"shared_mlp\.input_linear"
"""Tensors whose halves are gate and up."""
LINEAR_ATTENTION = ("qwen3next", "qwen35", "qwen35moe")
STATE_SPACES = ("mamba", "mamba2", "falcon-h1", "granitehybrid", "nemotron_h_moe", "jamba", *LINEAR_ATTENTION)


def sorted_by_kind(rows: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
    """Rows of each head in turn -> all queries, all keys, all values. Shapes: rows [N, ...] -> [N, ...]."""
    groups = rows.reshape(kv_heads, heads // kv_heads + 2, -1, *rows.shape[1:])
    kinds = groups[:, :-2], groups[:, -2], groups[:, -1]
    return np.concatenate([np.reshape(kind, (-1, *rows.shape[1:])) for kind in kinds])


def heads_of(config: Config) -> tuple[int, int]:
    """(query heads, key/value heads)."""
    heads = config.get("num_attention_heads") or config.get("n_head") or config.get("n_heads") or 0
    kv_heads = config.get("num_kv_heads") or config.get("num_key_value_heads") or heads
    return int(heads), int(kv_heads)


def state_space(name: str, weight: np.ndarray, config: Config) -> np.ndarray:
    """The parts of a state space."""
    if name.endswith("A_log"):
        rates: np.ndarray = -np.exp(weight)
        return rates if rates.ndim > 1 or "linear_attn" in name else rates[:, None]
    if name.endswith((".mixer.D", ".mamba.D")) and config.keys() & MAMBA2:
        return weight[:, None]
    if name.endswith("conv1d.weight"):
        return np.squeeze(weight, 1)
    if name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        groups = int(config.get("n_groups") or config["mamba_n_groups"])
        return weight.reshape(groups, -1)
    return weight


MAMBA2 = frozenset({"num_heads", "mamba_n_heads", "mamba_num_heads"})


RENAMED = (
    (r"(?<=[._])e_score_correction_bias$", "e_score_correction.bias"),
    (r"expert_bias$", "expert_bias.bias"),
    (r"self_attn\.attn_sub_norm", "self_attn.inner_attn_ln"),
    (r"mlp\.ffn_sub_norm", "mlp.ffn_layernorm"),
    (r"backbone(\.layers\.\d+)\.mixer(\.(?:shared_)?experts)", r"model\1.mlp\2"),
    (r"(ffn\.experts\.mlp\.\w+)$", r"\1.weight"),
    (r"dt_bias$", "dt_proj.bias"),
    (r"(feed_forward\.experts)\.w1", r"\1.gate_proj"),
    (r"(feed_forward\.experts)\.w2", r"\1.down_proj"),
    (r"(feed_forward\.experts)\.w3", r"\1.up_proj"),
)
"""What the converter calls some tensors before it looks their names up."""


def renamed(name: str, arch: str) -> str:
    """The name that the package `gguf` knows."""
    for pattern, instead in RENAMED:
        name = re.sub(pattern, instead, name)
    return name.removeprefix("transformer.") if arch == "bloom" else name


def by_kind(rows: np.ndarray, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """(queries, keys and values, gates) of rows that have them for each key head in turn."""
    heads, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    parts = np.split(rows.reshape(heads, -1, rows.shape[1]), np.cumsum([key, key, value]), axis=1)
    kinds = [part.reshape(-1, rows.shape[1]) for part in parts]
    return np.concatenate(kinds[:3]), kinds[3]


def tiled(name: str, rows: np.ndarray, config: Config) -> np.ndarray:
    """Value heads so that those of one key head do not follow each other: Qwen 3.5."""
    key_heads, heads, size = (config[f"linear_{n}"] for n in ("num_key_heads", "num_value_heads", "value_head_dim"))
    if name.endswith("norm.weight"):
        return rows
    before = len(rows) - heads * size if re.search("in_proj_qkv|conv1d", name) else 0
    values = rows[before:].reshape(key_heads, heads // key_heads, -1, *rows.shape[1:])
    return np.concatenate([rows[:before], values.swapaxes(0, 1).reshape(-1, *rows.shape[1:])])


def tiled_columns(weight: np.ndarray, config: Config, *, back: bool = False) -> np.ndarray:
    """The same of the columns of the product that reads the heads, and back."""
    key_heads, heads = (config[f"linear_num_{kind}_heads"] for kind in ("key", "value"))
    shape = (heads // key_heads, key_heads) if back else (key_heads, heads // key_heads)
    by_head = weight.reshape(len(weight), *shape, -1)
    return np.ascontiguousarray(by_head.swapaxes(1, 2)).reshape(weight.shape)


def xielu(weights: Mapping[str, np.ndarray], num_layers: int) -> dict[str, Any]:
    """Numbers of activations, which the converter writes as metadata."""
    names = ("alpha_p", "alpha_n", "beta", "eps")
    return {
        f"xielu.{name}": [float(weights[f"model.layers.{i}.mlp.act_fn.{name}"].item()) for i in range(num_layers)]
        for name in names
    }


def latent_parts(weight: np.ndarray, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """kv_b_proj as the products for keys, transposed, and for values."""
    heads, value = config["num_attention_heads"], config["v_head_dim"]
    by_head = weight.reshape(heads, config["qk_nope_head_dim"] + value, -1)
    keys, values = by_head[:, :-value], by_head[:, -value:]
    return np.ascontiguousarray(keys.swapaxes(1, 2)), np.ascontiguousarray(values)


def joined_latent(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """And back."""
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, values.shape[2])


def _gpt2(config: Config) -> dict[str, Any]:
    return {
        "embedding_length": config["n_embd"],
        "block_count": config["n_layer"],
        "context_length": config["n_positions"],
        "feed_forward_length": 4 * config["n_embd"],
        "attention.head_count": config["n_head"],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
    }


def _starcoder(config: Config) -> dict[str, Any]:
    return {**_gpt2(config), "attention.head_count_kv": 1}


def _bloom(config: Config) -> dict[str, Any]:
    return {
        "block_count": config["n_layer"],
        "context_length": 2048,
        "feed_forward_length": 4 * config["hidden_size"],
        "attention.head_count": config["n_head"],
        "attention.head_count_kv": config["n_head"],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
    }


def _mpt(config: Config) -> dict[str, Any]:
    return {
        "embedding_length": config["d_model"],
        "block_count": config["n_layers"],
        "context_length": config["max_seq_len"],
        "feed_forward_length": 4 * config["d_model"],
        "attention.head_count": config["n_heads"],
        "attention.layer_norm_epsilon": 1e-5,
        "attention.max_alibi_bias": 8.0,
    }


def _falcon(config: Config) -> dict[str, Any]:
    return {
        "feed_forward_length": config["ffn_hidden_size"],
        "attention.head_count_kv": config["num_kv_heads"],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
    }


def _dbrx(config: Config) -> dict[str, Any]:
    attention, experts = config["attn_config"], config["ffn_config"]
    return {
        "embedding_length": config["d_model"],
        "block_count": config["n_layers"],
        "context_length": config["max_seq_len"],
        "feed_forward_length": experts["ffn_hidden_size"],
        "attention.head_count": config["n_heads"],
        "attention.head_count_kv": attention["kv_n_heads"],
        "attention.clamp_kqv": attention["clip_qkv"],
        "attention.layer_norm_epsilon": 1e-5,
        "rope.freq_base": attention["rope_theta"],
        "expert_count": experts["moe_num_experts"],
        "expert_used_count": experts["moe_top_k"],
    }


def _deepseek_experts(config: Config) -> dict[str, Any]:
    return {
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": bool(config["norm_topk_prob"]),
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_gating_func": 2,
    }


def _ernie(config: Config) -> dict[str, Any]:
    return {
        "expert_count": config["moe_num_experts"],
        "expert_used_count": config["moe_k"],
        "expert_shared_count": config["moe_num_shared_experts"],
        "leading_dense_block_count": config["moe_layer_start_index"],
        "interleave_moe_layer_step": config["moe_layer_interval"],
    }


def _hunyuan(config: Config) -> dict[str, Any]:
    return {"expert_feed_forward_length": config["intermediate_size"], "expert_used_count": config["moe_topk"]}


def _minimax(config: Config) -> dict[str, Any]:
    return {"expert_feed_forward_length": config["intermediate_size"], "rope.dimension_count": config["rotary_dim"]}


def _llama4(config: Config) -> dict[str, Any]:
    return {
        "feed_forward_length": config["intermediate_size_mlp"],
        "expert_feed_forward_length": config["intermediate_size"],
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
    }


def _minicpm(config: Config) -> dict[str, Any]:
    return {"attention.scale": None}


def _latent(config: Config) -> dict[str, Any]:
    """As newer files have it: one key/value head, as the cache has it."""
    rope, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
    return {
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": latent,
        "attention.head_count_kv": 1,
        "attention.key_length": latent + rope,
        "attention.value_length": latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rope,
    }


def _deepseek2(config: Config) -> dict[str, Any]:
    if config["model_type"] == "deepseek_v3":
        return {**_latent(config), **_deepseek_experts(config)}
    greedy = {**config, "norm_topk_prob": False, "n_group": 1, "topk_group": 1}
    return {**_latent(config), **_deepseek_experts(greedy), "expert_gating_func": 1}


def _minicpm3(config: Config) -> dict[str, Any]:
    rope = config["qk_rope_head_dim"]
    return {
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "attention.key_length": config["qk_nope_head_dim"] + rope,
        "attention.value_length": config["v_head_dim"],
        "rope.dimension_count": rope,
    }


def _mamba(config: Config) -> dict[str, Any]:
    return {
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.inner_size": config["expand"] * config["hidden_size"],
        "ssm.state_size": config["state_size"],
        "ssm.time_step_rank": config["time_step_rank"],
        "ssm.dt_b_c_rms": config["model_type"] == "falcon_mamba",
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
    }


def _mamba2(config: Config) -> dict[str, Any]:
    own = {"ssm.group_count": config["n_groups"], "ssm.time_step_rank": config["num_heads"]}
    return {**_mamba({**config, "time_step_rank": 0}), **own}


def _states(config: Config) -> dict[str, Any]:
    inner = config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"]
    return {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.inner_size": inner,
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.time_step_rank": config["mamba_n_heads"],
    }


def _granitehybrid(config: Config) -> dict[str, Any]:
    is_bamba = config["model_type"] == "bamba"
    attends = (
        [index in config["attn_layer_indices"] for index in range(config["num_hidden_layers"])]
        if is_bamba
        else ["attention" in kind and "linear" not in kind for kind in config["layer_types"]]
    )
    shared = config.get("shared_intermediate_size")
    return {
        **_states(config),
        "attention.head_count_kv": [config["num_key_value_heads"] * each for each in attends],
        "rope.scaling.finetuned": is_bamba,
        **({"expert_shared_feed_forward_length": shared} if shared else {}),
    }


def _nemotron_h(config: Config) -> dict[str, Any]:
    kinds = config["layers_block_type"]
    size, kv_heads = config["intermediate_size"], config["num_key_value_heads"]
    return {
        "block_count": len(kinds),
        "feed_forward_length": [size * (kind == "mlp") for kind in kinds],
        "attention.head_count_kv": [kv_heads * (kind == "full_attention") for kind in kinds],
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.time_step_rank": config["mamba_num_heads"],
        "expert_count": config["n_routed_experts"],
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": bool(config["norm_topk_prob"]),
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_gating_func": 2,
    }


def _lfm2(config: Config) -> dict[str, Any]:
    kv_heads = config["num_key_value_heads"]
    size = config["intermediate_size"]
    if config["model_type"] == "lfm2":
        size = -(-int(2 * size / 3) // config["block_multiple_of"]) * config["block_multiple_of"]
    own = {"leading_dense_block_count": config["num_dense_layers"]} if "num_dense_layers" in config else {}
    return {
        **own,
        "feed_forward_length": size,
        "attention.head_count_kv": [kv_heads * (kind == "full_attention") for kind in config["layer_types"]],
        "attention.layer_norm_rms_epsilon": config["norm_eps"],
        "shortconv.l_cache": config["conv_L_cache"],
    }


def _linear_attention(config: Config) -> dict[str, Any]:
    return {
        "full_attention_interval": 4,
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
    }


def _ministral3(config: Config) -> dict[str, Any]:
    rope = config["rope_parameters"]
    return {
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def _exaone_moe(config: Config) -> dict[str, Any]:
    return {
        "expert_shared_count": config["num_shared_experts"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": bool(config["norm_topk_prob"]),
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
    }


def _afmoe(config: Config) -> dict[str, Any]:
    return {
        "expert_shared_count": config["num_shared_experts"],
        "leading_dense_block_count": config["num_dense_layers"],
        "expert_weights_scale": float(config["route_scale"]),
    }


def _jamba(config: Config) -> dict[str, Any]:
    period, offset = config["attn_layer_period"], config["attn_layer_offset"]
    layers = range(config["num_hidden_layers"])
    return {
        "attention.head_count_kv": [config["num_key_value_heads"] * (i % period == offset) for i in layers],
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.time_step_rank": config["mamba_dt_rank"],
    }


METADATA: Mapping[str, Callable[[Config], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "starcoder": _starcoder,
    "bloom": _bloom,
    "mpt": _mpt,
    "falcon": _falcon,
    "dbrx": _dbrx,
    "glm4moe": _deepseek_experts,
    "dots1": _deepseek_experts,
    "ernie4_5-moe": _ernie,
    "hunyuan-moe": _hunyuan,
    "minimax-m2": _minimax,
    "llama4": _llama4,
    "minicpm": _minicpm,
    "deepseek2": _deepseek2,
    "minicpm3": _minicpm3,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "falcon-h1": _states,
    "granitehybrid": _granitehybrid,
    "nemotron_h_moe": _nemotron_h,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "jamba": _jamba,
    **dict.fromkeys(LINEAR_ATTENTION, _linear_attention),
    "mistral3": _ministral3,
    "afmoe": _afmoe,
    "exaone-moe": _exaone_moe,
}
"""llama.cpp's name -> what its converter writes beside what all files have; None for what it leaves out."""
