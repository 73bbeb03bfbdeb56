"""How configs of Zaya are read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.arch import ModelArch
from quire.config.layers.mixers import AttentionSpec
from quire.config.layers.recurrent_mixers import ConvolvedQkvSpec
from quire.config.memory.weights.shapes import num_active_parameters, num_parameters
from quire.errors import ConfigError
from tests.checkpoints import parameters_in_transformers

ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


def arch_of(**changes: Any) -> ModelArch:
    return ModelArch.from_config({"model_type": "zaya", **changes}, source="config.json")


def test_what_a_config_leaves_out_is_as_in_transformers() -> None:
    arch = arch_of()
    assert num_parameters(arch) == parameters_in_transformers("zaya")
    assert num_parameters(arch) - num_active_parameters(arch) == 40 * 15 * 3 * 2048 * 2048
    attention, convolved = arch.mixers[:2]
    assert isinstance(attention, AttentionSpec)
    assert attention.rope is not None
    assert (attention.rope.theta, attention.rope.rotary_dim, attention.window) == (5e6, 64, None)
    assert convolved == ConvolvedQkvSpec(
        num_heads=8, num_kv_heads=2, head_size=128, single_width=2, joint_width=2, has_bias=False
    )
    assert convolved.num_state_elements == 2 * 1280 + 128
    assert [layer.mlp.experts and layer.mlp.experts.router for layer in arch.layers].count(None) == 0
    assert (arch.tie_word_embeddings, arch.bos_token_id, arch.eos_token_ids) == (True, 2, (106,))


def test_kinds_of_layers_have_rotations_and_windows_of_their_own() -> None:
    """A published config has the name of a type beside the rotations."""
    ropes = {"hybrid": ROPE, "hybrid_sliding": {**ROPE, "rope_theta": 5e3}, "rope_type": "default"}
    kinds = ["hybrid_sliding", "hybrid", "hybrid_sliding"]
    arch = arch_of(num_hidden_layers=3, layer_types=kinds, sliding_window=9, rope_parameters=ropes)
    found = [(mixer.window, mixer.rope and mixer.rope.theta) for mixer in arch.plain_attentions]
    assert found == [(9, 5e3), (None, 1e4), (9, 5e3)]


def test_only_the_first_router_reads_nothing_of_another() -> None:
    routers = [layer.mlp.experts.router for layer in arch_of(num_hidden_layers=3).layers if layer.mlp.experts]
    assert [router is not None and router.reads_last for router in routers] == [False, True, True]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_hidden_layers": 2, "layer_types": ["hybrid"]}, "layer_types .*2 layers"),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "layer_types .*hybrid_sliding"),
        ({"num_hidden_layers": 1, "layer_types": ["hybrid_sliding"]}, "sliding_window"),
        ({"rope_parameters": ROPE}, "rope_parameters .*hybrid layers"),
        ({"rope_parameters": {"hybrid": {"rope_type": "default"}}}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 9}, "head_dim"),
        ({"cca_time0": 0}, "cca_time0"),
        ({"cca_time1": 1000}, "cca_time1"),
        ({"router_hidden_size": 0}, "router_hidden_size"),
    ],
)
def test_what_quire_does_not_compute_is_refused_by_its_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        arch_of(**changes)
