"""Layers with attention beside a state, and layers of one half, from their config alone."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.arch import ModelArch
from quire.config.family_spec import MlpKind
from quire.config.layers.mixers import AttentionSpec, Factors
from quire.config.layers.recurrent_mixers import GateNorm, Mamba2Spec
from quire.config.memory.weights.shapes import num_parameters, weight_shapes
from quire.config.memory.weights.sizes import loading_bytes
from quire.errors import ConfigError
from quire.messages.kv import FullAttentionSpec, StateSpec

NEMOTRON_8B: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_hidden_layers": 52,
    "attention_head_dim": 128,
    "rms_norm_eps": 1e-5,
}
FALCON: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "vocab_size": 65_537,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_d_ssm": 3072,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "rope_theta": 1e11,
    "key_multiplier": 0.39,
    "attention_out_multiplier": 0.9375,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35],
    "mlp_multipliers": [0.88, 0.59],
}


def arch_of(config: dict[str, Any], **changes: Any) -> ModelArch:
    return ModelArch.from_config({**config, **changes}, source="config.json")


def test_a_layer_of_one_half_has_a_mixer_or_an_mlp_and_one_norm() -> None:
    arch = arch_of(NEMOTRON_8B)
    halves = {(len(layer.mixers), layer.mlp.kind) for layer in arch.layers}
    assert halves == {(1, MlpKind.NONE), (0, MlpKind.PLAIN)}
    assert (len(arch.attentions), len(arch.recurrences), len(arch.mixers)) == (4, 24, 28)
    assert round(num_parameters(arch) / 1e9, 1) == 8.1
    assert [list(arch.places_of(layer)) for layer in range(8)] == [[0], [], [1], [], [2], [], [3], [4]]


def test_experts_without_a_gate_have_two_products() -> None:
    sizes = {"n_routed_experts": 4, "moe_intermediate_size": 100, "moe_shared_expert_intermediate_size": 200}
    with_experts, with_mlp = (arch_of(NEMOTRON_8B, hybrid_override_pattern=f"M{kind}*", **sizes) for kind in "E-")
    (experts,) = with_experts.mixtures
    assert (experts.num_experts, experts.size, experts.shared_size, experts.is_gated) == (4, 100, 200, False)
    more = num_parameters(with_experts) - num_parameters(with_mlp)
    assert (
        more == 4096 * (4 * 2 * 100 + 2 * 200 + 4 - 2 * 21_504) + 4
    )  # experts, shared, router, no MLP, bias of choice


def test_only_what_keeps_something_has_a_place_in_the_cache() -> None:
    layout = arch_of(NEMOTRON_8B).kv_layout(16, "bfloat16", ops="cpu")
    assert sorted(layout.group_of_layer) == list(range(28))
    attention = [group.layers for group in layout.groups if isinstance(group.spec, FullAttentionSpec)]
    assert attention == [(4, 10, 16, 22)]


def test_a_layer_with_attention_and_a_state_has_pages_in_both_kinds_of_groups() -> None:
    arch = arch_of(FALCON)
    assert all([type(mixer) for mixer in layer.mixers] == [AttentionSpec, Mamba2Spec] for layer in arch.layers)
    groups = arch.kv_layout(16, "bfloat16", ops="cpu").groups
    assert [type(group.spec) for group in groups] == [FullAttentionSpec, StateSpec]
    assert [group.layers for group in groups] == [tuple(range(0, 48, 2)), tuple(range(1, 48, 2))]


def test_factors_of_products_are_read_part_by_part() -> None:
    arch = arch_of(FALCON)
    attention, state = arch.layers[0].mixers
    assert isinstance(attention, AttentionSpec)
    assert isinstance(state, Mamba2Spec)
    assert attention.factors == Factors(inner=(1.0, 0.39, 1.0), output=0.9375)
    assert state.factors == Factors(input=1.25, inner=(0.35, 0.25, 0.35, 0.5, 0.35))
    assert arch.layers[0].mlp.factors == Factors(inner=(0.88, 1.0), output=0.59)
    assert state.norm is GateNorm.NONE
    assert len(state.in_parts) == len(state.factors.inner)


def test_multiplied_weights_are_planned_in_float32_while_they_are_read() -> None:
    ones = {"key_multiplier": 1.0, "attention_out_multiplier": 1.0, "ssm_in_multiplier": 1.0}
    plain = arch_of(FALCON, **ones, ssm_multipliers=None, mlp_multipliers=None, tie_word_embeddings=True)
    largest = max(shape.num_weights for shape in weight_shapes(plain).body)
    multiplied = arch_of(FALCON, tie_word_embeddings=True)
    more = loading_bytes(multiplied, "bfloat16", ops="cpu") - loading_bytes(plain, "bfloat16", ops="cpu")
    assert more == 4 * largest


@pytest.mark.parametrize(
    "kinds",
    [
        {"hybrid_override_pattern": "M-*"},
        {"layers_block_type": ["linear_attention", "mlp", "full_attention"], "num_hidden_layers": 7},
        {"layers_block_type": ["mamba", "mlp", "attention"], "hybrid_override_pattern": "***"},
    ],
)
def test_the_kinds_of_layers_have_several_spellings(kinds: dict[str, Any]) -> None:
    listed = arch_of({**NEMOTRON_8B, "hybrid_override_pattern": None}, **kinds)
    assert listed.layers == arch_of(NEMOTRON_8B, hybrid_override_pattern="M-*").layers
    assert listed.num_layers == 3


def refused(config: dict[str, Any], changes: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        arch_of(config, **changes)
    return caught.value.message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hybrid_override_pattern": "M-X"}, "hybrid_override_pattern is 'M-X'"),
        ({"hybrid_override_pattern": ""}, "hybrid_override_pattern"),
        ({"hybrid_override_pattern": "MEM*", "moe_latent_size": 64}, "moe_latent_size is 64"),
        ({"hybrid_override_pattern": "MEM*", "n_routed_experts": 1}, "num_experts_per_tok is 2"),
        ({"layers_block_type": ["mlp", 3]}, "layers_block_type"),
        ({"hybrid_override_pattern": "---"}, "tokens would not see each other"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"sliding_window": 64}, "sliding_window is 64"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu'"),
        ({"n_groups": 7}, "n_groups is 7"),
    ],
)
def test_what_nemotron_h_does_not_have_is_refused(changes: dict[str, Any], expected: str) -> None:
    assert expected in refused(NEMOTRON_8B, changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mlp_multipliers": [1.0]}, "mlp_multipliers is [1.0]; it must list 2 numbers"),
        ({"ssm_multipliers": [1, 2, 3, 4, 0]}, "ssm_multipliers"),
        ({"key_multiplier": -1.0}, "key_multiplier is -1.0"),
        ({"mamba_d_head": 60}, "mamba_d_ssm is 3072"),
        ({"projectors_bias": True}, "projectors_bias is True"),
    ],
)
def test_what_falcon_h1_does_not_have_is_refused(changes: dict[str, Any], expected: str) -> None:
    assert expected in refused(FALCON, changes)


def test_experts_of_lfm2_need_a_list_of_layers() -> None:
    config = {"architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "vocab_size": 64, "hidden_size": 32}
    assert "layer_types is missing" in refused(config, {"num_hidden_layers": 2, "num_attention_heads": 4})
