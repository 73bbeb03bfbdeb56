"""Indexers as config.json describes them: published keys, what the cache keeps, what a step costs, what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from quire.config.arch import ModelArch
from quire.config.layers.any_mixer import MixerSpec
from quire.config.layers.mixers import IndexerSpec, LatentAttentionSpec
from quire.config.memory.activations.scratch import SELECTION_BYTES, selection_bytes
from quire.config.memory.weights.shapes import (
    context_per_token,
    num_active_parameters,
    num_parameters,
    query_sizes,
    window_shares,
)
from quire.errors import ConfigError
from quire.messages.codec import Codec, FrameReader
from tests.config.test_latent import DEEPSEEK_V3

DEEPSEEK_V32: dict[str, Any] = {
    **DEEPSEEK_V3,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}
"""As it was published, but for its quantisation."""
GLM_5: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "first_k_dense_replace": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}


@dataclass(frozen=True)
class Told:
    mixers: tuple[MixerSpec, ...]


def arch_of(base: dict[str, Any], **changes: Any) -> ModelArch:
    return ModelArch.from_config({**base, **changes}, source="config.json")


def latent_mixers(arch: ModelArch) -> list[LatentAttentionSpec]:
    return [mixer for mixer in arch.mixers if isinstance(mixer, LatentAttentionSpec)]


def indexer_of(arch: ModelArch) -> IndexerSpec:
    mixer = arch.mixers[0]
    assert isinstance(mixer, LatentAttentionSpec)
    assert mixer.indexer is not None
    assert all(other == mixer for other in arch.mixers)
    return mixer.indexer


@pytest.mark.parametrize(
    ("base", "parameters", "active"), [(DEEPSEEK_V32, 671.9e9, 37e9), (GLM_5, 744e9, 40e9)], ids=["V3.2", "GLM-5"]
)
def test_published_models_are_counted_as_their_reports_say(
    base: dict[str, Any], parameters: float, active: float
) -> None:
    arch = arch_of(base)
    assert num_parameters(arch) == pytest.approx(parameters, rel=0.005)
    assert num_active_parameters(arch) == pytest.approx(active, rel=0.12)


def test_indexers_are_what_v3_does_not_have() -> None:
    more = num_parameters(arch_of(DEEPSEEK_V32)) - num_parameters(arch_of(DEEPSEEK_V3))
    assert more == 61 * (1536 * 64 * 128 + 7168 * 128 + 7168 * 64 + 2 * 128)


def test_the_cache_keeps_the_indexers_key_behind_the_latent() -> None:
    arch = arch_of(DEEPSEEK_V32)
    assert (arch.num_kv_heads, arch.head_size, indexer_of(arch).head_size) == (1, 64 + 512 + 128, 128)
    assert arch.kv_layout(16, "bfloat16", ops="cpu").block_bytes == 61 * 2 * 16 * 704 * 2
    odd = arch_of(DEEPSEEK_V32, kv_lora_rank=17, qk_rope_head_dim=6, index_head_dim=8)
    assert odd.head_size == 24 + 8


def test_glm_5_alone_rotates_neighbours_in_the_indexer() -> None:
    v32, glm = arch_of(DEEPSEEK_V32), arch_of(GLM_5)
    assert not indexer_of(v32).interleaved
    assert indexer_of(glm).interleaved
    for arch in (v32, glm):
        mixer = arch.mixers[0]
        assert isinstance(mixer, LatentAttentionSpec)
        assert mixer.interleaved


def test_no_more_tokens_are_chosen_than_there_can_be() -> None:
    arch = arch_of(DEEPSEEK_V32, index_topk=10**6)
    assert indexer_of(arch).num_selected == arch.max_position_embeddings == 163_840


def test_a_config_with_indexers_passes_between_processes() -> None:
    codec, told = Codec([Told]), Told(arch_of(DEEPSEEK_V32).mixers)
    assert list(FrameReader(codec).feed(codec.encode(told))) == [told]


def test_attention_reads_the_chosen_and_the_indexer_everything() -> None:
    arch, dense = arch_of(DEEPSEEK_V32), arch_of(DEEPSEEK_V3)
    attention, scores = 128 * 704, 64 * 128 // 2
    assert query_sizes(arch) == [attention, scores] * 61
    assert window_shares(arch) == ((2048, attention / (attention + scores)),)
    assert context_per_token(arch) == pytest.approx(context_per_token(dense) * 0.79, rel=0.02)
    assert window_shares(dense) == ()


def test_what_selection_works_with_is_planned() -> None:
    arch, block = arch_of(DEEPSEEK_V32), 16 * 2 * 704 * 2
    assert selection_bytes(arch, 1, 2048, block, 16) == 0, "nothing is chosen of what is seen whole"
    of_one = selection_bytes(arch, 1, 8192, block, 16)
    assert of_one >= 2048 * 2 * 704 * 2, "the pages of one token"
    assert SELECTION_BYTES * 0.8 < selection_bytes(arch, 512, 8192, block, 16) < 1.4 * SELECTION_BYTES
    assert selection_bytes(arch_of(DEEPSEEK_V3), 512, 8192, block, 16) == 0


WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no heads": ({"index_n_heads": 0}, ["index_n_heads", "is 0", "4096"]),
    "heads beyond reason": ({"index_n_heads": 5000}, ["index_n_heads", "5000", "4096"]),
    "heads in words": ({"index_n_heads": "64"}, ["index_n_heads", "'64'"]),
    "keys beyond reason": ({"index_head_dim": 2048}, ["index_head_dim", "2048", "1024"]),
    "keys that no cache keeps": ({"index_head_dim": 130}, ["index_head_dim", "130", "multiple of 4"]),
    "keys smaller than what rotates": ({"index_head_dim": 32}, ["index_head_dim", "32", "qk_rope_head_dim (64)"]),
    "nothing chosen": ({"index_topk": 0}, ["index_topk", "is 0"]),
    "a fraction chosen": ({"index_topk": 0.5}, ["index_topk", "0.5"]),
    "more than can be counted": ({"index_topk": 2**40}, ["index_topk", str(2**40), str(2**31 - 1)]),
    "no low-rank queries": ({"q_lora_rank": None}, ["q_lora_rank", "must be a number"]),
    "layers without": (
        {"layer_types": ["full_attention"] * 61},
        ["layer_types", "full_attention", "indexed_attention"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("base", [DEEPSEEK_V32, GLM_5], ids=["V3.2", "GLM-5"])
def test_what_is_wrong_is_named(base: dict[str, Any], name: str) -> None:
    changes, words = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        arch_of(base, **changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


SHARING: dict[str, dict[str, Any]] = {
    "listed": {"indexer_types": ["full", "full", "shared", "shared", "full", "shared"]},
    "letters": {"index_topk_pattern": "FFSSFS"},
    "listed beside letters": {"indexer_types": ["full"] * 5 + ["shared"], "index_topk_pattern": "FFFFFF"},
    "every third": {"index_topk_freq": 3},
    "every second from the fourth on": {"index_topk_freq": 2, "index_skip_topk_offset": 4},
}


@pytest.mark.parametrize("case", SHARING)
def test_layers_share_a_choice_as_in_transformers(case: str) -> None:
    from transformers import GlmMoeDsaConfig

    changes = {"num_hidden_layers": 6, **SHARING[case]}
    arch = arch_of(GLM_5, **changes)
    kinds = ["shared" if mixer.num_shared else "full" for mixer in latent_mixers(arch)]
    assert kinds == GlmMoeDsaConfig(**changes).indexer_types
    followed = [bool(mixer.indexer and mixer.indexer.is_shared) for mixer in latent_mixers(arch)]
    assert followed == [pair == ("full", "shared") for pair in pairwise([*kinds, "full"])]


def test_layers_that_share_a_choice_have_no_indexer_and_keep_no_key() -> None:
    every, fourth = arch_of(GLM_5), arch_of(GLM_5, index_topk_freq=4)
    num_shared = sum(mixer.num_shared is not None for mixer in latent_mixers(fourth))
    assert num_shared == 57
    of_indexer = 2048 * 32 * 128 + 6144 * 128 + 6144 * 32 + 2 * 128
    assert num_parameters(every) - num_parameters(fourth) == num_shared * of_indexer
    assert {mixer.cached_size for mixer in latent_mixers(fourth)} == {704, 576}
    kept = sum(spec.page.num_bytes for spec in fourth.kv_cache_specs(16, "bfloat16", ops="cpu"))
    assert kept == (21 * 704 + 57 * 576) * 2 * 16 * 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"indexer_types": ["full"] * 77 + ["half"]}, "must name full or shared for each of the 78 layers"),
        ({"indexer_types": ["full"] * 77}, "must name full or shared for each of the 78 layers"),
        ({"indexer_types": 3}, "must name full or shared"),
        ({"indexer_types": ["shared"] * 78}, "must begin with full"),
        ({"index_topk_pattern": "FSSF"}, "must name full or shared"),
        ({"index_topk_pattern": "f" * 78}, "must name full or shared"),
        ({"index_topk_freq": "4"}, "must be a whole number"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 0}, "must let the first layer have an indexer"),
    ],
    ids=str,
)
def test_a_choice_that_cannot_be_shared_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        arch_of(GLM_5, **changes)


@pytest.mark.parametrize(
    "changes", [{"indexer_types": ["full"] * 78}, {"index_topk_pattern": "F" * 78}, {"index_topk_freq": 0}]
)
def test_ways_to_say_that_all_layers_have_one(changes: dict[str, Any]) -> None:
    assert arch_of(GLM_5, **changes).layers == arch_of(GLM_5).layers
