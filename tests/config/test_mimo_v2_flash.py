"""How configs of MiMo V2 Flash are read, in the published spelling and in that of transformers, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.arch import ModelArch
from quire.config.layers.layer_kinds import Heads
from quire.config.layers.rope import RopeConfig
from quire.config.memory.weights.shapes import num_active_parameters, num_parameters
from quire.errors import ConfigError

NUM_LAYERS = 48
WINDOWS = [int(index > 0 and (index + 1) % 6 > 0) for index in range(NUM_LAYERS)]
PUBLISHED: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "vocab_size": 152_576,
    "hidden_size": 4096,
    "intermediate_size": 16_384,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "hybrid_layer_pattern": WINDOWS,
    "moe_layer_freq": [0, *[1] * (NUM_LAYERS - 1)],
    "sliding_window": 128,
    "sliding_window_size": 128,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "attention_value_scale": 0.707,
    "layernorm_epsilon": 1e-5,
    "rope_theta": 5_000_000,
    "swa_rope_theta": 10_000,
    "partial_rotary_factor": 0.334,
    "n_routed_experts": 256,
    "n_shared_experts": None,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
}


def arch_of(**changes: Any) -> ModelArch:
    return ModelArch.from_config({**PUBLISHED, **changes}, source="config.json")


def test_a_published_config_is_read_as_transformers_reads_it() -> None:
    arch = arch_of()
    full, sliding = arch.plain_attentions[:2]
    assert full.heads == Heads(num_heads=64, num_kv_heads=4, head_size=192, value_size=128)
    assert sliding.heads == Heads(num_heads=64, num_kv_heads=8, head_size=192, value_size=128)
    assert (full.window, sliding.window) == (None, 129)
    assert (full.has_sinks, sliding.has_sinks) == (False, True)
    assert [int(mixer.window is not None) for mixer in arch.plain_attentions] == WINDOWS
    assert isinstance(full.rope, RopeConfig)
    assert isinstance(sliding.rope, RopeConfig)
    assert (full.rope.theta, full.rope.rotary_dim) == (5e6, 64)
    assert (sliding.rope.theta, sliding.rope.rotary_dim) == (1e4, 64)
    assert [mlp.experts is None for mlp in arch.mlps] == [True, *[False] * (NUM_LAYERS - 1)]
    assert full.factors.output == 0.707


def test_parameters_are_those_of_the_published_model() -> None:
    """309 billion, of which a token meets 15."""
    assert round(num_parameters(arch_of()) / 1e9) == 309
    assert round(num_active_parameters(arch_of()) / 1e9) == 15


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hybrid_layer_pattern": [0] * NUM_LAYERS}, "hybrid_layer_pattern"),
        ({"moe_layer_freq": [1] * NUM_LAYERS}, "moe_layer_freq"),
        ({"swa_num_attention_heads": 32}, "swa_num_attention_heads"),
        ({"swa_num_key_value_heads": 4}, "swa_num_key_value_heads"),
        ({"swa_head_dim": 128}, "swa_head_dim"),
        ({"swa_v_head_dim": 192}, "swa_v_head_dim"),
        ({"add_swa_attention_sink_bias": False}, "add_swa_attention_sink_bias"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias"),
        ({"layernorm_epsilon": 1e-6}, "layernorm_epsilon"),
        ({"rope_theta": 1e6}, "rope_theta"),
        ({"swa_rope_theta": 5e6}, "swa_rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_parameters"),
        ({"n_shared_experts": 1}, "n_shared_experts"),
        ({"v_head_dim": 256, "swa_v_head_dim": 256}, "v_head_dim"),
        ({"num_key_value_heads": 64, "swa_num_key_value_heads": 128}, "num_key_value_heads"),
        ({"attention_value_scale": 0.0}, "attention_value_scale"),
        ({"sliding_window_size": -1}, "sliding_window_size"),
    ],
)
def test_configs_that_would_be_computed_otherwise_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        arch_of(**changes)
