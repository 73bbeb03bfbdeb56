"""How configs of dots3-note are read, as published and as transformers writes them, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.config.arch import ModelArch
from quire.config.layers.mixers import LatentAttentionSpec
from quire.config.memory.weights.shapes import num_parameters, window_shares
from quire.errors import ConfigError
from tests.checkpoints import parameters_in_transformers

SMALL: dict[str, Any] = {
    "num_hidden_layers": 6,
    "use_dsa": True,
    "use_sliding_window": True,
    "sliding_window_size": 128,
    "swa_num_attention_heads": 16,
    "swa_num_key_value_heads": 16,
    "swa_qk_nope_head_dim": 160,
    "swa_rope_theta": 10_000.0,
    "moe_shared_expert_intermediate_size": 512,
    "first_k_dense_replace": 2,
}


def arch_of(**changes: Any) -> ModelArch:
    return ModelArch.from_config({"model_type": "dots3_note_text", **changes}, source="config.json")


def mixers_of(arch: ModelArch) -> list[LatentAttentionSpec]:
    return [mixer for mixer in arch.mixers if isinstance(mixer, LatentAttentionSpec)]


def test_what_a_config_leaves_out_is_as_in_transformers() -> None:
    arch = arch_of()
    assert num_parameters(arch) == parameters_in_transformers("dots3_note_text")
    first, *_, last = mixers_of(arch)
    assert (first.num_heads, first.cached_size, first.window) == (128, 704, None)
    assert (last.num_heads, last.cached_size, last.window, last.indexer) == (128, 704, None, first.indexer)
    sliding = mixers_of(arch)[2]
    assert (sliding.num_heads, sliding.cached_size, sliding.window, sliding.indexer) == (64, 1088, 512, None)
    assert first.rope is not None
    assert sliding.rope is not None
    assert (first.rope.theta, sliding.rope.theta) == (8e7, 5e4)


def test_published_keys_mean_what_transformers_writes() -> None:
    from transformers import AutoConfig

    written = json.loads(AutoConfig.for_model("dots3_note_text", **SMALL).to_json_string(use_diff=False))
    assert "per_layer_config" in written
    assert "swa_qk_nope_head_dim" not in written
    arch = arch_of(**SMALL)
    assert arch.layers == ModelArch.from_config(written, source="config.json").layers
    assert num_parameters(arch) == parameters_in_transformers("dots3_note_text", **SMALL)
    kinds = [(mixer.window, mixer.rope_size, mixer.indexer is not None) for mixer in mixers_of(arch)]
    assert kinds == [
        (None, 64, True),
        (None, 64, True),
        (128, 96, False),
        (128, 96, False),
        (128, 96, False),
        (None, 64, True),
    ]
    assert {window for window, _ in window_shares(arch)} == {128, 2048}


def test_numbers_of_layers_may_be_filled_with_zeros() -> None:
    """As transformers writes them where there are more than ten."""
    from transformers import AutoConfig

    sizes = {**SMALL, "num_hidden_layers": 12}
    written = json.loads(AutoConfig.for_model("dots3_note_text", **sizes).to_json_string(use_diff=False))
    assert "02" in written["per_layer_config"]
    assert ModelArch.from_config(written, source="config.json").layers == arch_of(**sizes).layers


def test_layers_may_have_neither_window_nor_indexer() -> None:
    arch = arch_of(**{**SMALL, "use_dsa": False, "use_sliding_window": False})
    assert {(mixer.window, mixer.indexer) for mixer in mixers_of(arch)} == {(None, None)}
    assert window_shares(arch) == ()


def by_layer(**sizes: Any) -> dict[str, Any]:
    return {"per_layer_config": {"2": sizes}, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["half"] * 46}, "layer_types"),
        ({"num_hidden_layers": 2, "layer_types": ["indexed_attention"]}, "layer_types .*2 layers"),
        ({"moe_layer_freq": [1, 1]}, "moe_layer_freq"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"n_shared_experts": 0}, "n_shared_experts"),
        ({"swa_head_dim": 100}, "swa_qk_nope_head_dim|swa_qk_rope_head_dim"),
        ({"swa_head_dim": 256, "swa_qk_rope_head_dim": 32}, "swa_head_dim is 256; it must be the sum"),
        ({"swa_num_key_value_heads": 8}, "num_key_value_heads"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "default"}}, "rope_scaling"),
        (
            {
                "num_hidden_layers": 2,
                "use_dsa": None,
                "layer_types": ["full_attention", "indexed_attention"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "indexed_attention": {"rope_type": "default", "rope_theta": 1e5},
                },
            },
            "rope_parameters .*same for full_attention and indexed_attention",
        ),
        (by_layer(hidden_size=3), "per_layer_config.2 .*num_attention_heads"),
        (by_layer(kv_lora_rank=3), "per_layer_config.3 .*as in the other layers of sliding_attention"),
        ({"per_layer_config": [1]}, "per_layer_config"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        arch_of(**changes)
