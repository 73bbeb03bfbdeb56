"""Mixtures of experts as config.json describes them: published keys, defaults, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.arch import ModelArch
from quire.config.layers.experts import ExpertsSpec, Routing
from quire.config.memory.weights.shapes import num_active_parameters, num_parameters
from quire.errors import ConfigError
from tests.family_configs import FAMILIES

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""As it was published, but for what concerns training."""
MINIMAX_M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "model_type": "minimax_m2",
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 200064,
}
PHI_35_MOE: dict[str, Any] = {
    "architectures": ["PhiMoEForCausalLM"],
    "attention_bias": True,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 6400,
    "lm_head_bias": True,
    "max_position_embeddings": 131072,
    "model_type": "phimoe",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [1.5] * 64,
        "long_mscale": 1.243163121016122,
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0] * 64,
        "short_mscale": 1.243163121016122,
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "router_jitter_noise": 0.01,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32064,
}
"""As it was published, but for the factors of the rotation."""
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
QWEN15_MOE: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def arch_of(config: dict[str, Any], **changes: Any) -> ModelArch:
    return ModelArch.from_config({**config, **changes}, source="config.json")


def experts_of(config: dict[str, Any], **changes: Any) -> list[ExpertsSpec | None]:
    return [layer.mlp.experts for layer in arch_of(config, **changes).layers]


def test_published_models_are_counted_as_their_pages_say() -> None:
    arch = arch_of(QWEN3_30B_A3B)
    assert num_parameters(arch) == 30_532_122_624
    assert f"{num_active_parameters(arch) / 1e9:.1f}" == "3.4", "3.3 without the router and the embeddings"
    assert f"{num_parameters(arch_of(MINIMAX_M2)) / 1e9:.0f}" == "229"
    assert f"{num_parameters(arch_of(PHI_35_MOE)) / 1e9:.1f}" == "41.9"
    assert f"{num_active_parameters(arch_of(PHI_35_MOE)) / 1e9:.1f}" == "6.6"
    assert num_parameters(arch_of(MIXTRAL_8X7B)) == 46_702_792_704
    assert f"{num_active_parameters(arch_of(MIXTRAL_8X7B)) / 1e9:.1f}" == "12.9"
    assert num_parameters(arch_of(QWEN15_MOE)) == 14_315_784_192
    assert f"{num_active_parameters(arch_of(QWEN15_MOE)) / 1e9:.1f}" == "2.7"


def test_the_key_of_either_transformers_is_read() -> None:
    renamed = {name: value for name, value in QWEN3_30B_A3B.items() if name != "num_experts"}
    assert experts_of(renamed, num_local_experts=16)[0] == ExpertsSpec(
        num_experts=16, size=768, routing=Routing(num_chosen=8, renormalized=True)
    )


def test_layers_without_experts_are_those_of_transformers() -> None:
    spec = experts_of(QWEN3_30B_A3B)[0]
    assert spec is not None
    assert experts_of(QWEN3_30B_A3B, num_hidden_layers=5, decoder_sparse_step=2) == [None, spec, None, spec, None]
    listed = experts_of(QWEN3_30B_A3B, num_hidden_layers=4, mlp_only_layers=[0, 3, 90])
    assert listed == [None, spec, spec, None]


def test_a_shared_expert_has_a_gate_in_qwen() -> None:
    spec = experts_of(QWEN15_MOE)[0]
    assert spec is not None
    assert (spec.shared_size, spec.has_shared_gate, spec.routing.renormalized) == (5632, True, False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 0}, "num_experts is 0; it must be a whole number above 0"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok is 129; it must be at most the number of experts, 128"),
        ({"num_experts": 5000}, "num_experts is 5000; it must be a whole number above 0, at most 4096"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers is 'all'; it must list indices of the 48 layers"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'; it must be true or false"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size is -1"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; it must be softmax"),
        ({"n_group": 8}, "n_group is 8; it must be 1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        arch_of(QWEN3_30B_A3B, **changes)
    assert words in str(caught.value)


def test_rotations_are_read_by_the_names_of_the_family() -> None:
    (minimax,), (phi,) = arch_of(MINIMAX_M2).ropes, arch_of(PHI_35_MOE).ropes
    assert (minimax.rotary_dim, minimax.theta) == (64, 5e6)
    assert (phi.rotary_dim, phi.attention_factor) == (128, 1.243163121016122)


def test_a_rotation_that_transformers_does_not_read_is_refused_by_name() -> None:
    """Its class of Command A MoE has a field `rope_scaling`, which nothing reads: it is not taken for the old key."""
    raw = {**FAMILIES["cohere2_moe"], "model_type": "cohere2_moe", "rope_theta": 1e3}
    with pytest.raises(ConfigError, match="rope_scaling is "):
        arch_of(raw, rope_scaling={"type": "linear", "factor": 2.0})
    assert arch_of(raw, rope_scaling=None).ropes == arch_of(raw).ropes


def test_what_phimoe_does_not_do_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="num_experts_per_tok is 3; it must be 2"):
        arch_of(PHI_35_MOE, num_experts_per_tok=3)
    for name, value in (("long_mscale", 1.3), ("short_mscale", "1.2"), ("long_mscale", -1.0), ("short_mscale", None)):
        with pytest.raises(ConfigError, match=f"rope_scaling: {name} is"):
            arch_of(PHI_35_MOE, rope_scaling={**PHI_35_MOE["rope_scaling"], name: value})


LAGUNA: dict[str, Any] = {
    "architectures": ["LagunaForCausalLM"],
    "model_type": "laguna",
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "num_attention_heads_per_layer": [48, 64] * 2,
}


def test_query_heads_differ_between_layers_with_and_without_a_window() -> None:
    arch = ModelArch.from_config(LAGUNA, source="config.json")
    assert [mixer.heads.num_heads for mixer in arch.plain_attentions] == [48, 64, 48, 64]
    assert [mixer.num_gates for mixer in arch.plain_attentions] == [48, 64, 48, 64]
    assert not arch.kv_layout(16, "bfloat16", ops="cpu").is_mixed, "KV heads are alike"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_attention_heads_per_layer": [48, 64, 48, 48]}, "num_attention_heads_per_layer"),
        ({"num_attention_heads_per_layer": [48, 60, 48, 60]}, "num_attention_heads_per_layer"),
        ({"num_attention_heads_per_layer": [48, 64]}, "num_attention_heads_per_layer"),
        ({"gating": "sometimes"}, "gating"),
        ({"gating": False}, "gating"),
        ({"moe_router_logit_softcapping": 30.0}, "moe_router_logit_softcapping"),
        ({"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input"),
    ],
)
def test_lagunas_that_would_be_computed_otherwise_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ModelArch.from_config({**LAGUNA, **changes}, source="config.json")
