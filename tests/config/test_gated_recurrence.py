"""Layers of linear attention and of RG-LRUs: what config.json says of them, what follows, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.arch import ModelArch
from quire.config.layers.mixers import AttentionSpec, LatentAttentionSpec
from quire.config.layers.recurrent_mixers import GatedDeltaSpec, LightningSpec, RgLruSpec
from quire.config.memory.weights.shapes import num_active_parameters, num_parameters
from quire.errors import ConfigError
from quire.messages.codec import Codec, FrameReader
from tests.config.test_recurrent import Told

QWEN3_NEXT_80B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "full_attention_interval": 4,
    "rope_theta": 10_000_000,
    "max_position_embeddings": 262_144,
}
KIMI_FULL = [4, 8, 12, 16, 20, 24, 27]
KIMI_LINEAR_48B: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "vocab_size": 163_840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 72,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "linear_attn_config": {
        "full_attn_layers": KIMI_FULL,
        "kda_layers": [number for number in range(1, 28) if number not in KIMI_FULL],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "first_k_dense_replace": 1,
    "mla_use_nope": True,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "use_grouped_topk": True,
    "model_max_length": 1_048_576,
    "rope_scaling": None,
    "rope_theta": 10_000.0,
}
MINIMAX_TEXT_01: dict[str, Any] = {
    "architectures": ["MiniMaxForCausalLM"],
    "model_type": "minimax",
    "vocab_size": 200_064,
    "hidden_size": 6144,
    "intermediate_size": 9216,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 32,
    "layer_types": [*["linear_attention"] * 7, "full_attention"] * 10,
    "mlp_alpha_factor": 3.5565588200778455,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.5},
}
RECURRENT_GEMMA_2B: dict[str, Any] = {
    "architectures": ["RecurrentGemmaForCausalLM"],
    "model_type": "recurrent_gemma",
    "vocab_size": 256_000,
    "hidden_size": 2560,
    "intermediate_size": 15_360,
    "num_hidden_layers": 26,
    "num_attention_heads": 10,
    "num_key_value_heads": 1,
}


def arch_of(config: dict[str, Any]) -> ModelArch:
    return ModelArch.from_config(config, source="config.json")


def kimi_lists(full: list[Any], kda: list[Any]) -> dict[str, Any]:
    return {"linear_attn_config": {"full_attn_layers": full, "kda_layers": kda}}


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [
        (QWEN3_NEXT_80B, 79.7, 3.9),
        (KIMI_LINEAR_48B, 49.1, 3.5),
        (MINIMAX_TEXT_01, 456.1, 48.4),
        (RECURRENT_GEMMA_2B, 2.7, 2.7),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_published_models_have_as_many_parameters_as_is_said(
    config: dict[str, Any], billions: float, active: float
) -> None:
    """MiniMax says 45.9 active: it leaves out the embedding and the head."""
    arch = arch_of(config)
    assert (round(num_parameters(arch) / 1e9, 1), round(num_active_parameters(arch) / 1e9, 1)) == (billions, active)


def test_states_of_published_models() -> None:
    """In numbers: heads * key size * value size and the last inputs of the convolution; heads * size^2; the width."""
    published = (QWEN3_NEXT_80B, KIMI_LINEAR_48B, MINIMAX_TEXT_01, RECURRENT_GEMMA_2B)
    delta, kimi, lightning, unit = (arch_of(config).recurrences for config in published)
    assert (len(delta), len(kimi), len(lightning), len(unit)) == (36, 20, 70, 18)
    assert {spec.num_state_elements for spec in kimi} == {32 * 128 * 128 + 3 * (3 * 32 * 128)}
    assert {spec.num_state_elements for spec in delta} == {32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128)}
    assert {spec.num_state_elements for spec in lightning} == {64 * 128 * 128}
    assert {spec.num_state_elements for spec in unit} == {4 * 2560}


def test_pages_hold_states_and_blocks_fill_them() -> None:
    layout = arch_of(MINIMAX_TEXT_01).kv_layout(16, "bfloat16", ops="cpu")
    assert len(layout.state_groups) == len(layout.groups) - 1
    assert layout.block_size == 1024  # as many tokens as have the bytes of 64 heads' states of 128 x 128 in float32


def test_gates_decay_slower_in_later_layers() -> None:
    arch = arch_of(MINIMAX_TEXT_01)
    first, last = arch.recurrences[0], arch.recurrences[-1]
    assert isinstance(first, LightningSpec)
    assert isinstance(last, LightningSpec)
    assert first.rates[0] == pytest.approx(2 ** (-1 / 8) * (1 + 1e-5))
    assert first.rates[-1] == pytest.approx(2**-8 * (1 + 1e-5))
    assert last.rates[0] == pytest.approx(2 ** (-1 / 8) * (1 - 78 / (79 + 1e-5) + 1e-5))


def test_layers_without_a_list_follow_the_family() -> None:
    kinds = [type(mixer) for mixer in arch_of(QWEN3_NEXT_80B).mixers]
    assert kinds[:5] == [GatedDeltaSpec, GatedDeltaSpec, GatedDeltaSpec, AttentionSpec, GatedDeltaSpec]
    kinds = [type(mixer) for mixer in arch_of(KIMI_LINEAR_48B).mixers]
    assert [number for number, kind in enumerate(kinds, 1) if kind is LatentAttentionSpec] == KIMI_FULL
    kinds = [type(mixer) for mixer in arch_of({**KIMI_LINEAR_48B, "linear_attn_config": None}).mixers]
    assert kinds[:6] == [*[GatedDeltaSpec] * 4, LatentAttentionSpec, GatedDeltaSpec]
    kinds = [type(mixer) for mixer in arch_of({**MINIMAX_TEXT_01, "layer_types": None}).mixers]
    assert kinds[:3] == [AttentionSpec, LightningSpec, AttentionSpec]
    kinds = [type(mixer) for mixer in arch_of(RECURRENT_GEMMA_2B).mixers]
    assert kinds[:4] == [RgLruSpec, RgLruSpec, AttentionSpec, RgLruSpec]


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (QWEN3_NEXT_80B, {"linear_num_value_heads": 24}, "linear_num_value_heads is 24; it must be a multiple"),
        (QWEN3_NEXT_80B, {"linear_num_value_heads": 0}, "linear_num_value_heads is 0"),
        (QWEN3_NEXT_80B, {"linear_key_head_dim": "wide"}, "linear_key_head_dim is 'wide'"),
        (QWEN3_NEXT_80B, {"linear_conv_kernel_dim": 65}, "linear_conv_kernel_dim is 65"),
        (QWEN3_NEXT_80B, {"full_attention_interval": -1}, "full_attention_interval is -1"),
        (QWEN3_NEXT_80B, {"layer_types": ["linear_attention"] * 47}, "layer_types"),
        (QWEN3_NEXT_80B, {"layer_types": ["mamba"] * 48}, "layer_types"),
        (QWEN3_NEXT_80B, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be silu"),
        (KIMI_LINEAR_48B, {"linear_attn_config": 4}, "linear_attn_config is 4"),
        (KIMI_LINEAR_48B, kimi_lists([4, 8], [1, 2, 3]), "linear_attn_config is {"),
        (KIMI_LINEAR_48B, kimi_lists([4, 8], [4, *range(1, 28)]), "linear_attn_config.kda_layers is [4, 1"),
        (KIMI_LINEAR_48B, kimi_lists(["4"], []), "linear_attn_config.full_attn_layers is ['4']"),
        (KIMI_LINEAR_48B, {"linear_attn_config": {"num_heads": 0}}, "linear_num_heads is 0"),
        (KIMI_LINEAR_48B, {"mla_use_nope": False}, "mla_use_nope is False"),
        (KIMI_LINEAR_48B, {"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
        (KIMI_LINEAR_48B, {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (KIMI_LINEAR_48B, {"use_grouped_topk": False, "num_expert_group": 2}, "use_grouped_topk is False"),
        (KIMI_LINEAR_48B, {"num_key_value_heads": 8}, "num_key_value_heads is 8; it must be num_attention_heads"),
        (KIMI_LINEAR_48B, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be silu"),
        (MINIMAX_TEXT_01, {"layer_types": ["sliding_attention"] * 80}, "layer_types"),
        (MINIMAX_TEXT_01, {"mlp_alpha_factor": 0}, "mlp_alpha_factor is 0"),
        (MINIMAX_TEXT_01, {"linear_attn_beta_factor": "1"}, "linear_attn_beta_factor is '1'"),
        (RECURRENT_GEMMA_2B, {"block_types": []}, "block_types"),
        (RECURRENT_GEMMA_2B, {"block_types": ["recurrent", ["attention"]]}, "block_types"),
        (RECURRENT_GEMMA_2B, {"lru_width": 2561}, "lru_width is 2561; it must be a multiple of num_attention_heads"),
        (RECURRENT_GEMMA_2B, {"conv1d_width": True}, "conv1d_width is True"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) and len(value) == 1 else "",
)
def test_what_makes_no_layer_is_refused(config: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        arch_of({**config, **change})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [QWEN3_NEXT_80B, KIMI_LINEAR_48B, MINIMAX_TEXT_01, RECURRENT_GEMMA_2B],
    ids=lambda config: str(config["model_type"]),
)
def test_layers_cross_processes(config: dict[str, Any]) -> None:
    codec = Codec([Told])
    told = Told(arch_of(config).layers)
    (heard,) = FrameReader(codec).feed(bytes(codec.encode(told)))
    assert heard == told
