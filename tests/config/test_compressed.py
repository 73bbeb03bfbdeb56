"""Compressed attention as config.json describes it: spellings, what the cache keeps, what is planned and refused."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from quire.config.arch import ModelArch
from quire.config.layers.any_mixer import MixerSpec
from quire.config.layers.compressed import HEAVY, SLIDING, SPARSE
from quire.config.layers.experts import Scores
from quire.config.layers.mixers import CompressedAttentionSpec
from quire.config.layers.rope import RopeType
from quire.config.memory.activations.scratch import COMPRESSED_BYTES, compressed_bytes
from quire.config.memory.weights.shapes import (
    context_per_token,
    num_active_parameters,
    num_parameters,
    query_sizes,
    window_shares,
)
from quire.errors import ConfigError
from quire.messages.codec import Codec, FrameReader
from quire.messages.kv import FullAttentionSpec, SlidingWindowSpec

FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "bos_token_id": 0,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
"""In the spelling of DeepSeek: the last of the ratios is that of a layer that drafts."""


@dataclass(frozen=True)
class Told:
    mixers: tuple[MixerSpec, ...]


def arch_of(**changes: Any) -> ModelArch:
    return ModelArch.from_config({**FLASH, **changes}, source="config.json")


def mixers_of(arch: ModelArch) -> list[CompressedAttentionSpec]:
    found = [mixer for mixer in arch.mixers if isinstance(mixer, CompressedAttentionSpec)]
    assert len(found) == len(arch.mixers)
    return found


def test_parameters_are_those_of_the_published_model() -> None:
    """284 billion, of which a token meets 13."""
    assert num_parameters(arch_of()) == pytest.approx(284e9, rel=0.005)
    assert num_active_parameters(arch_of()) == pytest.approx(13e9, rel=0.08)


def test_layers_are_as_the_published_ratios_say() -> None:
    sliding, sparse, heavy = mixers_of(arch_of())[1:4]
    assert sliding.compressor is None
    assert sparse.compressor is not None
    assert (sparse.compressor.rate, sparse.compressor.overlaps, sparse.compressor.reach) == (4, True, 8)
    assert sparse.compressor.indexer is not None
    assert (sparse.compressor.indexer.num_heads, sparse.compressor.indexer.num_selected) == (64, 512)
    assert heavy.compressor is not None
    assert (heavy.compressor.rate, heavy.compressor.overlaps, heavy.compressor.indexer) == (128, False, None)
    assert [spec.window for spec in (sliding, sparse, heavy)] == [128] * 3


def test_only_layers_that_compress_have_a_stretched_rotation() -> None:
    sliding, sparse = mixers_of(arch_of())[1:3]
    assert (sliding.rope.type, sliding.rope.theta, sliding.rope.rotary_dim) == (RopeType.DEFAULT, 1e4, 64)
    assert (sparse.rope.type, sparse.rope.theta, sparse.rope.rotary_dim) == (RopeType.YARN, 1.6e5, 64)
    assert sparse.rope.attention_factor == 1.0, "as DeepSeek computes it"


def test_the_first_layers_take_experts_from_a_table() -> None:
    arch = arch_of()
    specs = [mlp.experts for mlp in arch.mlps]
    assert [spec is not None and spec.has_token_table for spec in specs] == [True] * 3 + [False] * 40
    assert [spec is not None and spec.has_choice_bias for spec in specs] == [False] * 3 + [True] * 40
    spec = specs[0]
    assert spec is not None
    assert (spec.routing.scores, spec.routing.renormalized, spec.routing.factor) == (Scores.SQRT_SOFTPLUS, True, 1.5)
    assert spec.gate is not None
    assert (spec.gate.limit, spec.shared_size) == (10.0, 2048)


def modern(**changes: Any) -> dict[str, Any]:
    """The same model as transformers 5 writes it."""
    old = ("compress_ratios", "num_hash_layers", "qk_rope_head_dim", "rope_scaling")
    rest = {key: value for key, value in FLASH.items() if key not in old}
    yarn = {key: value for key, value in FLASH["rope_scaling"].items() if key != "type"}
    both = {"partial_rotary_factor": 0.125}
    return {
        **rest,
        "layer_types": [SLIDING, SLIDING, *[SPARSE, HEAVY] * 20, SPARSE],
        "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40,
        "compress_rates": {SPARSE: 4, HEAVY: 128},
        "partial_rotary_factor": 0.125,
        "rope_parameters": {
            "main": {**both, "rope_type": "default", "rope_theta": 10000.0},
            "compress": {**both, **yarn, "rope_type": "yarn", "rope_theta": 160000.0, "attention_factor": 1.0},
        },
        **changes,
    }


def test_the_spelling_of_transformers_is_the_same_model() -> None:
    assert ModelArch.from_config(modern(), source="config.json").layers == arch_of().layers


def test_nested_rotations_are_read_each_by_itself() -> None:
    rotations = {"main": {}, "compress": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}
    changed = modern(rope_parameters=rotations, partial_rotary_factor=None, index_head_dim=512)
    sliding, sparse = mixers_of(ModelArch.from_config(changed, source="config.json"))[1:3]
    assert (sliding.rope.rotary_dim, sparse.rope.rotary_dim) == (512, 512), "no share is the whole head"
    assert (sliding.rope.theta, sparse.rope.theta) == (1e4, 1e4), "the base beside them"
    assert sparse.rope.attention_factor is None, "derived from the factor"


def test_a_block_has_whole_entries_of_all_layers() -> None:
    arch = arch_of()
    assert arch.kv_layout(16, "bfloat16", ops="cpu").block_size == 128
    assert arch.kv_layout(200, "bfloat16", ops="cpu").block_size == 256
    rates = {"compress_rate_csa": 3, "compress_rate_hca": 10}
    assert arch_of(**rates).kv_layout(16, "bfloat16", ops="cpu").block_size == 30


@pytest.mark.parametrize("ops", ["cpu", "reference", "triton"])
def test_entries_take_what_they_are_compressed_to(ops: str) -> None:
    """Of a token the cache keeps 6.5 KB for good, where 43 layers without entries would keep 43 KB."""
    layout = arch_of().kv_layout(16, "bfloat16", ops=ops)
    (kept,) = [group for group in layout.groups if isinstance(group.spec, FullAttentionSpec)]
    sparse, heavy = 21 * (512 + 128) * 2 // 4, 20 * 512 * 2 / 128
    assert sum(kept.page_sizes) / 128 == sparse + heavy
    assert layout.padding < 0.1
    million = layout.most_blocks(1 << 20, 512) * layout.block_bytes
    assert (1 << 20) * (sparse + heavy) < million < 1.08 * (1 << 20) * (sparse + heavy)


def test_each_part_of_a_layer_has_a_place_of_its_own() -> None:
    arch = arch_of()
    layout = arch.kv_layout(16, "bfloat16", ops="cpu")
    assert [arch.caches_of(place) for place in range(4)] == [range(1), range(1, 2), range(2, 5), range(5, 8)]
    assert layout.group_of_layer.keys() == set(range(2 + 3 * 41))
    for group in layout.groups:
        spans = sorted(
            (layout.place_of_layer[layer].first_byte, group.page_of(layer).num_bytes // 2) for layer in group.layers
        )
        assert all(first + size <= behind for (first, size), (behind, _) in pairwise(spans))
        assert sum(spans[-1]) * 2 <= layout.block_bytes
    windows = {group.spec.window for group in layout.groups if isinstance(group.spec, SlidingWindowSpec)}
    assert windows == {8, 128}, "of entries that overlap two are made of a token"


def test_a_config_passes_between_processes() -> None:
    codec, told = Codec([Told]), Told(arch_of().mixers)
    assert list(FrameReader(codec).feed(codec.encode(told))) == [told]


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_cache_of_8_bits_is_refused(dtype: str) -> None:
    with pytest.raises(ConfigError, match=rf"KV cache of {dtype} has no room for what compressed attention keeps"):
        arch_of().kv_layout(16, dtype, ops="cpu")


def test_queries_read_windows_entries_and_keys_of_indexers() -> None:
    arch, heads = arch_of(num_hidden_layers=4), 64 * 512
    assert query_sizes(arch) == [heads, heads, heads, heads // 4, 64 * 128 // 8, heads, heads // 128]
    assert [window for window, _ in window_shares(arch)] == [128, 2048]
    assert context_per_token(arch) > 0


def test_what_ops_work_with_is_planned() -> None:
    arch = arch_of(num_hidden_layers=4)
    short, long = compressed_bytes(arch, 512, 1 << 12), compressed_bytes(arch, 512, 1 << 20)
    assert COMPRESSED_BYTES * 0.7 < short < 1.6 * COMPRESSED_BYTES
    assert long > 8192 * 512 * 4, "all entries of one token of a layer that chooses none"
    assert compressed_bytes(arch, 1, 256) < short


WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "another kind of layer": ({"layer_types": ["full_attention"] * 43}, ["layer_types", "full_attention", SPARSE]),
    "too few kinds": ({"layer_types": [SPARSE] * 42}, ["layer_types", "43 layers"]),
    "kinds in words": ({"layer_types": "sparse"}, ["layer_types", "'sparse'"]),
    "another ratio": ({"compress_ratios": [8] * 43}, ["compress_ratios", "0, 4, 128"]),
    "too few ratios": ({"compress_ratios": [4] * 42}, ["compress_ratios", "43 layers"]),
    "no ratios": ({"compress_ratios": 4}, ["compress_ratios", "is 4"]),
    "no rate of a kind": ({"compress_rates": {SPARSE: 4}}, ["compress_rates", HEAVY]),
    "a rate of nothing": ({"compress_rate_csa": 0}, ["compress_rate_csa", "is 0"]),
    "a rate in words": ({"compress_rates": {SPARSE: "4", HEAVY: 128}}, ["compress_rates", SPARSE]),
    "rates that no block fits": ({"compress_rates": {SPARSE: 127, HEAVY: 128}}, ["compress_rates", "8192"]),
    "several KV heads": ({"num_key_value_heads": 8}, ["num_key_value_heads", "must be 1"]),
    "groups that do not divide": ({"o_groups": 7}, ["o_groups", "32768"]),
    "index keys smaller than what rotates": ({"index_head_dim": 32}, ["index_head_dim", "(64)"]),
    "no selection": ({"index_topk": 0}, ["index_topk", "is 0"]),
    "a rotation that follows the length": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["dynamic"]),
    "a rotation in words": ({"rope_scaling": "yarn"}, ["rope_scaling", "'yarn'"]),
    "an odd part that is stretched": ({"qk_rope_head_dim": 63}, ["partial_rotary_factor", "even"]),
    "nothing that rotates": ({"partial_rotary_factor": 0.001}, ["partial_rotary_factor"]),
    "no streams": ({"hc_mult": 0}, ["hc_mult", "is 0"]),
    "streams beyond reason": ({"hc_mult": 65}, ["hc_mult", "65"]),
    "no turns": ({"hc_sinkhorn_iters": 0}, ["hc_sinkhorn_iters"]),
    "a negative epsilon": ({"hc_eps": -1e-6}, ["hc_eps"]),
    "another score": ({"scoring_func": "softmax"}, ["scoring_func", "sqrtsoftplus"]),
    "another gate": ({"hidden_act": "gelu"}, ["hidden_act", "silu"]),
    "no limit": ({"swiglu_limit": 0}, ["swiglu_limit"]),
    "weights as they are": ({"norm_topk_prob": False}, ["norm_topk_prob"]),
    "no shared expert": ({"n_shared_experts": 0}, ["n_shared_experts"]),
    "two widths": ({"intermediate_size": 1024}, ["intermediate_size", "2048"]),
    "two numbers of experts": ({"num_local_experts": 128}, ["num_local_experts", "256"]),
    "more experts than there are": ({"num_experts_per_tok": 257}, ["num_experts_per_tok", "256"]),
    "groups of experts": ({"n_group": 8}, ["n_group"]),
    "another kind of experts": ({"mlp_layer_types": ["dense"] * 43}, ["mlp_layer_types", "hash_moe"]),
    "tables in words": ({"num_hash_layers": "3"}, ["num_hash_layers"]),
    "biases": ({"attention_bias": True}, ["attention_bias"]),
    "biases of experts": ({"mlp_bias": True}, ["mlp_bias"]),
    "no window": ({"sliding_window": 0}, ["sliding_window"]),
    "queries of full rank": ({"q_lora_rank": 0}, ["q_lora_rank"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    changes, words = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        arch_of(**changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("seed", range(40))
def test_unusual_spellings_mean_what_transformers_takes_them_for(seed: int) -> None:
    from transformers import AutoConfig

    rng = random.Random(seed)
    number = rng.randint(1, 6)
    raw: dict[str, Any] = {"num_hidden_layers": number, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}
    for key, value in {
        "layer_types": [rng.choice((SLIDING, SPARSE, HEAVY)) for _ in range(number)],
        "compress_ratios": [rng.choice((0, 4, 128)) for _ in range(number + rng.randint(0, 2))],
        "compress_rates": {SPARSE: rng.randint(1, 9), HEAVY: rng.randint(1, 30)},
        "compress_rate_csa": rng.randint(1, 9),
        "compress_rate_hca": rng.randint(1, 30),
        "mlp_layer_types": [rng.choice(("moe", "hash_moe")) for _ in range(number)],
        "num_hash_layers": rng.randint(0, number + 1),
        "qk_rope_head_dim": rng.choice((2, 8, 16)),
        "partial_rotary_factor": rng.choice((0.25, 0.5, 1.0)),
        "rope_theta": 500.0,
        "compress_rope_theta": 70.0,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 99},
        "rope_parameters": {"main": {"rope_theta": 9.0}, "compress": {"partial_rotary_factor": 0.5}},
    }.items():
        if rng.random() < 0.4:
            raw[key] = value
    config = AutoConfig.for_model("deepseek_v4", **raw)
    arch = ModelArch.from_config({**FLASH_NAMES, **raw}, source="config.json")
    kinds = {(False, False): SLIDING, (True, False): HEAVY, (True, True): SPARSE}
    for index, mixer in enumerate(mixers_of(arch)):
        spec = mixer.compressor
        assert kinds[spec is not None, spec is not None and spec.overlaps] == config.layer_types[index]
        if spec is not None:
            assert spec.rate == config.compress_rates[config.layer_types[index]]
        rope = config.rope_parameters["main" if spec is None else "compress"]
        assert (mixer.rope.type, mixer.rope.theta) == (rope["rope_type"], rope["rope_theta"])
        assert mixer.rope.rotary_dim == int(32 * rope.get("partial_rotary_factor", 1.0))
        if mixer.rope.type is RopeType.YARN:
            assert mixer.rope.attention_factor == rope.get("attention_factor")
            assert mixer.rope.original_max_position == rope["original_max_position_embeddings"]
    tables = [mlp.experts is not None and mlp.experts.has_token_table for mlp in arch.mlps]
    assert tables == [kind == "hash_moe" for kind in config.mlp_layer_types]


FLASH_NAMES = {key: FLASH[key] for key in ("architectures", "model_type")}
