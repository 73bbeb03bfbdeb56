"""What llama.cpp calls the architectures that quire has, and how its files differ from checkpoints of transformers.

Sources: the metadata keys in docs/gguf.md of ggml, and what convert_hf_to_gguf.py of llama.cpp does to tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from quire.config.gguf import derived
from quire.config.gguf.derived import Constants, Derived, no_constants, nothing
from quire.config.gguf.metadata import GgufKeys
from quire.errors import ConfigError
from quire.utils.lazy import nearest


class Change(StrEnum):
    """What is done to a tensor of a file to give the one that transformers has."""

    TURNS = "turns"
    """Rows of queries or keys that the rotation pairs are neighbours: the first half of each head takes turns with the
    second, so that llama.cpp rotates (2i, 2i + 1) where transformers rotates (i, i + D / 2)."""
    BY_HEAD = "by_head"
    """The file has all queries, keys and values one after the other, transformers those of each key/value head."""
    TRANSPOSED = "transposed"
    """Transformers has [in, out]."""
    OFFSET = "offset"
    """The file adds what the family adds to its norms."""
    DECAY = "decay"
    """The file has -exp of the weight."""
    FLAT = "flat"
    """Transformers has one dimension."""
    ROW = "row"
    """Transformers has a matrix of one row."""
    CHANNELS = "channels"
    """Transformers has [channels, 1, width]."""
    TILED = "tiled"
    """The file has the value heads of linear attention so that each key head serves every so-manieth. Queries and keys
    are repeated, so that each value head has its own."""
    FIRST_OF_PAIRS = "first_of_pairs"
    """The file has two parts of each key head in turn, transformers a tensor for each part."""
    SECOND_OF_PAIRS = "second_of_pairs"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """How a file of one architecture becomes a model of a family."""

    model_type: str
    """Of the family, as config.json has it."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Metadata keys, without the architecture's name -> keys of config.json, beside `COMMON`."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """What all files of the architecture mean and none says."""
    derived: Derived = nothing
    """Values of config.json that follow from several keys, or from tensors."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """GGUF's parts of a layer -> transformers' paths in it, beside those that follow from the family's spec."""
    outside: Mapping[str, str] = field(default_factory=dict)
    """The same of parts outside of layers."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """By GGUF's part, with `.weight` or `.bias` where that matters."""
    splits: Mapping[str, Mapping[str, Change]] = field(default_factory=dict)
    """GGUF's part -> the paths in the layer of the tensors that transformers has of it, and how they are made."""
    constants: Constants = no_constants
    """Weights that are numbers of the metadata."""


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
TURNS = {"attn_q": Change.TURNS, "attn_k": Change.TURNS}
_BY_HEAD = {"attn_qkv": Change.BY_HEAD}
_TRANSPOSED = dict.fromkeys(
    ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"), Change.TRANSPOSED
)
_QWEN_EXPERTS = {"expert_feed_forward_length": "moe_intermediate_size"}
_GRANITE = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attention.scale": "attention_multiplier",
}
_DEEPSEEK_EXPERTS = {
    **_QWEN_EXPERTS,
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
_HYBRID_STATES = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
_OLMO2 = GgufArchitecture(model_type="olmo2")
_FALCON = GgufArchitecture(model_type="falcon", derived=derived.falcon, changes=_BY_HEAD)
_GRANITE_MOE = GgufArchitecture(model_type="granitemoe", keys=_GRANITE, changes=TURNS)
_GRANITE_HYBRID = GgufArchitecture(
    model_type="granitemoehybrid",
    keys={**_GRANITE, **_HYBRID_STATES},
    changes=TURNS,
    derived=derived.granite_hybrid,
)
_DEEPSEEK2 = GgufArchitecture(model_type="deepseek_v2", keys=_DEEPSEEK_EXPERTS, derived=derived.deepseek)
_MAMBA = GgufArchitecture(
    model_type="mamba",
    keys={"ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_size", "ssm.time_step_rank": "time_step_rank"},
    derived=derived.mamba,
    parts={"ssm_dt": "mixer.dt_proj", "ssm_dt.bias": "mixer.dt_proj.bias"},
)
_NEMOTRON_H = GgufArchitecture(
    model_type="nemotron_h",
    keys={
        **_DEEPSEEK_EXPERTS,
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "moe_latent_size": "moe_latent_size",
        "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "ssm_state_size",
        "ssm.group_count": "n_groups",
    },
    derived=derived.nemotron_h,
    parts={"attn_norm": "norm"},
)
_LINEAR_ATTENTION = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_QWEN35 = GgufArchitecture(
    model_type="qwen3_5_text",
    keys=_LINEAR_ATTENTION,
    derived=derived.qwen35,
    parts={
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
    },
    changes={"attn_qkv": Change.TILED, "ssm_conv1d": Change.TILED},
)
_QWEN3_NEXT = GgufArchitecture(
    model_type="qwen3_5_moe_text",
    keys=_LINEAR_ATTENTION,
    derived=derived.linear_attention,
    parts={"attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z"},
    splits={
        "ssm_ba": {
            "linear_attn.in_proj_b": Change.FIRST_OF_PAIRS,
            "linear_attn.in_proj_a": Change.SECOND_OF_PAIRS,
        }
    },
)
_LFM2 = GgufArchitecture(
    model_type="lfm2",
    keys={"shortconv.l_cache": "conv_L_cache"},
    derived=derived.lfm2,
    outside={"token_embd_norm": "embedding_norm"},
)
ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "llama": GgufArchitecture(model_type="llama", changes=TURNS),
        "qwen2": GgufArchitecture(model_type="qwen2"),
        "qwen2moe": GgufArchitecture(
            model_type="qwen2_moe",
            keys={**_QWEN_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
            fixed={"norm_topk_prob": False},
        ),
        "qwen3": GgufArchitecture(model_type="qwen3"),
        "qwen3moe": GgufArchitecture(model_type="qwen3_moe", keys=_QWEN_EXPERTS, fixed={"norm_topk_prob": True}),
        "gemma": GgufArchitecture(model_type="gemma"),
        "gemma2": GgufArchitecture(model_type="gemma2", derived=derived.gemma_queries(46)),
        "gemma3": GgufArchitecture(model_type="gemma3_text", derived=derived.gemma3),
        "phi3": GgufArchitecture(model_type="phi3"),
        "smollm3": GgufArchitecture(model_type="smollm3", changes=TURNS),
        "gpt-oss": GgufArchitecture(
            model_type="gpt_oss", keys={"expert_feed_forward_length": "intermediate_size"}, derived=derived.gpt_oss
        ),
        "granite": GgufArchitecture(model_type="granite", keys=_GRANITE, changes=TURNS),
        "granitemoe": _GRANITE_MOE,
        "olmo": GgufArchitecture(model_type="olmo", keys={"attention.clamp_kqv": "clip_qkv"}, changes=TURNS),
        "olmo2": _OLMO2,
        "olmoe": GgufArchitecture(model_type="olmoe", fixed={"norm_topk_prob": False}),
        "command-r": GgufArchitecture(
            model_type="cohere", keys={"logit_scale": "logit_scale"}, derived=derived.has_head_norms("use_qk_norm")
        ),
        "cohere2": GgufArchitecture(model_type="cohere2", keys={"logit_scale": "logit_scale"}),
        "glm4": GgufArchitecture(model_type="glm4"),
        "stablelm": GgufArchitecture(
            model_type="stablelm",
            keys={"use_parallel_residual": "use_parallel_residual"},
            derived=derived.has_head_norms("qk_layernorm"),
        ),
        "starcoder2": GgufArchitecture(model_type="starcoder2"),
        "exaone4": GgufArchitecture(model_type="exaone4"),
        "seed_oss": GgufArchitecture(model_type="seed_oss"),
        "arcee": GgufArchitecture(model_type="arcee", changes=TURNS),
        "ernie4_5": GgufArchitecture(model_type="ernie4_5"),
        "hunyuan-dense": GgufArchitecture(model_type="hunyuan_v1_dense"),
        "nemotron": GgufArchitecture(model_type="nemotron"),
        "phi2": GgufArchitecture(model_type="phi"),
        "gpt2": GgufArchitecture(model_type="gpt2", changes=_TRANSPOSED),
        "starcoder": GgufArchitecture(model_type="gpt_bigcode", derived=derived.multi_query),
        "gptneox": GgufArchitecture(
            model_type="gpt_neox", keys={"use_parallel_residual": "use_parallel_residual"}, changes=_BY_HEAD
        ),
        "bloom": GgufArchitecture(model_type="bloom", changes=_BY_HEAD),
        "mpt": GgufArchitecture(model_type="mpt", derived=derived.alibi),
        "falcon": _FALCON,
        "phimoe": GgufArchitecture(model_type="phimoe", derived=derived.phimoe),
        "dbrx": GgufArchitecture(
            model_type="dbrx", derived=derived.dbrx, parts={"attn_output_norm": "norm_attn_norm.norm_2"}
        ),
        "exaone": GgufArchitecture(model_type="llama"),
        "internlm2": GgufArchitecture(model_type="llama", changes=TURNS),
        "baichuan": GgufArchitecture(model_type="llama", changes=TURNS, derived=derived.baichuan),
        "orion": GgufArchitecture(model_type="stablelm", fixed={"partial_rotary_factor": 1.0}),
        "minicpm": GgufArchitecture(model_type="granite", changes=TURNS, derived=derived.minicpm),
        "chatglm": GgufArchitecture(model_type="glm"),
        "glm4moe": GgufArchitecture(model_type="glm4_moe", keys=_DEEPSEEK_EXPERTS, derived=derived.glm4_moe),
        "ernie4_5-moe": GgufArchitecture(
            model_type="ernie4_5_moe",
            keys={
                **_QWEN_EXPERTS,
                "expert_count": "moe_num_experts",
                "expert_used_count": "moe_k",
                "expert_shared_count": "moe_num_shared_experts",
                "leading_dense_block_count": "moe_layer_start_index",
                "interleave_moe_layer_step": "moe_layer_interval",
            },
        ),
        "dots1": GgufArchitecture(model_type="dots1", keys=_DEEPSEEK_EXPERTS, derived=derived.no_window),
        "hunyuan-moe": GgufArchitecture(
            model_type="hunyuan_v1_moe",
            keys={"expert_feed_forward_length": "intermediate_size", "expert_used_count": "moe_topk"},
        ),
        "minimax-m2": GgufArchitecture(
            model_type="minimax_m2",
            keys={"expert_feed_forward_length": "intermediate_size", "expert_count": "n_routed_experts"},
        ),
        "llama4": GgufArchitecture(
            model_type="llama4_text",
            keys={
                "feed_forward_length": "intermediate_size_mlp",
                "expert_feed_forward_length": "intermediate_size",
                "interleave_moe_layer_step": "interleave_moe_layer_step",
            },
            derived=derived.llama4,
        ),
        "deepseek2": _DEEPSEEK2,
        "minicpm3": GgufArchitecture(
            model_type="minicpm3",
            fixed={"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256},
            derived=derived.minicpm3,
        ),
        "mamba": _MAMBA,
        "mamba2": GgufArchitecture(
            model_type="mamba2",
            keys={
                "ssm.conv_kernel": "conv_kernel",
                "ssm.state_size": "state_size",
                "ssm.group_count": "n_groups",
                "ssm.time_step_rank": "num_heads",
            },
            derived=derived.mamba2,
        ),
        "falcon-h1": GgufArchitecture(model_type="falcon_h1", keys=_HYBRID_STATES, derived=derived.falcon_h1),
        "granitehybrid": _GRANITE_HYBRID,
        **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _NEMOTRON_H),
        "qwen3next": _QWEN3_NEXT,
        "qwen35": _QWEN35,
        "qwen35moe": replace(_QWEN35, model_type="qwen3_5_moe_text"),
        "qwen2vl": GgufArchitecture(model_type="qwen2"),
        "qwen3vl": GgufArchitecture(model_type="qwen3"),
        "qwen3vlmoe": GgufArchitecture(model_type="qwen3_moe", keys=_QWEN_EXPERTS, fixed={"norm_topk_prob": True}),
        "mistral3": GgufArchitecture(model_type="ministral3", derived=derived.ministral3, changes=TURNS),
        "jais2": GgufArchitecture(model_type="jais2"),
        "apertus": GgufArchitecture(model_type="apertus", derived=derived.apertus, constants=derived.xielu),
        "bitnet": GgufArchitecture(model_type="bitnet", fixed={"hidden_act": "silu"}, derived=derived.bitnet),
        "exaone-moe": GgufArchitecture(
            model_type="exaone_moe", keys=_DEEPSEEK_EXPERTS, derived=derived.without_draft_layers
        ),
        "afmoe": GgufArchitecture(
            model_type="afmoe",
            keys={
                **_QWEN_EXPERTS,
                "expert_shared_count": "num_shared_experts",
                "leading_dense_block_count": "num_dense_layers",
                "expert_weights_scale": "route_scale",
            },
            fixed={"mup_enabled": True},
        ),
        "lfm2": _LFM2,
        "lfm2moe": replace(
            _LFM2,
            model_type="lfm2_moe",
            keys={**_LFM2.keys, **_QWEN_EXPERTS, "leading_dense_block_count": "num_dense_layers"},
        ),
        "jamba": GgufArchitecture(
            model_type="jamba",
            keys={
                "ssm.conv_kernel": "mamba_d_conv",
                "ssm.state_size": "mamba_d_state",
                "ssm.time_step_rank": "mamba_dt_rank",
            },
            derived=derived.jamba,
            parts={
                "ssm_dt": "mamba.dt_proj",
                "ssm_dt.bias": "mamba.dt_proj.bias",
                "ssm_dt_norm": "mamba.dt_layernorm",
                "ssm_b_norm": "mamba.b_layernorm",
                "ssm_c_norm": "mamba.c_layernorm",
            },
        ),
    }
)
"""By llama.cpp's names."""
VARIANTS: Mapping[str, tuple[Callable[[GgufKeys], object], GgufArchitecture]] = MappingProxyType(
    {
        "llama": (
            lambda keys: keys.of_model("expert_count"),
            GgufArchitecture(model_type="mixtral", changes=TURNS, derived=derived.no_window),
        ),
        "olmo2": (lambda keys: keys.of_model("attention.sliding_window"), replace(_OLMO2, model_type="olmo3")),
        "granitemoe": (
            lambda keys: keys.has("blk.0.ffn_gate_shexp.weight"),
            replace(
                _GRANITE_MOE,
                model_type="granitemoeshared",
                keys={**_GRANITE, "expert_shared_feed_forward_length": "shared_intermediate_size"},
            ),
        ),
        "granitehybrid": (
            lambda keys: keys.of_model("embedding_scale") is None,
            GgufArchitecture(model_type="bamba", keys=_HYBRID_STATES, changes=TURNS, derived=derived.bamba),
        ),
        "falcon": (
            lambda keys: keys.has("blk.0.attn_norm_2.weight"),
            replace(_FALCON, parts={"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}),
        ),
        "deepseek2": (
            lambda keys: keys.of_model("expert_gating_func") == derived.SIGMOID,
            replace(_DEEPSEEK2, model_type="deepseek_v3"),
        ),
        "qwen3next": (
            lambda keys: keys.has("blk.0.ssm_in.weight"),
            replace(
                _QWEN3_NEXT,
                model_type="qwen3_next",
                parts={"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"},
                splits={},
            ),
        ),
        "mamba": (
            lambda keys: keys.flag_of_model("ssm.dt_b_c_rms", default=False),
            replace(_MAMBA, model_type="falcon_mamba"),
        ),
    }
)
"""llama.cpp's name -> (whether a file has it, another architecture that has the name, too)."""
HARMLESS = frozenset(
    {
        "attention.value_length",
        "attention.group_norm_groups",
        "rope.dimension_count",
        "rope.dimension_sections",
        "rope.scaling.finetuned",
        "vocab_size",
        "tensor_data_layout",
        "expert_shared_count",
        "expert_feed_forward_length",
        "expert_shared_feed_forward_length",
        "n_deepstack_layers",
    }
)
"""Keys of an architecture that say what follows from others or from tensors, or nothing of a text."""
ONLY: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "attention.causal": (True,),
        "rope.scaling.yarn_ext_factor": (1.0, -1.0),
        "rope.scaling.yarn_attn_factor": (1.0,),
    }
)
"""Keys of all architectures that are at one of these values where they are there; nothing else is computed."""
SOFTMAX, SIGMOID, CHOSEN = 1, derived.SIGMOID, 3
"""How `expert_gating_func` says what experts' scores pass: a softmax of all, sigmoids, or a softmax of those chosen."""
GATING: Mapping[str, int] = MappingProxyType(
    {
        "gpt_oss": CHOSEN,
        **dict.fromkeys(
            ("deepseek_v3", "glm4_moe", "dots1", "minimax_m2", "lfm2_moe", "exaone_moe", "afmoe", "nemotron_h"), SIGMOID
        ),
        "llama4_text": SIGMOID,
    }
)
"""By model_type, of families whose experts' scores pass something else than a softmax."""


def architecture_of(keys: GgufKeys) -> GgufArchitecture:
    """That of a file.

    Raises: ConfigError for one that is not read, naming those that are.
    """
    name = keys.architecture
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{keys.source}: GGUF files of the architecture {name!r} are not read{nearest(name, list(ARCHITECTURES))} "
            f"Those of {', '.join(sorted(ARCHITECTURES))} are. Use the model with *.safetensors."
        )
    is_it, variant = VARIANTS.get(name, (lambda keys: False, ARCHITECTURES[name]))
    return variant if is_it(keys) else ARCHITECTURES[name]


def rotary_share(head_size: int, rotary_dim: int) -> float:
    """The share of a head whose product with its size is `rotary_dim`, when it is rounded down."""
    share = rotary_dim / head_size
    return share if int(head_size * share) == rotary_dim else math.nextafter(share, 2.0)
