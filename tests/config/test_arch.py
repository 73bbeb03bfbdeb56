"""ModelArch: dialects of config.json, and everything that can be wrong with one."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from quire.config.arch import ModelArch
from quire.config.layers.rope import RopeConfig, RopeType
from quire.errors import ConfigError
from quire.messages.kv import FullAttentionSpec, PageSpec, SlidingWindowSpec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "bfloat16",
}
PHI3 = {**LLAMA, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}
QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
GEMMA2 = {**LLAMA, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
GEMMA3 = {**LLAMA, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "sliding_window": 32}
FALCON = {**LLAMA, "model_type": "falcon", "architectures": ["FalconForCausalLM"]}
SMOLLM3 = {**LLAMA, "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"]}
GRANITE_SWA = {**LLAMA, "model_type": "granite_swa", "architectures": ["GraniteSWAForCausalLM"]}
GPT_NEO = {"model_type": "gpt_neo", "vocab_size": 64, "hidden_size": 32, "num_layers": 4, "num_heads": 4}
MPT = {"model_type": "mpt", "vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 1000,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "eos_token_id": 999,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def arch_of(base: dict[str, Any] = LLAMA, **changes: Any) -> ModelArch:
    return ModelArch.from_config({**base, **changes}, source="config.json")


def windows_of(arch: ModelArch) -> tuple[int | None, ...]:
    return tuple(mixer.window for mixer in arch.mixers)


def rope_of(arch: ModelArch) -> RopeConfig:
    """The one rotation of all layers."""
    (rope,) = arch.ropes
    assert all(mixer.rope == rope for mixer in arch.mixers)
    return rope


def test_llama_is_read() -> None:
    arch = arch_of()
    assert (arch.num_layers, arch.num_heads, arch.num_kv_heads, arch.head_size) == (4, 8, 2, 8)
    assert (arch.hidden_size, arch.intermediate_size, arch.vocab_size) == (64, 128, 1000)
    assert (arch.activation, arch.norm_eps, arch.dtype) == ("silu", 1e-5, "bfloat16")
    assert (arch.eos_token_ids, arch.bos_token_id) == ((2,), 1)
    assert windows_of(arch) == (None,) * 4
    assert not arch.tie_word_embeddings
    assert arch.mixers[0].query_scale == pytest.approx(8**-0.5)


def test_gpt2_spellings_are_read() -> None:
    arch = arch_of(GPT2)
    assert arch.architecture == "GPT2LMHeadModel"
    assert (arch.hidden_size, arch.intermediate_size, arch.num_layers, arch.num_kv_heads) == (64, 256, 2, 4)
    assert arch.max_position_embeddings == 1024
    assert arch.ropes == frozenset()
    assert arch.tie_word_embeddings
    assert arch.attention_bias
    assert arch.layers[0].mlp.has_bias


def test_opt_spellings_are_read() -> None:
    arch = arch_of(
        {
            "model_type": "opt",
            "vocab_size": 100,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
            "enable_bias": False,
        }
    )
    assert (arch.intermediate_size, arch.embedding_size, arch.max_position_embeddings) == (96, 32, 2048)
    assert not arch.attention_bias


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["float16", "torch.float16"])
def test_dtype_of_transformers_4_and_5(key: str, value: str) -> None:
    config = {name: setting for name, setting in LLAMA.items() if name != "torch_dtype"}
    assert arch_of(config, **{key: value}).dtype == "float16"


def test_rope_of_transformers_4() -> None:
    rope = rope_of(arch_of(rope_theta=500_000.0, rope_scaling=LLAMA3))
    assert (rope.type, rope.theta, rope.factor, rope.original_max_position) == (RopeType.LLAMA3, 500_000.0, 8.0, 128)


def test_rope_of_transformers_5() -> None:
    rope = rope_of(arch_of(rope_parameters={**LLAMA3, "rope_theta": 500_000.0}))
    assert rope == rope_of(arch_of(rope_theta=500_000.0, rope_scaling=LLAMA3))


def test_rope_defaults() -> None:
    rope = rope_of(arch_of(rope_scaling=None))
    assert (rope.type, rope.theta, rope.rotary_dim, rope.max_position) == (RopeType.DEFAULT, 10_000.0, 8, 512)


@pytest.mark.parametrize("spelling", ["su", "yarn", "longrope"])
def test_early_phi3_spellings_mean_longrope(spelling: str) -> None:
    scaling = {**LONGROPE, "type": spelling}
    rope = rope_of(arch_of(PHI3, rope_scaling=scaling, original_max_position_embeddings=128))
    assert (rope.type, rope.original_max_position, rope.factor) == (RopeType.LONGROPE, 128, 4.0)


def test_partial_rotation() -> None:
    assert rope_of(arch_of(PHI3, partial_rotary_factor=0.5)).rotary_dim == 4


@pytest.mark.parametrize(
    ("base", "changes", "expected"),
    [
        ({**LLAMA, "model_type": "mistral"}, {"sliding_window": 32}, (32,) * 4),
        ({**LLAMA, "model_type": "mistral"}, {"sliding_window": None}, (None,) * 4),
        ({**LLAMA, "model_type": "mistral"}, {}, (4096,) * 4),
        (LLAMA, {"sliding_window": 32}, (None,) * 4),
        (QWEN2, {"sliding_window": 32, "max_window_layers": 1}, (None,) * 4),
        (QWEN2, {"sliding_window": 32, "max_window_layers": 1, "use_sliding_window": True}, (None, 32, 32, 32)),
        (
            QWEN2,
            {
                "sliding_window": 32,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (32, None, 32, None),
        ),
        (GEMMA2, {"sliding_window": 32}, (32, None, 32, None)),
        (GEMMA2, {"sliding_window": 32, "layer_types": ["full_attention"] * 4}, (None,) * 4),
        (GEMMA3, {}, (32,) * 4),
        (GEMMA3, {"num_hidden_layers": 7}, (*(32,) * 5, None, 32)),
        (GEMMA3, {"sliding_window_pattern": 3}, (32, 32, None, 32)),
        (GEMMA3, {"sliding_window_pattern": 1}, (None,) * 4),
        (GEMMA3, {"sliding_window_pattern": 3, "layer_types": ["full_attention"] * 4}, (None,) * 4),
        (GEMMA3, {"sliding_window": None}, (None,) * 4),
        (PHI3, {"sliding_window": 32}, (32,) * 4),
    ],
)
def test_windows_of_layers(base: dict[str, Any], changes: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    assert windows_of(arch_of(base, **changes)) == expected


def test_gemma3_spells_its_rotations_in_two_ways() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    old = arch_of(GEMMA3, sliding_window_pattern=2, rope_theta=7e5, rope_local_base_freq=7e3, rope_scaling=linear)
    by_kind = {
        "full_attention": {**linear, "rope_theta": 7e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
    }
    assert old.layers == arch_of(GEMMA3, sliding_window_pattern=2, rope_parameters=by_kind).layers
    found = [
        (mixer.window, mixer.rope and (mixer.rope.type, mixer.rope.theta, mixer.rope.factor)) for mixer in old.mixers
    ]
    assert found == [(32, (RopeType.DEFAULT, 7e3, 1.0)), (None, (RopeType.LINEAR, 7e5, 8.0))] * 2


PARTIAL = {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5}
BY_KIND = {
    "full_attention": {**LLAMA3, "rope_theta": 5e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
}
YARN = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 64}
SCALED_QUERIES = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "llama_4_scaling_beta": 0.1}
SLIDING, FULL = "sliding_attention", "full_attention"
SAME: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "share of heads": ("phi", {"partial_rotary_factor": 0.5, "rope_theta": 5e4}, {"rope_parameters": PARTIAL}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 5e4}, {"rope_parameters": PARTIAL}),
    "names of others": (
        "gpt_neox",
        {"rotary_pct": 0.5},
        {"rotary_pct": 0.5, "rope_theta": 77.0, "partial_rotary_factor": 1.0},
    ),
    "names of others alone": ("gpt_neox", {}, {"rope_theta": 77.0, "partial_rotary_factor": 1.0}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.5, "rope_theta": 5e4}, {"rope_parameters": PARTIAL}),
    "nemotron": ("nemotron", {"partial_rotary_factor": 0.5, "rope_theta": 5e4}, {"rope_parameters": PARTIAL}),
    "persimmon": ("persimmon", {"rope_theta": 5e4}, {"rope_parameters": PARTIAL}),
    "a base raised by alpha": (
        "hunyuan_v1_dense",
        {"rope_theta": 5e4, "rope_scaling": {"type": "dynamic", "alpha": 9.0, "factor": 1.0}},
        {"rope_parameters": {"rope_type": "dynamic", "alpha": 9.0, "factor": 1.0, "rope_theta": 5e4}},
    ),
    "a base for each layer": ("granite_swa", {"rope_theta": 5e4}, {"layer_rope_theta": [5e4] * 4}),
    "kinds of attention": ("cwm", {}, {"layer_types": [FULL, SLIDING, SLIDING, SLIDING]}),
    "a stretched rotation": (
        "cwm",
        {},
        {"rope_parameters": {**LLAMA3, "factor": 16.0, "original_max_position_embeddings": 8192, "rope_theta": 1e6}},
    ),
    "attention by name": ("bloom", {}, {"n_head": 8, "n_layer": 4, "n_embed": 64}),
    "pairs of kinds": ("gpt_neo", {}, {"attention_types": [[["global", "local"], 2]]}),
    "kinds beside pairs": (
        "gpt_neo",
        {"attention_types": [[["local"], 3], [["global"], 1]]},
        {"attention_types": [[["global", "local"], 2]], "attention_layers": ["local"] * 3 + ["global"]},
    ),
    "attention of defaults": ("mpt", {}, {"attn_config": {"alibi": True, "clip_qkv": None, "qk_ln": False}}),
    "scaling": (
        "granite",
        {"rope_theta": 5e4, "rope_scaling": LLAMA3},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e4}},
    ),
    "scaling beside parameters": (
        "llama",
        {"rope_theta": 5e4, "rope_scaling": LLAMA3, "rope_parameters": YARN},
        {"rope_theta": 5e4, "rope_scaling": LLAMA3},
    ),
    "scaling of full layers": (
        "olmo3",
        {"rope_theta": 5e4, "rope_scaling": LLAMA3},
        {"rope_parameters": BY_KIND},
    ),
    "a context beside its rotation": (
        "ministral3",
        {"rope_scaling": SCALED_QUERIES, "original_max_position_embeddings": 16},
        {"rope_parameters": {**SCALED_QUERIES, "original_max_position_embeddings": 16}},
    ),
    "a context that is the whole one": (
        "ministral3",
        {"rope_parameters": SCALED_QUERIES},
        {"rope_parameters": {**SCALED_QUERIES, "original_max_position_embeddings": 512}},
    ),
    "factors of nothing": (
        "llama",
        {"rope_parameters": {**YARN, "mscale": 0, "mscale_all_dim": 0.0}},
        {"rope_parameters": YARN},
    ),
    "layers without a list": ("olmo3", {}, {"layer_types": [SLIDING, SLIDING, SLIDING, FULL]}),
    "layers of listed experts": (
        "cohere2_moe",
        {"mlp_layer_types": ["dense", *["sparse"] * 3]},
        {"mlp_layer_types": ["dense", *["sparse"] * 3], "layer_types": [SLIDING, SLIDING, SLIDING, FULL]},
    ),
    "pattern": ("cohere2", {"sliding_window_pattern": 2}, {"layer_types": [SLIDING, FULL] * 2}),
    "number of first layers": (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 1},
        {"use_sliding_window": True, "layer_types": [FULL, SLIDING, SLIDING, SLIDING]},
    ),
    "interval": ("smollm3", {"no_rope_layer_interval": 2}, {"no_rope_layers": [1, 0, 1, 0]}),
    "defaults": ("cohere", {}, {"logit_scale": 0.0625, "rope_theta": 5e5, "use_qk_norm": False, "head_dim": None}),
    "one key head": ("falcon", {"multi_query": True}, {"num_kv_heads": None, "alibi": False}),
}


@pytest.mark.parametrize("name", SAME)
def test_two_dialects_are_one_model(name: str) -> None:
    model_type, old, new = SAME[name]
    base = {key: value for key, value in LLAMA.items() if key not in ("architectures", "rms_norm_eps")}
    base["model_type"] = model_type
    assert comparable(arch_of(base, **old)) == comparable(arch_of(base, **new))


def test_a_window_that_smollm3_lists_needs_no_flag() -> None:
    listed = {"sliding_window": 32, "use_sliding_window": False, "layer_types": [SLIDING, FULL] * 2}
    assert windows_of(arch_of(SMOLLM3, **listed)) == (32, None, 32, None)
    assert windows_of(arch_of(SMOLLM3, sliding_window=32, no_rope_layer_interval=2)) == (None,) * 4


def test_gemma3_bases_that_are_left_out() -> None:
    """A window that is left out takes no layer's base."""
    for changes in ({}, {"rope_parameters": {"sliding_attention": None}}, {"sliding_window": None}):
        arch = arch_of(GEMMA3, sliding_window_pattern=2, **changes)
        assert [mixer.rope and mixer.rope.theta for mixer in arch.mixers] == [10_000.0, 1_000_000.0] * 2


def test_a_cap_that_gemma3_never_applies_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert arch_of(GEMMA3, final_logit_softcapping=30.0).final_soft_cap == 30.0
    assert not caplog.text
    assert arch_of(GEMMA3, attn_logit_softcapping=50.0).attn_soft_cap is None
    assert "attn_logit_softcapping" in caplog.text


def test_early_gemma_configs_say_gelu_and_mean_its_approximation() -> None:
    assert arch_of({**LLAMA, "model_type": "gemma"}, hidden_act="gelu").activation == "gelu_pytorch_tanh"
    assert arch_of(hidden_act="gelu").activation == "gelu"


def test_gemma2_scales_and_caps() -> None:
    arch = arch_of(GEMMA2, head_dim=32, query_pre_attn_scalar=16, attn_logit_softcapping=None)
    assert (arch.head_size, arch.mixers[0].query_scale) == (32, 0.25)
    assert (arch.attn_soft_cap, arch.final_soft_cap) == (None, 30.0)


@pytest.mark.parametrize(
    ("value", "expected"), [(2, (2,)), ([2, 5], (2, 5)), (None, ()), ([], ())], ids=["one", "list", "null", "empty"]
)
def test_end_of_sequence_ids(value: object, expected: tuple[int, ...]) -> None:
    assert arch_of(eos_token_id=value).eos_token_ids == expected


def test_kv_cache_specs_follow_the_layers() -> None:
    specs = arch_of(GEMMA2, sliding_window=32, head_dim=8).kv_cache_specs(16, "bfloat16", ops="cpu")
    page = PageSpec(num_kv_heads=2, head_size=8, dtype="bfloat16", block_size=16, slot_multiple=16)
    assert specs == [SlidingWindowSpec(page=page, window=32), FullAttentionSpec(page=page)] * 2


GEMMA3N = {
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_types": ["sliding_attention", "sliding_attention"],
    "num_kv_shared_layers": 1,
}

WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "model_type missing": (LLAMA, {"model_type": None}, ["model_type", "missing"]),
    "model_type a number": (LLAMA, {"model_type": 3}, ["model_type", "3"]),
    "architectures unknown and absent": (
        {**LLAMA, "model_type": "other"},
        {"architectures": None},
        ["the model_type 'other' is not supported", "`quire models`"],
    ),
    "architectures two": (LLAMA, {"architectures": ["LlamaForCausalLM", "B"]}, ["architectures", "exactly one"]),
    "architectures none": (LLAMA, {"architectures": []}, ["architectures", "exactly one"]),
    "architectures a string": (LLAMA, {"architectures": "LlamaForCausalLM"}, ["architectures"]),
    "vocab_size missing": (LLAMA, {"vocab_size": None}, ["vocab_size", "missing"]),
    "keys of single layers": (
        LLAMA,
        {"per_layer_config": {"1": {"rms_norm_eps": 0.5}}},
        ["per_layer_config", "left out"],
    ),
    "hidden_size zero": (LLAMA, {"hidden_size": 0}, ["hidden_size", "is 0", "above 0"]),
    "hidden_size negative": (LLAMA, {"hidden_size": -64}, ["hidden_size", "-64"]),
    "hidden_size a fraction": (LLAMA, {"hidden_size": 64.5}, ["hidden_size", "64.5"]),
    "hidden_size a string": (LLAMA, {"hidden_size": "64"}, ["hidden_size", "'64'"]),
    "hidden_size true": (LLAMA, {"hidden_size": True}, ["hidden_size", "True"]),
    "hidden_size indivisible": (LLAMA, {"hidden_size": 65}, ["hidden_size", "65", "num_attention_heads (8)"]),
    "layers missing": (LLAMA, {"num_hidden_layers": None}, ["num_hidden_layers", "missing"]),
    "heads zero": (LLAMA, {"num_attention_heads": 0}, ["num_attention_heads", "is 0"]),
    "kv heads indivisible": (LLAMA, {"num_key_value_heads": 3}, ["num_key_value_heads", "is 3", "(8)"]),
    "kv heads negative": (LLAMA, {"num_key_value_heads": -1}, ["num_key_value_heads", "-1"]),
    "head_dim zero": (LLAMA, {"head_dim": 0}, ["head_dim", "is 0"]),
    "intermediate_size zero": (LLAMA, {"intermediate_size": 0}, ["intermediate_size"]),
    "positions negative": (LLAMA, {"max_position_embeddings": -1}, ["max_position_embeddings", "-1"]),
    "eps zero": (LLAMA, {"rms_norm_eps": 0}, ["rms_norm_eps", "above 0"]),
    "eps nan": (LLAMA, {"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
    "eps infinite": (LLAMA, {"rms_norm_eps": float("inf")}, ["rms_norm_eps", "inf"]),
    "activation a list": (LLAMA, {"hidden_act": ["silu"]}, ["hidden_act"]),
    "tie a string": (LLAMA, {"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "'yes'", "true or false"]),
    "bias a number": (LLAMA, {"attention_bias": 1}, ["attention_bias"]),
    "dtype unknown": (LLAMA, {"torch_dtype": "float8"}, ["torch_dtype", "float8", "bfloat16"]),
    "dtype a number": (LLAMA, {"torch_dtype": 16}, ["torch_dtype", "16"]),
    "eos beyond the vocabulary": (LLAMA, {"eos_token_id": 1000}, ["eos_token_id", "1000", "999"]),
    "eos a string": (LLAMA, {"eos_token_id": "2"}, ["eos_token_id"]),
    "bos negative": (LLAMA, {"bos_token_id": -1}, ["bos_token_id", "-1"]),
    "quantised": (LLAMA, {"quantization_config": {"quant_method": "hqq"}}, ["quantization_config", "hqq"]),
    "quantised oddly": (LLAMA, {"quantization_config": "yes"}, ["quantization_config", "yes"]),
    "rope type unknown": (
        LLAMA,
        {"rope_scaling": {"type": "lama3"}},
        ["rope_type", "'lama3'", "did you mean 'llama3'"],
    ),
    "rope type a number": (LLAMA, {"rope_scaling": {"type": 1}}, ["rope_type", "1"]),
    "rope a list": (LLAMA, {"rope_scaling": [1]}, ["rope_scaling", "object"]),
    "rope per layer type": (
        LLAMA,
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        ["rope_parameters", "all layers"],
    ),
    "rope without factor": (LLAMA, {"rope_scaling": {"type": "linear"}}, ["rope_parameters: factor", "missing"]),
    "rope factor below one": (LLAMA, {"rope_scaling": {"type": "linear", "factor": 0.5}}, ["factor", "0.5"]),
    "rope factor a string": (LLAMA, {"rope_scaling": {"type": "linear", "factor": "4"}}, ["factor", "'4'"]),
    "llama3 without low_freq_factor": (
        LLAMA,
        {"rope_scaling": {**LLAMA3, "low_freq_factor": None}},
        ["low_freq_factor", "missing"],
    ),
    "llama3 with crossed factors": (
        LLAMA,
        {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
        ["high_freq_factor", "low_freq_factor (1)"],
    ),
    "longrope without factors": (LLAMA, {"rope_scaling": {"type": "longrope"}}, ["short_factor", "missing"]),
    "longrope with too few factors": (
        LLAMA,
        {"rope_scaling": {**LONGROPE, "long_factor": [1.0]}},
        ["long_factor", "4 numbers"],
    ),
    "longrope with a negative factor": (
        LLAMA,
        {"rope_scaling": {**LONGROPE, "short_factor": [1.0, 1.0, -1.0, 1.0]}},
        ["short_factor", "-1.0"],
    ),
    "theta negative": (LLAMA, {"rope_theta": -1.0}, ["rope_theta", "-1.0"]),
    "rotation of nothing": (PHI3, {"partial_rotary_factor": 0.01}, ["partial_rotary_factor", "0.01"]),
    "rotation of more than the head": (PHI3, {"partial_rotary_factor": 2.0}, ["partial_rotary_factor", "2.0"]),
    "a part of a stretched head": (
        LLAMA,
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5},
        ["partial_rotary_factor is 0.5", "must be 1", "whole heads"],
    ),
    "window zero": (PHI3, {"sliding_window": 0}, ["sliding_window", "is 0"]),
    "window a string": (PHI3, {"sliding_window": "all"}, ["sliding_window", "'all'"]),
    "window layers negative": (
        QWEN2,
        {"use_sliding_window": True, "max_window_layers": -1},
        ["max_window_layers", "-1"],
    ),
    "layer types too few": (GEMMA2, {"layer_types": ["full_attention"]}, ["layer_types", "4 layers"]),
    "layer types unknown": (GEMMA2, {"layer_types": ["chunked"] * 4}, ["layer_types", "full_attention"]),
    "cap negative": (GEMMA2, {"final_logit_softcapping": -1}, ["final_logit_softcapping", "-1"]),
    "pattern zero": (GEMMA3, {"sliding_window_pattern": 0}, ["sliding_window_pattern", "is 0"]),
    "pattern a string": (GEMMA3, {"sliding_window_pattern": "6"}, ["sliding_window_pattern", "'6'"]),
    "layer types of an unknown kind": (GEMMA3, {"layer_types": ["linear"] * 4}, ["layer_types", "sliding_attention"]),
    "local base negative": (GEMMA3, {"rope_local_base_freq": -1}, ["rope_local_base_freq", "-1"]),
    "rope of one object where kinds differ": (
        GEMMA3,
        {"rope_parameters": {"rope_type": "default"}},
        ["rope_parameters", "full_attention and sliding_attention"],
    ),
    "rope of a kind a number": (GEMMA3, {"rope_parameters": {"full_attention": 3}}, ["rope_parameters", "one object"]),
    "rope of a kind without factor": (
        GEMMA3,
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
        ["rope_parameters.sliding_attention: factor", "missing"],
    ),
    "old scaling without factor": (
        GEMMA3,
        {"rope_scaling": {"rope_type": "linear"}},
        ["rope_parameters.full_attention: factor", "missing"],
    ),
    "old scaling by kind": (GEMMA3, {"rope_scaling": {"full_attention": {}}}, ["rope_scaling", "rope_type"]),
    "text and images": (
        {"architectures": ["PaliGemmaForConditionalGeneration"], "model_type": "paligemma"},
        {"text_config": {"model_type": "gemma"}},
        ["PaliGemmaForConditionalGeneration", "text_config", "text-only checkpoint of the family (GemmaForCausalLM)"],
    ),
    "rotation of too few layers": (SMOLLM3, {"no_rope_layers": [1, 0]}, ["no_rope_layers", "4 layers"]),
    "rotation of other numbers": (SMOLLM3, {"no_rope_layers": [1, 0, 2, 1]}, ["no_rope_layers", "a 1 or a 0"]),
    "rotation of every zeroth": (SMOLLM3, {"no_rope_layer_interval": 0}, ["no_rope_layer_interval", "is 0"]),
    "query scalar zero": (GEMMA2, {"query_pre_attn_scalar": 0}, ["query_pre_attn_scalar", "is 0"]),
    "clipped to nothing": ({**LLAMA, "model_type": "olmo"}, {"clip_qkv": 0}, ["clip_qkv is 0", "above 0"]),
    "slopes a word": (FALCON, {"alibi": "yes"}, ["alibi is 'yes'", "true or false"]),
    "head norms a number": ({**LLAMA, "model_type": "phi"}, {"qk_layernorm": 1}, ["qk_layernorm is 1"]),
    "kinds of attention without an end": (
        GPT_NEO,
        {"attention_types": [[["global", "local"], 10**12]]},
        ["attention_types", "one for each layer"],
    ),
    "kinds of attention unknown": (GPT_NEO, {"attention_types": [[["sparse"], 4]]}, ["attention_types", "pairs"]),
    "kinds of attention no pairs": (GPT_NEO, {"attention_types": ["global"] * 4}, ["attention_types", "pairs"]),
    "kinds of attention left out": (
        {**GPT_NEO, "num_layers": 3},
        {"attention_types": None},
        ["attention_types is missing", "one for each layer"],
    ),
    "kinds of too few layers": (GPT_NEO, {"attention_layers": ["local"]}, ["attention_layers", "each of 4 layers"]),
    "kinds of lists": (GPT_NEO, {"attention_layers": [["local"]] * 4}, ["attention_layers", "global or local"]),
    "bases of too few layers": (GRANITE_SWA, {"layer_rope_theta": [1e4]}, ["layer_rope_theta", "each layer"]),
    "bases of several kinds": (GRANITE_SWA, {"layer_rope_theta": [1e4, 0, 1e5, 0]}, ["layer_rope_theta", "the same"]),
    "bases of words": (GRANITE_SWA, {"layer_rope_theta": ["a"] * 4}, ["layer_rope_theta", "a number"]),
    "bases of lists": (GRANITE_SWA, {"layer_rope_theta": [[]] * 4}, ["layer_rope_theta", "a number"]),
    "base negative": (GRANITE_SWA, {"layer_rope_theta": [-1.0] * 4}, ["rope_theta", "-1.0"]),
    "queries not scaled": (
        {**LLAMA, "model_type": "ministral3"},
        {"rope_parameters": {"rope_type": "default"}},
        ["rope_parameters: llama_4_scaling_beta is missing"],
    ),
    "attention of a string": (MPT, {"attn_config": "torch"}, ["attn_config", "an object"]),
    "attention over a prefix": (MPT, {"attn_config": {"prefix_lm": True}}, ["attn_config: prefix_lm is True"]),
    "slopes of another series": (MPT, {"attn_config": {"alibi_bias_max": 16}}, ["alibi_bias_max is 16", "must be 8"]),
    "scores scaled by zero": (MPT, {"attn_config": {"softmax_scale": 0}}, ["attn_config: softmax_scale is 0"]),
    "logits scaled": (MPT, {"logit_scale": "inv_sqrt_d_model"}, ["logit_scale is 'inv_sqrt_d_model'"]),
    "residual behind norms": (
        {"model_type": "bloom", "vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        {"apply_residual_connection_post_layernorm": True},
        ["apply_residual_connection_post_layernorm is True"],
    ),
    "heads in no four groups": (
        {**LLAMA, "model_type": "codegen"},
        {"n_head": 6, "num_attention_heads": None},
        ["n_head is 6", "multiple of 4"],
    ),
    "two names of one size": (
        {**LLAMA, "model_type": "codegen"},
        {"n_head": 8, "num_attention_heads": 4},
        ["num_attention_heads is 4", "must be 8, like n_head"],
    ),
    "alpha negative": (
        {**LLAMA, "model_type": "hunyuan_v1_dense"},
        {"rope_scaling": {"type": "dynamic", "alpha": -1}},
        ["alpha is -1"],
    ),
    "alpha of heads too small": (
        {**LLAMA, "model_type": "hunyuan_v1_dense", "head_dim": 2},
        {"rope_scaling": {"type": "dynamic", "alpha": 5}},
        ["head_dim is 2"],
    ),
    "bidirectional": (GEMMA3, {"use_bidirectional_attention": True}, ["use_bidirectional_attention is True", "causal"]),
    "too many heads rotated": (
        {**LLAMA, "model_type": "gptj"},
        {"rotary_dim": 16},
        ["rotary_dim", "is 16", "each head's 8 elements"],
    ),
    "more key heads than queries": (
        FALCON,
        {"new_decoder_architecture": True, "num_kv_heads": 3},
        ["num_key_value_heads", "is 3"],
    ),
    "no layer keeps keys for others": (
        GEMMA3N,
        {"layer_types": ["full_attention", "sliding_attention"]},
        ["num_kv_shared_layers is 1", "a layer of sliding_attention"],
    ),
    "all layers read others": (GEMMA3N, {"num_kv_shared_layers": 2}, ["num_kv_shared_layers is 2", "from 0 to 1"]),
    "widths of other layers": (GEMMA3N, {"intermediate_size": [32]}, ["intermediate_size", "2 layers"]),
    "shares of other layers": (GEMMA3N, {"activation_sparsity_pattern": [0.5, 1.0]}, ["activation_sparsity_pattern"]),
    "no such stream": (GEMMA3N, {"altup_active_idx": 4}, ["altup_active_idx is 4", "4 streams"]),
    "more pairs than a head has": (
        GEMMA3N,
        {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5}}},
        ["partial_rotary_factor is 1.5", "at most 1"],
    ),
    "embedding width zero": (LLAMA, {"word_embed_proj_dim": 0}, ["word_embed_proj_dim"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_config_names_key_value_and_remedy(name: str) -> None:
    base, changes, expected = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        arch_of(base, **changes)
    for part in ["config.json", *expected]:
        assert part in caught.value.message
    assert "\n" not in caught.value.message


def comparable(arch: ModelArch) -> dict[str, Any]:
    return {name: getattr(arch, name) for name in ModelArch.__dataclass_fields__ if name != "raw"}


def test_arch_needs_no_torch() -> None:
    code = "import sys, quire.config.arch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
