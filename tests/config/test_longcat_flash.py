"""How configs of LongCat Flash are read, in the published spelling and in that of transformers, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.arch import ModelArch
from quire.config.layers.mixers import LatentAttentionSpec
from quire.config.memory.weights.shapes import num_parameters
from quire.errors import ConfigError

PUBLISHED: dict[str, Any] = {
    "architectures": ["LongcatFlashForCausalLM"],
    "model_type": "longcat_flash",
    "attention_bias": False,
    "attention_method": "MLA",
    "vocab_size": 131_072,
    "hidden_size": 6144,
    "ffn_hidden_size": 12_288,
    "expert_ffn_hidden_size": 2048,
    "num_layers": 28,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000_000.0,
    "router_bias": False,
    "n_routed_experts": 512,
    "zero_expert_num": 256,
    "zero_expert_type": "identity",
    "moe_topk": 12,
    "routed_scaling_factor": 6.0,
    "norm_topk_prob": False,
}


def arch_of(**changes: Any) -> ModelArch:
    return ModelArch.from_config({**PUBLISHED, **changes}, source="config.json")


def test_a_layer_of_a_published_config_is_two() -> None:
    arch = arch_of()
    assert arch.num_layers == 56
    first, second = arch.mlps[:2]
    assert (first.intermediate_size, second.intermediate_size) == (12_288, 12_288)
    assert first.beside is not None
    assert second.beside is None
    assert (first.beside.num_experts, first.beside.num_candidates, first.beside.size) == (512, 768, 2048)
    assert (first.beside.routing.num_chosen, first.beside.routing.factor) == (12, 6.0)
    (mixer,) = {*arch.mixers}
    assert isinstance(mixer, LatentAttentionSpec)
    assert (mixer.query_norm_scale, mixer.latent_norm_scale) == (2.0, 12**0.5)
    assert mixer.rope.theta == 1e7


def test_parameters_are_those_of_the_published_model() -> None:
    """560 billion."""
    assert round(num_parameters(arch_of()) / 1e10) == 56


def test_layers_may_be_counted_as_quire_counts_them() -> None:
    counted = {**PUBLISHED, "num_layers": None, "num_hidden_layers": 56}
    assert ModelArch.from_config(counted, source="config.json").layers == arch_of(num_hidden_layers=56).layers


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 28}, "num_hidden_layers"),
        ({"num_layers": None, "num_hidden_layers": 27}, "num_hidden_layers"),
        ({"router_bias": True}, "router_bias"),
        ({"zero_expert_type": "zero"}, "zero_expert_type"),
        ({"zero_expert_num": -1}, "zero_expert_num"),
        ({"moe_topk": 769}, "moe_topk"),
        ({"norm_topk_prob": True}, "norm_topk_prob"),
        ({"n_group": 4}, "n_group"),
        ({"attention_method": "MHA"}, "attention_method"),
        ({"mla_scale_q_lora": False}, "mla_scale_q_lora"),
        ({"mla_scale_kv_lora": False}, "mla_scale_kv_lora"),
        ({"head_dim": 128}, "head_dim"),
        ({"qk_head_dim": 128}, "qk_head_dim"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"q_lora_rank": 0}, "q_lora_rank"),
    ],
)
def test_configs_that_would_be_computed_otherwise_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        arch_of(**changes)
