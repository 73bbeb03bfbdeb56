"""What llama.cpp calls the architectures that quire has, and how its files differ from checkpoints of transformers.

Sources: the metadata keys in docs/gguf.md of ggml, and what convert_hf_to_gguf.py of llama.cpp does to tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from quire.config.gguf.metadata import GgufKeys
from quire.errors import ConfigError
from quire.utils.lazy import nearest


def _nothing(keys: GgufKeys) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """How a file of one architecture becomes a model of a family."""

    model_type: str
    """Of the family, as config.json has it."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Metadata keys, without the architecture's name -> keys of config.json, beside `COMMON`."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """What all files of the architecture mean and none says."""
    derived: Callable[[GgufKeys], Mapping[str, Any]] = _nothing
    """Values of config.json that follow from several keys, or from tensors."""
    takes_turns: bool = False
    """Rows of queries and keys that the rotation pairs are neighbours: the first half of each head takes turns with the
    second, so that llama.cpp rotates (2i, 2i + 1) where transformers rotates (i, i + D / 2)."""


COMMON: Mapping[str, str] = MappingProxyType(
    {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.layer_norm_epsilon": "rms_norm_eps",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "rope.freq_base": "rope_theta",
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
    }
)
"""Metadata keys of all architectures -> keys of config.json, in Llama's spelling."""
_QWEN_EXPERTS = {"expert_feed_forward_length": "moe_intermediate_size"}
_GRANITE = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attention.scale": "attention_multiplier",
}


def _gemma_queries(num_layers_of_27b: int) -> Callable[[GgufKeys], Mapping[str, Any]]:
    """Queries are scaled by the root of a head's size, in the model of 27 billion by that of a share of the width."""

    def derived(keys: GgufKeys) -> Mapping[str, Any]:
        is_27b = keys.count("block_count") == num_layers_of_27b
        width = keys.count("embedding_length") // keys.count("attention.head_count")
        return {"query_pre_attn_scalar": width if is_27b else keys.count("attention.key_length")}

    return derived


def _gemma3(keys: GgufKeys) -> Mapping[str, Any]:
    """The base of layers with a window has a key in newer files."""
    given = keys.of_model("rope.freq_base_swa")
    return {**_gemma_queries(62)(keys), **({} if given is None else {"rope_local_base_freq": given})}


def _no_window(keys: GgufKeys) -> Mapping[str, Any]:
    return {"sliding_window": None}


def _gpt_oss(keys: GgufKeys) -> Mapping[str, Any]:
    """No file has these: transformers and llama.cpp have them in code."""
    return {"swiglu_limit": 7.0}


def _has_head_norms(name: str) -> Callable[[GgufKeys], Mapping[str, Any]]:
    """A key of config.json that says whether queries and keys have norms of their own."""
    return lambda keys: {name: "blk.0.attn_q_norm.weight" in keys.model.tensors}


def _granite_experts(keys: GgufKeys) -> Mapping[str, Any]:
    """A file with a shared expert is of another family."""
    if "blk.0.ffn_gate_shexp.weight" in keys.model.tensors:
        raise ConfigError(f"{keys.source}: Granite MoE with shared experts is not read from GGUF. Use safetensors.")
    return {}


MIXTRAL = GgufArchitecture(model_type="mixtral", takes_turns=True, derived=_no_window)
"""Llama with experts: llama.cpp has one name for both."""
ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "llama": GgufArchitecture(model_type="llama", takes_turns=True),
        "qwen2": GgufArchitecture(model_type="qwen2"),
        "qwen2moe": GgufArchitecture(
            model_type="qwen2_moe",
            keys={**_QWEN_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
            fixed={"norm_topk_prob": False},
        ),
        "qwen3": GgufArchitecture(model_type="qwen3"),
        "qwen3moe": GgufArchitecture(model_type="qwen3_moe", keys=_QWEN_EXPERTS, fixed={"norm_topk_prob": True}),
        "gemma": GgufArchitecture(model_type="gemma"),
        "gemma2": GgufArchitecture(model_type="gemma2", derived=_gemma_queries(46)),
        "gemma3": GgufArchitecture(model_type="gemma3_text", derived=_gemma3),
        "phi3": GgufArchitecture(model_type="phi3"),
        "smollm3": GgufArchitecture(model_type="smollm3", takes_turns=True),
        "gpt-oss": GgufArchitecture(
            model_type="gpt_oss", keys={"expert_feed_forward_length": "intermediate_size"}, derived=_gpt_oss
        ),
        "granite": GgufArchitecture(model_type="granite", keys=_GRANITE, takes_turns=True),
        "granitemoe": GgufArchitecture(
            model_type="granitemoe", keys=_GRANITE, takes_turns=True, derived=_granite_experts
        ),
        "olmo": GgufArchitecture(model_type="olmo", keys={"attention.clamp_kqv": "clip_qkv"}, takes_turns=True),
        "olmo2": GgufArchitecture(model_type="olmo2", derived=_no_window),
        "olmoe": GgufArchitecture(model_type="olmoe", fixed={"norm_topk_prob": False}),
        "command-r": GgufArchitecture(
            model_type="cohere", keys={"logit_scale": "logit_scale"}, derived=_has_head_norms("use_qk_norm")
        ),
        "cohere2": GgufArchitecture(model_type="cohere2", keys={"logit_scale": "logit_scale"}),
        "glm4": GgufArchitecture(model_type="glm4"),
        "stablelm": GgufArchitecture(
            model_type="stablelm",
            keys={"use_parallel_residual": "use_parallel_residual"},
            derived=_has_head_norms("qk_layernorm"),
        ),
        "starcoder2": GgufArchitecture(model_type="starcoder2"),
        "exaone4": GgufArchitecture(model_type="exaone4"),
        "seed_oss": GgufArchitecture(model_type="seed_oss"),
        "arcee": GgufArchitecture(model_type="arcee", takes_turns=True),
        "ernie4_5": GgufArchitecture(model_type="ernie4_5"),
        "hunyuan-dense": GgufArchitecture(model_type="hunyuan_v1_dense"),
        "nemotron": GgufArchitecture(model_type="nemotron"),
        "phi2": GgufArchitecture(model_type="phi"),
    }
)
"""By llama.cpp's names."""
IGNORED = frozenset(
    {
        "attention.value_length",
        "attention.causal",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.attn_factor",
        "rope.scaling.finetuned",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.freq_base_swa",
        "rope.dimension_count_swa",
        "attention.key_length_swa",
        "attention.value_length_swa",
        "attention.sliding_window_pattern",
        "vocab_size",
        "tensor_data_layout",
        "expert_shared_count",
        "expert_group_count",
        "expert_group_used_count",
        "expert_gating_func",
        "expert_feed_forward_length",
        "attention.group_norm_groups",
    }
)
"""Keys of an architecture that are read elsewhere, or that say what follows from others."""


def architecture_of(keys: GgufKeys) -> GgufArchitecture:
    """That of a file.

    Raises: ConfigError for one that is not read, naming those that are.
    """
    name = keys.architecture
    if name == "llama" and keys.of_model("expert_count"):
        return MIXTRAL
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{keys.source}: GGUF files of the architecture {name!r} are not read{nearest(name, list(ARCHITECTURES))} "
            f"Those of {', '.join(sorted(ARCHITECTURES))} are. Use the model with *.safetensors."
        )
    return ARCHITECTURES[name]


def rotary_share(head_size: int, rotary_dim: int) -> float:
    """The share of a head whose product with its size is `rotary_dim`, when it is rounded down."""
    share = rotary_dim / head_size
    return share if int(head_size * share) == rotary_dim else math.nextafter(share, 2.0)
