"""How configs of A.X-K2 are read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.arch import ModelArch
from quire.config.layers.mixers import LatentAttentionSpec
from quire.config.memory.weights.shapes import num_parameters
from quire.errors import ConfigError
from tests.checkpoints import parameters_in_transformers


def arch_of(**changes: Any) -> ModelArch:
    return ModelArch.from_config({"model_type": "axk2", **changes}, source="config.json")


def test_what_a_config_leaves_out_is_as_in_transformers() -> None:
    arch = arch_of()
    assert num_parameters(arch) == parameters_in_transformers("axk2")
    (mixer,) = {*arch.mixers}
    assert isinstance(mixer, LatentAttentionSpec)
    assert (mixer.num_gates, mixer.gates_with_queries) == (32 * 64, True)


def test_norms_before_attention_and_experts_have_gates() -> None:
    arch = arch_of(num_hidden_layers=3, mlp_layer_types=["sparse", "dense", "sparse"], gated_norm_rank=7)
    assert [arch.norms_of(layer).with_gate for layer in arch.layers] == [
        ("input_layernorm", "post_attention_layernorm"),
        ("input_layernorm",),
        ("input_layernorm", "post_attention_layernorm"),
    ]
    assert num_parameters(arch) == parameters_in_transformers(
        "axk2", num_hidden_layers=3, mlp_layer_types=["sparse", "dense", "sparse"], gated_norm_rank=7
    )


@pytest.mark.parametrize(
    ("changes", "groups"),
    [({}, None), ({"n_group": 8, "topk_group": 4}, (8, 4, 0.0)), ({"n_group": 1, "topk_group": 1}, None)],
)
def test_experts_of_groups_that_are_left_out_have_a_score(changes: dict[str, Any], groups: Any) -> None:
    found = [spec.routing.groups for spec in arch_of(**changes).mixtures]
    assert [group and (group.count, group.num_chosen, group.left_out) for group in found] == [groups]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_group": 4}, "topk_group is missing; it must be null where n_group"),
        ({"topk_group": 4}, "topk_group is 4; it must be null where n_group"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"gated_norm_rank": 0}, "gated_norm_rank is 0"),
        ({"num_attention_heads": 30}, "num_key_value_heads"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        arch_of(num_key_value_heads=32, **changes)
