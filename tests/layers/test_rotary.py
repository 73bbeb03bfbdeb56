"""rotary_table against transformers' frequencies, over all positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire.config.arch import ModelArch
from quire.layers.rotary import rotary_table

MAX_POSITION = 512
LONG = [1.0 + index / 3 for index in range(16)]
SHORT = [1.0 + index / 50 for index in range(16)]
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    "yarn-one": {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 512},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn-mscale-alone": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 2.0},
    "yarn-attention": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.8,
        "beta_fast": 20.0,
        "beta_slow": 3.0,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 64,
    },
    "longrope-factor": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 64,
        "factor": 2.0,
    },
    "longrope-attention": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.7,
    },
}


def config_of(kind: str) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_theta": 10_000.0, **KINDS[kind]},
    )


def table_of(kind: str, max_model_len: int) -> Tensor:
    config = {**config_of(kind).to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": None}
    rope = ModelArch.from_config(config, source=kind).mixers[0].rope
    assert rope is not None
    return rotary_table(rope, max_model_len)


def transformers_table(kind: str, length: int) -> Tensor:
    embedding = LlamaRotaryEmbedding(config_of(kind))
    cos, sin = embedding(torch.zeros(1), torch.arange(length).unsqueeze(0))
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_table_equals_transformers_at_full_length(kind: str) -> None:
    torch.testing.assert_close(table_of(kind, MAX_POSITION), transformers_table(kind, MAX_POSITION), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_table_equals_transformers_within_the_original_context(kind: str) -> None:
    torch.testing.assert_close(table_of(kind, 64), transformers_table(kind, 64), rtol=0, atol=1e-6)


def test_dynamic_table_equals_transformers_beyond_the_context() -> None:
    torch.testing.assert_close(table_of("dynamic", 700), transformers_table("dynamic", 700), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "kind", sorted(KINDS.keys() - {"dynamic", "longrope", "longrope-factor", "longrope-attention"})
)
def test_a_longer_table_begins_with_the_shorter_one(kind: str) -> None:
    assert torch.equal(table_of(kind, 300)[:100], table_of(kind, 100))


def test_window_layers_have_a_table_of_their_own() -> None:
    """As Gemma 3's rotary embedding computes it for each kind of layer."""
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    kinds = {"full_attention": linear, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = Gemma3TextConfig(head_dim=32, num_hidden_layers=6, max_position_embeddings=512, rope_parameters=kinds)
    embedding = Gemma3RotaryEmbedding(config)
    raw = {**config.to_dict(), "architectures": ["Gemma3ForCausalLM"], "dtype": None}
    for mixer, kind in zip(ModelArch.from_config(raw, source="").mixers, config.layer_types, strict=True):
        assert mixer.rope is not None
        cos, sin = embedding(torch.zeros(1), torch.arange(512).unsqueeze(0), kind)
        theirs = torch.cat((cos[0, :, :16], sin[0, :, :16]), dim=-1)
        torch.testing.assert_close(rotary_table(mixer.rope, 512), theirs, rtol=0, atol=1e-6)


def test_table_is_shared() -> None:
    assert table_of("llama3", 100) is table_of("llama3", 100)


def test_cosines_are_taken_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    cosines = Tensor.cos

    def cos(angles: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return cosines(angles)

    monkeypatch.setattr(Tensor, "cos", cos)
    rotary_table.cache_clear()
    table_of("default", 512)
    assert seen == [1]
