"""`FamilySpec`: how a family of models differs from Llama, as data. Knows no tensors.

A new family is an entry of FAMILIES, a class in `quire.models` with its line in the registry, and rows in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from quire.config.experts import (
    ExpertsRule,
    mixtral_experts,
    no_experts,
    qwen2_experts,
    qwen3_experts,
)
from quire.config.layer_kinds import (
    LayerRule,
    all_full,
    all_sliding,
    full_below,
    full_by_pattern,
    full_every,
    listed_or,
    sliding_every_other,
    sliding_where_not_rotated,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySpec:
    """What is read from the config.json of a family, and what its layers are made of."""

    architecture: str = ""
    """For configs that name only the model_type."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What the class of the family assumes in transformers when config.json leaves a key out. A key that only some
    families have (`query_pre_attn_scalar`) is read for those that have a default for it."""
    ignored: tuple[str, ...] = ()
    """Keys of the family that its model never looks at in transformers; other values than null are reported."""
    layer_kinds: LayerRule = all_full
    experts: ExpertsRule = no_experts
    """Which layers have a mixture of experts in place of an MLP."""
    biases: tuple[str | bool, str | bool, str | bool] = ("attention_bias", "attention_bias", "mlp_bias")
    """Of query, key and value projections, of the attention's output, of the MLP: whether they have one, or the key
    that says so."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Values of rope_type and of the activation that mean another one in configs of this family."""
    has_learned_positions: bool = False
    """A table of positions instead of rotation, layer norms instead of RMS norms, a plain MLP."""
    has_head_norms: bool = False
    """An RMS norm on each query and key head."""
    has_post_norms: bool = False
    """Norms behind attention and MLP, too."""


_QWEN_MOE = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
}
_SILU = {"hidden_act": "silu", "rms_norm_eps": 1e-6}
_QWEN = {
    **_SILU,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_MISTRAL = {
    **_SILU,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_GLM = {
    "hidden_act": "silu",
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "eos_token_id": [151_329, 151_336, 151_338],
}

FAMILIES: Mapping[str, FamilySpec] = MappingProxyType(
    {
        "llama": FamilySpec(
            architecture="LlamaForCausalLM",
            defaults={**_SILU, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
        ),
        "mistral": FamilySpec(
            architecture="MistralForCausalLM",
            defaults=_MISTRAL,
            layer_kinds=all_sliding,
            biases=(False, False, False),
        ),
        "qwen2": FamilySpec(
            architecture="Qwen2ForCausalLM",
            defaults=_QWEN,
            layer_kinds=listed_or(full_below),
            biases=(True, False, False),
        ),
        "qwen3": FamilySpec(
            architecture="Qwen3ForCausalLM",
            defaults={**_QWEN, "head_dim": 128},
            layer_kinds=listed_or(full_below),
            has_head_norms=True,
        ),
        "phi3": FamilySpec(
            architecture="Phi3ForCausalLM",
            defaults={
                "hidden_act": "silu",
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 4096,
                "original_max_position_embeddings": 4096,
                "bos_token_id": 1,
                "eos_token_id": 32_000,
            },
            layer_kinds=all_sliding,
            biases=(False, False, False),
            aliases={"yarn": "longrope"},  # in early configs
        ),
        "gemma": FamilySpec(
            architecture="GemmaForCausalLM",
            defaults={
                "hidden_act": "gelu_pytorch_tanh",
                "rms_norm_eps": 1e-6,
                "max_position_embeddings": 8192,
                "head_dim": 256,
                "tie_word_embeddings": True,
                "bos_token_id": 2,
                "eos_token_id": 1,
            },
            aliases={"gelu": "gelu_pytorch_tanh"},  # in early configs
        ),
        "gemma2": FamilySpec(
            architecture="Gemma2ForCausalLM",
            defaults={
                **_GEMMA,
                "max_position_embeddings": 8192,
                "final_logit_softcapping": 30.0,
                "attn_logit_softcapping": 50.0,
            },
            layer_kinds=listed_or(full_every(2)),
            has_post_norms=True,
        ),
        "gemma3_text": FamilySpec(
            architecture="Gemma3ForCausalLM",
            defaults={
                **_GEMMA,
                "max_position_embeddings": 131_072,
                "rope_theta": 1_000_000.0,
                "rope_local_base_freq": 10_000.0,
                "sliding_window_pattern": 6,
            },
            ignored=("attn_logit_softcapping",),
            layer_kinds=listed_or(full_by_pattern),
            has_head_norms=True,
            has_post_norms=True,
        ),
        "seed_oss": FamilySpec(
            architecture="SeedOssForCausalLM",
            defaults={
                **_SILU,
                "max_position_embeddings": 524_288,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "attention_bias": True,
                "bos_token_id": 0,
                "eos_token_id": 2,
            },
            biases=("attention_bias", "attention_out_bias", "mlp_bias"),
        ),
        "ernie4_5": FamilySpec(
            architecture="Ernie4_5ForCausalLM",
            defaults={
                "hidden_act": "silu",
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 131_072,
                "num_key_value_heads": 2,
                "head_dim": 128,
                "rope_theta": 500_000.0,
                "tie_word_embeddings": True,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            biases=("use_bias", "use_bias", "use_bias"),
        ),
        "helium": FamilySpec(
            architecture="HeliumForCausalLM",
            defaults={
                "hidden_act": "silu",
                "rms_norm_eps": 1e-8,
                "max_position_embeddings": 4096,
                "num_key_value_heads": 20,
                "head_dim": 128,
                "rope_theta": 100_000.0,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            biases=("attention_bias", False, "mlp_bias"),
        ),
        "ministral": FamilySpec(
            architecture="MinistralForCausalLM",
            defaults=_MISTRAL,
            layer_kinds=listed_or(all_sliding),
            biases=(False, False, False),
        ),
        "smollm3": FamilySpec(
            architecture="SmolLM3ForCausalLM",
            defaults={
                **_SILU,
                "max_position_embeddings": 32_768,
                "num_key_value_heads": 4,
                "rope_theta": 2_000_000.0,
                "no_rope_layer_interval": 4,
                "use_sliding_window": False,
                "tie_word_embeddings": True,
                "bos_token_id": 128_000,
                "eos_token_id": 128_001,
            },
            layer_kinds=listed_or(sliding_where_not_rotated),
        ),
        "glm": FamilySpec(architecture="GlmForCausalLM", defaults=_GLM, biases=("attention_bias", False, False)),
        "glm4": FamilySpec(
            architecture="Glm4ForCausalLM",
            defaults=_GLM,
            biases=("attention_bias", False, False),
            has_post_norms=True,
        ),
        "mixtral": FamilySpec(
            architecture="MixtralForCausalLM",
            defaults={
                "hidden_act": "silu",
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 131_072,
                "num_key_value_heads": 8,
                "rope_theta": 1_000_000.0,
                "intermediate_size": 14_336,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            layer_kinds=all_sliding,
            experts=mixtral_experts,
            biases=(False, False, False),
        ),
        "qwen2_moe": FamilySpec(
            architecture="Qwen2MoeForCausalLM",
            defaults={
                **_QWEN_MOE,
                "num_key_value_heads": 16,
                "max_window_layers": 28,
                "intermediate_size": 5632,
                "moe_intermediate_size": 1408,
                "shared_expert_intermediate_size": 5632,
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "qkv_bias": True,
            },
            layer_kinds=listed_or(sliding_every_other),
            experts=qwen2_experts,
            biases=("qkv_bias", False, False),
        ),
        "qwen3_moe": FamilySpec(
            architecture="Qwen3MoeForCausalLM",
            defaults={
                **_QWEN_MOE,
                "num_key_value_heads": 4,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "num_experts_per_tok": 8,
            },
            layer_kinds=all_sliding,
            experts=qwen3_experts,
            biases=("attention_bias", "attention_bias", False),
            has_head_norms=True,
        ),
        "opt": FamilySpec(
            architecture="OPTForCausalLM",
            defaults={
                "activation_function": "relu",
                "enable_bias": True,
                "tie_word_embeddings": True,
                "max_position_embeddings": 2048,
                "bos_token_id": 2,
                "eos_token_id": 2,
            },
            biases=("enable_bias", "enable_bias", "enable_bias"),
            has_learned_positions=True,
        ),
        "gpt2": FamilySpec(
            architecture="GPT2LMHeadModel",
            defaults={
                "activation_function": "gelu_new",
                "scale_attn_weights": True,
                "tie_word_embeddings": True,
                "n_positions": 1024,
                "bos_token_id": 50_256,
                "eos_token_id": 50_256,
            },
            biases=(True, True, True),
            has_learned_positions=True,
        ),
    }
)
"""By model_type."""

ARCHITECTURES = {model_type: family.architecture for model_type, family in FAMILIES.items()}
"""model_type -> architecture, for configs that name only the former."""

LLAMA_LIKE = FamilySpec()
"""What a model_type that nobody knows is read as: a plug-in's."""


def family_of(model_type: str) -> FamilySpec:
    """How models of this type differ from Llama."""
    return FAMILIES.get(model_type, LLAMA_LIKE)
