"""How Gemma 4's configs are read: heads of full layers in both spellings, shared layers, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from quire.config.arch import ModelArch
from quire.config.layers.layer_kinds import Heads
from quire.config.memory.weights.shapes import num_active_parameters, num_parameters
from quire.errors import ConfigError
from quire.messages.kv import FullAttentionSpec
from tests.family_configs import FAMILIES

SMALL: Mapping[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
}
LARGE: Mapping[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}


def arch_of(raw: Mapping[str, Any], **changes: Any) -> ModelArch:
    return ModelArch.from_config({**raw, **changes}, source="config.json")


def by_layer(raw: Mapping[str, Any], overrides: Mapping[str, Any], every: int) -> dict[str, Any]:
    """As transformers 5 writes it: with an object for each full layer."""
    left = {key: value for key, value in raw.items() if key != "num_global_key_value_heads"}
    count = raw.get("num_hidden_layers", 30)
    numbers = (str(index).zfill(len(str(count - 1))) for index in range(every - 1, count, every))
    return {**left, "per_layer_config": {number: dict(overrides) for number in numbers}}


def test_what_transformers_writes_is_what_the_published_keys_mean() -> None:
    from transformers import AutoConfig

    sizes = {**FAMILIES["gemma4_text"], "num_hidden_layers": 12, "layer_types": None}
    config = AutoConfig.for_model("gemma4_text", **sizes)
    written = {**json.loads(config.to_json_string(use_diff=False)), "architectures": ["Gemma4ForCausalLM"]}
    assert sorted(written["per_layer_config"]) == ["05", "11"]
    left = {key: value for key, value in written.items() if key != "per_layer_config"}
    assert arch_of(written).layers == arch_of(left, global_head_dim=48).layers


def test_full_layers_have_heads_of_their_own_in_both_spellings() -> None:
    sliding, full = (arch_of(LARGE).plain_attentions[index].heads for index in (0, 5))
    assert sliding == Heads(num_heads=16, num_kv_heads=8, head_size=256)
    assert full == Heads(num_heads=16, num_kv_heads=2, head_size=512, values_are_keys=True)
    listed = arch_of(by_layer(LARGE, {"head_dim": 512, "num_key_value_heads": 2}, every=6))
    assert listed.layers == arch_of(LARGE).layers
    small = arch_of(by_layer(SMALL, {"head_dim": 512}, every=5))
    assert small.layers == arch_of(SMALL).layers


def test_kv_heads_of_full_layers_count_only_where_values_are_keys() -> None:
    full = arch_of(LARGE, attention_k_eq_v=False).plain_attentions[5].heads
    assert full == Heads(num_heads=16, num_kv_heads=8, head_size=512), "as transformers has it"


def test_the_last_layer_is_full_whatever_the_list_says() -> None:
    arch = arch_of(LARGE, num_hidden_layers=7)
    assert [mixer.window for mixer in arch.plain_attentions] == [1024] * 5 + [None] * 2


def test_small_models_keep_the_caches_of_fifteen_layers_without_padding() -> None:
    layout = arch_of(SMALL).kv_layout(32, "bfloat16", ops="cpu")
    assert [(type(group.spec) is FullAttentionSpec, len(group.layers)) for group in layout.groups] == [
        (True, 3),
        (False, 6),
        (False, 6),
    ]
    assert layout.padding == 0
    assert layout.block_bytes == 3 * 32 * 2 * 512 * 2
    assert len(layout.reads) == 20
    assert {kept for _, kept in layout.reads} == {13, 14}


def test_large_models_pad_little_of_a_long_context() -> None:
    layout = arch_of(LARGE).kv_layout(32, "bfloat16", ops="cpu")
    assert [len(group.layers) for group in layout.groups] == [5, *[2] * 12, 1]
    assert layout.block_bytes == 5 * 32 * 2 * 2 * 512 * 2
    assert layout.padding < 0.08


def test_shared_layers_have_mlps_of_twice_the_width() -> None:
    widths = [mlp.intermediate_size for mlp in arch_of(SMALL).mlps]
    assert widths == [6144] * 15 + [12_288] * 20


def test_parameters_count_all_experts_and_what_a_token_meets() -> None:
    arch = arch_of(LARGE)
    assert 25e9 < num_parameters(arch) < 27e9
    assert 3.5e9 < num_active_parameters(arch) < 4.5e9
    assert all(mlp.beside and mlp.beside.num_experts == 128 for mlp in arch.mlps)


WRONG: dict[str, tuple[Mapping[str, Any], dict[str, Any], list[str]]] = {
    "attends to what follows": (
        SMALL,
        {"use_bidirectional_attention": "all"},
        ["use_bidirectional_attention", "'all'"],
    ),
    "heads that KV heads do not divide": (
        LARGE,
        {"num_global_key_value_heads": 3},
        ["num_global_key_value_heads is 3"],
    ),
    "embeddings for some tokens only": (
        SMALL,
        {"vocab_size_per_layer_input": 100},
        ["vocab_size_per_layer_input is 100"],
    ),
    "heads of layers that have a window": (
        SMALL,
        {"per_layer_config": {"0": {"head_dim": 512}}},
        ["per_layer_config", "full layers"],
    ),
    "heads that differ between full layers": (
        SMALL,
        {"per_layer_config": {str(index): {"head_dim": 8 * index} for index in range(4, 35, 5)}},
        ["per_layer_config", "the same"],
    ),
    "what no layer has": (
        SMALL,
        {"per_layer_config": {str(index): {"rms_norm_eps": 1.0} for index in range(4, 35, 5)}},
        ["per_layer_config"],
    ),
    "not by layer": (SMALL, {"per_layer_config": [1]}, ["per_layer_config"]),
    "no size of experts": (LARGE, {"moe_intermediate_size": None}, ["moe_intermediate_size is missing"]),
    "more experts than there are": (LARGE, {"top_k_experts": 129}, ["top_k_experts is 129", "128"]),
    "no layer keeps what others read": (
        SMALL,
        {"num_kv_shared_layers": 31},
        ["num_kv_shared_layers", "full_attention"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_configs_are_refused_by_the_key(name: str) -> None:
    raw, changes, expected = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        arch_of(raw, **changes)
    assert all(part in caught.value.message for part in expected), caught.value.message
