"""Experts with biases and clamped gates, and those in objects of their own, as config.json describes them."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.arch import ModelArch
from quire.config.layers.experts import ClampedGate, ExpertsSpec, Scores
from quire.config.layers.rope import RopeType
from quire.config.memory.weights.shapes import num_active_parameters, num_parameters
from quire.errors import ConfigError

GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
}
"""As it was published, but for its quantisation."""
DBRX: dict[str, Any] = {
    "architectures": ["DbrxForCausalLM"],
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000},
    "d_model": 6144,
    "emb_pdrop": 0.0,
    "ffn_config": {
        "ffn_hidden_size": 10752,
        "model_type": "",
        "moe_jitter_eps": 0.01,
        "moe_loss_weight": 0.05,
        "moe_num_experts": 16,
        "moe_top_k": 4,
    },
    "max_seq_len": 32768,
    "model_type": "dbrx",
    "n_heads": 48,
    "n_layers": 40,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 100352,
}
HUNYUAN_A13B: dict[str, Any] = {
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 3072,
    "max_position_embeddings": 32768,
    "model_type": "hunyuan_v1_moe",
    "moe_topk": [8] * 32,
    "num_attention_heads": 32,
    "num_experts": 64,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128167,
}

LLAMA_4_SCOUT_TEXT: dict[str, Any] = {
    "architectures": ["Llama4ForCausalLM"],
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "max_position_embeddings": 10485760,
    "model_type": "llama4_text",
    "no_rope_layers": [],
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "use_qk_norm": True,
    "vocab_size": 202048,
}
"""The part of the published config that is its language model's."""


def arch_of(config: dict[str, Any], **changes: Any) -> ModelArch:
    return ModelArch.from_config({**config, **changes}, source="config.json")


def experts_of(config: dict[str, Any], **changes: Any) -> ExpertsSpec:
    spec = arch_of(config, **changes).layers[0].mlp.experts
    assert spec is not None
    return spec


def test_published_models_are_counted_as_their_pages_say() -> None:
    assert num_parameters(arch_of(GPT_OSS_20B)) == 20_914_757_184
    assert f"{num_active_parameters(arch_of(GPT_OSS_20B)) / 1e9:.1f}" == "4.2", "3.6 without the embeddings"
    assert f"{num_parameters(arch_of(DBRX)) / 1e9:.0f}" == "132"
    assert f"{num_active_parameters(arch_of(DBRX)) / 1e9:.0f}" == "36"
    assert f"{num_parameters(arch_of(HUNYUAN_A13B)) / 1e9:.0f}" == "80"
    assert f"{num_active_parameters(arch_of(HUNYUAN_A13B)) / 1e9:.0f}" == "13"
    assert f"{num_parameters(arch_of(LLAMA_4_SCOUT_TEXT)) / 1e9:.0f}" == "108"
    assert f"{num_active_parameters(arch_of(LLAMA_4_SCOUT_TEXT)) / 1e9:.0f}" == "17"


def test_gpt_oss_has_biases_and_a_clamped_gate() -> None:
    spec = experts_of(GPT_OSS_20B)
    assert spec.gate == ClampedGate(limit=7.0, slope=1.702, offset=1.0)
    assert spec.has_bias
    assert spec.has_router_bias
    assert spec.routing.scores is Scores.LOGITS
    (rope,) = arch_of(GPT_OSS_20B).ropes
    assert (rope.type, rope.theta, rope.truncate) == (RopeType.YARN, 150_000.0, False)


def test_dbrx_is_read_from_its_parts() -> None:
    arch = arch_of(DBRX)
    assert (arch.num_kv_heads, arch.clip_qkv, {rope.theta for rope in arch.ropes}) == (8, 8.0, {500_000.0})
    assert experts_of(DBRX).routing.renormalized
    unscaled = {**DBRX["ffn_config"], "moe_normalize_expert_weights": None}
    assert not experts_of(DBRX, ffn_config=unscaled).routing.renormalized


def test_llama_4_attends_in_chunks_where_it_rotates() -> None:
    arch = arch_of(LLAMA_4_SCOUT_TEXT)
    chunked, full = arch.plain_attentions[0], arch.plain_attentions[3]
    assert (chunked.window, chunked.is_chunked, chunked.rope is None, chunked.position_scale) == (
        8192,
        True,
        False,
        None,
    )
    assert (full.window, full.is_chunked, full.rope, full.position_scale is None) == (None, False, None, False)
    assert experts_of(LLAMA_4_SCOUT_TEXT).routing.weighs_input


def test_blocks_that_do_not_divide_a_chunk_are_refused() -> None:
    arch = arch_of(LLAMA_4_SCOUT_TEXT, attention_chunk_size=48)
    assert arch.kv_cache_specs(16, "bfloat16", ops="reference")
    with pytest.raises(ConfigError, match="chunks of 48 tokens, which blocks of 32 do not divide"):
        arch.kv_cache_specs(32, "bfloat16", ops="reference")


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (GPT_OSS_20B, {"quantization_config": {"quant_method": "mxfp9"}}, "the weights are quantised by 'mxfp9'"),
        (GPT_OSS_20B, {"swiglu_limit": 0}, "swiglu_limit is 0; it must be a number above 0"),
        (GPT_OSS_20B, {"num_experts_per_tok": 33}, "num_experts_per_tok is 33"),
        (LLAMA_4_SCOUT_TEXT, {"layer_types": ["sliding_attention"] * 48}, "chunked_attention or full_attention"),
        (LLAMA_4_SCOUT_TEXT, {"moe_layers": ["all"]}, "moe_layers is ['all']; it must list indices of the 48 layers"),
        (LLAMA_4_SCOUT_TEXT, {"no_rope_layers": [2] * 48}, "no_rope_layers"),
        (LLAMA_4_SCOUT_TEXT, {"attn_temperature_tuning": "yes"}, "attn_temperature_tuning is 'yes'"),
        (DBRX, {"ffn_config": 3}, "ffn_config is 3; it must be null or an object"),
        (DBRX, {"ffn_config": {"moe_normalize_expert_weights": 2.0}}, "moe_normalize_expert_weights is 2.0"),
        (DBRX, {"ffn_config": {"ffn_act_fn": "silu"}}, "ffn_act_fn is 'silu'; it must be null or an object"),
        (DBRX, {"attn_config": {"kv_n_heads": 0}}, "attn_config: kv_n_heads is 0"),
        (HUNYUAN_A13B, {"moe_topk": [8]}, "or list one for each of the 32 layers"),
        (HUNYUAN_A13B, {"moe_topk": [8] * 31 + ["8"]}, "moe_topk is '8'"),
        (HUNYUAN_A13B, {"moe_topk": [65] * 32}, "moe_topk is 65; it must be at most the number of experts, 64"),
    ],
)
def test_what_cannot_be_is_refused_by_name(config: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        arch_of(config, **changes)
    assert words in str(caught.value)
