"""Latent attention as config.json describes it: published keys, what the cache keeps, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from quire.config.arch import ModelArch
from quire.config.layers.mixers import LatentAttentionSpec
from quire.config.memory.weights.shapes import num_active_parameters, num_parameters
from quire.errors import ConfigError

DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 102400,
}
"""As it was published."""
DEEPSEEK_V3: dict[str, Any] = {
    **DEEPSEEK_V2_LITE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": {**DEEPSEEK_V2_LITE["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
"""As it was published, but for its quantisation."""
MINICPM3_4B: dict[str, Any] = {
    "architectures": ["MiniCPM3ForCausalLM"],
    "bos_token_id": 1,
    "dim_model_base": 256,
    "eos_token_id": [2, 73440],
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 6400,
    "kv_lora_rank": 256,
    "max_position_embeddings": 32768,
    "model_type": "minicpm3",
    "num_attention_heads": 40,
    "num_hidden_layers": 62,
    "num_key_value_heads": 40,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [1.0] * 16,
        "original_max_position_embeddings": 32768,
        "short_factor": [1.0] * 16,
        "type": "longrope",
    },
    "scale_depth": 1.4,
    "scale_emb": 12,
    "torch_dtype": "bfloat16",
    "vocab_size": 73448,
}
"""As it was published, but for the numbers of its rotation."""


def arch_of(base: dict[str, Any], **changes: Any) -> ModelArch:
    return ModelArch.from_config({**base, **changes}, source="config.json")


def mixer_of(arch: ModelArch) -> LatentAttentionSpec:
    mixer = arch.mixers[0]
    assert isinstance(mixer, LatentAttentionSpec)
    assert all(other == mixer for other in arch.mixers)
    return mixer


@pytest.mark.parametrize(
    ("base", "parameters", "active"),
    [(DEEPSEEK_V2_LITE, 15.7e9, 2.4e9), (DEEPSEEK_V3, 671e9, 37e9), (MINICPM3_4B, 4.07e9, 4.07e9)],
    ids=["DeepSeek-V2-Lite", "DeepSeek-V3", "MiniCPM3-4B"],
)
def test_published_models_are_counted_as_their_reports_say(
    base: dict[str, Any], parameters: float, active: float
) -> None:
    """Reports count the active ones with or without embeddings."""
    arch = arch_of(base)
    assert num_parameters(arch) == pytest.approx(parameters, rel=0.005)
    assert num_active_parameters(arch) == pytest.approx(active, rel=0.12)


@pytest.mark.parametrize(("base", "size"), [(DEEPSEEK_V3, 576), (MINICPM3_4B, 288)])
def test_the_cache_keeps_one_head_of_a_latent_and_a_rotated_key(base: dict[str, Any], size: int) -> None:
    arch = arch_of(base)
    assert (arch.num_kv_heads, arch.head_size, mixer_of(arch).cached_size) == (1, size, size)
    layout = arch.kv_layout(16, "bfloat16", ops="cpu")
    assert layout.block_bytes == arch.num_layers * 2 * 16 * size * 2, "keys and values, two bytes each"


@pytest.mark.parametrize(("rank", "size"), [(16, 24), (17, 28), (19, 28), (18, 28), (20, 28)])
def test_heads_are_padded_to_what_every_cache_takes(rank: int, size: int) -> None:
    arch = arch_of(DEEPSEEK_V2_LITE, kv_lora_rank=rank, qk_rope_head_dim=8)
    assert arch.head_size == size
    assert arch.kv_layout(16, "int8", ops="cpu").page.head_size == size


def test_yarn_scales_queries_and_not_the_rotation() -> None:
    v3, lite = mixer_of(arch_of(DEEPSEEK_V3)), mixer_of(arch_of(DEEPSEEK_V2_LITE))
    for mixer, mscale in ((v3, 1.0), (lite, 0.707)):
        assert mixer.query_scale == pytest.approx(192**-0.5 * (0.1 * mscale * math.log(40) + 1) ** 2)
    assert mixer_of(arch_of(DEEPSEEK_V3, rope_scaling=None)).query_scale == pytest.approx(192**-0.5)


def test_v2_rotates_neighbours_v3_may_not_and_minicpm3_never_does() -> None:
    assert mixer_of(arch_of(DEEPSEEK_V2_LITE)).interleaved
    assert mixer_of(arch_of(DEEPSEEK_V3)).interleaved
    assert not mixer_of(arch_of(DEEPSEEK_V3, rope_interleave=False)).interleaved
    assert not mixer_of(arch_of(MINICPM3_4B)).interleaved


def test_minicpm3_has_factors_which_null_turns_off() -> None:
    scales = arch_of(MINICPM3_4B).scales
    assert (scales.embedding, scales.logits) == (12.0, 0.1)
    assert scales.residual == pytest.approx(1.4 / math.sqrt(62))
    none = arch_of(MINICPM3_4B, scale_depth=None, dim_model_base=None, scale_emb=1).scales
    assert (none.embedding, none.residual, none.logits) == (1.0, 1.0, 1.0)
    assert mixer_of(arch_of(MINICPM3_4B, v_head_dim=None)).value_size == 64


def test_both_dialects_of_a_config_are_one_model() -> None:
    new = {key: value for key, value in DEEPSEEK_V3.items() if key not in ("rope_scaling", "rope_theta")}
    scaling = DEEPSEEK_V3["rope_scaling"]
    parameters = {**scaling, "rope_type": "yarn", "rope_theta": 10_000.0}
    assert arch_of(new, rope_parameters=parameters, head_dim=64).layers == arch_of(DEEPSEEK_V3).layers


def test_kimi_k2_is_deepseek_v3_by_another_name() -> None:
    assert arch_of(DEEPSEEK_V3, model_type="kimi_k2").layers == arch_of(DEEPSEEK_V3).layers


LITE = {"model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"]}
WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "latent missing": ({"kv_lora_rank": 0}, ["kv_lora_rank", "is 0"]),
    "query rank zero": ({"q_lora_rank": 0}, ["q_lora_rank", "is 0", "null"]),
    "rotated size odd": ({"qk_rope_head_dim": 7}, ["qk_rope_head_dim", "is 7", "even"]),
    "rotated size none": ({"qk_rope_head_dim": 0}, ["qk_rope_head_dim", "is 0"]),
    "values negative": ({"v_head_dim": -1}, ["v_head_dim", "-1"]),
    "keys shared by heads": ({"num_key_value_heads": 4}, ["num_key_value_heads", "is 4", "16"]),
    "a part rotated": ({**LITE, "partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5", "must be 1"]),
    "heads beyond reason": (
        {"num_attention_heads": 100_000, "num_key_value_heads": 100_000},
        ["num_attention_heads", "100000", "4096"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    changes, words = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        arch_of(DEEPSEEK_V2_LITE, **changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)
