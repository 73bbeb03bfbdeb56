"""How configs of HY V4 are read, as published and as transformers writes them, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.config.arch import ModelArch
from quire.config.layers.mixers import LatentAttentionSpec
from quire.config.memory.weights.shapes import num_parameters
from quire.errors import ConfigError
from tests.checkpoints import parameters_in_transformers

PUBLISHED: dict[str, Any] = {
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "layer_types": ["deepseek_sparse_attention"] * 6,
    "indexer_types": ["full", "full", "shared", "shared", "shared", "full"],
    "mlp_layer_types": ["dense"] + ["sparse"] * 5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000},
    "enable_ihc": True,
    "enable_lm_head_fp32": True,
    "gated_mla": True,
    "gating_type": "elementwise",
    "learnable_sink": True,
    "use_dsa": True,
    "use_mla": True,
    "num_nextn_predict_layers": 1,
}
"""Its keys and kinds of values, with fewer layers."""


def arch_of(**changes: Any) -> ModelArch:
    return ModelArch.from_config({"model_type": "hy_v4", **changes}, source="config.json")


def mixers_of(arch: ModelArch) -> list[LatentAttentionSpec]:
    return [mixer for mixer in arch.mixers if isinstance(mixer, LatentAttentionSpec)]


def test_what_a_config_leaves_out_is_as_in_transformers() -> None:
    arch = arch_of()
    assert num_parameters(arch) == parameters_in_transformers("hy_v4")
    mixers = mixers_of(arch)
    assert [index for index, mixer in enumerate(mixers) if mixer.indexer] == [0, 1, 5, 9, 13, 17, 21, 25, 29, 33]
    assert [index for index, layer in enumerate(arch.layers) if layer.mlp.experts is None] == [0]
    first, shared = mixers[0], mixers[2]
    assert (first.has_sinks, first.num_gates, first.interleaved, shared.num_shared) == (True, 32 * 256, False, 2048)
    assert first.indexer is not None
    assert (first.indexer.rotates_last, first.indexer.norm_eps, first.indexer.is_shared) == (True, 1e-5, False)
    assert arch.hyper is not None
    assert (arch.hyper.parts, arch.hyper.magnitude, arch.hyper.least_added) == ((4, 4), 2.0, 1e-6)


def test_published_keys_mean_what_transformers_writes() -> None:
    from transformers import AutoConfig

    written = json.loads(AutoConfig.for_model("hy_v4", **PUBLISHED).to_json_string(use_diff=False))
    arch = arch_of(**PUBLISHED)
    assert (written["num_key_value_heads"], written["layer_types"][0]) == (64, "indexed_attention")
    assert arch.layers == ModelArch.from_config(written, source="config.json").layers
    assert arch.hyper == ModelArch.from_config(written, source="config.json").hyper
    assert num_parameters(arch) == parameters_in_transformers("hy_v4", **PUBLISHED)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"enable_ihc": False}, "enable_ihc"),
        ({"learnable_sink": False}, "learnable_sink"),
        ({"gating_type": "headwise"}, "gating_type"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"swiglu_limit": 0.0}, "swiglu_limit"),
        ({"hc_mult": 0}, "hc_mult"),
        ({"hc_magnitude": -1.0}, "hc_magnitude"),
        ({"hc_eps": 1.0}, "hc_eps"),
        ({"layer_types": ["full_attention"] * 34}, "layer_types"),
        ({"num_hidden_layers": 2, "indexer_types": ["shared", "full"]}, "indexer_types .*begin with full"),
        ({"num_hidden_layers": 2, "mlp_layer_types": ["sparse"]}, "mlp_layer_types .*2 layers"),
        ({"index_head_dim": 32}, "index_head_dim"),
    ],
)
def test_what_quire_does_not_compute_is_refused_by_its_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        arch_of(**changes)
