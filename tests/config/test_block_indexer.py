"""MiniMax M3: what its config says, in both dialects, what the cache keeps, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.arch import ModelArch
from quire.config.layers.experts import ClampedGate
from quire.config.layers.mixers import BlockIndexerSpec
from quire.config.memory.activations.scratch import block_selection_bytes
from quire.config.memory.weights.shapes import num_parameters, query_sizes, window_shares
from quire.errors import ConfigError
from quire.messages.kv import FullAttentionSpec

FULL, SPARSE = "full_attention", "minimax_m3_sparse"
WRITTEN: dict[str, Any] = {
    "model_type": "minimax_m3_vl_text",
    "num_hidden_layers": 60,
    "partial_rotary_factor": 0.5,
    "layer_types": [FULL] * 3 + [SPARSE] * 57,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57,
    "index_local_blocks": 2,
}
"""As transformers writes it, of the published sizes."""
PUBLISHED: dict[str, Any] = {
    "model_type": "minimax_m3_vl_text",
    "num_hidden_layers": 60,
    "hidden_act": "swigluoai",
    "partial_rotary_factor": 0.5,
    "moe_layer_freq": [0] * 3 + [1] * 57,
    "sparse_attention_config": {
        "sparse_num_index_heads": 4,
        "sparse_index_dim": 128,
        "sparse_block_size": 128,
        "sparse_topk_blocks": 16,
        "sparse_local_block": 2,
        "sparse_attention_freq": [0] * 3 + [1] * 57,
    },
}


def arch_of(raw: dict[str, Any], **changes: Any) -> ModelArch:
    return ModelArch.from_config({**raw, **changes}, source="config.json")


def test_both_dialects_are_one_model() -> None:
    arch = arch_of(WRITTEN)
    assert arch.layers == arch_of(PUBLISHED).layers
    spec = BlockIndexerSpec(num_heads=4, head_size=128, block_size=128, num_selected=16, num_local=2)
    assert [mixer.blocks for mixer in arch.plain_attentions] == [None] * 3 + [spec] * 57
    gate = ClampedGate(limit=7.0, slope=1.702, offset=1.0)
    assert {(mlp.intermediate_size, mlp.gate) for mlp in arch.mlps[:3]} == {(12_288, gate)}
    assert {(mlp.experts.gate, mlp.experts.shared_size) for mlp in arch.mlps[3:] if mlp.experts} == {(gate, 3072)}
    assert 426e9 < num_parameters(arch) < 429e9


def test_lists_that_are_given_count_before_what_is_nested() -> None:
    mixed = arch_of(PUBLISHED, layer_types=[SPARSE] * 60, mlp_layer_types=["sparse"] * 60)
    assert all(mixer.blocks for mixer in mixed.plain_attentions)
    assert all(mlp.experts for mlp in mixed.mlps)


def test_the_cache_keeps_keys_of_indexers_in_the_group_of_keys_and_values() -> None:
    layout = arch_of(WRITTEN).kv_layout(16, "bfloat16", ops="cpu")
    (group,) = layout.groups
    assert isinstance(group.spec, FullAttentionSpec)
    assert len(group.layers) == 60 + 57
    assert layout.block_bytes == 16 * 2 * (60 * 2 * 4 * 128 + 57 * 128)
    assert layout.padding == 0


def test_attention_reads_the_chosen_and_the_indexer_everything() -> None:
    arch, attention, scores = arch_of(WRITTEN), 64 * 128, 4 * 128 // 2
    assert query_sizes(arch) == [attention] * 3 + [attention, scores] * 57
    total = 60 * attention + 57 * scores
    assert window_shares(arch) == ((2048, pytest.approx(57 * attention / total)),)


def test_what_selection_works_with_is_planned() -> None:
    arch = arch_of(WRITTEN)
    assert block_selection_bytes(arch, "bfloat16", 512, 2048, 16) == 0, "nothing is chosen of what is seen whole"
    short, long = (block_selection_bytes(arch, "bfloat16", 512, n, 16) for n in (1 << 13, 1 << 19))
    assert 512 * (128 * 4 + 16 * 128 * 2) <= short < long < 32 << 20
    narrow = arch_of(WRITTEN, index_block_size=16)
    wave = block_selection_bytes(narrow, "bfloat16", 2048, 1 << 12, 16)
    assert wave >= 2048 * 4 * 4 * 256, "scores of a whole wave of tokens"
    assert block_selection_bytes(arch_of(WRITTEN, layer_types=None), "bfloat16", 512, 1 << 19, 16) == 0


def test_blocks_of_the_cache_are_whole_parts_of_those_that_are_chosen() -> None:
    arch = arch_of(WRITTEN, index_block_size=48)
    assert arch.whole_blocks == {48}
    with pytest.raises(ConfigError, match=r"blocks of 48 tokens \(index_block_size\).*KV blocks of 32.*--block-size"):
        arch.kv_layout(32, "bfloat16", ops="cpu")
    with pytest.raises(ConfigError, match="a KV cache of int8 has no room for the keys of indexers"):
        arch.kv_layout(16, "int8", ops="cpu")


WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "heads of their own": ({"index_n_heads": 2}, ["index_n_heads", "is 2", "num_key_value_heads (4)"]),
    "an odd key": ({"index_head_dim": 129}, ["index_head_dim", "129", "even"]),
    "keys smaller than what rotates": ({"index_head_dim": 62}, ["index_head_dim", "62", "(64)"]),
    "nothing chosen": ({"index_topk_blocks": 0}, ["index_topk_blocks", "is 0"]),
    "more than is chosen": ({"index_local_blocks": 17}, ["index_local_blocks", "17", "index_topk_blocks (16)"]),
    "no number": ({"index_local_blocks": -1}, ["index_local_blocks", "-1"]),
    "blocks beyond reason": ({"index_block_size": 2**20}, ["index_block_size", str(2**20), "8192"]),
    "another kind of layer": ({"layer_types": ["sliding_attention"] * 60}, ["layer_types", SPARSE]),
    "too few layers": ({"layer_types": [SPARSE]}, ["layer_types", "60 layers"]),
    "no object": ({"sparse_attention_config": 3}, ["sparse_attention_config", "is 3", "an object"]),
    "another routing": ({"scoring_func": "softmax"}, ["scoring_func", "softmax", "sigmoid"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    changes, words = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        arch_of(WRITTEN, **changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)
